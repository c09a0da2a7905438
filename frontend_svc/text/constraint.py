"""What a client asks of an output, checked and written as a grammar backend enforces it.

The check runs in a text worker: a schema may take seconds or much memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from frontend_svc.text.json_schema.document import InvalidSchema, SchemaTooLarge
from frontend_svc.text.json_schema.keywords import UnenforcedKeywords, serve
from triptych_kit.grammars.constraint import (
    Constraint,
    ConstraintKind,
    GrammarError,
    GrammarTooComplex,
    Whitespace,
    shortened,
)
from triptych_kit.grammars.structural_tags import read_structural_tags

# Reasons of a refusal. The first two say something about the constraint for good.
INVALID = "CONSTRAINT_INVALID"
NOT_ENFORCED = "CONSTRAINT_NOT_ENFORCED"
TOO_COMPLEX = "CONSTRAINT_TOO_COMPLEX"

_ANY_OBJECT = {"type": "object"}


class ConstraintRefused(ValueError):
    def __init__(self, message: str, reason: str) -> None:
        super().__init__(shortened(message))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AskedConstraint:
    """backends: those that may be chosen, the first one that enforces everything is.

    is_lenient: keywords of schemas that no backend enforces are left out. lenient_tags: the same for single
    structural tags, whose schema may then also be none.
    """

    constraint: Constraint
    backends: tuple[str, ...]
    is_lenient: bool = False
    lenient_tags: tuple[bool, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), default=lambda kind: kind.value, sort_keys=True).encode()

    @classmethod
    def from_json(cls, content: bytes) -> AskedConstraint:
        values = json.loads(content)
        asked = values.pop("constraint")
        constraint = Constraint(
            ConstraintKind(asked.pop("kind")),
            choices=tuple(asked.pop("choices")),
            whitespace=Whitespace(**asked.pop("whitespace")),
            **asked,
        )
        return cls(
            constraint,
            tuple(values["backends"]),
            values["is_lenient"],
            tuple(values["lenient_tags"]),
        )


@dataclass(frozen=True, slots=True)
class CheckedConstraint:
    """text: of the constraint, for this backend. It says by itself which properties objects may have."""

    backend: str
    text: str


def check(asked: AskedConstraint) -> CheckedConstraint:
    """Raises ConstraintRefused."""
    first: Exception | None = None
    try:
        for backend, is_lenient in _attempts(asked):
            try:
                text = _text_for(asked, backend, is_lenient=is_lenient)
                _check_compiles(dataclasses.replace(asked.constraint, text=text), backend)
            except UnenforcedKeywords as error:
                first = first or error
            except GrammarError as error:
                first = first or error
                # Another backend is known to take a schema alone, and without limits on the work for it.
                is_limit = isinstance(error, GrammarTooComplex)
                if is_limit or asked.constraint.kind is not ConstraintKind.JSON_SCHEMA:
                    break
            else:
                return CheckedConstraint(backend, text)
    except InvalidSchema as error:
        raise ConstraintRefused(str(error), INVALID) from None
    except (SchemaTooLarge, MemoryError, RecursionError) as error:
        message = str(error) or "it takes more memory than the limit"
        raise ConstraintRefused(message, TOO_COMPLEX) from None
    if isinstance(first, UnenforcedKeywords):
        raise ConstraintRefused(f"no backend enforces {first}", NOT_ENFORCED)
    reason = TOO_COMPLEX if isinstance(first, GrammarTooComplex) else INVALID
    raise ConstraintRefused(str(first), reason)


def _attempts(asked: AskedConstraint) -> Iterator[tuple[str, bool]]:
    for is_lenient in (False, True) if asked.is_lenient else (False,):
        for backend in asked.backends:
            yield backend, is_lenient


def _text_for(asked: AskedConstraint, backend: str, *, is_lenient: bool) -> str:
    constraint = asked.constraint
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return _schema_for(constraint.text, constraint, backend, is_lenient=is_lenient)
    if constraint.kind is not ConstraintKind.STRUCTURAL_TAG:
        return constraint.text
    tags = read_structural_tags(constraint.text)
    written = []
    for index, tag in enumerate(tags.tags):
        is_tag_lenient = index < len(asked.lenient_tags) and asked.lenient_tags[index]
        try:
            text = _schema_for(
                json.dumps(tag.schema), constraint, backend, is_lenient=is_lenient or is_tag_lenient
            )
        except InvalidSchema as error:
            if not is_tag_lenient:
                raise InvalidSchema(f"the schema of {tag.begin!r}: {error}") from None
            text = json.dumps(_ANY_OBJECT)
        except UnenforcedKeywords as error:
            where = f", in the tag {tag.begin!r}"
            raise UnenforcedKeywords(
                [dataclasses.replace(one, reason=one.reason + where) for one in error.unenforced]
            ) from None
        written.append(dataclasses.replace(tag, schema=json.loads(text)))
    return json.dumps(dataclasses.replace(tags, tags=tuple(written)).document())


def _schema_for(text: str, constraint: Constraint, backend: str, *, is_lenient: bool) -> str:
    return serve(
        text,
        (backend,),
        is_lenient=is_lenient,
        has_additional_properties=constraint.has_additional_properties,
    ).text


def _check_compiles(constraint: Constraint, backend: str) -> None:
    """Raises GrammarError. What xgrammar refuses is known in an engine alone: it cannot do without torch."""
    if backend != "llguidance":
        return
    # Imported in workers alone.
    from llguidance import LLMatcher

    from triptych_kit.grammars.llguidance_text import grammar_error, grammar_text, parser_limits

    # Special tokens change nothing about whether a grammar is one.
    grammar = grammar_text(dataclasses.replace(constraint, has_additional_properties=True), {})
    message = LLMatcher.validate_grammar(grammar, None, limits=parser_limits())
    if message:
        raise grammar_error(message)
