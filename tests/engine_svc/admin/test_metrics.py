"""What an engine's metrics show of real sessions, the real loop and the real scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from engine_svc.admin import announce
from engine_svc.admin.metrics import register_engine
from engine_svc.loop.mailbox import LoopStats, StatsSnapshot
from engine_svc.speculation.accounting import DraftStats
from tests.engine_svc.fakes import make_scheduler
from tests.engine_svc.session.service_rig import ServiceRig, StreamClient, connected, make_entry, served
from triptych.engine.v1 import engine_pb2, session_pb2
from triptych_kit.telemetry.metrics import LabelValues


def readings(rig: ServiceRig) -> dict[str, dict[LabelValues, float]]:
    """The values of all metrics, without the labels' names, by the samples' names."""
    found: dict[str, dict[LabelValues, float]] = {}
    for metric in rig.engine.metrics.collect():
        for sample in metric.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_tokens_ends_and_aborts_are_counted_by_reason_and_cause():
    async with connected() as (rig, _, client):
        register_engine(rig.engine.metrics, rig.engine, rig.servicer)
        rig.executor.gate.clear()
        await client.add(*(make_entry(handle, max_tokens=100) for handle in (1, 2)))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        await client.abort(1)
        await client.flush()
        during = readings(rig)
        rig.executor.gate.set()
        await client.until_ended(1, 2)
        after = readings(rig)
    running = "triptych_engine_requests_running"
    assert (during[running], after[running], after["vllm:num_requests_running"]) == (
        {(): 2}, {(): 0}, {(): 0},
    )  # fmt: skip
    assert during["triptych_engine_kv_cache_usage_ratio"][()] > 0
    assert after["triptych_engine_kv_cache_usage_ratio"] == {(): 0}
    assert after["triptych_engine_prompt_tokens_total"] == {(): 10}
    assert after["triptych_engine_generated_tokens_total"] == {(): 100}
    finished = after["triptych_engine_requests_finished_total"]
    assert {reason: count for (reason,), count in finished.items() if count} == {"length": 1, "abort": 1}
    aborted = after["triptych_engine_requests_aborted_total"]
    assert {cause: count for (cause,), count in aborted.items() if count} == {"client": 1}
    steps = after["triptych_engine_steps_total"][()]
    assert steps >= 100
    assert after["triptych_engine_step_duration_seconds_count"] == {(): steps}
    assert after["vllm:iteration_tokens_total_count"] == {(): steps}
    assert after["vllm:iteration_tokens_total_sum"][()] >= 100
    assert after["triptych_engine_state"]["ready",] == 1
    assert after["triptych_engine_stream_sent_bytes_total"][()] > 100


async def test_drafts_and_waiting_requests_are_counted_in_metrics_load_and_status():
    async with served() as (rig, stub):
        engine = rig.engine
        engine.stats_snapshot = StatsSnapshot()  # one that the loop does not post to
        register_engine(engine.metrics, engine, rig.servicer)
        before = readings(rig)
        drafts = DraftStats(5, 15, 8, (5, 2, 1))
        seen = replace(make_scheduler().stats(), drafts=drafts, num_waiting=3, num_blocked=2)
        engine.stats_snapshot.post(LoopStats(scheduler=seen))
        after = readings(rig)
        stats = (await stub.GetLoad(engine_pb2.GetLoadRequest())).stats
        status = announce.status(engine, 0)
    assert after["vllm:num_requests_waiting"] == {(): 5}
    assert after["vllm:num_requests_waiting_by_reason"] == {("capacity",): 3, ("deferred",): 2}
    names = ["draft_rows", "draft_tokens", "accepted_draft_tokens"]
    assert [before[f"triptych_engine_{name}_total"][()] for name in names] == [0, 0, 0]
    assert [after[f"triptych_engine_{name}_total"][()] for name in names] == [5, 15, 8]
    by_position = {("0",): 5, ("1",): 2, ("2",): 1}
    assert after["triptych_engine_accepted_draft_tokens_by_position_total"] == by_position
    assert after["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == by_position
    assert (stats.num_draft_rows, stats.num_drafts, stats.num_accepted_drafts) == (5, 15, 8)
    assert list(stats.num_accepted_drafts_by_position) == [5, 2, 1]
    assert (status["num_drafts"], status["num_accepted_drafts"]) == (15, 8)


async def test_sessions_are_counted_over_all_of_their_streams():
    async with served() as (rig, stub):
        register_engine(rig.engine.metrics, rig.engine, rig.servicer)
        first = StreamClient(stub, "f")
        await first.open(features=["resume"])
        await first.until(lambda: "ready" in first.kinds())
        sent = readings(rig)["triptych_engine_stream_sent_bytes_total"][()]
        second = StreamClient(stub, "f")
        last_seq = max(message.seq for message in first.received)
        point = session_pb2.ResumePoint(engine_epoch=7, last_seq=last_seq)
        await second.open(features=["resume"], resume=point)
        await second.until(lambda: second.received)
        found = readings(rig)
        assert found["triptych_engine_sessions"] == {(): 1}
        assert found["triptych_engine_sessions_resumed_total"] == {(): 1}
        await second.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
        await second.until(lambda: second.is_over)
        closed = readings(rig)
        assert closed["triptych_engine_sessions"] == {(): 0}
        assert closed["triptych_engine_stream_sent_bytes_total"][()] >= sent
