"""A child process: what it announces and prints, how its end is seen, and that it ends with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.processes import running_async, source_environment
from triptych_kit.process.child import STARTING, Announcement, Child, ChildDied, Output
from triptych_kit.process.setup import child_command

LIMIT_S = 30.0
ANNOUNCE = (
    "import os, signal, sys\n"
    "fd = int(sys.argv[-1].partition('=')[2])\n"
    'os.write(fd, b\'{"address": "h:1", "admin_address": "h:2"}\\n\')\n'
)
HANG = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n" + (
    "signal.pause()\n" * 9
)


def main(argv: Sequence[str]) -> int:
    """What `child_command` runs here: a child that would live for long."""
    print("runs", *argv, flush=True)
    time.sleep(600)
    return 0


def child_of(program: str, **options: Any) -> Child:
    return Child("engine-0", (sys.executable, "-c", program), source_environment(), **options)


class Unread(io.StringIO):
    """What stderr is once its reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@contextlib.contextmanager
def ending(child: Child):
    """`child`, which is killed after the block."""
    try:
        yield child
    finally:
        child.kill()
        assert child.join(LIMIT_S)


def test_the_end_is_seen_without_an_event_loop() -> None:
    with ending(child_of("input(); raise SystemExit(7)", stdin=-1)) as child:
        fd = child.end_fd()
        assert select.select([fd], [], [], 0)[0] == []
        assert not child.join(0.0)
        assert (child.is_running, child.how_it_ended) == (True, "is running")
        pipe = child._process.stdin  # The test's own end.
        assert pipe is not None
        pipe.write(b"\n")
        pipe.close()
        assert child.join(LIMIT_S)
        assert select.select([fd], [], [], 0)[0] == [fd]
        os.close(fd)
        assert (child.exit_code, child.shell_code, child.how_it_ended) == (7, 7, "exited with code 7")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_any_number_of_tasks_wait_for_the_end(run) -> None:
    async def wait_twice() -> None:
        child = child_of("raise SystemExit(3)")
        await asyncio.wait_for(asyncio.gather(child.wait(), child.wait()), LIMIT_S)
        assert child.exit_code == 3
        await child.wait()

    run(wait_twice())


async def test_a_wait_that_is_given_up_leaves_the_child_alone() -> None:
    with ending(child_of("import signal; signal.pause()")) as child:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.wait(), 0.01)
        assert child.is_running


async def test_its_addresses_are_read_and_a_child_that_ends_without_them_has_died() -> None:
    child = child_of(ANNOUNCE, announces=True)
    assert await child.announced() == Announcement(child.pid, "h:1", "h:2") == child.announcement
    await child.wait()
    silent = child_of("print('no model'); raise SystemExit(2)", announces=True, output=Output.KEPT)
    with pytest.raises(
        ChildDied, match=r"engine-0 \(pid \d+\) exited with code 2 while it was .*: no model"
    ) as died:
        await silent.announced()
    assert died.value.exit_code == 2


async def test_the_cause_that_a_child_announces_is_reported_once_whatever_it_logs_behind_it(capsys):
    program = "print('INFO a\\ntriptych engine: no model\\nINFO b'); raise SystemExit(2)"
    child = child_of(program, announces=True, output=Output.COPIED)
    with pytest.raises(ChildDied) as died:
        await child.announced()
    assert str(died.value) == f"{child.name} {child.ending} {STARTING}: no model"
    assert died.value.was_starting
    assert capsys.readouterr().err == f"[{child.name}] INFO a\n[{child.name}] INFO b\n"


async def test_messages_below_a_warning_can_be_hidden(capsys):
    lines = [
        "12:00:00.000 INFO    engine[0] listening",
        "12:00:00.000 WARNING engine[0] slow",
        '{"ts": "2026-01-01T00:00:00.000+00:00", "level": "info", "logger": "a"}',
        '{"ts": "2026-01-01T00:00:00.000+00:00", "level": "error", "logger": "a"}',
        "Traceback",
    ]
    child = child_of(f"print('\\n'.join({lines!r}))", output=Output.COPIED)
    child.hides_info = True
    await child.wait()
    shown = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == [lines[1], lines[3], lines[4]]


