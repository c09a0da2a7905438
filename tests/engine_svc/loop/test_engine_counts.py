"""What is counted of requests on their way through the loop, and what is not kept of those that were none."""

from __future__ import annotations

from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.loop.mailbox import Abort, Add
from tests.engine_svc.loop.test_engine import Rig, prompt_of


def test_counts_follow_a_request_and_its_row_is_freed_with_the_next_step():
    plans: list[StepPlan] = []
    rig = Rig(on_launch=plans.append)
    counts: list[tuple[int, int, int]] = []

    def count() -> None:
        stats = rig.scheduler.stats()
        counts.append((stats.num_waiting, stats.num_running, rig.scheduler.num_unfinished))

    request = Request("r1", [1, 2, 3], 3, SamplingParams(max_tokens=9))
    rig.inbox.put(Add(request, rig.frontend.outbox, 1))
    rig.engine.abort((), "nobody")
    rig.scheduler.add(Request("r2", [1], 1, SamplingParams(max_tokens=1)))
    count()
    rig.scheduler.abort(["r2"], 0.0)
    rig.engine.turn()
    count()
    rig.engine.abort(["r1"], "client")
    count()
    # Nothing is left to compute, so the row waits for a plan that has one.
    assert not rig.engine.turn()
    rig.add(1, max_tokens=1)
    rig.engine.turn()
    rig.engine.close()
    assert counts == [(1, 0, 1), (0, 1, 1), (0, 0, 0)]
    assert [plan.released for plan in plans] == [[], ["r1"]]
    assert [admitted.request_id for plan in plans for admitted in plan.admitted] == ["r1", "r1"]


def test_aborts_for_unknown_ids_leave_nothing_behind():
    rig = Rig()
    before = rig.scheduler.stats()
    for number in range(10_000):
        rig.inbox.put(Abort(f"nobody-{number}"))
    assert not rig.engine.turn()
    rig.engine.close()
    assert rig.inbox.take() == []
    assert rig.scheduler.stats() == before
    assert rig.executor.num_launched == 0


def test_89_prompts_are_counted_once_when_they_come_and_outputs_with_every_step():
    rig = Rig()

    def counted() -> tuple[int, int]:
        figures = rig.board.read()
        return figures.num_prompt_tokens, figures.num_generated_tokens

    for handle in (1, 2):
        rig.add(handle)
    rig.engine.turn()
    after_prefill = counted()
    rig.engine.turn()
    after_decode = counted()
    rig.add(3)
    rig.engine.turn()
    rig.engine.close()
    prompts = [len(prompt_of(handle)) for handle in (1, 2, 3)]
    assert after_prefill == (sum(prompts[:2]), 2)
    assert after_decode == (sum(prompts[:2]), 4)
    assert counted() == (sum(prompts), 7)
