"""What is computed again of shared prompts and conversations of a model with states, on an idle engine."""

from __future__ import annotations

import random

import pytest

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention, KeptState
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepResult
from engine_svc.scheduler.config import SchedulerConfig

# Tokens that may be computed again: from the newest kept state on.
MOST_AGAIN = 64


class IdleEngine:
    """An engine that serves one request after the other; the tokens are drawn."""

    def __init__(self, num_slots: int = 200) -> None:
        self.rng = random.Random(1)
        self._core = build_core(
            SchedulerConfig(8192, 512, max_num_seqs=4),
            CacheConfig(4000, (FullAttention(16), KeptState(16, 512)), num_state_slots=num_slots),
        )
        self._num_requests = 0

    def text(self, num_tokens: int) -> list[int]:
        return self.rng.choices(range(1 << 16), k=num_tokens)

    def serve(self, prompt: list[int], num_output: int = 3) -> tuple[int, list[int]]:
        """How many tokens of the prompt were computed, and the answer."""
        scheduler = self._core.scheduler
        self._num_requests += 1
        name, answer, num_cached = f"r{self._num_requests}", list[int](), 0
        scheduler.add(Request(name, list(prompt), len(prompt), SamplingParams(num_output)))
        while scheduler.has_work:
            plan = scheduler.schedule(0.0)
            sampled = [self.text(1) if samples else [] for samples in plan.samples]
            for output in scheduler.update(plan, StepResult(plan.step_number, sampled), 0.0):
                answer += output.new_token_ids
                num_cached = output.num_cached_tokens or num_cached
        return len(prompt) - num_cached, answer

    @property
    def num_states(self) -> int:
        pool = self._core.kv_cache.pools[1]
        return sum(pool.content_of(block_id) is not None for block_id in pool.block_ids)


@pytest.mark.parametrize("num_shared", [100, 300, 500, 2000])
def test_requests_behind_a_shared_prompt_compute_their_own_tokens(num_shared: int):
    engine = IdleEngine()
    shared = engine.text(num_shared)
    for number in range(16):
        num_own = engine.rng.randint(20, 200)
        num_computed, _ = engine.serve([*shared, *engine.text(num_own)])
        assert number == 0 or num_computed <= num_own + MOST_AGAIN


def test_turns_of_a_conversation_compute_what_is_new():
    engine = IdleEngine()
    history = engine.text(300)
    for turn in range(10):
        num_new = engine.rng.randint(40, 200)
        history += engine.text(num_new)
        num_computed, answer = engine.serve(history, engine.rng.randint(5, 150))
        assert turn == 0 or num_computed <= num_new + MOST_AGAIN
        history += answer


def test_a_history_without_its_thinking_is_computed_from_the_end_of_the_prompt():
    engine = IdleEngine()
    history = engine.text(300)
    for turn in range(10):
        history += (new := engine.text(engine.rng.randint(40, 200)))
        num_computed, answer = engine.serve(history, 120)
        assert turn == 0 or num_computed <= 40 + len(new) + MOST_AGAIN
        # The first 80 tokens were thinking, which the template removes.
        history += answer[80:]


def test_conversations_that_part_in_the_middle_go_on_from_there():
    engine = IdleEngine()
    common = engine.text(900)
    first, second = [*common, *engine.text(700)], [*common, *engine.text(700)]
    engine.serve(first)
    # It goes on from the end of an interval, and leaves a state where the two part.
    assert engine.serve(second)[0] <= 700 + 900 - 512
    third = [*common, *engine.text(50)]
    assert engine.serve(third)[0] <= 50 + MOST_AGAIN
    for history in (first, second):
        assert engine.serve([*history, *engine.text(30)])[0] <= 30 + MOST_AGAIN


def test_with_room_for_few_states_the_newest_conversations_are_hits():
    engine = IdleEngine(num_slots=8)
    histories = [engine.text(engine.rng.randint(100, 400)) for _ in range(64)]
    for history in histories:
        history += engine.serve(history)[1]
        assert engine.num_states <= 8
    num_new = len(new := engine.text(30))
    assert engine.serve([*histories[-1], *new])[0] <= num_new + MOST_AGAIN
    assert engine.serve([*histories[0], *new])[0] == len(histories[0]) + num_new
