"""Every assertion and applicator of draft 2020-12: enforced by the grammar, or refused by its name."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine_svc.features.structured_output.check import check
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind
from engine_svc.features.structured_output.json_schema.keywords import (
    BACKENDS,
    UnenforcedKeywords,
    serve,
)  # fmt: skip
from engine_svc.features.structured_output.json_schema.patterns import literal
from engine_svc.features.structured_output.json_schema.rules import FORMATS
from engine_svc.features.structured_output.llguidance_text import grammar_text, parser_limits
from tests.engine_svc.features.structured_output.test_check import KEYWORDS, written


class Bytes:
    """A vocabulary of single bytes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def matcher_of(schema: str) -> LLMatcher:
    grammar = grammar_text(Constraint(ConstraintKind.JSON_SCHEMA, schema), {})
    matcher = LLMatcher(vocabulary(), grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(schema: str, text: str) -> bool:
    matcher, tokens = matcher_of(schema), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# Keyword, schema, a text that is valid, one that is not.
ENFORCED: list[tuple[str, Any, str, str]] = [
    ("type", {"type": ["string", "null"]}, "null", "1"),
    ("enum", {"enum": [1, "a", [2]]}, "[2]", "2"),
    ("const", {"const": {"a": 1}}, '{"a": 1}', "{}"),
    ("minimum", {"minimum": 5}, "5", "4"),
    ("maximum", {"maximum": 5}, "5", "6"),
    ("exclusiveMinimum", {"exclusiveMinimum": 5}, "5.1", "5"),
    ("exclusiveMaximum", {"exclusiveMaximum": 5}, "4", "5"),
    ("contains", {"contains": {"const": 1}}, "[2, 1]", "[2]"),
    (
        "contains",
        {"contains": {"const": 1}, "maxItems": 2, "prefixItems": [{"type": "null"}]},
        "[null, 1]",
        "[1]",
    ),
    ("contains", {"contains": {"const": 1}, "items": {"minimum": 1}, "minItems": 2}, "[1, 2, 3]", "[1]"),
    (
        "contains",
        {"allOf": [{"contains": {"const": 1}}, {"contains": {"maximum": 0}}]},
        "[2, 0, 1]",
        "[2, 1]",
    ),
    ("contains", {"not": {"items": {"type": "string"}}}, '["a", 1]', '["a"]'),
    ("contains", {"not": {"contains": {"type": "string"}}}, "[1]", '["a"]'),
    ("multipleOf", {"multipleOf": 0.5}, "1.5", "1.2"),
    ("minLength", {"minLength": 2}, '"ab"', '"a"'),
    ("maxLength", {"maxLength": 1}, '"😀"', '"ab"'),
    ("pattern", {"pattern": "b|^c"}, '"abd"', '"ac"'),
    ("pattern", {"pattern": r"^\w.$"}, '"ab"', '"é!"'),
    ("pattern", {"pattern": "^[a&&b]$"}, '"&"', '"c"'),
    ("pattern", {"pattern": r"^\cA?[^]\/$"}, '"x/"', '"x"'),
    ("format", {"format": "date"}, '"2024-02-29"', '"2023-02-29"'),
    ("format", {"format": "date-time"}, '"2024-02-29T00:00:00Z"', '"2023-02-29T00:00:00Z"'),
    ("format", {"format": "date-time"}, '"1998-12-31T23:59:60Z"', '"1998-12-31T22:59:60Z"'),
    ("format", {"format": "time"}, '"23:59:60Z"', '"23:10:60-22:46"'),
    ("format", {"format": "json-pointer"}, '"/a~0b/"', '"a"'),
    ("properties", {"properties": {"a": {"type": "string"}}}, '{"a": "x"}', '{"a": 1}'),
    ("properties", {"properties": {"a": {"type": "string"}}}, '{"b": 1}', '{"\\u0061": 1}'),
    ("required", {"required": ["a"]}, '{"a": 1, "b": 2}', '{"b": 2}'),
    ("additionalProperties", {"additionalProperties": {"const": 1}}, '{"a": 1}', '{"a": 2}'),
    (
        "additionalProperties",
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        '{"a": 1}',
        '{"b": 1}',
    ),
    ("patternProperties", {"patternProperties": {"a": {"const": 1}}}, '{"ba": 1}', '{"ba": 2}'),
    (
        "patternProperties",
        {"patternProperties": {".*": {"const": 1}, "^a": {"type": "integer"}}},
        '{"a":1}',
        '{"b":2}',
    ),
    ("propertyNames", {"propertyNames": {"pattern": "^a"}}, '{"ab": 1}', '{"b": 1}'),
    ("minProperties", {"minProperties": 1, "properties": {"a": {}}}, '{"a": 1}', "{}"),
    ("minProperties", {"minProperties": 1}, '{"a": 1}', "{}"),
    ("maxProperties", {"maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 1}'),
    (
        "maxProperties",
        {"maxProperties": 1, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        '{"b": 1}',
        '{"a": 1, "b": 1}',
    ),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}, '{"a": 1, "b": 1}', '{"a": 1}'),
    ("dependentSchemas", {"dependentSchemas": {"a": {"maxProperties": 1}}}, '{"a": 1}', '{"a": 1, "b": 1}'),
    ("items", {"items": {"type": "integer"}}, "[1]", '["a"]'),
    ("prefixItems", {"prefixItems": [{"type": "integer"}], "items": False}, "[1]", '["a"]'),
    ("minItems", {"minItems": 1}, "[1]", "[]"),
    ("maxItems", {"maxItems": 1}, "[1]", "[1, 2]"),
    ("uniqueItems", {"uniqueItems": True, "maxItems": 1}, "[1]", "[1, 1]"),
    ("contains", {"contains": {"const": 1}, "maxItems": 2}, "[2, 1]", "[2, 2]"),
    ("minContains", {"contains": {}, "minContains": 2}, "[1, 2]", "[1]"),
    ("maxContains", {"contains": {}, "maxContains": 2}, "[1, 2]", "[1, 2, 3]"),
    ("unevaluatedItems", {"prefixItems": [{}], "unevaluatedItems": False}, "[1]", "[1, 2]"),
    (
        "unevaluatedProperties",
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        '{"a": 1}',
        '{"b": 1}',
    ),
    ("allOf", {"allOf": [{"maximum": 5}, {"minimum": 3}]}, "4", "6"),
    ("anyOf", {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1}', "{}"),
    ("oneOf", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, "1", "null"),
    (
        "oneOf",
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        '{"a": 1}',
        '{"a": 1, "b": 1}',
    ),
    (
        "oneOf",
        {
            "oneOf": [
                {"required": ["k"], "properties": {"k": {"const": "x"}, "v": {"type": "string"}}},
                {"required": ["k"], "properties": {"k": {"const": "y"}, "v": {"type": "integer"}}},
            ]
        },
        '{"k": "y", "v": 1}',
        '{"k": "x", "v": 1}',
    ),
    ("not", {"not": {"type": "string"}}, "1", '"a"'),
    ("not", {"type": "string", "not": {"enum": ["a", "ab"]}}, '"abc"', '"ab"'),
    ("not", {"type": "object", "not": {"required": ["a"]}}, '{"b": 1}', '{"a": 1}'),
    ("if", {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}}, '"a"', "1"),
    ("then", {"if": {"type": "string"}, "then": {"maxLength": 1}}, "1", '"ab"'),
    ("else", {"if": {"type": "string"}, "else": {"type": "null"}}, '"ab"', "1"),
    ("$ref", {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}, "minLength": 2}, '"ab"', '"a"'),
    ("$anchor", {"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "string"}}}, '"a"', "1"),
    (
        "$anchor",
        {"items": {"$ref": "#x"}, "properties": {"enum": {"$anchor": "x", "type": "string"}}},
        '["a"]',
        "[1]",
    ),
    (
        "$dynamicRef",
        {"$dynamicRef": "#x", "$defs": {"y": {"$dynamicAnchor": "x", "type": "string"}}},
        '"a"',
        "1",
    ),
    (
        "$defs",
        {"$defs": {"x": {"$id": "urn:x", "type": "null"}}, "items": {"$ref": "urn:x"}},
        "[null]",
        "[1]",
    ),
    (
        "$ref",
        {"$defs": {"x": {"properties": {"n": {"$ref": "#/$defs/x", "type": "object"}}}}, "$ref": "#/$defs/x"},
        '{"n": {"n": {}}}',
        '{"n": {"n": 1}}',
    ),
]


# As earlier drafts spell them.
OF_EARLIER_DRAFTS: list[tuple[str, Any, str, str]] = [
    ("definitions", {"definitions": {"x": {"type": "null"}}, "$ref": "#/definitions/x"}, "null", "1"),
    ("dependencies", {"dependencies": {"a": ["b"]}}, '{"a": 1, "b": 1}', '{"a": 1}'),
    ("dependencies", {"dependencies": {"a": {"maxProperties": 1}}}, '{"a": 1}', '{"a": 1, "b": 1}'),
    ("items", {"items": [{"type": "null"}]}, "[null, 1]", "[1]"),
    ("additionalItems", {"items": [{}], "additionalItems": {"type": "null"}}, "[1, null]", "[1, 1]"),
    ("additionalItems", {"items": {"type": "null"}, "additionalItems": False}, "[null]", "[1]"),
    ("$id", {"definitions": {"x": {"$id": "#y", "type": "null"}}, "$ref": "#y"}, "null", "1"),
    ("exclusiveMaximum", {"maximum": 3, "exclusiveMaximum": True}, "2", "3"),
    (
        "id",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "definitions": {"x": {"id": "urn:x", "type": "null"}},
            "items": {"$ref": "urn:x"},
        },
        "[null]",
        "[1]",
    ),
    (
        "$recursiveRef",
        {"type": "object", "properties": {"a": {"$recursiveRef": "#"}}},
        '{"a": {}}',
        '{"a": 1}',
    ),
]


# What was seen to be accepted or refused wrongly by one of the backends alone: a text that is valid, one that
# is not.
PROBED: list[tuple[Any, str, str]] = [
    ({"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 2}]}, "1", "2"),
    ({"allOf": [{"type": "integer", "maximum": 9}, {"maximum": 5}]}, "5", "6"),
    ({"not": {"const": 1}, "type": "integer"}, "2", "1"),
    ({"type": "object", "properties": {"a": {"type": "null"}}}, '{"a": null, "b": 1}', '{"a": 1}'),
    ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),
    ({"type": "object", "minProperties": 1}, '{"x": 1}', "{}"),
    ({"type": "string", "const": "é"}, '"é"', '"e"'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1, 2]", "[1]"),
    ({"type": "string", "minLength": 3}, '"日本語"', '"ab"'),
    ({"type": "string", "format": "date"}, '"2024-01-31"', '"2024-01-32"'),
    ({"prefixItems": [{"type": "integer"}, {"type": "null"}], "minItems": 2}, "[1, null]", "[null, 1]"),
    ({"contains": {"type": "null"}, "maxContains": 0}, "1", "[]"),
    ({"uniqueItems": True, "items": {"enum": [1, "a", None]}}, '[null, "a"]', "[1, 1]"),
    (
        {
            "uniqueItems": True,
            "minItems": 2,
            "items": {"$ref": "#/$defs/x"},
            "$defs": {"x": {"enum": [1, 2]}},
        },
        "[2, 1]",
        "[1]",
    ),
    (
        {"required": ["a"], "maxProperties": 2, "additionalProperties": {"type": "integer"}},
        '{"a": 1, "b": 1}',
        '{"a": "x"}',
    ),
    (
        {"required": ["a"], "minProperties": 2, "additionalProperties": {"type": "integer"}},
        '{"a": 1, "b": 1}',
        '{"a": "x", "b": 1}',
    ),
]


_NAMED = {
    "type": "object",
    "properties": {"k": {"type": "string"}, "v": {"type": "integer"}},
    "required": ["k", "v"],
    "additionalProperties": False,
}

# Characters that JSON escapes, or that dialects of patterns read differently: a value, one that is invalid.
TEXTS: list[tuple[Any, Any, Any]] = [
    ({"type": "string", "pattern": '^[^"]*$'}, "say \\ hi\n", 'say "hi"'),
    ({"type": "string", "pattern": r"^[^\\]*$"}, 'C:"dir', "C:\\dir"),
    ({"type": "string", "pattern": r"^[\x00-!#-[\]-~]*$"}, "a\t!", '"'),
    ({"type": "string", "pattern": r"^\P{P}$"}, "\n", '"'),
    ({"type": "string", "pattern": r"^[\P{P}]$"}, "a", "\\"),
    ({"type": "string", "pattern": r"^\p{Cc}$"}, "\b", '"'),
    ({"type": "string", "pattern": r"^[^\p{L}\u0022]$"}, "\\", '"'),
    ({"type": "string", "pattern": r"^\w$|\x1f"}, "a", "é"),
    ({"type": "string", "pattern": r"^\u0001*$"}, "", "a"),
    ({"type": "string", "pattern": "^.$"}, "\\", "\n"),
    ({"type": "string", "pattern": r"^\s$"}, "\ufeff", "\x85"),
    ({"type": "string", "pattern": r"^\/\S\W$"}, "/éé", "/ é"),
    ({"oneOf": [{"type": "string", "pattern": r"^\W$"}, {"const": "é"}]}, "ö", "é"),
    ({"type": "string", "not": {"pattern": '^[^"]*$'}}, 'a"', "a\\"),
    ({"oneOf": [{"type": "string", "pattern": '"'}, {"pattern": r"^\\"}]}, '"\\', '\\"'),
    ({"type": "string", "pattern": r'^(?!.*")\w'}, "a\\", 'a"'),
    ({"type": "string", "not": {"const": '"'}}, "\\", '"'),
    ({"type": "string", "not": {"enum": ["\\", "\n\t"]}}, "\n", "\n\t"),
    ({"oneOf": [{"type": "string"}, {"enum": ['5" pipe']}]}, '5 " pipe', '5" pipe'),
    (
        _NAMED | {"if": {"properties": {"k": {"const": 'a"'}}}, "then": {"properties": {"v": {"const": 1}}}},
        {"k": "a\\", "v": 2},
        {"k": 'a"', "v": 2},
    ),
    ({"type": "object", "propertyNames": {"pattern": '^[^"]+$'}}, {"\\": 1}, {'"': 1}),
    ({"type": "object", "propertyNames": {"minLength": 0, "maxLength": 0}}, {"": 1}, {"a": 1}),
    (
        {
            "properties": {"é": True},
            "patternProperties": {"a|b": True},
            "propertyNames": {"maxLength": 1},
            "additionalProperties": False,
        },
        {"é": 10.1},
        {"c": 1},
    ),
    (
        {
            "properties": {"é": {"const": 1}},
            "patternProperties": {"a|b": True},
            "propertyNames": {"maxLength": 1},
            "additionalProperties": {"const": 2},
        },
        {"é": 1, "c": 2},
        {"é": 1, "c": 1},
    ),
    ({"type": "object", "propertyNames": {"pattern": "\\n", "minLength": 2}}, {"\n\n": 1}, {"\n": 1}),
    (
        {
            "patternProperties": {'["\\\\]': {"const": 1}},
            "propertyNames": {"pattern": '["\\\\]', "minLength": 2},
        },
        {'"a': 1},
        {'"': 1},
    ),
    (
        {"patternProperties": {'"': {"const": 1}, "a": {"maximum": 5}}, "additionalProperties": {"const": 2}},
        {'"a': 1, "ba": 5, "b": 2},
        {'"a': 3},
    ),
    ({"type": "object", "patternProperties": {"^[^\\\\]*$": False}}, {"\\": 1}, {'"': 1}),
    ({"properties": {'a"': {"const": 1}}, "additionalProperties": {"const": 2}}, {'a\\"': 2}, {'a"': 2}),
    ({"type": "array", "maxItems": 2, "contains": {"pattern": '^[^"]$'}}, ["\\", '"'], ['"', '"']),
    ({"dependentSchemas": {'"': {"required": ["\\"]}}}, {"\\": 1}, {'"': 1}),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), TEXTS)
def test_a_schema_limits_texts_not_their_spelling(schema, valid, invalid):
    text = serve(json.dumps(schema)).text
    assert accepts(text, json.dumps(valid, ensure_ascii=False))
    assert not accepts(text, json.dumps(invalid, ensure_ascii=False))


CHARACTERS = ('"', "\\", "/", "a", "é", "\n", "\t", "😀", "\u2028", "-", "0")


def test_random_patterns_take_the_texts_that_they_match():
    noise = random.Random(3)

    def pattern(depth: int) -> str:
        def part() -> str:
            text = "".join(map(literal, noise.sample(CHARACTERS, noise.randint(1, 3))))
            one = noise.choice([text, f"[{text}]", f"[^{text}]", r"[^\n-~]", r"\w", r"\D"])
            return f"(?:{pattern(depth - 1)})" if depth and noise.random() < 0.3 else one

        parts = [part() + noise.choice(["", "", "*", "?", "{1,2}"]) for _ in range(noise.randint(1, 3))]
        return noise.choice(["", "|"]).join(parts)

    num_matches = 0
    for _ in range(60):
        written = f"^(?:{pattern(2)})$"
        matcher = matcher_of(serve(json.dumps({"type": "string", "pattern": written})).text)
        expected = re.compile(written.replace("$", r"\Z"), re.ASCII)
        for text in ("", *CHARACTERS, *("".join(noise.sample(CHARACTERS, 2)) for _ in range(8))):
            tokens = list(json.dumps(text, ensure_ascii=False).encode())
            count = matcher.try_consume_tokens(tokens)
            is_allowed = count == len(tokens) and matcher.is_accepting()
            assert is_allowed == bool(expected.match(text)), (written, text)
            num_matches += is_allowed
            matcher.reset()
    assert num_matches > 100


@pytest.mark.parametrize(
    ("keyword", "schema", "valid", "invalid"),
    [*ENFORCED, *OF_EARLIER_DRAFTS, *(("probed", *probe) for probe in PROBED)],
)
def test_a_keyword_is_enforced(keyword, schema, valid, invalid):
    served = check(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), BACKENDS, written)
    assert served.backend == "llguidance"
    assert accepts(served.constraint.text, valid)
    assert not accepts(served.constraint.text, invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {"required": ["a", "b"], "propertyNames": {"pattern": "^[ab]$"}},
        {
            "properties": {"a": {}},
            "required": ["b"],
            "patternProperties": {"^(a|b)$": {"type": "integer"}},
            "additionalProperties": False,
        },
    ],
)
def test_no_comma_follows_where_no_name_is_left(schema):
    text = '{"a":1,"b":2'
    assert matcher_of(serve(json.dumps(schema)).text).try_consume_tokens(list(f"{text},".encode())) == len(
        text
    )


