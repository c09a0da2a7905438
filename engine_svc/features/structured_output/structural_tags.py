"""The document of a structural tag: texts that begin and end a tag, and the schema between them.

Two forms are read. The older: {"structures": [{"begin", "schema", "end"}], "triggers": [text]}. The newer:
{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers", "tags", ...}}, where a tag is
{"type": "tag", "begin", "content": {"type": "json_schema", "json_schema", "lenient"}, "end"}, or such a tag
alone, or {"type": "tags_with_separator", "tags", "separator", ...}, which has no text but these and its
`begin` and `end`, or {"type": "or", "elements": [such tags, another tag or a content]}, one of the two. A
`preface` of such tags or of `or` is a tag that may come first.

The content of a tag may also be {"type": "keyword_arguments", "json_schema", "lenient"}: the members of an
object as Python's keyword arguments, required ones first, with their values as JSON; or {"type": "regex",
"pattern"}: a text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from engine_svc.features.structured_output.constraint import GrammarError
from triptych_kit import exact_json

MAX_TAGS = 1024
_KEYWORD = re.compile(r"[^\W\d]\w*")
# Members of a schema of keyword arguments: those that are written, and those that say nothing of them.
_ARGUMENT_KEYS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_ANNOTATIONS = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples"})
_CONTENTS = {
    "json_schema": ("json_schema", "lenient"),
    "keyword_arguments": ("json_schema", "lenient"),
    "regex": ("pattern",),
}
_TEXTS = ("separator", "begin", "end")
_DEFINITIONS = ("$defs", "definitions")
_LOCAL = re.compile(r"#/(\$defs|definitions)/")


@dataclass(frozen=True, slots=True)
class Tag:
    begin: str
    schema: dict[str, Any] | bool
    end: str
    is_lenient: bool = False  # without keywords that no backend enforces; any object where the schema is none
    is_keywords: bool = False  # members as keyword arguments
    pattern: str = ""  # of a text in place of the schema


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Free text in which each trigger begins one of the tags that start with it."""

    triggers: tuple[str, ...]  # empty: the output is tags with `separator` between them and nothing else
    tags: tuple[Tag, ...]
    separator: str = ""
    at_least_one: bool = False
    stop_after_first: bool = False
    alternative: Tag | None = None  # an output in place of the tags; it may have neither begin nor end
    begin: str = ""  # before the first tag
    end: str = ""  # behind the last one
    preface: Tag | None = None  # may come before the tags, or before the alternative

    def all_tags(self) -> list[Tag]:
        return [*self.tags, *(tag for tag in (self.alternative, self.preface) if tag is not None)]

    def texts(self) -> list[str]:
        """The texts outside of the schemas."""
        around = [text for tag in self.all_tags() for text in (tag.begin, tag.end)]
        return [*self.triggers, self.separator, self.begin, self.end, *around]

    def map(self, change: Callable[[Tag], Tag]) -> StructuralTags:
        """A copy with each tag changed."""
        alternative = None if self.alternative is None else change(self.alternative)
        preface = None if self.preface is None else change(self.preface)
        tags = tuple(change(tag) for tag in self.tags)
        return dataclasses.replace(self, tags=tags, alternative=alternative, preface=preface)

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
            form |= {name: text for name, text in (("begin", self.begin), ("end", self.end)) if text}
        if self.alternative is not None:
            form = {"type": "or", "elements": [form, _written(self.alternative, content(self.alternative))]}
        if self.preface is not None:
            form["preface"] = _written(self.preface, content(self.preface))
        return {"type": "structural_tag", "format": form}


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    is_required: bool
    schema: dict[str, Any]


