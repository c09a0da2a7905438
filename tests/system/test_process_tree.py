"""What the processes of a stack are called, and that none of them outlives the one that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.processes import running_async
from tests.system.ranks import named_segments, wait_for_end
from tests.system.stack import START_LIMIT_S

pytestmark = pytest.mark.chaos

# What each starts: workers that share a port with text workers of their own, and an engine's ranks.
FLAGS = ("--workers=2", "--text-workers=1", "--pipeline-parallel-size=2", "--drain-lag-s=0")
TITLES = {
    "triptych-coordinator": 1,
    "triptych-engine-0": 1,
    "triptych-engine-0-rank-0": 1,
    "triptych-engine-0-rank-1": 1,
    # Of two workers one has the number, and the title, of the frontend that looks after them.
    "triptych-frontend": 2,
    "triptych-frontend-1": 1,
    "triptych-text-worker": 2,
}


@dataclass(frozen=True, slots=True)
class Tree:
    """A running `triptych serve` and every process that came of it."""

    launcher: asyncio.subprocess.Process
    by_title: dict[str, list[int]]

    @property
    def process_ids(self) -> list[int]:
        return [pid for pids in self.by_title.values() for pid in pids]


@contextlib.asynccontextmanager
async def whole_tree(ready_file: Path) -> AsyncIterator[Tree]:
    """A stack on the embedded model, once every kind of process runs that it has."""
    process_ids: list[int] = []
    try:
        async with running_async(
            *(
                sys.executable,
                "-m",
                "triptych_cli.cli",
                "serve",
                "--port=0",
                "--grpc-port=0",
                f"--ready-file={ready_file}",
                *FLAGS,
            ),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as launcher:
            assert launcher.stdout is not None
            await asyncio.wait_for(launcher.stdout.readuntil(b"triptych complete"), START_LIMIT_S)
            tree = Tree(launcher, {})
            async with asyncio.timeout(START_LIMIT_S):
                # Text workers start with the first tokenizer; there is no event for it.
                while {title: len(pids) for title, pids in tree.by_title.items()} != TITLES:
                    await asyncio.sleep(0.05)
                    tree = Tree(launcher, by_title(psutil.Process(launcher.pid).children(recursive=True)))
                    process_ids = tree.process_ids
            yield tree
    finally:
        assert wait_for_end(process_ids) == []


def by_title(processes: list[psutil.Process]) -> dict[str, list[int]]:
    """The ids of `processes` by what `ps` shows."""
    found: dict[str, list[int]] = {}
    for process in processes:
        # One that lives for a moment, e.g. to look something up, may have ended since it was listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.setdefault(title_of(process.pid), []).append(process.pid)
    return found


def title_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


async def test_every_process_has_a_title_and_none_outlives_a_killed_launcher(tmp_path: Path) -> None:
    async with whole_tree(tmp_path / "ready.json") as tree:
        ranks = [pid for title, pids in tree.by_title.items() if "-rank-" in title for pid in pids]
        segments = named_segments(ranks) | {
            Path(name)
            for pid in tree.process_ids
            for name in re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())
        }
        # Stopped, one cannot do anything for its own end any more.
        os.kill(tree.by_title["triptych-engine-0"][0], signal.SIGSTOP)
        tree.launcher.kill()
        assert wait_for_end(tree.process_ids) == []
        assert [segment for segment in segments if segment.exists()] == []


@pytest.mark.parametrize(
    ("killed", "gone"),
    [
        ("triptych-engine-0", ["triptych-engine-0-rank-0", "triptych-engine-0-rank-1"]),
        ("triptych-frontend-1", ["triptych-text-worker"]),
    ],
)
async def test_what_a_killed_service_has_started_ends_with_it(tmp_path, killed, gone):
    async with whole_tree(tmp_path / "ready.json") as tree:
        [pid] = tree.by_title[killed]
        children = [child.pid for child in psutil.Process(pid).children()]
        assert {title_of(child) for child in children} == set(gone)
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(children) == []
        assert tree.launcher.returncode is None