# Of draft 2020-12: assertions, applicators and references. All other keywords are annotations.
STANDARD = {
    "$ref", "$dynamicRef", "$anchor", "$defs", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "dependentSchemas", "prefixItems", "items", "contains", "properties", "patternProperties",
    "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "type", "enum",
    "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength",
    "minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains",
    "maxProperties", "minProperties", "required", "dependentRequired", "format",
}  # fmt: skip


def test_every_keyword_has_a_probe():
    assert set(KEYWORDS) == STANDARD
    assert {keyword for keyword, *_ in ENFORCED} == STANDARD


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_enforced_formats_are_known_to_the_backend(form):
    assert not accepts(serve(json.dumps({"format": form})).text, '"?"')


def test_other_formats_are_annotations():
    assert accepts(serve('{"format": "color"}').text, '"?"')


def test_what_no_backend_enforces_is_refused_by_keyword_and_place():
    schema = json.dumps(
        {"properties": {"a": {"uniqueItems": True}, "b": {"contains": {"const": 1}, "minContains": 2}}}
    )
    with pytest.raises(UnenforcedKeywords, match=r"uniqueItems at #/properties/a: .* \(and 1 more\)"):
        serve(schema)


def test_a_lenient_request_is_served_without_the_keyword():
    served = serve('{"uniqueItems": true, "items": {"type": "integer"}}', is_lenient=True)
    assert [found.keyword for found in served.unenforced] == ["uniqueItems"]
    assert accepts(served.text, "[1, 1]")
    assert not accepts(served.text, '["a"]')


