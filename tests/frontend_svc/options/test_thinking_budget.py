"""Thinking budget: the marks of reasoning that an engine gets."""

from __future__ import annotations

import pytest

from frontend_svc.parsers.registry import ParserNames
from tests.frontend_svc.options.asking import BYTE_LEVEL, model_of, prepared
from triptych_kit.errors import Unimplemented


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
