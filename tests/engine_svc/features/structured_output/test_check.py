"""Constraints as a backend gets them, and refusals of what is none, with a cause in every case."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
from llguidance import LLMatcher

from engine_svc.features.structured_output.check import ConstraintRefused, WrittenConstraint, check
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind, GrammarError
from engine_svc.features.structured_output.json_schema.keywords import ENFORCED_KEYWORDS
from engine_svc.features.structured_output.llguidance_text import grammar_error, grammar_text, parser_limits

EMAIL = {"type": "object", "properties": {"email": {"type": "string"}}, "required": ["email"]}
UNKNOWN = {"properties": {"a": {"type": "object", "minProperties": 3}}}
KEYWORDS = (
    *ENFORCED_KEYWORDS,
    "oneOf", "not", "if", "then", "else", "propertyNames", "patternProperties", "minProperties",
    "maxProperties", "unevaluatedProperties", "unevaluatedItems", "uniqueItems", "contains",
    "minContains", "maxContains", "$dynamicRef",
)  # fmt: skip
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


def schema(document: object, **options: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(document), **options)


def tags(*entries: dict[str, object]) -> Constraint:
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": entries}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))


def tag(name: str, inner: object, **options: object) -> dict[str, object]:
    content = {"type": "json_schema", "json_schema": inner, **options}
    return {"type": "tag", "begin": f"<{name}>", "content": content, "end": f"</{name}>"}


def written(backend: str, constraint: Constraint, is_last: bool = False) -> str:
    """A grammar that llguidance takes."""
    if backend != "llguidance":
        return ""
    grammar = grammar_text(constraint, {})
    message = LLMatcher.validate_grammar(grammar, None, limits=parser_limits())
    if message:
        raise grammar_error(constraint, message)
    return grammar


def checked(constraint: Constraint, *backends: str) -> WrittenConstraint:
    return check(constraint, backends or ("llguidance",), written)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_with_any_value_is_taken_or_refused(keyword):
    for value in ODD:
        for document in ({keyword: value}, {"type": "object", "properties": {"a": {keyword: value}}}):
            with contextlib.suppress(ConstraintRefused):
                checked(schema(document))


def test_a_second_backend_gets_what_the_first_does_not_enforce():
    plain = {"type": "string"}
    assert checked(schema(plain), "xgrammar", "llguidance").backend == "xgrammar"
    assert checked(schema(plain | {"pattern": "a"}), "xgrammar", "llguidance").backend == "llguidance"
    with pytest.raises(ConstraintRefused, match="pattern at #: xgrammar"):
        checked(schema(plain | {"pattern": "a"}), "xgrammar")


def test_a_lenient_request_leaves_keywords_out_only_where_no_backend_enforces_all():
    pattern = schema({"type": "string", "pattern": "a"}, is_lenient=True)
    one = checked(pattern, "xgrammar", "llguidance")
    assert (one.backend, "pattern" in one.constraint.text) == ("llguidance", True)
    counted = schema({"type": "object", "minProperties": 3}, is_lenient=True)
    one = checked(counted, "xgrammar", "llguidance")
    assert (one.backend, "minProperties" in one.constraint.text) == ("xgrammar", False)


def test_what_is_written_needs_no_options_of_the_client():
    one = checked(schema(EMAIL, has_additional_properties=False, is_lenient=True)).constraint
    assert json.loads(one.text)["additionalProperties"] is False
    assert (one.has_additional_properties, one.is_lenient) == (True, False)


def test_the_last_backend_is_known_to_be():
    calls = []

    def write(backend: str, constraint: Constraint, is_last: bool) -> str:
        calls.append((backend, is_last))
        raise GrammarError("no")

    for is_lenient in (False, True):
        with pytest.raises(ConstraintRefused, match="no"):
            check(schema({}, is_lenient=is_lenient), ("llguidance", "xgrammar"), write)
    plain = [("llguidance", False), ("xgrammar", True)]
    assert calls == [*plain, ("llguidance", False), ("xgrammar", False), *plain]


def test_a_limit_of_one_backend_is_no_reason_to_take_another():
    many = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(2001)}}
    closed = many | {"additionalProperties": False}
    with pytest.raises(ConstraintRefused, match="2001 entries, 2000 are allowed") as caught:
        checked(schema(closed), "llguidance", "xgrammar")
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"


def test_only_lenient_tags_may_have_a_schema_that_is_none():
    none = {"type": "map"}
    form = json.loads(checked(tags(tag("a", none, lenient=True))).constraint.text)["format"]
    assert [one["content"] for one in form["tags"]] == [
        {"type": "json_schema", "json_schema": {"type": "object"}}
    ]
    with pytest.raises(ConstraintRefused, match="the schema of '<b>'") as caught:
        checked(tags(tag("a", none, lenient=True), tag("b", none)))
    assert caught.value.reason == "CONSTRAINT_INVALID"
    with pytest.raises(ConstraintRefused, match="'lenient' is not a bool"):
        checked(tags(tag("a", none, lenient=1)))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a b": {}}, "required": ["a b"]}, "the argument 'a b'"),
        ({"patternProperties": {"^x": {"type": "null"}}}, "the keyword 'patternProperties'"),
    ],
)
def test_a_schema_that_keyword_arguments_cannot_say_is_refused_unless_it_is_lenient(schema, words):
    def document(is_lenient: bool) -> Constraint:
        content: dict[str, object] = {
            "type": "keyword_arguments",
            "json_schema": {"type": "object", **schema},
        }
        content |= {"lenient": True} if is_lenient else {}
        return tags({"type": "tag", "begin": "<f>", "content": content, "end": "."})

    with pytest.raises(ConstraintRefused, match=words):
        checked(document(False))
    assert checked(document(True)).grammar


def test_the_schemas_of_structural_tags_are_rewritten_or_refused_with_the_tag():
    closed = dataclasses.replace(tags(tag("f", EMAIL)), has_additional_properties=False)
    form = json.loads(checked(closed).constraint.text)["format"]
    assert form["triggers"] == ["<"]
    assert form["tags"][0]["content"]["json_schema"]["additionalProperties"] is False
    with pytest.raises(ConstraintRefused, match=r"minProperties at #/properties/a.*in the tag '<f>'"):
        checked(tags(tag("f", UNKNOWN)))


@pytest.mark.parametrize(
    ("kind", "text", "words", "reason"),
    [
        ("json_schema", "{", "not JSON", "CONSTRAINT_INVALID"),
        ("json_schema", "3", "neither an object nor a bool", "CONSTRAINT_INVALID"),
        ("json_schema", "false", "no output satisfies", "CONSTRAINT_INVALID"),
        ("json_schema", json.dumps(UNKNOWN), "minProperties at #/properties/a", "CONSTRAINT_NOT_ENFORCED"),
        ("regex", "(a", "unclosed group", "CONSTRAINT_INVALID"),
        ("grammar", 'start: "a" b', "unknown name", "CONSTRAINT_INVALID"),
        ("grammar", "root ::= (", "grammar", "CONSTRAINT_INVALID"),
        ("structural_tag", "[]", "not a JSON object", "CONSTRAINT_INVALID"),
        ("regex", "(a{1000}){1000}", "are allowed", "CONSTRAINT_TOO_COMPLEX"),
        ("json_schema", "[" * 5000 + "]" * 5000, "deep", "CONSTRAINT_TOO_COMPLEX"),
    ],
)
def test_123_a_constraint_that_no_backend_takes_is_refused_with_its_cause(kind, text, words, reason):
    with pytest.raises(ConstraintRefused, match=words) as caught:
        checked(Constraint(ConstraintKind(kind), text), "llguidance", "xgrammar")
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (ConstraintKind.JSON_SCHEMA, {"type": "q" * 100_000}),
        (ConstraintKind.JSON_SCHEMA, {"properties": {"q" * 10_000: {"not": {"format": "email"}}}}),
        (ConstraintKind.STRUCTURAL_TAG, {"format": {"type": "q" * 100_000}}),
    ],
)
def test_a_refusal_is_short_and_keeps_its_end(kind, document):
    with pytest.raises(ConstraintRefused, match=r"^.{,1005}$") as refused:
        checked(Constraint(kind, json.dumps(document)))
    assert "q ..." in str(refused.value)
