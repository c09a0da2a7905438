"""Constraints as a backend gets them, and refusals of what is none, with a cause in every case."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest

from frontend_svc.text.constraint import AskedConstraint, ConstraintRefused, check
from frontend_svc.text.json_schema.keywords import CONDITIONAL_KEYWORDS, ENFORCED_KEYWORDS
from triptych_kit.grammars.constraint import Constraint, ConstraintKind, Whitespace

KEYWORDS = (*ENFORCED_KEYWORDS, *CONDITIONAL_KEYWORDS)
ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    0.5,
    10**400,
    "",
    "(",
    "\ud800",
    [],
    [None],
    [[]],
    {},
    {"": None},
    {"a": -1},
)


def asked(document: object, *backends: str, **options: object) -> AskedConstraint:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(document))
    return AskedConstraint(constraint, backends or ("llguidance",), **options)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_with_any_value_is_taken_or_refused(keyword):
    for value in ODD:
        for document in ({keyword: value}, {"type": "object", "properties": {"a": {keyword: value}}}):
            with contextlib.suppress(ConstraintRefused):
                check(asked(document))


def test_a_worker_reads_what_was_asked():
    constraint = Constraint(
        ConstraintKind.CHOICE,
        choices=("a", "b"),
        whitespace=Whitespace(is_any=False, pattern=" "),
        has_additional_properties=False,
    )
    one = AskedConstraint(constraint, ("llguidance", "xgrammar"), True, (True, False))
    assert AskedConstraint.from_json(one.to_json()) == one


def test_a_second_backend_gets_what_the_first_does_not_enforce():
    plain = {"type": "string"}
    assert check(asked(plain, "xgrammar", "llguidance")).backend == "xgrammar"
    assert check(asked(plain | {"pattern": "a"}, "xgrammar", "llguidance")).backend == "llguidance"


def test_a_lenient_request_leaves_keywords_out_only_where_no_backend_enforces_all():
    pattern = {"type": "string", "pattern": "a"}
    checked = check(asked(pattern, "xgrammar", "llguidance", is_lenient=True))
    assert (checked.backend, "pattern" in checked.text) == ("llguidance", True)
    counted = {"type": "object", "minProperties": 3}
    checked = check(asked(counted, "xgrammar", "llguidance", is_lenient=True))
    assert (checked.backend, "minProperties" in checked.text) == ("xgrammar", False)


def test_a_limit_of_one_backend_is_no_reason_to_take_another():
    many = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(2001)}}
    closed = many | {"additionalProperties": False}
    with pytest.raises(ConstraintRefused, match="2001 entries, 2000 are allowed") as caught:
        check(asked(closed, "llguidance", "xgrammar"))
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"


def test_only_lenient_tags_may_have_a_schema_that_is_none():
    def tag(name: str) -> dict[str, object]:
        return {"begin": f"<{name}>", "schema": {"type": "map"}, "end": f"</{name}>"}

    document = {"structures": [tag("a"), tag("b")], "triggers": ["<"]}
    constraint = Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(document))
    both = AskedConstraint(constraint, ("llguidance",), lenient_tags=(True, True))
    form = json.loads(check(both).text)["format"]
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [{"type": "object"}] * 2
    with pytest.raises(ConstraintRefused, match="the schema of '<b>'") as caught:
        check(dataclasses.replace(both, lenient_tags=(True, False)))
    assert caught.value.reason == "CONSTRAINT_INVALID"


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (ConstraintKind.JSON_SCHEMA, {"type": "q" * 100_000}),
        (ConstraintKind.JSON_SCHEMA, {"properties": {"q" * 10_000: {"not": {"pattern": "a"}}}}),
        (ConstraintKind.STRUCTURAL_TAG, {"format": {"type": "q" * 100_000}}),
    ],
)
def test_a_refusal_is_short_and_keeps_its_end(kind, document):
    with pytest.raises(ConstraintRefused, match=r"^.{,1005}$") as refused:
        check(AskedConstraint(Constraint(kind, json.dumps(document)), ("llguidance",)))
    assert "q ... " in str(refused.value)
