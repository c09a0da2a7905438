"""A client's constraint in the form that a grammar backend enforces, or the refusal of it.

Rewriting may take seconds and much memory, so it runs in the grammar worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_svc.features.structured_output.constraint import (
    Constraint,
    ConstraintKind,
    GrammarError,
    GrammarNotEnforced,
    GrammarTooComplex,
    shortened,
)
from engine_svc.features.structured_output.json_schema.document import InvalidSchema, SchemaTooLarge
from engine_svc.features.structured_output.json_schema.keywords import UnenforcedKeywords, serve
from engine_svc.features.structured_output.structural_tags import Tag, read_structural_tags, schema_content
from triptych_kit.exact_json import dumps, loads

# Reasons of a refusal. The first two hold for the constraint whenever it comes again.
INVALID = "CONSTRAINT_INVALID"
NOT_ENFORCED = "CONSTRAINT_NOT_ENFORCED"
TOO_COMPLEX = "CONSTRAINT_TOO_COMPLEX"

_ANY_OBJECT = {"type": "object"}

# Writes a constraint in a backend's own form. is_last: no other backend follows. Raises GrammarError.
Write = Callable[[str, Constraint, bool], str]


class ConstraintRefused(ValueError):
    def __init__(self, message: str, reason: str) -> None:
        super().__init__(shortened(message))
        self.reason = reason

    @classmethod
    def of(cls, error: GrammarError) -> ConstraintRefused:
        if isinstance(error, GrammarNotEnforced):
            return cls(str(error), NOT_ENFORCED)
        return cls(str(error), TOO_COMPLEX if isinstance(error, GrammarTooComplex) else INVALID)


@dataclass(frozen=True, slots=True)
class WrittenConstraint:
    """constraint: rewritten for the backend; its schemas say which properties objects may have.

    grammar: the constraint in the backend's own form; empty if the backend writes it itself.
    """

    backend: str
    constraint: Constraint
    grammar: str = ""


def check(constraint: Constraint, backends: Sequence[str], write: Write) -> WrittenConstraint:
    """The constraint for the first backend that enforces all of it. Raises ConstraintRefused.

    A lenient constraint that none enforces goes to the first one without the keywords it does not enforce.
    """
    first: UnenforcedKeywords | GrammarError | None = None
    leniencies = (False, True) if constraint.is_lenient else (False,)
    attempts = [(backend, is_lenient) for is_lenient in leniencies for backend in backends]
    try:
        for backend, is_lenient in attempts:
            try:
                rewritten = _rewritten(constraint, backend, is_lenient=is_lenient)
                grammar = write(backend, rewritten, (backend, is_lenient) == attempts[-1])
            except UnenforcedKeywords as error:
                first = first or error
            except GrammarError as error:
                first = first or error
                # Another backend is known to take a schema alone, and without limits on the work for it.
                is_limit = isinstance(error, GrammarTooComplex)
                if is_limit or constraint.kind is not ConstraintKind.JSON_SCHEMA:
                    break
            else:
                return WrittenConstraint(backend, rewritten, grammar)
    except InvalidSchema as error:
        raise ConstraintRefused(str(error), INVALID) from None
    except (SchemaTooLarge, MemoryError, RecursionError) as error:
        message = str(error) or "it takes more memory than the limit"
        raise ConstraintRefused(message, TOO_COMPLEX) from None
    if isinstance(first, UnenforcedKeywords):
        raise ConstraintRefused(f"no backend enforces {first}", NOT_ENFORCED)
    assert first is not None, "there is a backend"
    raise ConstraintRefused.of(first)


def _rewritten(constraint: Constraint, backend: str, *, is_lenient: bool) -> Constraint:
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        text = _schema_for(constraint.text, constraint, backend, is_lenient=is_lenient)
    elif constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        text = _tags_for(constraint, backend, is_lenient=is_lenient)
    else:
        text = constraint.text
    return dataclasses.replace(constraint, text=text, has_additional_properties=True, is_lenient=False)


def _tags_for(constraint: Constraint, backend: str, *, is_lenient: bool) -> str:
    def rewritten(tag: Tag) -> Tag:
        if tag.pattern:
            return tag
        own = is_lenient or tag.is_lenient
        try:
            text = _schema_for(dumps(tag.schema), constraint, backend, is_lenient=own)
        except InvalidSchema as error:
            if not tag.is_lenient:
                place = f"the schema of {tag.begin!r}: " if tag.begin else ""
                raise InvalidSchema(f"{place}{error}") from None
            text = dumps(_ANY_OBJECT)
        except UnenforcedKeywords as error:
            where = f", in the tag {tag.begin!r}" if tag.begin else ""
            raise UnenforcedKeywords(
                [dataclasses.replace(one, reason=one.reason + where) for one in error.unenforced]
            ) from None
        return dataclasses.replace(tag, schema=loads(text), is_lenient=own)

    tags = read_structural_tags(constraint.text).map(rewritten)
    return dumps(tags.document(schema_content))


def _schema_for(text: str, constraint: Constraint, backend: str, *, is_lenient: bool) -> str:
    return serve(
        text,
        (backend,),
        is_lenient=is_lenient,
        has_additional_properties=constraint.has_additional_properties,
    ).text
