"""Schemas that no finite value satisfies are refused, and parts of others that have none are never opened."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_svc.features.structured_output.json_schema.document import InvalidSchema
from engine_svc.features.structured_output.json_schema.rewrite import rewrite

ROOT = {"$ref": "#"}
LOOP = {"$ref": "#/$defs/loop"}
DEFINITIONS = {
    "$defs": {"loop": {"type": "object", "properties": {"n": LOOP}, "required": ["n"]}},
}
OBJECT = {"type": "object", "properties": {"n": ROOT}, "required": ["n"]}
LIST = {"type": "array", "items": ROOT, "minItems": 1}


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT,
        LIST,
        {
            "$defs": {
                "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
            },
            "$ref": "#/$defs/a",
        },
        {"type": "array", "prefixItems": [ROOT], "minItems": 1},
        {"type": "array", "prefixItems": [True, ROOT], "minItems": 2},
        {"type": "array", "items": ROOT, "minItems": 1, "maxItems": 3},
        {"allOf": [{"type": "object", "required": ["n"]}, {"properties": {"n": ROOT}}]},
        {"anyOf": [OBJECT, LIST]},
        {"oneOf": [OBJECT, LIST]},
        {"type": "object", "additionalProperties": ROOT, "minProperties": 1},
        {"type": "object", "additionalProperties": ROOT, "required": ["n"]},
        {"type": "object", "patternProperties": {"^a": ROOT}, "required": ["ab"]},
        {
            "type": "object",
            "patternProperties": {"^a": ROOT},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {
            "type": "object",
            "properties": {"a": ROOT, "b": ROOT},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {"type": "object", "unevaluatedProperties": ROOT, "minProperties": 1},
        {
            "type": "object",
            "properties": {"k": {"enum": [1, 2]}, "n": ROOT},
            "required": ["k"],
            "if": {"properties": {"k": {"const": 1}}},
            "then": {"required": ["n"]},
            "else": {"required": ["n"]},
        },
        {
            "$dynamicAnchor": "node",
            "type": "object",
            "properties": {"n": {"$dynamicRef": "#node"}},
            "required": ["n"],
        },
        {
            "type": "object",
            "dependentSchemas": {"a": {"properties": {"b": ROOT}, "required": ["b"]}},
            "required": ["a"],
        },
        {
            "$defs": {
                "a": {"allOf": [{"$ref": "#/$defs/b"}, {"required": ["x"]}]},
                "b": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}},
            },
            "$ref": "#/$defs/a",
        },
        DEFINITIONS | {"allOf": [LOOP, {"description": "a loop"}]},
    ],
    ids=json.dumps,
)
def test_a_recursion_without_an_end_is_an_empty_language(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchema, match="no finite value"):
        rewrite(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [OBJECT, {"type": "null"}]},
        {"type": "array", "items": ROOT},
        {"type": "array", "prefixItems": [ROOT]},
        {"type": "object", "properties": {"n": ROOT}},
        {"properties": {"n": ROOT}, "required": ["n"]},  # a text is one, so an object with it is
        {"type": "object", "additionalProperties": ROOT},
        {
            "type": "object",
            "properties": {"next": {"anyOf": [ROOT, {"type": "null"}]}},
            "required": ["next"],
        },
        {
            "$defs": {
                "sum": {
                    "type": "object",
                    "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/term"}, "minItems": 2}},
                    "required": ["of"],
                },
                "term": {"anyOf": [{"$ref": "#/$defs/sum"}, {"type": "integer"}]},
            },
            "$ref": "#/$defs/sum",
        },
    ],
    ids=json.dumps,
)
def test_a_recursion_with_an_end_is_as_before(schema: dict[str, Any]) -> None:
    assert "false" not in json.dumps(rewrite(json.dumps(schema)).schema)


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        (
            {"type": "object", "properties": {"a": LOOP, "b": True}},
            {"type": "object", "properties": {"a": False, "b": True}},
        ),
        ({"type": "array", "items": LOOP}, {"type": "array", "items": False}),
        (
            {"type": ["object", "null"], "properties": {"n": LOOP}, "required": ["n"]},
            {"type": ["null"]},
        ),
        (
            {"type": "array", "items": {"anyOf": [LOOP, {"type": "null"}]}},
            {"type": "array", "items": {"$ref": "#/$defs/d0"}},
        ),
        ({"type": "object", "additionalProperties": LOOP}, {"type": "object", "additionalProperties": False}),
    ],
)
def test_a_part_without_an_end_is_never_opened(schema: dict[str, Any], written: Any) -> None:
    result = dict(rewrite(json.dumps(schema | DEFINITIONS)).schema)
    definitions = result.pop("$defs")
    assert result == written
    assert "required" not in json.dumps(definitions)


@pytest.mark.parametrize(
    "empty",
    [
        {"type": "integer", "minimum": 0.1, "maximum": 0.9},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        {"type": "number", "minimum": 1, "maximum": 3, "multipleOf": 7},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "array", "minItems": 1, "maxItems": 0},
        {"type": "string", "minLength": 2, "pattern": "^.$"},
        {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "^b"}]},
        {"allOf": [{"type": "number", "minimum": 2}, {"maximum": 1}]},
        {"type": "integer", "maximum": 1.5, "anyOf": [{"type": "string"}, {"minimum": 2}]},
        {"type": "integer", "maximum": 9, "if": {"maximum": 10}, "then": {"type": "string"}},
        {"type": "string", "pattern": "^a", "anyOf": [{"pattern": "^b"}, {"maxLength": 0}]},
        {"type": "array", "items": {"type": "object"}, "anyOf": [{"enum": [2, [0.75]]}]},
        {"allOf": [{"additionalProperties": {"type": "null"}}, {"enum": [{"a": 1}]}]},
        {"type": "array", "contains": {"not": {}}},
    ],
    ids=json.dumps,
)
def test_a_definition_without_a_value_is_never_referred_to(empty: dict[str, Any]) -> None:
    reference = {"$ref": "#/$defs/empty"}
    schema = {"type": "object", "properties": {"a": reference, "b": {"anyOf": [reference, {"type": "null"}]}}}
    result = rewrite(json.dumps(schema | {"$defs": {"empty": empty}})).schema
    assert result["properties"] == {"a": False, "b": {"anyOf": [{"type": "null"}]}}
    with pytest.raises(InvalidSchema, match="no finite value"):
        rewrite(json.dumps({"items": reference, "type": "array", "minItems": 1, "$defs": {"empty": empty}}))


def test_unique_items_that_lead_to_themselves_are_refused():
    itself = {"$ref": "#/$defs/itself"}
    schema = {"type": "array", "items": itself, "uniqueItems": True, "$defs": {"itself": itself}}
    with pytest.raises(InvalidSchema, match="leads to itself"):
        rewrite(json.dumps(schema))
