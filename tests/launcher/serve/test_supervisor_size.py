"""The supervisor when another number of engines is wanted than it started with."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from launcher.serve.supervisor import SupervisorLimits
from tests.launcher.serve.supervised import Stack, greeted, stack, stack_of_a_program_that_may_go


async def test_engines_that_are_wanted_later_are_started_and_kept_like_the_others(tmp_path: Path) -> None:
    one = stack(tmp_path)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    await asyncio.sleep(0)
    one.supervisor.want(4, starts_missing=True, num_kv_blocks=640)
    await one.until("engine-2 READY")
    await one.until("engine-3 READY")
    assert set(one.asked[:4]) == {
        (name, 2, 0) for name in ("coordinator-0", "engine-0", "engine-1", "frontend-0")
    }
    assert sorted(one.asked[4:]) == [("engine-2", 4, 640), ("engine-3", 4, 640)]
    address = one.supervisor.address_of("engine-3")
    one.restarted.clear()
    os.kill(one.supervisor.children["engine-3"].pid, signal.SIGKILL)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.address_of("engine-3") == address
    assert len(one.supervisor.children) == 6
    keeping.cancel()
    await one.supervisor.stop()


async def test_no_more_engines_are_started_than_a_machine_is_to_have(tmp_path: Path) -> None:
    one = stack(tmp_path, max_engines=3)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    await asyncio.sleep(0)
    one.supervisor.want(1000, starts_missing=True)
    one.supervisor.want(1000, starts_missing=True)
    await one.until("engine-2 READY")
    assert sum(name.startswith("engine") for name in one.supervisor.children) == 3
    assert [report for report in one.reports if "1000" in report] == [
        "1000 engines are wanted, 3 are the most that are started here"
    ]
    keeping.cancel()
    await one.supervisor.stop()


async def test_an_engine_that_ends_with_0_has_left_and_comes_back_only_when_it_is_wanted_anew(
    tmp_path: Path,
) -> None:
    one = stack(tmp_path)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    left = one.supervisor.children["engine-1"].pid
    os.kill(left, signal.SIGTERM)
    await one.until(f"engine-1 (pid {left}) exited with code 0 and is not started again")
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "frontend-0"]
    one.supervisor.want(2, starts_missing=False)
    assert "engine-1" not in one.supervisor.children
    one.restarted.clear()
    one.supervisor.want(2, starts_missing=True)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.children["engine-1"].pid != left
    keeping.cancel()
    await one.supervisor.stop()


async def test_an_engine_that_leaves_while_it_is_wanted_anew_starts_again(tmp_path: Path) -> None:
    one = stack(tmp_path)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    await asyncio.sleep(0)
    one.supervisor.want(2, starts_missing=True)
    os.kill(one.supervisor.children["engine-1"].pid, signal.SIGTERM)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.children["engine-1"].is_running
    keeping.cancel()
    await one.supervisor.stop()


async def test_engines_above_the_wanted_number_are_ended_where_they_are_not_ready_and_never_restarted(
    tmp_path: Path,
) -> None:
    async def all_but_the_new_one(service: str, address: str) -> None:
        await greeted(service, address)
        if len(one.supervisor.children) > 4:
            one.restarted.set()
            await asyncio.Event().wait()

    limits = SupervisorLimits(startup_s=30.0, restart_delay_s=0.01)
    one = Stack(tmp_path / "diary", limits=limits, extra={}, await_ready=all_but_the_new_one)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    await asyncio.sleep(0)
    one.supervisor.want(3, starts_missing=True)
    await asyncio.wait_for(one.restarted.wait(), 30)
    ready = one.supervisor.children["engine-1"].pid
    one.supervisor.want(1, starts_missing=False)
    await one.until("engine-2 (pid")
    assert one.supervisor.children["engine-1"].is_running
    os.kill(ready, signal.SIGKILL)
    await one.until(f"engine-1 (pid {ready}) was killed by SIGKILL and is not started again")
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "frontend-0"]
    keeping.cancel()
    await one.supervisor.stop()


async def test_an_engine_that_came_later_and_keeps_dying_is_given_up_alone(tmp_path: Path) -> None:
    one = stack(tmp_path, {"engine-2": ("--die-at-start=3",)}, max_restarts=2)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    await asyncio.sleep(0)
    one.supervisor.want(3, starts_missing=True)
    await one.until("exited with code 3 after 2 restarts within 60 s")
    assert not keeping.done()
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "engine-1", "frontend-0"]
    keeping.cancel()
    await one.supervisor.stop()


async def test_an_engine_that_came_later_and_cannot_be_started_at_all_is_given_up_alone(
    tmp_path: Path,
) -> None:
    one, program = stack_of_a_program_that_may_go(tmp_path, max_restarts=2)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    await asyncio.sleep(0)
    program.unlink()
    one.supervisor.want(3, starts_missing=True)
    await one.until("engine-2 could not be started; starts again in 0.02 s (2 of 2)")
    await one.until("engine-2 cannot be started after 2 restarts within 60 s")
    assert sum(report.startswith("engine-2 cannot be started: No such") for report in one.reports) == 3
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "engine-1", "frontend-0"]
    keeping.cancel()
    await one.supervisor.stop()
