"""Engines that die again and again, by a signal or by one request: the others and their streams go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest

from benchmarks.rig.faults import kill
from benchmarks.rig.history import Oracle
from benchmarks.rig.streams import Case, Flow, Load, StreamRecord, make_cases
from benchmarks.rig.watch import moved_requests
from tests.acceptance.scenarios.poison import poison_round
from tests.chaos.fault_plugin import MARKER_POSITION, EngineFault, strikes
from tests.chaos.served import ServedStack
from tests.chaos.stacks import Stack, StackPlan, cases_with_marks
from tests.system.checkpoints import make_hybrid
from tests.triptych_cli.fakes import children_of, triptych
from triptych.api.v1 import model_pb2, model_pb2_grpc
from triptych_cli.serve.readiness import health_of
from triptych_cli.services import READINESS, embedded_model
from triptych_kit.channel import open_channel

pytestmark = pytest.mark.chaos

_NUM_TOKENS = 48
_NUM_KILLS = 10
_LIMIT_S = 60.0
_POLL_S = 0.02


async def test_an_engine_that_is_killed_ten_times_stays_down_and_no_stream_of_the_others_is_harmed(
    tmp_path: Path,
) -> None:
    cases = make_cases(8, num_tokens=_NUM_TOKENS)
    async with (
        ServedStack(tmp_path, ["--data-parallel-size=3"]) as stack,
        open_channel(stack.address, profile="public") as channel,
    ):
        undisturbed = Load(label="undisturbed")
        undisturbed.send(channel, cases)
        oracle = Oracle(await undisturbed.finish())
        before = stack.pids()
        others = {before["engine-1"], before["engine-2"]}
        flow = Flow(channel, cases, "killed")
        killed: set[int] = set()
        async with flow.running(6, finds_engines=False), asyncio.timeout(_LIMIT_S):
            await flow.begin_more(6)
            while len(killed) < _NUM_KILLS and not stack.given_up():
                for pid in {*children_of(stack.pid, "engine")} - others - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                await asyncio.sleep(_POLL_S)
            await flow.begin_more(6)
        after = stack.pids()
        health = await health_of(stack.address, READINESS["frontend"], _LIMIT_S)
        status = await triptych("admin", "coordinator-0", "status")
        down = await triptych("admin", "engine-0", "status")
    assert oracle.violations(flow.load.records) == []
    assert after == {name: pid for name, pid in before.items() if name != "engine-0"}
    assert (len(killed), health) == (4, "SERVING")
    why = "4 deaths, the last: was killed by SIGKILL"
    errors = [line for line in stack.log_file.read_text().splitlines() if line.startswith("[serve] ERROR")]
    assert errors == [f"[serve] ERROR engine-0 stays down after 3 restarts within 60 s: {why}"]
    assert f"given_up.engine-0 {why}" in status.out
    assert (down.exit_code, down.err) == (1, f"engine-0 stays down: {why}\n")


async def test_states_of_requests_on_a_killed_engine_are_computed_again_by_another(tmp_path: Path) -> None:
    model = await asyncio.to_thread(make_hybrid, tmp_path / "model", embedded_model())
    cases = make_cases(12, num_tokens=_NUM_TOKENS)
    plan = StackPlan(model=model, engine_flags=("--state-interval=64",))
    async with AsyncExitStack() as ending:
        stack = Stack(plan, tmp_path)
        ending.push_async_callback(stack.stop)
        await stack.start()
        undisturbed, load = Load(label="undisturbed"), Load(label="disturbed")
        undisturbed.send(stack.channel(), cases)
        oracle = Oracle(await undisturbed.finish())
        records = load.send(stack.channel(), cases)
        async with asyncio.timeout(_LIMIT_S):
            while sum(record.num_tokens for record in records) < len(records) * _NUM_TOKENS // 4:  # noqa: ASYNC110  Load has no event.
                await asyncio.sleep(_POLL_S)
        await kill(stack.engines[0])
        await load.finish()
        num_moved = await moved_requests(stack.frontends[0])
    assert oracle.violations(records) == []
    assert num_moved > 0


async def test_poison_that_is_sent_twenty_times_over_two_frontends_of_two_workers_kills_two_engines(
    tmp_path: Path,
) -> None:
    *cases, _, _, poison, _, _, _ = cases_with_marks(15, 2 * _NUM_TOKENS)
    assert poison.token_ids[MARKER_POSITION] == EngineFault.EXIT.value
    plan = StackPlan(num_frontends=2, has_plugin=True, frontend_flags=("--workers=2",))
    async with AsyncExitStack() as ending:
        stack = Stack(plan, tmp_path)
        ending.push_async_callback(stack.stop)
        await stack.start()
        for engine in stack.engines:
            stack.fleet.keep(engine.name)
        # Each connection is given to one of the workers.
        addresses = [frontend.address for frontend in stack.frontends] * 6
        channels = [await ending.enter_async_context(open_channel(address)) for address in addresses]
        await _until_ready(channels)
        undisturbed, load = Load(label="undisturbed"), Load(label="disturbed")
        for channel, case in zip(channels * 2, cases, strict=False):
            undisturbed.send(channel, [case])
        oracle = Oracle(await undisturbed.finish())

        neighbours = [load.send(one, [case])[0] for one, case in zip(channels * 2, cases, strict=False)]
        async with asyncio.timeout(_LIMIT_S):
            while not all(record.num_tokens for record in neighbours):  # noqa: ASYNC110  Load has no event.
                await asyncio.sleep(_POLL_S)
        sent = [await _sent(load, channels[0], poison)]
        await load.finish()
        assert oracle.violations(neighbours) == []
        await _until_ready(channels)
        for channel in (channels * 2)[:18]:
            sent += [await _sent(load, channel, poison)]

        frontend = stack.frontends[1]
        await frontend.stop()
        await stack.fleet.start([frontend.name])
        channel = await ending.enter_async_context(open_channel(frontend.address))
        await _until_ready([channel])
        sent.append(await _sent(load, channel, poison))
        assert strikes(tmp_path, EngineFault.EXIT) == 2
    assert {(record.code, record.reason) for record in sent} == {(grpc.StatusCode.INTERNAL, "QUARANTINED")}
    assert len({record.details.rpartition("incident ")[2] for record in sent}) == 1
    took_s = [record.ended_at - record.sent_at for record in sent[1:] if record.ended_at is not None]
    assert max(took_s) < 1.0


async def test_variations_of_five_kinds_of_poison_kill_two_engines_and_harm_no_other_tenant() -> None:
    row = await poison_round(seed=7, num_variations=3, num_streams=8)
    assert (row["violations"], row["first_violation"]) == (0, "")
    assert (row["deaths"], row["engines"]) == (2, 3)


async def test_without_keys_each_poison_kills_two_engines_and_no_request_beside_it_is_taken_for_it() -> None:
    row = await poison_round(seed=3, num_variations=2, num_streams=6, has_keys=False)
    # Where engines die faster than they start, there is none for a while.
    assert (row["legal_quarantined"], row["differing"]) == (0, 0)
    assert row["deaths"] in range(2, 5)
    assert row["engines"] == 3


async def _sent(load: Load, channel: grpc.aio.Channel, case: Case) -> StreamRecord:
    [record] = load.send(channel, [case])
    await load.ended(record)
    return record


async def _until_ready(channels: Sequence[grpc.aio.Channel]) -> None:
    """Wait until the worker behind each connection has both engines."""
    async with asyncio.timeout(_LIMIT_S):
        for channel in channels:
            models = model_pb2_grpc.ModelServiceStub(channel)
            while True:
                info = await models.GetServerInfo(
                    model_pb2.GetServerInfoRequest(), wait_for_ready=True, timeout=_LIMIT_S
                )
                if [engine.state for engine in info.engines].count("ready") == 2:
                    break
                await asyncio.sleep(_POLL_S)
