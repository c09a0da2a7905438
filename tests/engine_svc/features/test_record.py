"""A recording says all that was decided: a scheduler that replays it decides the same, block by block."""

from __future__ import annotations

import gc
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.config import EngineConfig
from engine_svc.core.errors import DeviceLost
from engine_svc.core.request import ContentSpan, FinishReason, Request
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.record import RecordedScheduler
from engine_svc.features.recorded_case import CaseFile, case_config, create_case
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Inbox, Outbox, StatsSnapshot, Stop
from engine_svc.loop.protocols import NoLockstep
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from service_kit.clock import FakeClock
from service_kit.config import ConfigError
from tests.conformance.replay import first_difference, read_case
from tests.engine_svc.fakes import FakeExecutor
from tests.engine_svc.features.recording import CACHE, SCHEDULER, Recording, Traffic, request

ASYNC = replace(SCHEDULER, async_scheduling=True, max_steps_in_flight=2)
DRAFTS = replace(SCHEDULER, num_speculative_tokens=2)
SETUPS = {
    "plain": (SCHEDULER, CACHE, "fcfs"),
    "in flight": (ASYNC, CACHE, "fcfs"),
    "by priority": (SCHEDULER, CACHE, "priority"),
    "by priority, in flight": (ASYNC, CACHE, "priority"),
    "drafts": (DRAFTS, replace(CACHE, num_lookahead_tokens=2, drop_last_matched_block=True), "fcfs"),
    "drafts, in flight": (replace(ASYNC, num_speculative_tokens=2), CACHE, "fcfs"),
    "a window": (SCHEDULER, replace(CACHE, groups=(FullAttention(4), SlidingWindow(4, 10))), "fcfs"),
    "a window, in flight": (ASYNC, replace(CACHE, groups=(FullAttention(4), SlidingWindow(4, 10))), "fcfs"),
    "limited prompts": (
        replace(SCHEDULER, long_prefill_token_threshold=5, reserve_full_prompt=False), CACHE, "fcfs",
    ),
    "whole prompts": (
        replace(SCHEDULER, enable_chunked_prefill=False, max_num_batched_tokens=64), CACHE, "fcfs",
    ),
    "no cache": (SCHEDULER, replace(CACHE, enable_prefix_caching=False), "fcfs"),
}  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS)
def test_a_recording_replays_whatever_happened(setup: str, tmp_path: Path):
    scheduler, cache, policy = SETUPS[setup]
    coverage: Counter[str] = Counter()
    reasons: Counter[FinishReason] = Counter()
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        recording = Recording(folder, scheduler, cache, policy)
        traffic = Traffic(recording, scheduler, seed)
        traffic.run(250)
        case = recording.end()
        assert case["ended"] == "the engine ended"
        assert case["coverage"]["scheduled_tokens"] == sum(
            num_tokens for step in case["steps"] for _, num_tokens in step["decision"]["scheduled"]
        )
        assert first_difference(case) is None
        coverage.update(case["coverage"])
        reasons.update(traffic.reasons)
    expected = {"requests", "preemptions", "resumes", "outputs_dropped", "abort_running", "abort_waiting"}
    expected |= {"pause_new", "pause_all", "pause_none"}
    if cache.enable_prefix_caching:
        expected |= {"hit_requests", "hit_tokens"}
    if scheduler.num_speculative_tokens:
        expected |= {"draft_accepted", "draft_rejected"}
    assert {name for name in expected if not coverage[name]} == set()
    assert set(reasons) == set(FinishReason) - {FinishReason.REPETITION, FinishReason.ERROR}


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step["after_events"].update(free_blocks=step["after_events"]["free_blocks"] + 1),
        lambda step: step["decision"]["scheduled"].reverse(),
        lambda step: step["decision"]["blocks"]["r0"]["new"][0].reverse(),
        lambda step: step["updates"][0]["expected"]["outputs"][0].update(cached_tokens=4),
        lambda step: step["updates"][0]["expected"].update(waiting=["r0"]),
    ],
    ids=["state", "order", "blocks", "outputs", "queue"],
)
def test_a_replay_tells_what_is_different(change: Callable[[dict], None], tmp_path: Path):
    recording = Recording(tmp_path)
    recording.scheduler.add(request("r0"))
    recording.scheduler.add(request("r1"))
    recording.step()
    case = recording.end()
    change(case["steps"][0])
    difference = first_difference(case)
    assert difference is not None
    assert difference.startswith("step 0")


