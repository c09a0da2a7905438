"""A trace says what a scheduler was asked, had and decided: its replay decides the same, block by block."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engine_svc.cache.attention import (
    AlignedState,
    ChunkedLocal,
    EveryState,
    FullAttention,
    KeptState,
    SingleState,
    SlidingWindow,
)
from engine_svc.core.errors import DeviceLost
from engine_svc.core.step import StepCosts, StepPlan
from engine_svc.features.sched_trace import scheduler
from engine_svc.features.sched_trace.records import DECISION, PREFIX_CACHE, SNAPSHOT, Setup
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Inbox, Outbox, StatsSnapshot, Stop
from engine_svc.loop.protocols import NoLockstep
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.policies import POLICIES
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.fakes import FakeExecutor
from tests.engine_svc.features.sched_trace.tracing import (
    CACHE,
    SCHEDULER,
    SETUP,
    Keeper,
    OddEnds,
    Tracing,
    Traffic,
    replayed,
    request,
)
from triptych_kit.clock import FakeClock

ASYNC = replace(SCHEDULER, async_scheduling=True, max_steps_in_flight=2)
DRAFTS = replace(SCHEDULER, num_speculative_tokens=2)
COSTS = StepCosts((1, 8), (1.0, 1.5), seconds_per_read=1e-3, seconds_per_draw=0.1)
WINDOW = replace(CACHE, groups=(FullAttention(4), SlidingWindow(4, 10)))
SETUPS = {
    **{policy: Setup(SCHEDULER, CACHE, policy) for policy in POLICIES},
    **{f"{policy}, in flight": Setup(ASYNC, CACHE, policy) for policy in POLICIES},
    "drafts": Setup(DRAFTS, replace(CACHE, num_lookahead_tokens=2, drop_last_matched_block=True)),
    "drafts, in flight": Setup(replace(ASYNC, num_speculative_tokens=2), CACHE),
    "drafts by gain": Setup(replace(DRAFTS, drafts_at_launch=True, step_costs=COSTS), CACHE),
    "drafts by gain, in flight": Setup(
        replace(ASYNC, num_speculative_tokens=2, drafts_at_launch=True, step_costs=COSTS), CACHE
    ),
    "a window, in flight": Setup(ASYNC, WINDOW),
    "chunks": Setup(SCHEDULER, replace(CACHE, groups=(FullAttention(4), ChunkedLocal(4, 8)))),
    "kept states, in flight": Setup(
        ASYNC, replace(CACHE, groups=(FullAttention(4), KeptState(4, 8)), num_state_slots=12)
    ),
    "aligned states": Setup(SCHEDULER, replace(CACHE, groups=(FullAttention(4), AlignedState(4)))),
    "every state": Setup(SCHEDULER, replace(CACHE, groups=(FullAttention(4), EveryState(4)))),
    "single states": Setup(
        SCHEDULER,
        replace(CACHE, groups=(FullAttention(4), SingleState(64)), enable_prefix_caching=False),
    ),
    "limited prompts": Setup(
        replace(SCHEDULER, long_prefill_token_threshold=5, reserve_full_prompt=False), CACHE
    ),
    "whole prompts": Setup(
        replace(SCHEDULER, enable_chunked_prefill=False, max_num_batched_tokens=64), CACHE
    ),
    "stages": Setup(replace(ASYNC, pipeline_stages=2), CACHE),
    "no cache": Setup(SCHEDULER, replace(CACHE, enable_prefix_caching=False)),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_trace_replays_whatever_happened(setup: Setup):
    seen: Counter[str] = Counter()
    for seed in range(4):
        tracing = Tracing(setup)
        traffic = Traffic(tracing, setup.scheduler, seed)
        traffic.run(250)
        run = replayed(tracing.end())
        assert run.difference is None
        assert (run.setup, run.num_steps) == (setup, len(tracing.of(DECISION)))
        assert run.num_hit_tokens == _num_hits(tracing)
        seen += traffic.seen
        seen["hits"] += run.num_hits
    expected = {"preempted", "withdrawn", "reset", "stop", "length", "abort", "error", "repetition", "hits"}
    expected.add("unblocked")
    assert {name for name in expected if not seen[name]} == (
        set() if setup.cache.enable_prefix_caching else {"hits"}
    )


@pytest.mark.parametrize("setup", [SETUPS["fcfs"], SETUPS["fcfs, in flight"], SETUPS["drafts"]])
def test_ends_by_features_replay_without_them(setup: Setup):
    tracing = Tracing(setup, [OddEnds()])
    Traffic(tracing, setup.scheduler, 1).run(400)
    records = tracing.end()
    verdicts = [
        verdict
        for record in records
        for event in record.get("events", ())
        for verdict in event.get("verdicts", {}).values()
    ]
    assert {(one["reason"], one["num_tokens"] is None) for one in verdicts} == {
        (reason, is_whole) for reason in ("stop", "error") for is_whole in (True, False)
    }
    assert replayed(records).difference is None


@pytest.mark.parametrize("name", ["fcfs", "continuum", "continuum, in flight"])
def test_what_is_retained_replays_without_the_feature_that_retains_it(name: str):
    setup = replace(SETUPS[name], cache=replace(CACHE, num_blocks=18))
    seen: Counter[str] = Counter()
    for seed in range(6):
        keeper = Keeper()
        tracing = Tracing(setup, [keeper])
        Traffic(tracing, setup.scheduler, seed).run(300)
        records = tracing.end()
        assert replayed(records).difference is None
        seen += keeper.seen
        seen["snapshot"] += sum(record.get("num_pinned", 0) for record in records)
    causes = ("step", "plan", "note", "pressure", "exhausted", "reset", "finish", "snapshot")
    assert {cause for cause in causes if not seen[cause]} == set()


TURNS = {
    "hold": Setup(replace(SCHEDULER, holds_idle=True), CACHE, "priority"),
    "hold, in flight": Setup(replace(ASYNC, holds_idle=True), CACHE),
    **{name: SETUPS[name] for name in ("fair", "fcfs, in flight", "drafts by gain, in flight", "no cache")},
}


@pytest.mark.parametrize("setup", TURNS.values(), ids=TURNS)
def test_turns_replay(setup: Setup):
    seen: Counter[str] = Counter()
    for seed in range(2):
        tracing = Tracing(setup, [OddEnds()])
        traffic = Traffic(tracing, setup.scheduler, seed, has_turns=True)
        traffic.run(250)
        assert replayed(tracing.end()).difference is None
        seen += traffic.seen
    assert seen["turns"] > 5


# Row 283.
def test_a_record_names_the_job_of_a_request_and_those_whose_blocks_are_retained():
    keeper = Keeper()
    tracing = Tracing(SETUP, [keeper])
    turn = request("r0", num_tokens=9, max_tokens=1)
    turn.job = "a"
    tracing.scheduler.add(turn)
    tracing.step(1.0)
    tracing.scheduler.add(request("r1", num_tokens=9))
    tracing.step(1.5)
    assert [record["job_id"] for record in tracing.of(PREFIX_CACHE)] == ["a", None]
    snapshot = tracing.of(SNAPSHOT)[-1]
    retained = (snapshot["num_pinned"], snapshot["pinned_blocks"], snapshot["pinned_job_ids"])
    assert retained == (1, 2, ["a"])


def _num_hits(tracing: Tracing) -> int:
    kv_cache = tracing.core.kv_cache
    return kv_cache.prefix_hits + kv_cache.preempted_hits


def test_a_record_has_the_fields_that_its_kind_is_known_by():
    tracing = Tracing()
    tracing.scheduler.add(request("r0", num_tokens=9))
    tracing.step(now=2.5)
    tracing.scheduler.add(request("r1", num_tokens=10))
    tracing.step(now=3.0)
    first, first_hit, first_decision, snapshot, hit, decision = tracing.records
    assert [record["kind"] for record in tracing.records] == 2 * [SNAPSHOT, PREFIX_CACHE, DECISION]
    assert [record["step"] for record in tracing.records] == [1, 1, 1, 2, 2, 2]
    events = snapshot.pop("events")
    assert snapshot == {
        "kind": SNAPSHOT,
        "step": 2,
        "at": 3.0,
        "running": ["r0"],
        "waiting": ["r1"],
        "free_blocks": 22,
        "total_blocks": 25,
        "gpu_cached_blocks": 2,
        "cpu_free_blocks": 0,
        "cpu_total_blocks": 0,
        "cpu_cached_blocks": 0,
        "num_pinned": 0,
        "pinned_blocks": 0,
        "pinned_job_ids": [],
        "max_num_running_reqs": 6,
        "max_num_scheduled_tokens": 24,
    }
    assert [event["op"] for event in events] == ["update", "add"]
    assert events[0]["sampled"] == {"r0": [7]}
    assert hit == {
        "kind": PREFIX_CACHE,
        "step": 2,
        "req_id": "r1",
        "job_id": None,
        "local_hit_tokens": 8,
        "external_hit_tokens": 0,
        "total_prompt_tokens": 10,
        "num_tokens": 10,
        "connector_name": None,
        "load_kv_async": False,
    }
    assert decision == {
        "kind": DECISION,
        "step": 2,
        "scheduled_new_req_ids": ["r1"],
        "scheduled_resumed_req_ids": [],
        "scheduled_running_req_ids": ["r0"],
        "preempted_req_ids": [],
        "num_scheduled_tokens": {"r0": 1, "r1": 2},
        "total_scheduled_tokens": 3,
        "draft_token_ids": {},
        "block_ids": {"r1": {"hit": [[1, 2]], "new": [[4]]}},
        "free_blocks": 21,
    }
    assert first["trace"]["config"]["policy"] == "fcfs"
    assert first_hit["local_hit_tokens"] == 0
    assert first_decision["scheduled_new_req_ids"] == ["r0"]


def test_snapshot_and_decision_give_the_queues_of_the_next_snapshot():
    tracing = Tracing()
    for number in range(6):
        tracing.scheduler.add(request(f"r{number}", num_tokens=9, max_tokens=40))
    while num_unfinished(tracing.core.scheduler):
        tracing.step()
    tracing.end()
    snapshots, decisions = tracing.of(SNAPSHOT), tracing.of(DECISION)
    assert sum(len(decision["preempted_req_ids"]) for decision in decisions) > 2
    resumed = [name for decision in decisions for name in decision["scheduled_resumed_req_ids"]]
    preempted = [name for decision in decisions for name in decision["preempted_req_ids"]]
    assert sorted(resumed) == sorted(preempted)
    for before, decision, after in zip(snapshots, decisions, snapshots[1:], strict=False):
        ended = {
            output["id"]
            for event in after["events"]
            for output in event.get("outputs", ())
            if output["finish"] is not None
        }
        admitted = decision["scheduled_new_req_ids"] + decision["scheduled_resumed_req_ids"]
        gone = ended.union(decision["preempted_req_ids"])
        assert after["running"] == [name for name in before["running"] if name not in gone] + [
            name for name in admitted if name not in gone
        ]
        # The first to be preempted is the last to continue.
        waiting = decision["preempted_req_ids"][::-1] + before["waiting"]
        assert after["waiting"] == [name for name in waiting if name not in admitted]


def test_a_step_in_which_nothing_happens_has_no_records():
    tracing = Tracing()
    tracing.scheduler.set_pause(PauseState.NEW)
    tracing.scheduler.add(request("r0"))
    for _ in range(5):
        tracing.step()
    tracing.scheduler.set_pause(PauseState.NONE)
    tracing.step()
    assert [record["step"] for record in tracing.of(DECISION)] == [1, 6]
    assert replayed(tracing.end()).difference is None


def test_calls_that_no_step_follows_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "MAX_EVENTS", 20)
    tracing = Tracing()
    tracing.scheduler.set_pause(PauseState.ALL)
    for number in range(20):
        tracing.scheduler.add(request(f"r{number}"))
        tracing.scheduler.abort([f"r{number}"], 0.0)
    records = tracing.end()
    assert [len(record["events"]) for record in records] == [20, 20, 1]
    assert {record["step"] for record in records} == {1}
    assert replayed(records).difference is None


def test_what_a_feature_keeps_a_request_waiting_for_is_in_the_trace():
    tracing = Tracing()
    blocked = request("r0")
    blocked.blockers.add("grammar")
    tracing.scheduler.add(blocked)
    tracing.scheduler.add(request("r1"))
    tracing.step()
    assert tracing.of(DECISION)[0]["scheduled_new_req_ids"] == ["r1"]
    assert replayed(tracing.end()).difference is None


def test_once_it_is_closed_calls_are_passed_on_and_nothing_is_kept():
    tracing = Tracing()
    tracing.scheduler.add(request("r0", max_tokens=2))
    tracing.step()
    tracing.close()
    num_records = len(tracing.records)
    tracing.scheduler.add(request("r1", max_tokens=1))
    tracing.step()
    tracing.step()
    tracing.scheduler.abort(["r1"], 0.0)
    assert num_unfinished(tracing.core.scheduler) == 0
    assert len(tracing.end()) == num_records
    assert vars(tracing.scheduler)["_events"] == []


@pytest.mark.parametrize("ending", ["stop", "error"])
def test_the_trace_is_complete_however_the_loop_ends(ending: str):
    tracing = Tracing(SETUP)
    inbox = Inbox(100)
    outbox = Outbox(max_bytes=1_000_000, wake=lambda: None)

    def command(plan: StepPlan) -> None:
        if plan.step_number == 3:
            inbox.put(Add(request("r1"), outbox, 1))
        if plan.step_number == 6:
            inbox.put(Stop())
            if ending == "error":
                raise DeviceLost("device lost")

    engine = Engine(
        scheduler=tracing.scheduler,
        executor=FakeExecutor(command),
        inbox=inbox,
        stats_snapshot=StatsSnapshot(),
        clock=FakeClock(),
        lockstep=NoLockstep(),
        at_end=(tracing.feature.close,),
    )
    inbox.put(Add(request("r0", max_tokens=40), outbox, 0))
    if ending == "error":
        with pytest.raises(RuntimeError, match="device lost"):
            engine.run()
    else:
        engine.run()
    assert tracing.of(DECISION)[-1]["num_scheduled_tokens"] == {"r0": 1, "r1": 1}
    assert tracing.records[-1]["running"] == ["r0", "r1"]
    assert replayed(tracing.records).difference is None
