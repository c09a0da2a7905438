"""An operator at a real engine's admin listener, under real streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import collect, random_prompt, request_of
from tests.system.stack import Stack, Trio, listeners_of
from tests.triptych_cli.fakes import triptych
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.api.v1 import inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2, utility_pb2
from triptych_kit.process.child import Child

pytestmark = pytest.mark.chaos

NUM_STREAMS = 8
# So many that none ends before everything was done to them.
NUM_TOKENS = 400
KEEP = utility_pb2.PAUSE_MODE_KEEP


@dataclass
class Operated:
    """An engine with eight prompts, and its admin listener."""

    stack: Stack
    trio: Trio
    frontend: inference_pb2_grpc.InferenceServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    prompts: list[list[int]]

    async def call(self, **call: object) -> utility_pb2.UtilityResult:
        """Make a utility call; its failure is the RPC's status."""
        request = admin_pb2.UtilityRequest(call=utility_pb2.UtilityCall(**call))
        return (await self.admin.Utility(request, timeout=120)).result

    def streams(self) -> list[asyncio.Task[list[int]]]:
        return [asyncio.create_task(self._ids(prompt)) for prompt in self.prompts]

    async def running(self) -> session_pb2.Stats:
        """Wait until all streams run and have got some tokens since now."""
        view = self.stack.engine(self.trio.engine)
        wanted = (await view.stats()).num_generated_tokens + 2 * NUM_STREAMS
        stats = await view.until(lambda now: now.num_generated_tokens >= wanted)
        assert stats.num_running == NUM_STREAMS
        return stats

    async def state(self) -> session_pb2.EngineState:
        stub = engine_pb2_grpc.EngineCoreServiceStub(self.stack.channel(self.trio.engine))
        info = await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)
        return info.state

    async def _ids(self, prompt: list[int]) -> list[int]:
        answer = await collect(self.frontend, request_of(prompt, NUM_TOKENS))
        assert answer.reason == output_pb2.FINISH_REASON_LENGTH
        return answer.token_ids


@asynccontextmanager
async def operated(model: str, *flags: str) -> AsyncIterator[Operated]:
    rng = random.Random(8)
    prompts = [random_prompt(rng, 24, VOCAB_SIZE) for _ in range(NUM_STREAMS)]
    async with Stack() as stack:
        trio = await stack.start_all(model, *flags)
        async with grpc.aio.insecure_channel(listeners_of(trio.engine)[1]) as channel:
            yield Operated(
                stack,
                trio,
                stack.inference(trio.frontend),
                admin_pb2_grpc.AdminServiceStub(channel),
                prompts,
            )


async def test_streams_survive_pauses_sleeps_and_resets_with_the_ids_of_an_undisturbed_run(
    slow_llama: str, tmp_path: Path
) -> None:
    async with operated(slow_llama, f"--profile-dir={tmp_path}") as engine:
        undisturbed = await asyncio.gather(*engine.streams())
        tasks = engine.streams()
        await pause_and_resume(engine)
        for level in (0, 1, 2):
            await sleep_and_wake(engine, level)
        await reset_under_load(engine)
        await reload_while_paused(engine, slow_llama)
        await profile_under_load(engine, tmp_path)
        await refusals(engine)
        await engine.running()
        assert await asyncio.gather(*tasks) == undisturbed


async def pause_and_resume(engine: Operated) -> None:
    await engine.running()
    await engine.call(pause={"mode": KEEP, "clear_cache": False})
    assert await engine.state() == session_pb2.ENGINE_STATE_PAUSED
    assert (await engine.call(is_paused={})).is_paused
    view = engine.stack.engine(engine.trio.engine)
    held = await view.stats()
    for _ in range(100):
        assert (await view.stats()).num_generated_tokens == held.num_generated_tokens
    assert held.num_running == NUM_STREAMS
    await engine.call(resume={})


async def sleep_and_wake(engine: Operated, level: int) -> None:
    await engine.running()
    await engine.call(sleep={"level": level, "mode": KEEP})
    assert await engine.state() == session_pb2.ENGINE_STATE_ASLEEP
    await engine.call(wake={"tags": ["kv_cache"]})
    await engine.call(wake={})
    assert await engine.state() == session_pb2.ENGINE_STATE_READY


