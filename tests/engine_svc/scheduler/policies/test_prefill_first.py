"""Prompts before decodes, up to a share of the step."""

from __future__ import annotations

import pytest

from engine_svc.core.request import Request
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.policies.prefill_first import PrefillFirst
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.scheduler.fakes import STOP, Stage, granted, ids_of, request, segment, session


def _stage(**options: object) -> Stage:
    return Stage(**{"policy": "prefill-first", "max_num_batched_tokens": 10, **options})


def _running(request_id: str, *, in_prompt: bool) -> Request:
    running = request(request_id, 4)
    running.last_row_sampled = not in_prompt
    return running


def test_prompts_are_served_before_decodes_each_in_order_of_admission():
    policy = PrefillFirst(SchedulerConfig(max_model_len=64))
    running = [_running(name, in_prompt=name in "bd") for name in "abcde"]
    assert ids_of(policy.walk(running, 0)) == ["b", "d", "a", "c", "e"]


# Row 192.
def test_a_prompt_is_served_first_up_to_its_share_and_decodes_have_the_rest():
    stage = _stage()
    stage.add(request("decode", 3))
    assert granted(stage.step()) == {"decode": 3}
    stage.add(request("prompt", 30))
    plan = stage.step()
    assert (plan.request_ids, granted(plan)) == (["decode", "prompt"], {"decode": 1, "prompt": 5})
    plan = stage.step()
    assert (plan.request_ids, granted(plan)) == (["prompt", "decode"], {"prompt": 5, "decode": 1})


@pytest.mark.parametrize(
    ("share", "prompt_tokens"), [(0.5, 5), (0.59, 5), (0.6, 6), (0.99, 9), (0.01, 1), (0.19, 1), (0.2, 2)]
)
def test_the_share_is_rounded_down_and_leaves_each_kind_a_token(share: float, prompt_tokens: int):
    stage = _stage(prefill_share=share)
    stage.add(request("decode", 3))
    stage.step()
    stage.add(request("prompt", 30))
    assert granted(stage.step()) == {"decode": 1, "prompt": prompt_tokens}
    assert granted(stage.step()) == {"prompt": prompt_tokens, "decode": 1}


def test_the_share_counts_over_all_prompts_of_a_step():
    stage = _stage(prefill_share=0.7)
    stage.add(request("decode", 3))
    stage.step()
    stage.add(request("a", 4), request("b", 9))
    assert granted(stage.step()) == {"decode": 1, "a": 4, "b": 3}
    # Now `a` decodes too.
    plan = stage.step()
    assert (plan.request_ids, granted(plan)) == (["b", "decode", "a"], {"b": 6, "decode": 1, "a": 1})


def test_decodes_have_their_part_and_no_more_while_a_prompt_wants_the_other():
    stage = _stage(prefill_share=0.7, max_num_batched_tokens=10)
    stage.add(*(request(f"r{index}", 1) for index in range(5)))
    stage.step()
    stage.add(request("prompt", 30))
    # Three of ten tokens are for decodes.
    assert granted(stage.step()) == {"r0": 1, "r1": 1, "r2": 1, "prompt": 7}
    # A request without a turn comes first.
    assert granted(stage.step()) == {"prompt": 7, "r3": 1, "r4": 1, "r0": 1}
    assert granted(stage.step()) == {"prompt": 7, "r1": 1, "r2": 1, "r3": 1}


def test_without_decodes_prompts_have_the_whole_step():
    stage = _stage()
    stage.add(request("a", 15), request("b", 15))
    assert granted(stage.step()) == {"a": 10}
    # The step ends the prompt of `a`, which does not decode yet.
    assert granted(stage.step()) == {"a": 5, "b": 5}
    assert granted(stage.step()) == {"b": 5, "a": 1}


def test_without_prompts_or_waiting_requests_decodes_have_the_whole_step():
    stage = _stage()
    stage.add(*(request(f"r{index}", 1) for index in range(9)))
    stage.step()
    assert granted(stage.step()) == {f"r{index}": 1 for index in range(9)}
    # One that waits and cannot enter has no part kept for it.
    stage = _stage(max_num_seqs=9)
    stage.add(*(request(f"r{index}", 1) for index in range(10)))
    stage.step()
    assert granted(stage.step()) == {f"r{index}": 1 for index in range(9)}
    stage = _stage()
    stage.add(*(request(f"r{index}", 1) for index in range(9)))
    stage.step()
    stage.scheduler.set_pause(PauseState.NEW)
    stage.add(request("late", 1))
    assert granted(stage.step()) == {f"r{index}": 1 for index in range(9)}