async def test_lines_that_are_held_back_are_copied_later_in_order(capsys):
    child = child_of("print('a\\nb')", output=Output.COPIED)
    child.hold()
    await child.wait()
    assert capsys.readouterr().err == ""
    child.release()
    assert capsys.readouterr().err == "[engine-0] a\n[engine-0] b\n"


async def test_one_that_cannot_be_started_leaves_no_descriptor_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        Child("engine-0", ("/nonexistent/python",), {}, announces=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_child_that_ends_by_itself_is_stopped_and_one_that_does_not_is_killed() -> None:
    child = child_of("import signal; signal.pause()")
    assert await child.stop(LIMIT_S)
    assert (child.exit_code, child.shell_code) == (-signal.SIGTERM, 0)
    deaf = child_of(HANG, output=Output.KEPT)
    async with asyncio.timeout(LIMIT_S):
        # There is no event for its first line.
        while not deaf.last_lines:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not await deaf.stop(0.1)
    assert deaf.shell_code == 128 + signal.SIGKILL
    assert await deaf.stop(LIMIT_S)


async def test_a_signal_to_a_child_that_has_just_ended_does_not_take_its_exit_code() -> None:
    child = child_of("raise SystemExit(7)")
    waiting = asyncio.ensure_future(child.wait())
    await asyncio.sleep(0)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # Nothing else runs.
    child.terminate()
    child.kill()
    await asyncio.wait_for(waiting, LIMIT_S)
    assert (child.exit_code, child.shell_code) == (7, 7)


async def test_a_sigterm_of_another_process_is_a_failure() -> None:
    child = child_of("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    await child.wait()
    assert child.shell_code == 128 + signal.SIGTERM


async def test_a_line_above_the_limit_is_left_out() -> None:
    child = child_of("print('x' * 200_000); print('the end')", output=Output.KEPT)
    await asyncio.wait_for(child.wait(), LIMIT_S)
    assert child.last_lines[-1] == "the end"


def test_what_a_child_runs_is_bound_to_this_process() -> None:
    assert child_command("a.b", "--c") == (
        *(sys.executable, "-m", "triptych_kit.process.setup"),
        *(str(os.getpid()), "a.b", "--c"),
    )


async def test_children_end_with_their_launcher() -> None:
    """A launcher that is killed has no chance to stop its children."""

    program = (
        "import subprocess; from triptych_kit.process.setup import child_command\n"
        "subprocess.Popen(child_command('tests.triptych_kit.process.test_child')).wait()\n"
    )
    async with running_async(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, env=source_environment()
    ) as launcher:
        assert launcher.stdout is not None
        assert await launcher.stdout.readline() == b"runs\n"
        launcher.kill()
        # The pipe ends when the last process that holds it has ended, i.e. the grandchild.
        assert await asyncio.wait_for(launcher.stdout.read(), 30) == b""


async def test_a_child_is_still_read_when_its_copied_output_is_not() -> None:
    """Else it would stop in the middle of a log line once its pipe is full."""
    program = "import sys; [print('x' * 1000) for _ in range(1000)]; print('the end')"
    with contextlib.redirect_stderr(Unread()):
        child = child_of(program, output=Output.COPIED)
        await asyncio.wait_for(child.wait(), LIMIT_S)
    assert child.last_lines[-1] == "the end"


END_BY = "import os; os.kill(os.getpid(), {number})"


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
    ids=["SIGKILL", "a-real-time-signal"],
)
async def test_any_signal_that_ended_a_child_is_named(number: int, name: str) -> None:
    child = child_of(END_BY.format(number=int(number)))
    await child.wait()
    assert child.ending == f"(pid {child.pid}) was killed by {name}"