def keyword_arguments(tag: Tag) -> list[Argument]:
    """The arguments of a tag, required ones first. Raises GrammarError for what they cannot say.

    A lenient tag has those that they can.
    """
    schema = tag.schema if isinstance(tag.schema, dict) else {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    definitions: dict[str, Any] = {name: schema[name] for name in _DEFINITIONS if name in schema}
    faults = [f"the keyword {name!r}" for name in schema if name not in _ARGUMENT_KEYS | _ANNOTATIONS]
    found = []
    for name in [*required, *(name for name in properties if name not in required)]:
        value = properties.get(name, True)
        if _KEYWORD.fullmatch(name) is None:
            faults += [f"the argument {name!r}"] if name in required else []
        elif value is False or not all(_LOCAL.match(target) for target in _references(value)):
            faults += [f"the schema of {name!r}"] if name in required or value is not False else []
        else:
            found.append(
                Argument(name, name in required, {**definitions, **({} if value is True else value)})
            )
    if faults and not tag.is_lenient:
        raise GrammarError(f"structural_tag: keyword arguments cannot have {faults[0]} of {tag.begin!r}")
    return found


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [target for one in value for target in _references(one)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [target for one in value.values() for target in _references(one)]


def read_structural_tags(text: str) -> StructuralTags:
    try:
        document = exact_json.loads(text)
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
    if tag.pattern:
        return {"type": "regex", "pattern": tag.pattern}
    if tag.is_keywords:
        # Leniency also says which arguments there are.
        return {"type": "keyword_arguments", "json_schema": tag.schema, "lenient": tag.is_lenient}
    return {"type": "json_schema", "json_schema": tag.schema}


def _written(tag: Tag, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": tag.begin, "content": content, "end": tag.end} if tag.begin else content


def _read_format(form: object) -> StructuralTags:
    if not _is_object(form):
        raise GrammarError("structural_tag has neither 'structures' nor an object 'format'")
    kind = form.get("type")
    if "preface" in form:
        rest = {name: value for name, value in form.items() if name != "preface"}
        if kind not in ("or", "tags_with_separator"):
            raise GrammarError(f"structural_tag: 'preface' of {kind} is not supported")
        return dataclasses.replace(_read_format(rest), preface=_new_tag(form["preface"]))
    if kind == "or":
        return _read_or(form)
    if kind == "tag":
        return StructuralTags((), (_new_tag(form),), at_least_one=True, stop_after_first=True)
    if kind == "tags_with_separator":
        known = {"type", "tags", "separator", "begin", "end", "at_least_one", "stop_after_first"}
        if unknown := set(form) - known:
            raise GrammarError(f"structural_tag: {min(unknown)!r} of tags_with_separator is not supported")
        texts: dict[str, Any] = {name: form.get(name, None if name == "separator" else "") for name in _TEXTS}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise GrammarError(f"structural_tag: {name!r} of tags_with_separator is not a text")
        return StructuralTags(
            (),
            tuple(_new_tag(entry) for entry in _list(form, "tags")),
            **texts,
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
    alternatives = ("tag", "json_schema", "regex")
    if len(kinds) != 2 or kinds[0] != "tags_with_separator" or kinds[1] not in alternatives:
        raise GrammarError(
            "structural_tag: or takes tags_with_separator and a tag, json_schema or regex alone"
        )
    tags, other = elements
    alternative = _new_tag(other) if kinds[1] == "tag" else _new_tag({"content": other}, is_bare=True)
    return dataclasses.replace(_read_format(tags), alternative=alternative)


def _new_tag(entry: Any, *, is_bare: bool = False) -> Tag:
    content = entry.get("content") if _is_object(entry) else None
    kind = content.get("type") if _is_object(content) else content
    if not _is_object(content) or kind not in _CONTENTS:
        raise GrammarError(f"structural_tag: the content {kind!r} of a tag is not supported")
    if unknown := set(content) - {"type", *_CONTENTS[kind]}:
        raise GrammarError(f"structural_tag: {min(unknown)!r} of a {kind} content is not supported")
    place = {"begin": ""} if is_bare else entry
    if kind == "regex":
        pattern = content.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            raise GrammarError("structural_tag: 'pattern' of a regex content is not a text")
        return dataclasses.replace(_tag(place, True, is_bare=is_bare), pattern=pattern)
    schema, is_lenient = content.get("json_schema"), _flag(content, "lenient")
    tag = _tag(place, schema, is_lenient=is_lenient, is_bare=is_bare)
    return dataclasses.replace(tag, is_keywords=kind == "keyword_arguments")


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
