"""Constraints that a frontend rewrote before it sent them, as those did that are older than this engine."""

from __future__ import annotations

import json

import pytest

from engine_svc.convert.feature import AddContext
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.features.structured_output.wire import StructuredOutputOfAdd
from tests.contract.our_engine import SCHEMA as REFERENCES
from tests.engine_svc.features.structured_output.test_backends import TOKENIZER, backend, ids, sampled
from tests.engine_svc.features.structured_output.test_check import checked
from tests.engine_svc.session.service_rig import make_entry, make_facts
from triptych.common.v1 import sampling_pb2

FEATURE = StructuredOutputOfAdd(("llguidance", "xgrammar"))
REFERENCES_SENT = {
    "type": "object",
    "required": ["legs", "kind"],
    "properties": {"legs": {"$ref": "#/$defs/d0"}, "kind": {"anyOf": [{"const": "crab"}, {"const": "fox"}]}},
    "patternProperties": {"^x": {"type": "null"}},
    "additionalProperties": False,
    "$defs": {"d0": {"type": "integer", "minimum": 0, "maximum": 9}},
}
OPEN = {"type": "object", "minProperties": 3, "properties": {"a": {"type": "null"}}}
OPEN_SENT = {"type": "object", "properties": {"a": {"type": "null"}}}
CLOSED_SENT = {**OPEN_SENT, "additionalProperties": False}


def tags(*schemas: tuple[str, object, bool]) -> dict[str, object]:
    entries = []
    for begin, document, is_lenient in schemas:
        content = {
            "type": "json_schema",
            "json_schema": document,
            **({"lenient": True} if is_lenient else {}),
        }
        entries.append({"type": "tag", "begin": begin, "content": content, "end": "</f>"})
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": entries}
    return {"type": "structural_tag", "format": form}


# What a client wrote, what the frontend of revision 76d0ec20 sent of it, texts of the language, and others.
SENT = {
    "references": (
        {"json_schema": REFERENCES},
        {"json_schema": REFERENCES_SENT},
        ['{"legs": 4, "kind": "fox"}', '{"legs": 0, "kind": "crab", "x1": null}'],
        [
            '{"legs": 10, "kind": "fox"}',
            '{"legs": 4, "kind": "cow"}',
            '{"legs": 4, "kind": "fox", "y": null}',
        ],
    ),
    "condition": (
        {
            "json_schema": {
                "type": "object",
                "properties": {
                    "a": {"type": "boolean"},
                    "b": {"type": "integer", "maximum": 99, "minimum": 0},
                },
                "if": {"properties": {"a": {"const": True}}, "required": ["a"]},
                "then": {"required": ["b"]},
                "additionalProperties": False,
            }
        },
        {
            "json_schema": {
                "type": "object",
                "properties": {
                    "a": {"type": "boolean"},
                    "b": {"type": "integer", "maximum": 99, "minimum": 0},
                },
                "additionalProperties": False,
                "anyOf": [
                    {
                        "allOf": [
                            {"required": ["a"], "properties": {"a": {"const": True}}},
                            {"required": ["b"]},
                        ]
                    },
                    {
                        "anyOf": [
                            {"type": "object", "required": ["a"], "properties": {"a": {"const": False}}},
                            {"type": "object", "properties": {"a": False}},
                        ]
                    },
                ],
            }
        },
        ['{"a": true, "b": 1}', '{"a": false}', '{"b": 5}', "{}"],
        ['{"a": true}', '{"a": false, "c": 1}'],
    ),
    "overlap": (
        {"json_schema": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]}},
        {
            "json_schema": {
                "anyOf": [
                    {
                        "allOf": [
                            {"type": ["integer"]},
                            {"type": "integer", "minimum": 0},
                            {"type": "number", "exclusiveMinimum": 5},
                        ]
                    },
                    {
                        "allOf": [
                            {"type": ["integer"]},
                            {"type": "integer", "maximum": 5},
                            {"type": "number", "exclusiveMaximum": 0},
                        ]
                    },
                ]
            }
        },
        ["-1", "6", "1000"],
        ["0", "5", "3"],
    ),
    "closed": (
        {"json_schema": OPEN_SENT, "disable_additional_properties": True},
        {"json_schema": CLOSED_SENT},
        ["{}", '{"a": null}'],
        ['{"a": 1}', '{"b": null}'],
    ),
    "lenient": (
        {"json_schema": OPEN, "lenient": True},
        {"json_schema": OPEN_SENT},
        ["{}", '{"a": null}', '{"b": 5}'],
        ['{"a": 1}'],
    ),
    "tags": (
        {"structural_tag": tags(("<f>", REFERENCES, False), ("<fb>", OPEN, True))},
        {"structural_tag": tags(("<f>", REFERENCES_SENT, False), ("<fb>", OPEN_SENT, False))},
        ["no", 'so <f>{"legs": 4, "kind": "fox"}</f>', '<fb>{"a": null, "c": 5}</f>'],
        ['so <f>{"legs": 4}</f>', '<fb>{"a": 5}</f>'],
    ),
}


def parsed(fields: dict[str, object], backend_name: str) -> StructuredOutput:
    texts = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in fields.items()}
    asked = sampling_pb2.StructuredOutput(**texts, backend=backend_name, disable_any_whitespace=True)
    found = FEATURE.parse(make_entry(1, structured_output=asked), AddContext(make_facts(), None, [5]))
    assert found is not None and isinstance(found.extra, StructuredOutput)
    return found.extra


@pytest.mark.parametrize("name", SENT)
def test_a_rewritten_constraint_has_the_language_that_the_client_wrote(name):
    written, sent, texts, others = SENT[name]
    made = backend("llguidance")
    grammars = []
    for fields in (written, sent):
        rewritten = checked(parsed(fields, "llguidance").constraint)
        grammars.append(made.compile(rewritten.constraint, rewritten.grammar))
    for text in (*texts, *others):
        for grammar in grammars:
            matcher = grammar.matcher()
            is_in = matcher.accept(ids(text)) == len(ids(text)) and matcher.is_accepting
            assert is_in == (text in texts), text
    outputs = [(index, sampled(grammars[index].matcher(), seed)) for index in (0, 1) for seed in range(4)]
    for index, tokens in outputs:
        if tokens is not None:
            other = grammars[1 - index].matcher()
            assert other.accept(tokens) == len(tokens) and other.is_accepting, TOKENIZER.decode(tokens)


def test_a_constraint_that_was_rewritten_for_xgrammar_stays_with_it():
    asked = parsed({"json_schema": CLOSED_SENT}, "xgrammar")
    rewritten = checked(asked.constraint, *asked.backends)
    assert rewritten.backend == "xgrammar"
    assert json.loads(rewritten.constraint.text) == CLOSED_SENT