def test_objects_are_closed_before_they_are_rewritten():
    schema = {
        "properties": {
            "a": {"properties": {"b": {}}},
            "c": {},
            "d": {"additionalProperties": True, "properties": {}},
        },
        "dependentRequired": {"a": ["c"]},
    }
    served = serve(json.dumps(schema), has_additional_properties=False)
    assert accepts(served.text, '{"a": {"b": 1}, "c": 1, "d": {"x": 1}}')
    for text in ('{"x": 1}', '{"a": {"x": 1}, "c": 1}', '{"a": {}}'):
        assert not accepts(served.text, text)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"minLength": 1}, "minLength"),
        # With control characters as they are, and without escapes.
        ({"type": "string", "minLength": 1}, "minLength"),
        ({"type": "string", "maxLength": 1}, "maxLength"),
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "string", "format": "email"}, "format"),
        ({"type": ["string", "null"], "minLength": 1}, "minLength"),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, "properties"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"allOf": [{"maximum": 1}, {"minimum": 0}]}, "allOf"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"),
        ({"type": "array", "items": {"type": "integer", "enum": [1]}}, "enum"),
    ],
)
def test_what_xgrammar_ignores_is_refused_for_it(schema, keyword):
    with pytest.raises(UnenforcedKeywords, match=keyword):
        serve(json.dumps(schema), ["xgrammar"])
    assert serve(json.dumps(schema), ["xgrammar", "llguidance"]).backend == "llguidance"


def test_xgrammar_takes_what_it_enforces():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/x"}},
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"x": {"anyOf": [{"type": "null"}, {"enum": [1, 2]}]}},
    }
    assert serve(json.dumps(schema), ["xgrammar"]).backend == "xgrammar"
