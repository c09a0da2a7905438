"""What can never be served is refused in words, and what just can is not."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import CrossAttention, FullAttention, SlidingWindow
from engine_svc.core.request import Chunk
from engine_svc.core.sampling_params import SamplingParams
from tests.engine_svc.scheduler.fakes import STOP, Stage, chunk, request, session


def _small(**options: object) -> Stage:
    """Room for 56 tokens; the model takes more."""
    return Stage(**{"num_blocks": 15, "block_size": 4, "max_model_len": 64, **options})


def _chunk(num_tokens: int, max_tokens: int = 1) -> Chunk:
    return Chunk([5] * num_tokens, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "reason"),
    [
        (0, 1, "prompt has 0 tokens, must have at least 1"),
        (1, 1, None),
        (64, 1, "request begins with 64 tokens, the model takes 63"),
        (65, 1, "request begins with 65 tokens, the model takes 63"),
        (63, 1, "request may need 16 KV blocks, the engine has 14"),
        (60, 16, "request may need 16 KV blocks, the engine has 14"),
        (10, 46, None),
        # The last token is never computed: 57 tokens have KV for 56.
        (10, 47, None),
        (10, 48, "request may need 15 KV blocks, the engine has 14"),
        (56, 1, None),
        (57, 1, "request may need 15 KV blocks, the engine has 14"),
    ],
)
def test_a_request_has_to_fit_the_model_and_the_pool(num_tokens: int, max_tokens: int, reason: str | None):
    assert _small().scheduler.refusal(request("a", num_tokens, max_tokens=max_tokens)) == reason


def test_the_longest_request_of_the_model_needs_no_more_than_the_model_takes():
    stage = _small(num_blocks=17)
    assert stage.scheduler.refusal(request("a", 63, max_tokens=1000)) is None
    # 64 tokens, the last without KV, fill 16 blocks as 63 do.
    assert _small(num_blocks=16).scheduler.refusal(request("a", 1, max_tokens=1000)) == (
        "request may need 16 KV blocks, the engine has 15"
    )


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(44, None), (45, "request may need 15 KV blocks, the engine has 14")]
)
def test_drafts_behind_the_last_token_need_room_too(max_tokens: int, reason: str | None):
    stage = _small(num_speculative_tokens=3)
    assert stage.scheduler.refusal(request("a", 10, max_tokens=max_tokens)) == reason


def test_a_prompt_has_no_more_tokens_than_there_are():
    broken = request("a", 8)
    broken.num_prompt_tokens = 9
    assert Stage().scheduler.refusal(broken) is not None


@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [
        (1, "2 output tokens are there already, max_tokens is 1"),
        (2, "2 output tokens are there already, max_tokens is 2"),
        (3, None),
    ],
)
def test_a_continuation_must_have_something_to_say(max_tokens: int, reason: str | None):
    continued = request("a", 8, max_tokens=max_tokens)
    continued.token_ids.extend([1, 1])
    assert Stage().scheduler.refusal(continued) == reason


def test_an_id_is_served_once_at_a_time():
    stage = Stage()
    stage.add(request("a", 8))
    assert stage.scheduler.refusal(request("a", 8)) == "request a is already being served"
    assert stage.scheduler.refusal(request("b", 8)) is None
    with pytest.raises(ValueError, match="request a is already being served"):
        stage.add(request("a", 8))
    stage.scheduler.abort(["a"], now=0.0)
    assert stage.scheduler.refusal(request("a", 8)) is None


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(40, None), (41, "request may need 15 KV blocks, the engine has 14")]
)
def test_a_window_needs_what_it_reads_and_what_is_in_flight(num_tokens: int, reason: str | None):
    # A window of 5 reads 4 tokens before, 8 are in flight: 12 tokens fill 3 blocks and touch one more.
    groups = [FullAttention(4), SlidingWindow(4, 5)]
    stage = _small(groups=groups, max_num_batched_tokens=8)
    assert stage.scheduler.refusal(request("a", num_tokens, max_tokens=1)) == reason


@pytest.mark.parametrize(
    ("num_encoder_tokens", "reason"),
    [(0, None), (16, None), (17, "request may need 15 KV blocks, the engine has 14")],
)
def test_what_an_encoder_made_needs_room_from_the_beginning(num_encoder_tokens: int, reason: str | None):
    stage = _small(groups=[FullAttention(4), CrossAttention(4)], enable_prefix_caching=False)
    heard = request("a", 40, max_tokens=1)
    heard.num_encoder_tokens = num_encoder_tokens
    assert stage.scheduler.refusal(heard) == reason


def test_what_is_not_refused_can_be_served_to_its_end():
    for num_tokens, max_tokens in ((10, 47), (56, 1), (1, 56)):
        stage = _small(num_speculative_tokens=0)
        longest = request("a", num_tokens, max_tokens=max_tokens)
        assert stage.scheduler.refusal(longest) is None
        stage.add(longest)
        stage.step_until_idle(max_steps=60)
        assert (longest.num_output_tokens, longest.num_preemptions) == (max_tokens, 0)


def _open(stage: Stage, num_tokens: int = 10, max_tokens: int = 20) -> None:
    """A resumable request whose first turn runs."""
    stage.add(request("a", num_tokens, max_tokens=max_tokens, is_resumable=True))
    stage.step()


def test_input_is_for_requests_that_are_open():
    stage = Stage()
    closed = "the request is not open for further input"
    assert stage.scheduler.chunk_refusal("a", _chunk(1)) == closed
    stage.add(request("plain", 8))
    assert stage.scheduler.chunk_refusal("plain", _chunk(1)) == closed
    _open(stage)
    assert stage.scheduler.chunk_refusal("a", _chunk(1)) is None
    stage.scheduler.extend("a", None, now=2.0)
    assert stage.scheduler.chunk_refusal("a", _chunk(1)) == closed


def test_only_so_many_chunks_wait_for_their_turn():
    stage = Stage()
    _open(stage)
    for _ in range(63):
        stage.scheduler.extend("a", _chunk(1), now=2.0)
    assert stage.scheduler.chunk_refusal("a", _chunk(1)) is None
    stage.scheduler.extend("a", _chunk(1), now=2.0)
    assert stage.scheduler.chunk_refusal("a", _chunk(1)) == (
        "64 chunks of the request wait for their turn already"
    )


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (_chunk(0), "chunk has 0 tokens, must have at least 1"),
        (_chunk(1), None),
        (_chunk(1, max_tokens=0), "max_tokens is 0, must be at least 1"),
        # The turn that runs may reach 30 tokens.
        (_chunk(33), None),
        (_chunk(34), "request could begin with 64 tokens, the model takes 63"),
        (_chunk(35), "request could begin with 65 tokens, the model takes 63"),
    ],
)
def test_a_chunk_has_to_fit_behind_the_turn_that_runs(chunk: Chunk, reason: str | None):
    stage = _small(num_blocks=100)
    _open(stage)
    assert stage.scheduler.chunk_refusal("a", chunk) == reason


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(24, None), (25, "request could begin with 64 tokens, the model takes 63")]
)
def test_a_chunk_has_to_fit_behind_those_that_wait(num_tokens: int, reason: str | None):
    stage = _small(num_blocks=100)
    _open(stage)
    # With what it may yield, up to 39 tokens.
    stage.scheduler.extend("a", _chunk(5, max_tokens=4), now=2.0)
    assert stage.scheduler.chunk_refusal("a", _chunk(num_tokens)) == reason


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(22, None), (23, "request may need 15 KV blocks, the engine has 14")]
)
def test_a_chunk_has_to_fit_the_pool(max_tokens: int, reason: str | None):
    stage = _small()
    _open(stage)
    # 30 tokens before it, then 5 and so many more; the last has no KV.
    assert stage.scheduler.chunk_refusal("a", _chunk(5, max_tokens)) == reason


def test_a_chunk_brings_nothing_for_the_encoder_but_what_is_there_counts():
    stage = _small(groups=[FullAttention(4), CrossAttention(4)], enable_prefix_caching=False)
    heard = request("a", 10, max_tokens=10, is_resumable=True)
    heard.num_encoder_tokens = 16
    stage.add(heard)
    assert stage.scheduler.chunk_refusal("a", _chunk(20, max_tokens=1)) is None
    assert stage.scheduler.chunk_refusal("a", _chunk(21, max_tokens=1)) == (
        "request may need 15 KV blocks, the engine has 14"
    )


def test_room_for_a_chunk_is_counted_as_far_as_the_model_goes():
    stage = _small(num_blocks=17)
    _open(stage)
    assert stage.scheduler.chunk_refusal("a", _chunk(5, max_tokens=1000)) is None


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [(53, None), (54, "request could begin with 64 tokens, the model takes 63")],
)
def test_a_turn_that_is_over_makes_a_request_no_longer(num_tokens: int, reason: str | None):
    stage = Stage(max_model_len=64, block_size=4)
    stage.add(session("a", 10, max_tokens=50))
    stage.step({"a": [STOP]})
    assert stage.scheduler.chunk_refusal("a", chunk(*range(num_tokens), max_tokens=1)) == reason
