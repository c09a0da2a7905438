"""The document of a structural tag: texts that begin and end a tag, and the schema between them.

Two forms are read. The older: {"structures": [{"begin", "schema", "end"}], "triggers": [text]}. The newer:
{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers", "tags", ...}}, where a tag is
{"type": "tag", "begin", "content": {"type": "json_schema", "json_schema", "lenient"}, "end"}, or such a tag
alone, or {"type": "tags_with_separator", "tags", "separator", ...}, which has no text but these, or
{"type": "or", "elements": [such tags, another tag or {"type": "json_schema", ...}]}, one of the two.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from engine_svc.features.structured_output.constraint import GrammarError

MAX_TAGS = 1024


@dataclass(frozen=True, slots=True)
class Tag:
    begin: str
    schema: dict[str, Any] | bool
    end: str
    is_lenient: bool = False  # without keywords that no backend enforces; any object where the schema is none


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Free text in which each trigger begins one of the tags that start with it."""

    triggers: tuple[str, ...]  # empty: the output is tags with `separator` between them and nothing else
    tags: tuple[Tag, ...]
    separator: str = ""
    at_least_one: bool = False
    stop_after_first: bool = False
    alternative: Tag | None = None  # an output in place of the tags; it may have neither begin nor end

    def all_tags(self) -> list[Tag]:
        return [*self.tags, *([] if self.alternative is None else [self.alternative])]

    def texts(self) -> list[str]:
        """The texts outside of the schemas."""
        tags = self.all_tags()
        return [*self.triggers, self.separator, *(text for tag in tags for text in (tag.begin, tag.end))]

    def document(self, content: Callable[[Tag], dict[str, Any]]) -> dict[str, Any]:
        """The document in the newer form, with the content of each tag as a backend reads it."""
        form: dict[str, Any] = {
            "tags": [_written(tag, content(tag)) for tag in self.tags],
            "at_least_one": self.at_least_one,
            "stop_after_first": self.stop_after_first,
        }
        if self.triggers:
            form |= {"type": "triggered_tags", "triggers": list(self.triggers)}
        else:
            form |= {"type": "tags_with_separator", "separator": self.separator}
        if self.alternative is not None:
            form = {"type": "or", "elements": [form, _written(self.alternative, content(self.alternative))]}
        return {"type": "structural_tag", "format": form}


def read_structural_tags(text: str) -> StructuralTags:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"structural_tag is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise GrammarError("structural_tag is not a JSON object")
    if "structures" in document:
        entries = _list(document, "structures")
        tags = StructuralTags(
            _triggers(document),
            tuple(_tag(entry, entry.get("schema") if _is_object(entry) else None) for entry in entries),
        )
    else:
        tags = _read_format(document.get("format"))
    if not 0 < len(tags.tags) <= MAX_TAGS:
        raise GrammarError(f"structural_tag has {len(tags.tags)} tags, 1 to {MAX_TAGS} are allowed")
    for tag in tags.tags:
        if tags.triggers and not any(tag.begin.startswith(trigger) for trigger in tags.triggers):
            raise GrammarError(f"structural_tag: no trigger begins the tag {tag.begin!r}")
    for trigger in tags.triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags.tags):
            raise GrammarError(f"structural_tag: no tag begins with the trigger {trigger!r}")
        for other in tags.triggers:
            if other != trigger and trigger in other:
                raise GrammarError(
                    f"structural_tag: the trigger {trigger!r} is a part of the trigger {other!r}"
                )
    return tags


def schema_content(tag: Tag) -> dict[str, Any]:
    """The content of a tag, without leniency: for schemas that are enforced."""
    return {"type": "json_schema", "json_schema": tag.schema}


