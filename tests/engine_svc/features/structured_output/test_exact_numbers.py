"""Numbers of schemas as written, to the last digit, wherever a schema stands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine_svc.features.structured_output.check import ConstraintRefused, check
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind, Spacing, Whitespace
from engine_svc.features.structured_output.llguidance_text import grammar_error, grammar_text, parser_limits

BYTES = LLTokenizer("byte")
LARGE = (1 << 53) + 1  # which a double cannot hold
PRICE = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
INT64 = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}


def written(constraint: Constraint) -> str:
    def write(_backend: str, rewritten: Constraint, _is_last: bool) -> str:
        grammar = grammar_text(rewritten, {})
        matcher = LLMatcher(BYTES, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise grammar_error(rewritten, matcher.get_error())
        return grammar

    return check(constraint, ("llguidance",), write).grammar


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=parser_limits())
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def members(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"const": LARGE}, [str(LARGE)], [str(LARGE - 1), f"{LARGE}.0"]),
        ({"enum": [12345678901234567890123]}, ["12345678901234567890123"], ["12345678901234568000000"]),
        (
            members(["id"], id={"enum": [1234567890123456789, 987654321098765432]}),
            ['{"id": 1234567890123456789}', '{"id":987654321098765432}'],
            ['{"id": 1234567890123456768}', "{}"],
        ),
        (
            {"type": "integer", "exclusiveMinimum": LARGE - 1, "exclusiveMaximum": LARGE + 1},
            [str(LARGE)],
            [str(LARGE - 1), str(LARGE + 1)],
        ),
        (
            members(["i", "q"], i=INT64, q={"type": "string", "pattern": "^[A-Z]+$"}),
            [f'{{"i": {-(1 << 63)}, "q": "A"}}', f'{{"i": {(1 << 63) - 1}, "q": "A"}}'],
            [f'{{"i": {1 << 63}, "q": "A"}}', '{"i": 0, "q": "a"}'],
        ),
        (INT64 | {"multipleOf": 1 << 62}, [str(1 << 62), "0", str(-(1 << 63))], [str((1 << 62) + 1)]),
        (INT64 | {"multipleOf": 1000}, ["9223372036854775000"], ["9223372036854776000", "1001"]),
        (PRICE, ["0.3", "0.5", "0.50"], ["0", "0.0", "0.51"]),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.2", "-1.5"], ["-1", "-1.0"]),
        (PRICE | {"exclusiveMaximum": 0.25}, ["0.1", "0.2", "0.24"], ["0", "0.25", "0.5"]),
        ({"type": "number", "minimum": 0, "maximum": 0.25}, ["0.2", "0.25", "0", "-0"], ["0.3"]),
        ({"type": "number", "multipleOf": 0.25}, ["0.5", "0.50", "-1.75", "2"], ["0.3"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.5", "0.07"], ["0.001"]),
        ({"type": "number", "multipleOf": 0.3}, ["0.3", "3", "-0.6"], ["0.5", "1"]),
        ({"const": 0.1}, ["0.1"], ["0.10000000000000001"]),
        ({"maximum": 1.7976931348623157e308}, ["1" + "0" * 308, '"a"', "[1.5]"], ["1" + "0" * 309]),
        ({"type": "number", "exclusiveMinimum": 5e-324}, ["0.1"], ["0"]),
        ({"type": "integer", "not": {"const": LARGE}}, [str(LARGE - 1), str(LARGE + 1)], [str(LARGE)]),
        (
            {"oneOf": [{"type": "integer", "minimum": LARGE}, {"type": "integer", "maximum": LARGE}]},
            [str(LARGE - 1)],
            [str(LARGE)],
        ),
        ({"type": "integer", "if": {"minimum": LARGE}, "then": False}, [str(LARGE - 1)], [str(LARGE)]),
        (
            {"allOf": [{"properties": {"p": PRICE}}, {"properties": {"p": {"minimum": 0.5}}}]},
            ['{"p": 0.5}', '{"q": [0]}'],
            ['{"p": 0.4}'],
        ),
        (
            {"$defs": {"t": {"anyOf": [PRICE, {"type": "array", "items": {"$ref": "#/$defs/t"}}]}}}
            | {"$ref": "#/$defs/t"},
            ["0.5", "[[0.1], 0.2, []]"],
            ["[[0.1], 0]", "0.6"],
        ),
        (
            {"type": "array", "prefixItems": [PRICE, {"type": "null"}], "items": {"const": LARGE}}
            | {"minItems": 1, "maxItems": 4},
            ["[0.1]", "[0.1, null]", f"[0.1, null, {LARGE}, {LARGE}]"],
            ["[]", "[0]", f"[0.1, null, {LARGE - 1}]", f"[0.1, null, {LARGE}, {LARGE}, {LARGE}]"],
        ),
        (
            {
                "type": "object",
                "additionalProperties": PRICE,
                "properties": {'a"\\': True},
                "minProperties": 1,
            },
            ['{"a\\"\\\\": 7}', '{"b": 0.1, "c": 0.2}'],
            ['{"b": 0}', '{"b": 0.1, "a\\"\\\\": 7}', "{}"],
        ),
        (
            {"type": "object", "patternProperties": {"^x": PRICE}, "additionalProperties": False},
            ['{"x1": 0.1}', "{}"],
            ['{"x1": 0}', '{"y": 0.1}'],
        ),
        ({"type": "array", "items": PRICE, "maxItems": 1}, ["[]", "[0.5]"], ["[0]", "[0.5, 0.5]"]),
        ({"type": ["integer", "null"], "exclusiveMaximum": -(LARGE - 1)}, [str(-LARGE)], [str(1 - LARGE)]),
        (
            {"anyOf": [PRICE, {"type": "string", "pattern": "^a", "maxLength": 0}]},
            ["0.5"],
            ['"a"', '""'],
        ),
        # Beside parts that have no value.
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/x"},
                "$defs": {"x": {"allOf": [{"minimum": 0.75}, {"type": "null"}, {"type": "number"}]}},
            },
            ["[]"],
            ["[null]", "[1]"],
        ),
        (
            {
                "anyOf": [{"$ref": "#/$defs/x"}, {"minimum": 0.75, "type": "number"}],
                "$defs": {"x": {"allOf": [{"type": "null"}, {"type": "array"}]}},
            },
            ["1"],
            ["null", "0.5", "[]"],
        ),
        (
            {
                "type": "object",
                "properties": {"\\": {"maximum": 0.25, "type": "number"}},
                "propertyNames": {"maxLength": 0, "minLength": 1},
            },
            ["{}"],
            ['{"\\\\": 0}', '{"a": 0}'],
        ),
    ],
    ids=str,
)
def test_a_schema_allows_its_numbers(schema: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    grammar = written(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    assert [text for text in allowed if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (json.dumps(INT64 | {"multipleOf": 7}), "CONSTRAINT_NOT_ENFORCED", "multipleOf at #: multiples of 7"),
        (
            json.dumps({"properties": {"a": INT64 | {"multipleOf": 7}}}),
            "CONSTRAINT_NOT_ENFORCED",
            "multipleOf at #/properties/a: multiples of 7",
        ),
        (
            '{"allOf": [{"patternProperties": {"^a": {"const": 1}}}, {"patternProperties": {"b$": false}}]}',
            "CONSTRAINT_NOT_ENFORCED",
            "patternProperties of which several may match one name",
        ),
        ('{"enum": [7], "multipleOf": 2}', "CONSTRAINT_INVALID", "json_schema is satisfied by no value"),
        ('{"const": 1e400}', "CONSTRAINT_TOO_COMPLEX", "a number has more than 400 digits"),
        ('{"const": 1%s}' % ("0" * 400), "CONSTRAINT_TOO_COMPLEX", "a number has more than 400 digits"),
        ('{"type": "integer", "minimum": 0.1, "maximum": 0.9}', "CONSTRAINT_INVALID", "no value"),
    ],
)
def test_numbers_without_a_form_are_refused_by_keyword_and_place(text: str, reason: str, words: str) -> None:
    with pytest.raises(ConstraintRefused, match=words) as caught:
        written(Constraint(ConstraintKind.JSON_SCHEMA, text))
    assert caught.value.reason == reason


def test_a_lenient_schema_is_served_without_them() -> None:
    schema = members([], a=INT64 | {"multipleOf": 7})
    grammar = written(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), is_lenient=True))
    assert accepts(grammar, '{"a": 1}')
    assert not accepts(grammar, '{"a": "1"}')


@pytest.mark.parametrize("spacing", list(Spacing))
def test_the_numbers_of_tags_are_those_of_their_schemas(spacing: Spacing) -> None:
    schema = members(["id"], id={"const": LARGE}, p=PRICE)
    tags = [{"begin": "<f>", "schema": schema, "end": "</f>"}, {"begin": "<g>", "schema": {}, "end": ""}]
    text = json.dumps({"structures": tags, "triggers": ["<"]})
    constraint = Constraint(ConstraintKind.STRUCTURAL_TAG, text, whitespace=Whitespace(spacing, ""))
    grammar = written(constraint)
    assert accepts(grammar, f'a <f>{{"id": {LARGE}, "p": 0.5}}</f> b <g>[0]')
    assert not accepts(grammar, f'<f>{{"id": {LARGE - 1}}}</f>')
    assert not accepts(grammar, f'<f>{{"id": {LARGE}, "p": 0}}</f>')
    loose = f'<f>{{ "id": {LARGE}\n,"p" : 0.5 }}</f>'
    assert accepts(grammar, loose) == (spacing is Spacing.FREE)


def test_keyword_arguments_have_the_numbers_of_their_schema() -> None:
    content = {"type": "keyword_arguments", "json_schema": members(["id"], id={"const": LARGE}, p=PRICE)}
    tag = {"type": "tag", "begin": "f(", "content": content, "end": ")"}
    text = json.dumps({"type": "structural_tag", "format": tag})
    grammar = written(Constraint(ConstraintKind.STRUCTURAL_TAG, text))
    assert accepts(grammar, f"f(id={LARGE}, p=0.25)")
    assert not accepts(grammar, f"f(id={LARGE - 1})")
    assert not accepts(grammar, f"f(id={LARGE}, p=0)")


def test_xgrammar_is_given_no_number_that_it_rounds() -> None:
    for schema in ({"const": LARGE}, INT64, PRICE, {"type": "number", "multipleOf": 0.5}):
        with pytest.raises(ConstraintRefused, match="xgrammar"):
            check(
                Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)),
                ("xgrammar",),
                lambda *_: "",
            )
