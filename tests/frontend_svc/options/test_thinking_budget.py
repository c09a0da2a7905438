"""Thinking budget: its limits, and the marks of reasoning that an engine gets."""

from __future__ import annotations

import pytest

from frontend_svc.parsers.registry import ParserNames
from tests.frontend_svc.options.asking import BYTE_LEVEL, breaches, model_of, prepared
from triptych_kit.errors import Unimplemented


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 0},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_taken(fields):
    assert breaches(**fields) == {}


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget", "is -2, must be -1 or at least 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_violation_names_field_value_and_limit(fields, name, words):
    found = breaches(**fields)
    assert list(found) == [f"sampling.{name}"]
    assert f"sampling.{name}" in found[f"sampling.{name}"]
    assert words in found[f"sampling.{name}"]


async def test_the_engine_gets_the_budget_with_the_marks_of_reasoning():
    model = model_of(parsers=ParserNames("none", "think"))
    (entry,) = (await prepared(model, thinking_token_budget=5)).entries
    assert entry.sampling.thinking_token_budget == 5
    marks = (entry.reasoning_options.start_token_ids, entry.reasoning_options.end_token_ids)
    assert [BYTE_LEVEL.decode(list(ids)) for ids in marks] == ["<think>", "</think>"]
    (free,) = (await prepared(model, thinking_token_budget=-1)).entries
    assert not free.sampling.HasField("thinking_token_budget")
    assert not free.HasField("reasoning_options")


async def test_a_budget_without_a_known_parser_is_refused_by_name():
    with pytest.raises(Unimplemented) as caught:
        await prepared(model_of(), thinking_token_budget=5)
    assert caught.value.metadata == {"fields": "sampling.thinking_token_budget"}
