"""The supervisor over real child processes that are no services."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from launcher.serve.process import ChildDied, ProcessPlan, spawn
from launcher.serve.supervisor import StartTimeout, SupervisorLimits
from tests.launcher.serve.supervised import Stack, greeted, stack, stack_of_a_program_that_may_go


class Unread(io.StringIO):
    """What stderr is once its reader has gone."""

    def write(self, text: str) -> int:
        """Refuse the text."""
        raise BrokenPipeError


async def test_the_coordinator_starts_first_and_all_are_told_of_it(tmp_path: Path) -> None:
    one = stack(tmp_path)
    await one.supervisor.start()
    coordinator = one.supervisor.address_of("coordinator-0")
    await one.supervisor.stop()
    assert one.events()[0] == "coordinator-0 start"
    assert sorted(one.events()[1:4]) == ["engine-0 start", "engine-1 start", "frontend-0 start"]
    starts = [line for line in one.diary.read_text().splitlines() if " start " in line]
    assert all(line.endswith(f"coordinator={coordinator}") for line in starts[1:])


async def test_it_stops_the_frontend_then_the_engines_then_the_coordinator(tmp_path: Path) -> None:
    one = stack(tmp_path)
    await one.supervisor.start()
    await one.supervisor.stop()
    stops = [event for event in one.events() if event.endswith("stop")]
    assert stops[0] == "frontend-0 stop"
    assert sorted(stops[1:3]) == ["engine-0 stop", "engine-1 stop"]
    assert stops[3] == "coordinator-0 stop"
    assert not any(child.is_running for child in one.supervisor.children.values())


@pytest.mark.parametrize("flag", ["--die-at-start", "--die-before-ready"])
async def test_a_child_that_dies_before_it_is_ready_is_named_with_its_last_lines(
    tmp_path: Path, flag: str
) -> None:
    one = stack(tmp_path, {"engine-1": (f"{flag}=3",)})
    with pytest.raises(
        ChildDied, match=r"engine-1 \(pid \d+\) exited with code 3 while it was starting"
    ) as died:
        await one.supervisor.start()
    assert "starting: with this model\n  its lines before that:\n    something went wrong" in str(died.value)
    await one.supervisor.stop()


async def test_a_child_that_dies_between_its_own_readiness_and_the_others_ends_the_start(
    tmp_path: Path,
) -> None:
    async def all_but_the_frontend(service: str, address: str) -> None:
        await greeted(service, address)
        if service == "frontend":
            while not any(report.startswith("engine-1 READY") for report in one.reports):
                one.reported.clear()
                await one.reported.wait()
            os.kill(one.supervisor.children["engine-1"].pid, signal.SIGKILL)
            await asyncio.Event().wait()

    one = Stack(
        tmp_path / "diary",
        limits=SupervisorLimits(startup_s=30.0),
        extra={},
        await_ready=all_but_the_frontend,
    )
    with pytest.raises(ChildDied, match=r"engine-1 \(pid \d+\) was killed by SIGKILL"):
        await one.supervisor.start()
    await one.supervisor.stop()


async def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    one = stack(tmp_path, startup_s=0.0)
    with pytest.raises(
        StartTimeout, match="not ready within 0 s: coordinator-0, engine-0, engine-1, frontend-0"
    ):
        await one.supervisor.start()
    await one.supervisor.stop()


@pytest.mark.parametrize("name", ["coordinator-0", "engine-1", "frontend-0"])
async def test_a_child_that_dies_later_is_reported_and_starts_again_on_its_port(
    tmp_path: Path, name: str
) -> None:
    one = stack(tmp_path)
    await one.supervisor.start()
    before = one.supervisor.children[name]
    address = one.supervisor.address_of(name)
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    os.kill(before.pid, signal.SIGKILL)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.children[name].pid != before.pid
    assert one.supervisor.address_of(name) == address
    assert any(
        f"{name} (pid {before.pid}) was killed by SIGKILL; starts again" in line for line in one.reports
    )
    keeping.cancel()
    await one.supervisor.stop()


@pytest.mark.parametrize("name", ["coordinator-0", "engine-1"])
async def test_a_restart_that_fails_does_not_cost_a_process_its_port(tmp_path: Path, name: str) -> None:
    trap = tmp_path / "trap"
    one = stack(tmp_path, {name: (f"--die-once={trap}",)})
    await one.supervisor.start()
    address = one.supervisor.address_of(name)
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    trap.touch()
    os.kill(one.supervisor.children[name].pid, signal.SIGKILL)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert not trap.exists()
    assert one.supervisor.address_of(name) == address
    keeping.cancel()
    await one.supervisor.stop()


async def test_a_process_that_the_system_refuses_to_start_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    one, program = stack_of_a_program_that_may_go(tmp_path)
    await one.supervisor.start()
    others = {name: child.pid for name, child in one.supervisor.children.items() if name != "engine-0"}
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    program.unlink()
    os.kill(one.supervisor.children["engine-0"].pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while "engine-0 cannot be started: No such file or directory" not in one.reports:
            one.reported.clear()
            await one.reported.wait()
        program.symlink_to(sys.executable)
        await one.restarted.wait()
    assert {name: one.supervisor.children[name].pid for name in others} == others
    assert one.supervisor.children["engine-0"].is_running
    keeping.cancel()
    await one.supervisor.stop()


async def test_a_process_that_the_system_refuses_to_start_is_given_up_like_one_that_dies(
    tmp_path: Path,
) -> None:
    one, program = stack_of_a_program_that_may_go(tmp_path, max_restarts=2)
    await one.supervisor.start()
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    program.unlink()
    os.kill(one.supervisor.children["engine-0"].pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match=r"engine-0 .* after 2 restarts within 60 s"):
        await asyncio.wait_for(keeping, 30)
    assert sum(report.startswith("engine-0 cannot be started") for report in one.reports) == 2
    await one.supervisor.stop()


async def test_an_engine_that_starts_while_the_coordinator_is_down_is_told_where_it_will_be(
    tmp_path: Path,
) -> None:
    trap = tmp_path / "trap"
    one = stack(tmp_path, {"coordinator-0": (f"--die-once={trap}",)}, restart_delay_s=0.2)
    await one.supervisor.start()
    address = one.supervisor.address_of("coordinator-0")
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    trap.touch()
    for name in ("coordinator-0", "engine-1"):
        os.kill(one.supervisor.children[name].pid, signal.SIGKILL)
    # Whichever of the two is quicker: it is the engine whose second start is looked at.
    await one.until("engine-1 READY", num_reports=2)
    keeping.cancel()
    await one.supervisor.stop()
    starts = [line for line in one.diary.read_text().splitlines() if line.startswith("engine-1 start ")]
    assert len(starts) == 2
    assert all(line.endswith(f"coordinator={address}") for line in starts)


async def test_a_child_is_read_on_when_nobody_reads_what_is_copied(tmp_path: Path) -> None:
    """Else it would stop in the middle of a log line once its pipe is full."""
    program = "import sys; [print('x' * 1000) for _ in range(1000)]; print('the end')"
    plan = ProcessPlan("engine", 0, (sys.executable, "-c", program))
    with contextlib.redirect_stderr(Unread()):
        child, pipe_fd = await spawn(plan, [], os.environ)
        os.close(pipe_fd)
        await asyncio.wait_for(child.wait(), 30)
    assert child.last_lines[-1] == "the end"


async def test_a_child_that_keeps_dying_is_restarted_ever_later_and_then_given_up(tmp_path: Path) -> None:
    one = stack(tmp_path, max_restarts=3)
    await one.supervisor.start()
    others = {name: child.pid for name, child in one.supervisor.children.items() if name != "engine-0"}
    keeping = asyncio.ensure_future(one.supervisor.keep_running())
    for _ in range(3):
        one.restarted.clear()
        os.kill(one.supervisor.children["engine-0"].pid, signal.SIGKILL)
        await asyncio.wait_for(one.restarted.wait(), 30)
    assert {name: one.supervisor.children[name].pid for name in others} == others
    os.kill(one.supervisor.children["engine-0"].pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match=r"engine-0 .* was killed by SIGKILL after 3 restarts within 60 s"):
        await asyncio.wait_for(keeping, 30)
    delays = [line.partition("starts again in ")[2] for line in one.reports if "starts again" in line]
    assert delays == ["0.01 s (1 of 3)", "0.02 s (2 of 3)", "0.04 s (3 of 3)"]
    await one.supervisor.stop()


async def test_children_end_with_their_launcher(tmp_path: Path) -> None:
    """A launcher that is killed has no chance to stop anybody."""

    program = (
        "import os, subprocess, sys\n"
        "child = 'import os, sys, time; from service_kit.process import die_with_parent;"
        ' die_with_parent(int(sys.argv[1])); print("tied", flush=True); time.sleep(600)\'\n'
        "subprocess.Popen([sys.executable, '-c', child, str(os.getpid())]).wait()\n"
    )
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert launcher.stdout is not None
    assert await launcher.stdout.readline() == b"tied\n"
    launcher.kill()
    # The pipe ends when the last process that holds it has ended, i.e. the grandchild.
    assert await asyncio.wait_for(launcher.stdout.read(), 30) == b""
    await launcher.wait()