async def reset_under_load(engine: Operated) -> None:
    await engine.running()
    await refused(engine, grpc.StatusCode.FAILED_PRECONDITION, reset_prefix_cache={})
    assert (await engine.call(reset_prefix_cache={"reset_running": True})).reset_prefix_cache


async def reload_while_paused(engine: Operated, folder: str) -> None:
    await engine.running()
    await refused(engine, grpc.StatusCode.FAILED_PRECONDITION, update_weights={"path": folder})
    await engine.call(pause={"mode": KEEP})
    await refused(engine, grpc.StatusCode.FAILED_PRECONDITION, update_weights={"path": "/nowhere"})
    await engine.call(update_weights={"path": folder, "version": "again"})
    assert (await engine.call(get_weight_version={})).weight_version == "again"
    await engine.call(resume={})


async def profile_under_load(engine: Operated, folder: Path) -> None:
    await engine.call(profile={"start": True, "prefix": "mine"})
    await refused(engine, grpc.StatusCode.FAILED_PRECONDITION, profile={"start": True})
    await engine.running()
    await engine.call(profile={})
    assert [file.name.split("-")[0] for file in folder.glob("*.trace.json.gz")] == ["mine"]


async def refusals(engine: Operated) -> None:
    await refused(engine, grpc.StatusCode.UNIMPLEMENTED)
    await refused(engine, grpc.StatusCode.UNIMPLEMENTED, flush_pins={})
    await refused(engine, grpc.StatusCode.INVALID_ARGUMENT, pause={"mode": 9})
    assert await forbidden_over_a_session(engine) == grpc.StatusCode.PERMISSION_DENIED.value[0]
    async with grpc.aio.insecure_channel(listeners_of(engine.trio.frontend)[1]) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Utility(admin_pb2.UtilityRequest(), timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def refused(engine: Operated, code: grpc.StatusCode, **call: object) -> None:
    """The call ends with this status, and the next one is answered."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.call(**call)
    assert caught.value.code() == code
    assert not (await engine.call(is_sleeping={})).is_sleeping


async def forbidden_over_a_session(engine: Operated) -> int:
    """The status code of a pause that a frontend's stream asks for."""
    stream = engine_pb2_grpc.EngineCoreServiceStub(engine.stack.channel(engine.trio.engine)).Connect()
    hello = session_pb2.Hello(
        frontend_id="claims", session_id="ab" * 16, schema_revision=1, role=session_pb2.PEER_ROLE_ADMIN
    )
    await stream.write(engine_pb2.ConnectRequest(hello=hello))
    pause = utility_pb2.UtilityCall(call_id=1, pause=utility_pb2.PauseCall(mode=KEEP))
    await stream.write(engine_pb2.ConnectRequest(utility=pause))
    async for message in stream:
        if message.HasField("utility_result"):
            stream.cancel()
            return int(message.utility_result.failure.code)
    raise AssertionError("the stream ended without an answer")


async def test_an_operator_has_verbs_and_what_sleeps_is_not_waited_for_at_the_end(slow_llama):
    async with operated(slow_llama, "--drain-deadline-s=600") as engine:
        address = listeners_of(engine.trio.engine)[1]
        tasks = engine.streams()
        await engine.running()
        paused = await triptych("admin", address, "pause", "--mode", "keep")
        assert (paused.exit_code, paused.out) == (0, "done\n")
        shown = await triptych("admin", address, "status")
        assert "run_state paused" in shown.out.splitlines()
        options = (await triptych("admin", address, "config")).out.splitlines()
        assert "max_num_seqs 256 (default)" in options
        assert "port 0 (flag)" in options
        refused = await triptych("admin", address, "profile", "start")
        assert refused.exit_code == 1
        assert refused.err.startswith("FAILED_PRECONDITION (NO_PROFILE_DIR): call to profile failed: ")
        resumed = await triptych("admin", address, "resume")
        assert (resumed.exit_code, resumed.out) == (0, "done\n")
        slept = await triptych("admin", address, "sleep", "--level", "1", "--mode", "keep")
        assert slept.exit_code == 0
        stats = await engine.stack.engine(engine.trio.engine).stats()
        assert stats.num_waiting == NUM_STREAMS
        engine.trio.engine.terminate()
        assert await ending_of(engine.trio.engine) == "exited with code 0"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ending_of(child: Child) -> str:
    async with asyncio.timeout(60):
        await child.wait()
    return child.ending.partition(") ")[2]