def test_what_comes_during_a_step_is_a_paused_step_of_its_own(tmp_path: Path):
    recording = Recording(tmp_path)
    recording.scheduler.add(request("r0"))
    recording.scheduler.add(request("r1"))
    plan = recording.scheduler.schedule(0.0)
    recording.scheduler.abort(["r0"], 0.0)
    recording.give_back(plan)
    recording.step()
    case = recording.end()
    first, between, last = case["steps"]
    assert (first["updates"], [update["for_step"] for update in between["updates"]]) == ([], [0])
    assert between["events"] == [{"op": "abort", "ids": ["r0"]}, {"op": "pause", "state": "all"}]
    assert between["after_events"]["running"] == ["r1"]
    assert (between["decision"]["scheduled"], between["decision"]["finished"]) == ([], ["r0"])
    assert between["updates"][0]["model"]["sampled"] == {"r0": [7], "r1": [7]}
    assert [output["id"] for output in between["updates"][0]["expected"]["outputs"]] == ["r1"]
    assert last["events"] == [{"op": "pause", "state": "none"}]
    assert last["decision"]["finished"] == []
    assert first_difference(case) is None


def test_a_row_with_broken_logits_ends_the_recording_and_not_the_engine(tmp_path: Path):
    recording = Recording(tmp_path)
    for name in ("r0", "r1"):
        recording.scheduler.add(request(name, num_tokens=9))
    recording.give_back(recording.scheduler.schedule(0.0), non_finite=(1,))
    recording.step()
    assert recording.scheduler.running_ids == ["r0"]
    case = recording.end()
    assert (len(case["steps"]), case["ended"]) == (1, "a row without a token")
    assert first_difference(case) is None


def test_steps_in_which_nothing_happens_are_left_out(tmp_path: Path):
    recording = Recording(tmp_path)
    recording.scheduler.set_pause(PauseState.NEW)
    recording.scheduler.add(request("r0"))
    for _ in range(5):
        recording.step()
    recording.scheduler.set_pause(PauseState.NONE)
    recording.step()
    case = recording.end()
    assert [step["decision"]["scheduled"] for step in case["steps"]] == [[["r0", 6]]]
    assert first_difference(case) is None


def test_events_that_no_step_follows_do_not_pile_up(tmp_path: Path):
    recording = Recording(tmp_path)
    recording.scheduler.set_pause(PauseState.ALL)
    for number in range(6_000):
        recording.scheduler.add(request(f"r{number}"))
        recording.scheduler.abort([f"r{number}"], 0.0)
    case = recording.end()
    assert [len(step["events"]) for step in case["steps"]] == [10_001]
    assert first_difference(case) is None


def test_the_recording_ends_at_its_limit_and_the_scheduler_goes_on(tmp_path: Path):
    recording = Recording(tmp_path, max_steps=3)
    recording.scheduler.add(request("r0", max_tokens=9))
    plans = [recording.step() for _ in range(9)]
    case = recording.end()
    assert all(plan.request_ids == ["r0"] for plan in plans)
    assert recording.core.scheduler.num_unfinished == 0
    assert (len(case["steps"]), case["ended"]) == (3, "the limit of 3 steps")
    assert (case["coverage"]["steps"], case["coverage"]["scheduled_tokens"]) == (3, 8)
    assert first_difference(case) is None


def test_the_recording_ends_when_it_gets_too_long_to_be_read(tmp_path: Path):
    recording = Recording(tmp_path, max_characters=3_000)
    recording.scheduler.add(request("r0", max_tokens=30))
    num_steps = sum(bool(recording.step().request_ids) for _ in range(40))
    case = recording.end()
    assert (num_steps, case["ended"]) == (30, "the limit of 3000 characters")
    assert 1 < len(case["steps"]) < 10
    assert first_difference(case) is None


def test_a_limit_reached_during_a_step_loses_no_output(tmp_path: Path):
    recording = Recording(tmp_path, max_steps=1)
    recording.scheduler.add(request("r0", max_tokens=1))
    plan = recording.scheduler.schedule(0.0)
    recording.scheduler.add(request("r1"))
    recording.give_back(plan)
    assert recording.scheduler.waiting_ids == ["r1"]
    assert recording.core.scheduler.num_unfinished == 1
    assert first_difference(recording.end()) is None


