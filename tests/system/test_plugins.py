"""Code of other packages in the processes of an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.system.generation import request_of
from tests.system.stack import WAIT_LIMIT_S, Stack, listeners_of
from tests.triptych_kit.plugin_folder import python_path, write_plugin
from triptych_cli.services import embedded_model
from triptych_kit.process.child import ChildDied

MODEL = str(embedded_model())

# Notes in which process it was called, and what was there by then.
NOTING = """
import json, os, pathlib, sys
def start():
    title = pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode()
    with open({diary!r}, "a") as diary:
        print(json.dumps([title, os.getpid(), "engine_svc.build.runner" in sys.modules]), file=diary)
"""

# Changes how the engine's process looks after memory, and notes what is kept from the collector at its end.
WATCHING = """
import gc
def start():
    unfreeze = gc.unfreeze
    def noting():
        before = gc.get_freeze_count()
        unfreeze()
        with open({diary!r}, "w") as diary:
            diary.write(str([before, gc.get_freeze_count()]))
    gc.unfreeze = noting
"""

RENAMING = """
def start():
    from engine_svc.build import engine as build
    build.POLICIES["late-first"] = build.POLICIES["fcfs"]
"""


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    return tmp_path / "diary"


def stack_with(folder: Path) -> Stack:
    """Services that find the packages in `folder`."""
    return Stack({"PYTHONPATH": python_path(folder)})


async def test_plugins_are_called_once_in_the_engine_before_it_has_an_executor_and_change_it(tmp_path, diary):
    site, collected = tmp_path / "site", tmp_path / "collected"
    write_plugin(site, "noting", NOTING.format(diary=str(diary)))
    write_plugin(site, "watching", WATCHING.format(diary=str(collected)))
    write_plugin(site, "renaming", RENAMING)
    async with stack_with(site) as stack:
        engine = await stack.start("engine", MODEL, "--port=0", "--scheduling-policy=late-first")
        await stack.ready("engine", engine)
        assert json.loads(diary.read_text()) == ["triptych-engine-0", engine.pid, False]
        engine.terminate()
        await asyncio.wait_for(engine.wait(), WAIT_LIMIT_S)
        # It is given back at the end.
        while_serving, at_the_end = json.loads(collected.read_text())
        assert while_serving > 0
        assert at_the_end == 0
        with pytest.raises(ChildDied, match="--scheduling-policy is 'late-first'"):
            await stack.start("engine", MODEL, "--port=0", "--scheduling-policy=late-first", "--plugins=")


async def test_every_rank_of_an_engine_is_given_the_plugins_too(tmp_path: Path, diary: Path) -> None:
    write_plugin(tmp_path / "site", "noting", NOTING.format(diary=str(diary)))
    async with stack_with(tmp_path / "site") as stack:
        engine = await stack.start("engine", MODEL, "--port=0", "--pipeline-parallel-size=2")
        await stack.ready("engine", engine)
    titles = sorted(json.loads(line)[0] for line in diary.read_text().splitlines())
    assert titles == ["triptych-engine-0", "triptych-engine-0-rank-0", "triptych-engine-0-rank-1"]


SCHEDULING = """
from engine_svc.scheduler.scheduler import Scheduler
class start(Scheduler):
    def schedule(self, now):
        plan = super().schedule(now)
        if plan.request_ids:
            with open({diary!r}, "w") as diary:
                diary.write(type(self).__qualname__)
        return plan
"""


async def test_a_scheduler_class_of_a_plugin_decides_the_steps(tmp_path: Path, diary: Path) -> None:
    source = SCHEDULING.format(diary=str(diary))
    write_plugin(tmp_path / "site", "noted", source, group="triptych.schedulers")
    async with stack_with(tmp_path / "site") as stack:
        trio = await stack.start_all(MODEL, "--scheduler-class=noted")
        call = stack.inference(trio.frontend).Generate(request_of("the cat", 3))
        assert [message async for message in call]
        assert diary.read_text() == "start"


@pytest.mark.parametrize("service", ["coordinator", "engine", "frontend"])
async def test_a_plugin_that_fails_stops_the_start_with_one_line_and_code_2(tmp_path, service):
    flags = {"coordinator": (), "engine": (MODEL,), "frontend": ("--engine=127.0.0.1:1",)}[service]
    write_plugin(tmp_path / "site", "broken", "def start(): raise RuntimeError('no such chip')\n")
    async with stack_with(tmp_path / "site") as stack:
        with pytest.raises(ChildDied, match="exited with code 2 while it was starting") as died:
            await stack.start(service, *flags, "--port=0")
        assert listeners_of(await stack.start(service, *flags, "--port=0", "--plugins="))
    cause = "plugin broken (plugin_broken:start): RuntimeError: no such chip"
    assert str(died.value).endswith(f": {cause}")
    assert list(stack.children[0].last_lines) == [f"triptych {service}: {cause}"]
