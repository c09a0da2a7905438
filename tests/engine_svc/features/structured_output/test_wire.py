"""Which structured outputs an ADD may ask for, and what becomes of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, WireFeatures
from engine_svc.convert.messages import to_request
from engine_svc.features.structured_output.constraint import (
    Constraint,
    ConstraintKind,
    Spacing,
    Whitespace,
)
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.features.structured_output.wire import StructuredOutputOfAdd, make
from tests.engine_svc.session.service_rig import make_entry, make_facts
from triptych.common.v1 import sampling_pb2
from triptych.common.v1.sampling_pb2 import StructuredChoice
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented

AFTER = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
FACTS = make_facts()
FEATURE = StructuredOutputOfAdd(("llguidance",))


def entry_of(opening: tuple[int, ...] = (), end: tuple[int, ...] = (), **fields: object) -> add_pb2.AddEntry:
    entry = make_entry(1, structured_output=sampling_pb2.StructuredOutput(**fields))
    entry.reasoning_options.start_token_ids.extend(opening)
    entry.reasoning_options.end_token_ids.extend(end)
    return entry


def parsed(entry: add_pb2.AddEntry, prompt: tuple[int, ...] = (1, 2, 3)) -> StructuredOutput:
    found = FEATURE.parse(entry, AddContext(FACTS, None, list(prompt)))
    assert found is not None
    extra = found.extra
    assert isinstance(extra, StructuredOutput)
    return extra


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"json_schema": "{}"}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        ({"json_object": True}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        (
            {"choice": StructuredChoice(choices=["a", "b"])},
            Constraint(ConstraintKind.CHOICE, choices=("a", "b")),
        ),
        ({"grammar": "start: A"}, Constraint(ConstraintKind.GRAMMAR, "start: A")),
        ({"structural_tag": "{}"}, Constraint(ConstraintKind.STRUCTURAL_TAG, "{}")),
        (
            {
                "json_schema": "{}",
                "disable_any_whitespace": True,
                "disable_additional_properties": True,
                "lenient": True,
            },
            Constraint(
                ConstraintKind.JSON_SCHEMA,
                "{}",
                whitespace=Whitespace(Spacing.SINGLE),
                has_additional_properties=False,
                is_lenient=True,
            ),
        ),
        (
            {"json_object": True, "any_whitespace": True},
            Constraint(ConstraintKind.JSON_OBJECT, whitespace=Whitespace(Spacing.FREE)),
        ),
        (
            {"json_object": True, "whitespace_pattern": " ?"},
            Constraint(ConstraintKind.JSON_OBJECT, whitespace=Whitespace(pattern=" ?")),
        ),
    ],
)
def test_each_kind_of_constraint_is_read(fields: dict[str, object], constraint: Constraint):
    extra = parsed(entry_of(**fields))
    assert extra == StructuredOutput(constraint, ("llguidance",), (), FACTS.eos_token_ids)
    assert extra.blocker == "grammar"
    assert extra.digest != StructuredOutput(constraint, ("xgrammar",)).digest


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "structured_output has no constraint, it takes exactly one"),
        ({"json_object": False}, "structured_output.json_object is false, it takes true"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "structured_output.disable_any_whitespace is set, but regex is no JSON",
        ),
        (
            {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern is set beside disable_any_whitespace",
        ),
        (
            {"json_object": True, "any_whitespace": True, "disable_any_whitespace": True},
            "disable_any_whitespace is set beside any_whitespace",
        ),
        ({"regex": "a", "backend": "xgrammar"}, "backend is 'xgrammar', it takes one of llguidance"),
        ({"regex": "a", "start": AFTER}, "end_token_ids is 0, it takes at least 1 id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, object], shown: str):
    with pytest.raises(InvalidArgument, match=shown):
        parsed(entry_of(**fields))


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"json_schema": ""}, "json_schema", "must not be empty"),
        ({"regex": "a" * (2**20 + 1)}, "regex", "has 1048577 bytes, must have at most 1048576"),
        ({"grammar": "a\0"}, "grammar", "must not contain a NUL character"),
        ({"choice": {}}, "choice.choices", "has 0 texts, must have 1..4096"),
        ({"regex": "a", "start": 7}, "start", "is 7, must be one of"),
    ],
)
def test_a_wrong_constraint_is_refused_by_the_rules_of_the_contract(
    fields: dict[str, object], field: str, words: str
):
    entry = make_entry(1, structured_output=sampling_pb2.StructuredOutput(**fields))
    with pytest.raises(InvalidArgument, match=re.escape(words)) as caught:
        to_request(entry, session_number=1, facts=FACTS, now=0.0, features=WireFeatures((FEATURE,)))
    assert caught.value.violations[0][0] == f"structured_output.{field}"


@pytest.mark.parametrize(
    ("prompt", "ended", "reasoning_end"),
    [
        ((1, 2), None, (8, 9)),
        ((1, 7, 2), None, (8, 9)),
        ((1, 7, 2, 8, 9), None, ()),
        ((7, 8, 9, 7, 2), None, (8, 9)),
        ((1, 8, 9), False, (8, 9)),
        ((1, 7), True, ()),
    ],
    ids=["not begun", "open", "closed", "open again", "stated open", "stated closed"],
)
def test_124_whether_reasoning_has_ended_is_stated_or_read_off_the_prompt(
    prompt: tuple[int, ...], ended: bool | None, reasoning_end: tuple[int, ...]
):
    entry = entry_of((7,), (8, 9), regex="a", start=AFTER)
    if ended is not None:
        entry.reasoning_ended = ended
    assert parsed(entry, prompt).reasoning_end == reasoning_end


def test_a_model_without_an_end_token_or_a_tokenizer_serves_none(tmp_path):
    context = AddContext(replace(FACTS, eos_token_ids=()), None, [1])
    with pytest.raises(Unimplemented, match="structured_output"):
        FEATURE.parse(entry_of(regex="a"), context)
    assert make(EngineConfig(model=str(tmp_path))) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert make(EngineConfig(model=str(tmp_path))) is not None
    assert make(EngineConfig(model=str(tmp_path), enable_structured_output=False)) is None


def test_the_backends_that_may_be_chosen_are_those_of_the_engine_or_the_one_that_is_named():
    feature = StructuredOutputOfAdd(("llguidance", "xgrammar"))
    for backend, backends in (
        ("", ("llguidance", "xgrammar")),
        ("auto", ("llguidance", "xgrammar")),
        ("xgrammar", ("xgrammar",)),
    ):
        entry = entry_of(regex="a", backend=backend)
        found = feature.parse(entry, AddContext(FACTS, None, [1]))
        assert found is not None and found.extra.backends == backends


def test_the_backends_are_announced():
    ready = session_pb2.Ready(eos_token_ids=[0])
    FEATURE.announce(ready)
    assert ready.structured_output_backends == ["llguidance"]
    assert {"type", "properties", "pattern", "$ref"} <= {*ready.structured_output_keywords}
    assert "oneOf" not in ready.structured_output_keywords