UNRECORDABLE: dict[str, dict[str, Any]] = {
    "a blocked request": {"blockers": {"somebody"}},
    "a resumable request": {"is_resumable": True},
    "content keys": {"spans": (ContentSpan(0, 2, "key"),)},
    "a request with encoder tokens": {"num_encoder_tokens": 3},
    "a request that comes with output": {"num_prompt_tokens": 4},
    "a request with repetition": {"sampling": SamplingParams(9, repetition=RepetitionLimits(4))},
}


@pytest.mark.parametrize("reason", UNRECORDABLE)
def test_what_the_format_cannot_say_ends_the_recording_by_name_and_not_the_engine(reason, tmp_path):
    recording = Recording(tmp_path)
    recording.scheduler.add(request("r0"))
    recording.step()
    original = request("r1")
    arguments = {"num_prompt_tokens": 6, "sampling": original.sampling} | UNRECORDABLE[reason]
    recording.scheduler.add(Request("r1", original.token_ids, **arguments))
    recording.core.scheduler.unblock("r1", "somebody")
    recording.step()
    assert recording.scheduler.running_ids == ["r0", "r1"]
    case = recording.end()
    assert (len(case["steps"]), case["ended"]) == (1, reason)
    assert first_difference(case) is None


def test_a_reset_of_the_prefix_cache_ends_the_recording_only_when_something_was_reset(tmp_path: Path):
    recording = Recording(tmp_path)
    recording.scheduler.add(request("r0", max_tokens=3))
    recording.step()
    assert not recording.scheduler.reset_prefix_cache(0.0)
    recording.step()
    assert recording.scheduler.reset_prefix_cache(0.0, reset_running=True)
    recording.step()
    assert recording.core.scheduler.num_unfinished == 0
    case = recording.end()
    assert (len(case["steps"]), case["ended"]) == (2, "a reset of the prefix cache")


def test_a_reset_that_was_refused_ends_the_recording_too_when_it_made_requests_run_anew(tmp_path: Path):
    recording = Recording(tmp_path)
    held = request("r0")
    recording.scheduler.add(held)
    recording.step()
    recording.core.kv_cache.hold(held)
    assert not recording.scheduler.reset_prefix_cache(0.0, reset_running=True)
    assert recording.end()["ended"] == "a reset of the prefix cache"


def test_a_full_disk_ends_the_recording_and_not_the_engine():
    core = build_core(SCHEDULER, CACHE)
    case = CaseFile(open("/dev/full", "wb"), {"format": 1})  # noqa: SIM115
    scheduler = RecordedScheduler(core.scheduler, core.kv_cache, case)
    rng = random.Random(1)
    num_steps = 0
    while case.is_open:
        prompt = [rng.randrange(1 << 30) for _ in range(60)]
        scheduler.add(Request(f"disk{num_steps}", prompt, 60, SamplingParams(max_tokens=2)))
        plan = scheduler.schedule(0.0)
        sampled = [[7] if samples else [] for samples in plan.samples]
        scheduler.update(plan, StepResult(plan.step_number, sampled), 0.0)
        scheduler.abort([f"disk{num_steps}"], 0.0)
        num_steps += 1
        assert num_steps < 10_000
    scheduler.add(request("last", max_tokens=1))
    scheduler.schedule(0.0)
    assert scheduler.running_ids == ["last"]
    scheduler.close()
    # Nor are requests kept for it.
    gc.collect()
    kept = [item.request_id for item in gc.get_objects() if type(item) is Request]
    assert [request_id for request_id in kept if request_id.startswith("disk")] == []


@pytest.mark.parametrize("ending", ["stop", "error"])
def test_the_file_is_complete_however_the_loop_ends(ending: str, tmp_path: Path):
    recording = Recording(tmp_path)
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
        scheduler=recording.scheduler,
        executor=FakeExecutor(command),
        inbox=inbox,
        stats_snapshot=StatsSnapshot(),
        clock=FakeClock(),
        lockstep=NoLockstep(),
        at_end=(recording.scheduler.close,),
    )
    inbox.put(Add(request("r0", max_tokens=40), outbox, 0))
    if ending == "error":
        with pytest.raises(RuntimeError, match="device lost"):
            engine.run()
    else:
        engine.run()
    case = read_case(recording.path)
    assert case["ended"] == "the engine ended"
    assert case["steps"][-1]["decision"]["scheduled"] == [["r0", 1], ["r1", 1]]
    assert first_difference(case) is None