def _written(tag: Tag, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": tag.begin, "content": content, "end": tag.end} if tag.begin else content


def _read_format(form: object) -> StructuralTags:
    if not _is_object(form):
        raise GrammarError("structural_tag has neither 'structures' nor an object 'format'")
    kind = form.get("type")
    if kind == "or":
        return _read_or(form)
    if kind == "tag":
        return StructuralTags((), (_new_tag(form),), at_least_one=True, stop_after_first=True)
    if kind == "tags_with_separator":
        unknown = set(form) - {"type", "tags", "separator", "at_least_one", "stop_after_first"}
        if unknown:
            raise GrammarError(f"structural_tag: {min(unknown)!r} of tags_with_separator is not supported")
        if not isinstance(form.get("separator"), str):
            raise GrammarError("structural_tag: 'separator' of tags_with_separator is not a text")
        return StructuralTags(
            (),
            tuple(_new_tag(entry) for entry in _list(form, "tags")),
            separator=form["separator"],
            at_least_one=_flag(form, "at_least_one"),
            stop_after_first=_flag(form, "stop_after_first"),
        )
    if kind == "triggered_tags":
        unknown = set(form) - {"type", "triggers", "tags", "at_least_one", "stop_after_first"}
        if unknown:
            raise GrammarError(f"structural_tag: {min(unknown)!r} of triggered_tags is not supported")
        return StructuralTags(
            _triggers(form),
            tuple(_new_tag(entry) for entry in _list(form, "tags")),
            at_least_one=_flag(form, "at_least_one"),
            stop_after_first=_flag(form, "stop_after_first"),
        )
    raise GrammarError(f"structural_tag: the format {kind!r} is not supported")


def _read_or(form: dict[str, Any]) -> StructuralTags:
    elements = _list(form, "elements")
    kinds = [element.get("type") if _is_object(element) else None for element in elements]
    if len(kinds) != 2 or kinds[0] != "tags_with_separator" or kinds[1] not in ("tag", "json_schema"):
        raise GrammarError("structural_tag: or takes tags_with_separator and a tag or json_schema alone")
    tags, other = elements
    alternative = _new_tag(other) if kinds[1] == "tag" else _new_tag({"content": other}, is_bare=True)
    return dataclasses.replace(_read_format(tags), alternative=alternative)


def _new_tag(entry: Any, *, is_bare: bool = False) -> Tag:
    content = entry.get("content") if _is_object(entry) else None
    if not _is_object(content) or content.get("type") != "json_schema":
        kind = content.get("type") if _is_object(content) else content
        raise GrammarError(f"structural_tag: the content {kind!r} of a tag is not supported")
    unknown = set(content) - {"type", "json_schema", "lenient"}
    if unknown:
        raise GrammarError(f"structural_tag: {min(unknown)!r} of a json_schema content is not supported")
    schema, is_lenient = content.get("json_schema"), _flag(content, "lenient")
    return _tag({"begin": ""} if is_bare else entry, schema, is_lenient=is_lenient, is_bare=is_bare)


def _tag(entry: Any, schema: object, *, is_lenient: bool = False, is_bare: bool = False) -> Tag:
    begin, end = (entry.get("begin"), entry.get("end", "")) if _is_object(entry) else (None, None)
    if not isinstance(begin, str) or (not begin and not is_bare):
        raise GrammarError("structural_tag: a tag has no text 'begin'")
    if not isinstance(end, str):
        raise GrammarError(f"structural_tag: 'end' of the tag {begin!r} is not a text")
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"structural_tag: the tag {begin!r} has no schema")
    return Tag(begin, schema, end, is_lenient)


def _triggers(document: Any) -> tuple[str, ...]:
    triggers = _list(document, "triggers")
    if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GrammarError("structural_tag: 'triggers' is not a list of texts")
    return tuple(dict.fromkeys(triggers))


def _list(document: Any, name: str) -> list[Any]:
    entries = document.get(name)
    if not isinstance(entries, list):
        raise GrammarError(f"structural_tag: {name!r} is not a list")
    return entries


def _flag(document: Any, name: str) -> bool:
    value = document.get(name, False)
    if not isinstance(value, bool):
        raise GrammarError(f"structural_tag: {name!r} is not a bool")
    return value


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
