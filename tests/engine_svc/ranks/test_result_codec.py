"""Results reach the engine as they were."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.core.step import PromptPlaces, StepResult, TokenLogprobs
from engine_svc.ranks.byte_fields import MessageError
from engine_svc.ranks.result_codec import decode_result, encode_result

ids = st.integers(0, (1 << 31) - 1)
some_ids = st.lists(ids, max_size=4)
logprobs = st.lists(st.floats(max_value=0.0, allow_nan=False), max_size=4)
told = st.builds(
    TokenLogprobs,
    logprobs=logprobs,
    ranks=some_ids,
    k=st.integers(0, 20),
    top_token_ids=some_ids,
    top_logprobs=logprobs,
)
results = st.builds(
    StepResult,
    step_number=st.integers(0, 1 << 62),
    sampled=st.lists(some_ids, max_size=6),
    drafts=st.dictionaries(st.text(max_size=5), some_ids, max_size=3),
    non_finite=some_ids,
    barred=some_ids,
    logprobs=st.dictionaries(st.integers(0, 9), told, max_size=3),
    prompt_logprobs=st.dictionaries(
        st.integers(0, 9), st.builds(PromptPlaces, first_position=st.integers(1, 99), told=told), max_size=3
    ),
)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(result=results)
def test_a_result_is_read_as_it_was_written(result: StepResult) -> None:
    assert decode_result(encode_result(result)) == result


def test_what_was_cut_away_stays_at_minus_infinity() -> None:
    result = StepResult(1, [[3]], logprobs={0: TokenLogprobs([-math.inf], [2])})
    assert decode_result(encode_result(result)).logprobs[0].logprobs == [-math.inf]


def test_256_rows_take_about_8_bytes_each() -> None:
    result = StepResult(9, [[token_id] for token_id in range(256)])
    assert len(encode_result(result)) <= 8 * 256 + 64


def test_bytes_of_another_version_are_refused() -> None:
    with pytest.raises(MessageError, match="version 7"):
        decode_result(b"\x07" + encode_result(StepResult(1, []))[1:])
