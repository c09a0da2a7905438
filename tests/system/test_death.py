"""A stop that was not asked for: all waiting calls end with an error, the exit code is one of a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from engine_svc.process.engine_thread import EXIT_LOOP_FAILED
from tests.system.generation import read_to_end, request_of
from tests.system.stack import START_LIMIT_S, WAIT_LIMIT_S, Stack
from tests.triptych_kit.plugin_folder import python_path, write_plugin
from triptych_cli.services import embedded_model

MODEL = str(embedded_model())

FAILING_STEPS = """
from engine_svc.runner.model_runner import ModelRunner
def start():
    execute, dead = ModelRunner.execute, []
    def failing(self, plan):
        if len(plan.request_ids) == 3:
            dead.append(plan)
        if dead:
            raise RuntimeError("the device does nothing any more")
        return execute(self, plan)
    ModelRunner.execute = failing
"""

FAILING_LOAD = """
import engine_svc.build.runner
def start():
    def failing(*arguments, **options):
        raise RuntimeError("no kernel image is available")
    engine_svc.build.runner.load_model = failing
"""

FAILING_FORWARD = """
from engine_svc.runner.model_runner import ModelRunner
def start():
    def failing(self, num_tokens):
        raise RuntimeError("no kernel image is available")
    ModelRunner.warm_up = failing
"""


async def test_an_engine_whose_steps_all_fail_ends_and_every_request_gets_an_error(tmp_path: Path) -> None:
    write_plugin(tmp_path, "failing", FAILING_STEPS)
    async with Stack({"PYTHONPATH": python_path(tmp_path)}) as stack:
        engine = await stack.start("engine", MODEL, "--port=0")
        known = f"--engine={engine.announcement.address}" if engine.announcement else ""
        frontend = await stack.start("frontend", "--port=0", "--reconnect-window-s=0.2", known)
        await stack.ready("frontend", frontend)
        stub = stack.inference(frontend)
        calls = [stub.Generate(request_of("Once upon a time", 1900)) for _ in range(3)]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(read_to_end(call), WAIT_LIMIT_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_to_end(stub.Generate(request_of("A fox", 5))), WAIT_LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(engine.wait(), WAIT_LIMIT_S)
        assert engine.ending.endswith(f"exited with code {EXIT_LOOP_FAILED}")
        assert frontend.is_running
    assert not Path(f"/proc/{engine.pid}").exists()


@pytest.mark.parametrize("source", [FAILING_LOAD, FAILING_FORWARD], ids=["load", "first forward"])
async def test_an_engine_that_cannot_get_ready_says_so_in_one_line_and_exits_with_an_error(tmp_path, source):
    write_plugin(tmp_path, "failing", source)
    async with Stack({"PYTHONPATH": python_path(tmp_path)}) as stack:
        engine = await stack.start("engine", MODEL, "--port=0")
        await asyncio.wait_for(engine.wait(), START_LIMIT_S)
        lines = [line for line in engine.last_lines if line.startswith("triptych engine: ")]
    assert lines == ["triptych engine: internal error (RuntimeError), see the engine's log"]
    assert engine.ending.endswith(f"exited with code {EXIT_LOOP_FAILED}")
