"""Whatever fits alone gets to its end, under every policy; no step is planned for nothing for ever."""

from __future__ import annotations

import pytest

from engine_svc.core.request import Request, RequestStatus
from engine_svc.scheduler.policies import POLICIES
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.scheduler.doubles import AtMost
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, STOP, Stage, request, segment, session
from tests.simulation.budgets import AdapterCap, Adapters

every_policy = pytest.mark.parametrize("policy", list(POLICIES))


def _finish(stage: Stage, *requests: Request, max_steps: int) -> None:
    """All of them end, each with all its tokens."""
    for added in requests:
        assert stage.scheduler.refusal(added) is None
        stage.add(added)
    stage.step_until_idle(max_steps)
    assert all(done.num_output_tokens == done.sampling.max_tokens for done in requests)
    assert (num_unfinished(stage.scheduler), stage.cache.num_used_blocks) == (0, 0)


@every_policy
@pytest.mark.parametrize("reserve_full_prompt", [True, False])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_tokens", [80, 100, 120])
def test_two_long_prompts_that_do_not_fit_together_both_end(
    policy: str, reserve_full_prompt: bool, enable_prefix_caching: bool, num_tokens: int
):
    # Eight blocks; each prompt needs five to eight of them, in chunks of one.
    stage = Stage(
        policy=policy,
        num_blocks=9,
        reserve_full_prompt=reserve_full_prompt,
        enable_prefix_caching=enable_prefix_caching,
        long_prefill_token_threshold=16,
    )
    prompts = [request(name, num_tokens, max_tokens=4, arrival_at=at) for at, name in enumerate("ab")]
    _finish(stage, *prompts, max_steps=20)


# They came at the same instant, so under `priority` nothing but their ids distinguishes them.
@every_policy
@pytest.mark.parametrize(("reserve_full_prompt", "max_steps"), [(True, 60), (False, 200)])
def test_long_prompts_of_equal_rank_both_end(policy: str, reserve_full_prompt: bool, max_steps: int):
    stage = Stage(
        policy=policy,
        num_blocks=9,
        long_prefill_token_threshold=16,
        enable_prefix_caching=False,
        reserve_full_prompt=reserve_full_prompt,
    )
    _finish(stage, *(request(name, 100, max_tokens=20) for name in "ab"), max_steps=max_steps)


@every_policy
def test_decodes_that_do_not_fit_together_all_end(policy: str):
    stage = Stage(policy=policy, num_blocks=9, block_size=4, enable_prefix_caching=False)
    _finish(stage, *(request(name, 3, max_tokens=29) for name in "abcd"), max_steps=200)
    assert stage.scheduler.stats().num_preemptions > 0


@every_policy
def test_the_first_that_came_is_never_preempted_and_so_gets_to_its_end(policy: str):
    stage = Stage(policy=policy, num_blocks=7, block_size=4, enable_prefix_caching=False)
    first = request("first", 4, max_tokens=20)
    stage.add(first, *(request(f"r{at}", 5, max_tokens=12, arrival_at=float(at)) for at in range(1, 5)))
    while not first.is_finished:
        assert stage.step().request_ids[:1] == ["first"] or policy == "prefill-first"
    assert (first.num_preemptions, first.num_output_tokens) == (0, 20)
    stage.step_until_idle(200)


@every_policy
def test_idle_sessions_that_hold_every_block_do_not_stop_others(policy: str):
    stage = Stage(policy=policy, num_blocks=9, block_size=4)
    sessions = [session(f"s{index}", 7) for index in range(4)]
    stage.add(*sessions)
    stage.step({idle.request_id: [STOP] for idle in sessions})
    assert all(idle.status is RequestStatus.BLOCKED for idle in sessions)
    assert stage.cache.num_free_blocks == 0
    long = request("long", 28, max_tokens=4)
    stage.add(long)
    stage.step_until_idle(5)
    assert (long.num_output_tokens, long.num_preemptions) == (4, 0)
    for idle in sessions:
        stage.scheduler.extend(idle.request_id, segment(50, 51, max_tokens=2), now=9.0)
    stage.step_until_idle(10)
    assert [idle.token_ids[-3:] for idle in sessions] == [[50, 51, NEW_TOKEN]] * 4


@every_policy
def test_sessions_that_go_on_together_but_do_not_fit_together_all_get_their_turn(policy: str):
    stage = Stage(policy=policy, num_blocks=9, block_size=4)
    sessions = [session(f"s{index}", 7) for index in range(4)]
    stage.add(*sessions)
    stage.step({idle.request_id: [STOP] for idle in sessions})
    for idle in sessions:
        stage.scheduler.extend(idle.request_id, segment(*range(50, 66), max_tokens=3), now=9.0)
    stage.step_until_idle(40)
    assert [idle.num_tokens for idle in sessions] == [7 + 16 + 2] * 4


@every_policy
def test_small_budgets_delay_but_do_not_stop_requests(policy: str):
    stage = Stage(
        policy=policy,
        num_blocks=9,
        block_size=4,
        max_num_batched_tokens=6,
        features=[Adapters(AdapterCap(1))],
        budgets=[AtMost({"a": 1, "b": 2})],
    )
    requests = [request(name, 9, max_tokens=5) for name in "abc"]
    for adapted, adapter in zip(requests, ("one", "two", "one"), strict=True):
        adapted.extra_keys = (adapter,)
    _finish(stage, *requests, max_steps=100)