def test_whole_prompts_have_no_part_of_a_step():
    with pytest.raises(ValueError, match="policy prefill-first needs chunked prefill"):
        _stage(enable_chunked_prefill=False, max_model_len=10)


def test_who_is_blocked_does_not_count_as_waiting():
    stage = _stage()
    stage.add(*(request(f"r{index}", 1) for index in range(9)), request("b", 1, blockers=["one"]))
    stage.step()
    assert len(granted(stage.step())) == 9


def test_a_step_of_one_token_is_for_decodes_while_there_are_any():
    stage = _stage(max_num_batched_tokens=1)
    stage.add(request("decode", 1, max_tokens=3), request("prompt", 2, max_tokens=1))
    plans = [granted(plan) for plan in stage.step_until_idle()]
    assert plans == [{"decode": 1}] * 3 + [{"prompt": 1}] * 2


def test_drafts_count_as_tokens_of_decodes():
    stage = _stage(num_speculative_tokens=4)
    stage.add(request("decode", 3))
    stage.step()
    stage.update(stage.schedule(), drafts={"decode": [1, 2, 3, 4]})
    stage.add(request("prompt", 30))
    assert granted(stage.step()) == {"decode": 5, "prompt": 5}
    stage.update(stage.schedule(), drafts={"decode": [1, 2, 3, 4]})
    assert granted(stage.step()) == {"prompt": 5, "decode": 5}


def test_a_prompt_already_planned_gives_way_to_a_decode():
    stage = _stage(num_blocks=8, block_size=4, enable_prefix_caching=False, max_num_batched_tokens=8)
    stage.add(request("decode", 4))
    stage.step()
    stage.add(request("prompt", 20))
    plans = [stage.step() for _ in range(5)]
    assert granted(plans[3]) == {"prompt": 4, "decode": 1}
    # The prompt took the last block, then the decode wanted one.
    assert (granted(plans[4]), plans[4].preempted) == ({"decode": 1}, ["prompt"])


def test_what_a_victim_gives_back_goes_to_its_own_kind():
    policy = PrefillFirst(SchedulerConfig(max_model_len=64, max_num_batched_tokens=10, prefill_share=0.6))
    [share] = policy.budgets
    prompt, other = (_running(name, in_prompt=True) for name in "pq")
    decode, later = (_running(name, in_prompt=False) for name in "de")
    share.begin_step()
    policy.walk([decode, prompt, later, other], 0)
    assert [share.clip(one, 50) for one in (prompt, decode)] == [6, 4]
    share.take(prompt, 5)
    share.take(decode, 3)
    assert [share.clip(one, 50) for one in (other, later)] == [1, 1]
    share.give_back(decode, 3)
    assert [share.clip(one, 50) for one in (other, later)] == [1, 4]
    share.give_back(prompt, 5)
    assert [share.clip(one, 50) for one in (other, later)] == [6, 4]
    assert share.admits(prompt) and share.admits(decode)
    # In the next step there is only one kind.
    share.take(prompt, 6)
    policy.walk([prompt, other], 0)
    assert [share.clip(one, 50) for one in (prompt, other)] == [50, 50]


def test_a_turn_that_begins_is_a_prompt_again():
    stage = _stage()
    stage.add(request("decode", 3), session("a", 3))
    stage.step({"a": [STOP]})
    stage.scheduler.extend("a", segment(*range(50, 62)), now=2.0)
    assert granted(stage.step()) == {"decode": 1, "a": 5}
    assert granted(stage.step()) == {"a": 5, "decode": 1}
    assert granted(stage.step()) == {"a": 2, "decode": 1}


def test_no_request_starves_under_new_arrivals():
    stage = _stage(prefill_share=0.9, max_num_seqs=4)
    first = request("first", 3, max_tokens=8)
    stage.add(first)
    for number in range(40):
        stage.add(request(f"r{number}", 12, max_tokens=2))
        stage.step()
    assert first.num_output_tokens == 8
    stage.step_until_idle()
    assert num_unfinished(stage.scheduler) == 0