# The file of a case: complete in what it says, and careful with what is there.


def test_a_recording_is_one_json_object_with_what_is_known_last_at_its_end(tmp_path: Path):
    recording = Recording(tmp_path)
    assert list(recording.end()) == [
        "format", "case", "family", "set", "reference_version", "seed", "config", "steps",
        "coverage", "ended",
    ]  # fmt: skip
    text = gzip.decompress(recording.path.read_bytes()).decode()
    assert json.loads(text)["reference_version"] == "triptych 9"
    assert json.loads(text)["steps"] == []


def test_a_case_names_everything_by_which_the_scheduler_decides(tmp_path: Path):
    scheduler = SchedulerConfig(
        max_model_len=70,
        max_num_batched_tokens=80,
        max_num_seqs=6,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=9,
        reserve_full_prompt=False,
        num_speculative_tokens=3,
        async_scheduling=True,
        max_steps_in_flight=2,
    )
    cache = CacheConfig(40, (SlidingWindow(8, 20), FullAttention(4)), True, 2, True)
    recording = Recording(tmp_path, scheduler, cache, "priority")
    sampling = SamplingParams(
        max_tokens=9, min_tokens=3, eos_token_id=5, ignore_eos=True, stop_token_ids=frozenset({8, 7}),
        skip_reading_prefix_cache=True,
    )  # fmt: skip
    added = Request("r0", [1, 2], 2, sampling, priority=-4, arrival_at=0.1 + 0.2, cache_salt="salt")
    recording.scheduler.add(added)
    recording.step()
    case = recording.end()
    assert case["config"] == {
        "block_size": 4,
        "num_gpu_blocks": 40,
        "max_num_batched_tokens": 80,
        "max_num_seqs": 6,
        "max_model_len": 70,
        "policy": "priority",
        "long_prefill_token_threshold": 9,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "reserve_full_prompt": False,
        "num_speculative_tokens": 3,
        "num_lookahead_tokens": 2,
        "drop_last_matched_block": True,
        "async_scheduling": True,
        "max_steps_in_flight": 2,
        "kv_groups": [
            {"kind": "sliding", "block_size": 8, "sliding_window": 20},
            {"kind": "full", "block_size": 4, "sliding_window": None},
        ],
    }
    assert case["steps"][0]["events"][0]["request"] == {
        "id": "r0",
        "prompt": [1, 2],
        "max_tokens": 9,
        "min_tokens": 3,
        "ignore_eos": True,
        "eos_token_id": 5,
        "stop_token_ids": [7, 8],
        "priority": -4,
        "arrival_time": 0.1 + 0.2,
        "cache_salt": "salt",
        "skip_prefix_lookup": True,
    }


def test_an_earlier_recording_is_kept(tmp_path: Path):
    for _ in range(3):
        Recording(tmp_path).end()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["case-2.json.gz", "case-3.json.gz", "case.json.gz"]
    assert [read_case(tmp_path / name)["case"] for name in names] == ["case-2", "case-3", "case"]


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere/x\.json\.gz: No such file"):
        create_case(tmp_path / "nowhere" / "x.json.gz", {}, version="9")


@pytest.mark.parametrize(
    ("cache", "policy", "has_budgets", "words"),
    [
        (CACHE, "least-recompute", False, "least-recompute"),
        (CACHE, "fcfs", True, "with budgets besides"),
        (replace(CACHE, groups=(ChunkedLocal(4, 8),)), "fcfs", False, "ChunkedLocal"),
    ],
    ids=["policy", "budgets", "attention"],
)
def test_a_setup_that_the_format_cannot_say_is_refused(cache, policy, has_budgets, words):
    with pytest.raises(ValueError, match=words):
        case_config(SCHEDULER, cache, policy, has_budgets=has_budgets)


def test_decisions_over_several_stages_are_not_recorded():
    with pytest.raises(ValueError, match="with budgets besides"):
        case_config(replace(SCHEDULER, pipeline_stages=2), CACHE, "fcfs")


def test_the_file_has_to_have_the_name_of_a_case():
    assert EngineConfig("folder", record_decisions="here/x.json.gz").record_decisions == "here/x.json.gz"
    with pytest.raises(ConfigError, match="--record-decisions"):
        EngineConfig("folder", record_decisions="x.json")
