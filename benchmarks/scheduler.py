"""What a running decode costs the scheduler in a step, beside vLLM's on the same requests.

    taskset -c 1 python -m benchmarks.scheduler --peer VENV/bin/python --json scheduler.json

Real schedulers whose steps yield a token at once; timed are planning a step and taking in its result. Both
systems take turns on the same core, first step by step, then with two steps in flight. Prompts have 64 to 79
tokens, so that every step fills some blocks, as in service. `in_phase` is the same for prompts of exactly 64,
where all requests fill their blocks in the same step. The garbage collector is as in an engine: on, and what
was alive before the first request came is frozen. Where another process was given the core meanwhile, the
time is that of the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# So that it runs as a file, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.load import percentile
from benchmarks.report import Report, print_table
from benchmarks.scheduler_load import LoadShape, SchedulerLoad, Timings, WrongLoad, time_hashes

_PROMPT_SPREAD = 16  # a block: as many requests at each place of one
_NUM_HASHED_TOKENS = 1_024
_NUM_HASH_REPEATS = 20
_COLUMNS = (
    "running",
    "overlapped",
    "schedule_us",
    "update_us",
    "p99_us",
    "per_decode_us",
    "in_phase_p99_us",
    "peer_schedule_us",
    "peer_update_us",
    "peer_p99_us",
    "peer_per_decode_us",
    "ratio",
    "hash_us_per_1000_tokens",
    "peer_hash_us_per_1000_tokens",
)
_PEER_SCRIPT = Path(__file__).with_name("scheduler_peer.py")


class PeerFailed(Exception):
    """The peer's process ended before it had answered."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often and how long both systems take turns."""

    num_rounds: int
    num_steps: int  # measured, of a round
    num_lead_in: int  # not measured, at the beginning of a round: the other system has used the core's caches


class Peer:
    """The peer's scheduler, in a process of its own Python."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version = str(self._read()["version"])

    def begin(self, shape: LoadShape) -> None:
        """Build a scheduler and add the requests of this load."""
        self._ask({"load": asdict(shape)})

    def measure(self, num_lead_in: int, num_steps: int) -> Timings:
        """As `SchedulerLoad.measure`."""
        return Timings(**self._ask({"lead_in": num_lead_in, "steps": num_steps}))

    def time_hashes(self, num_tokens: int, num_repeats: int, block_size: int) -> list[float]:
        """Seconds to hash a prompt of so many tokens."""
        command = {"hash_tokens": num_tokens, "repeats": num_repeats, "block_size": block_size}
        times: list[float] = self._ask(command)["hash_s"]
        return times

    def _ask(self, command: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None, "the process was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "the process was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"the peer ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark, print its table and write its report."""
    arguments = _parse(words)
    rounds = Rounds(arguments.rounds, arguments.steps, arguments.lead_in)
    with running_peer(arguments.peer) as peer:
        hashing = compare_hashing(peer)
        rows = [
            compare(num_running, overlapped, rounds, peer) | hashing
            for overlapped in (False, True)
            for num_running in arguments.running
        ]
        peer_name = f"vLLM {peer.version}" if peer else None
    print_table([{column: row[column] for column in _COLUMNS} for row in rows])
    if arguments.json:
        settings = asdict(LoadShape(0, overlapped=False, prompt_spread=_PROMPT_SPREAD)) | asdict(rounds)
        del settings["num_running"], settings["overlapped"]
        settings |= {
            "peer": peer_name,
            "garbage_collector": "on; as each engine sets it before requests come",
        }
        Report("scheduler", settings, rows).write(arguments.json)


@contextlib.contextmanager
def running_peer(python: Path | None) -> Iterator[Peer | None]:
    """The peer for as long as the block lasts; None without its Python."""
    if python is None:
        yield None
        return
    # Isolated: nothing of this repository or of the caller's environment gets among the peer's modules.
    process = subprocess.Popen(
        [str(python), "-I", str(_PEER_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.communicate()


def compare(num_running: int, overlapped: bool, rounds: Rounds, peer: Peer | None) -> dict[str, Any]:
    """One row: the same load in both systems."""
    in_phase = LoadShape(num_running, overlapped)
    row = {"running": num_running, "overlapped": overlapped}
    row |= _take_turns(replace(in_phase, prompt_spread=_PROMPT_SPREAD), rounds, peer)
    figures = _take_turns(in_phase, replace(rounds, num_rounds=-(-rounds.num_rounds // 2)), peer)
    names = ("per_decode_us", "p99_us", "peer_per_decode_us", "peer_p99_us")
    return row | {f"in_phase_{name}": figures[name] for name in names}


def _take_turns(shape: LoadShape, rounds: Rounds, peer: Peer | None) -> dict[str, Any]:
    ours, theirs = Timings(), Timings()
    load = SchedulerLoad(shape)
    if peer is not None:
        peer.begin(shape)
    # First the prompts, until everybody decodes.
    num_prefill_steps = 2 + 2 * shape.num_running * shape.max_prompt_tokens // shape.max_num_batched_tokens
    for round_index in range(rounds.num_rounds):
        num_lead_in = rounds.num_lead_in + (0 if round_index else num_prefill_steps)
        ours.extend(load.measure(num_lead_in, rounds.num_steps))
        if peer is not None:
            theirs.extend(peer.measure(num_lead_in, rounds.num_steps))
    load.close()
    return summarize(ours, theirs if peer else None, shape.num_running)


def summarize(ours: Timings, theirs: Timings | None, num_running: int) -> dict[str, float | None]:
    """The figures of both systems, and how many times what ours takes the peer takes."""
    figures: dict[str, float | None] = {**figures_of(ours, num_running)}
    if theirs is None:
        return figures | {f"peer_{name}": None for name in figures} | {"ratio": None}
    peer_figures = figures_of(theirs, num_running)
    ratio = statistics.median(theirs.total_s) / statistics.median(ours.total_s)
    return figures | {f"peer_{name}": value for name, value in peer_figures.items()} | {"ratio": ratio}


def figures_of(timings: Timings, num_running: int) -> dict[str, float]:
    """What one system took, in microseconds of a step, or of a decode in it. Every step had all requests."""
    if set(timings.num_rows) != {num_running}:
        raise WrongLoad(f"steps of {num_running} decodes had {sorted(set(timings.num_rows))} rows")
    totals = timings.total_s
    return {
        "schedule_us": statistics.median(timings.schedule_s) * 1e6,
        "update_us": statistics.median(timings.update_s) * 1e6,
        "p99_us": percentile(totals, 99) * 1e6,
        "per_decode_us": statistics.median(totals) * 1e6 / num_running,
        "num_steps": len(totals),
        "num_interrupted": timings.num_interrupted,
    }


def compare_hashing(peer: Peer | None) -> dict[str, float | None]:
    """What it costs to hash the blocks of 1,000 prompt tokens."""
    block_size = LoadShape(0, False).block_size
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(10):
        ours += time_hashes(_NUM_HASHED_TOKENS, _NUM_HASH_REPEATS, block_size)
        if peer is not None:
            theirs += peer.time_hashes(_NUM_HASHED_TOKENS, _NUM_HASH_REPEATS, block_size)
    return {
        "hash_us_per_1000_tokens": _per_1000_tokens(ours),
        "peer_hash_us_per_1000_tokens": _per_1000_tokens(theirs) if peer else None,
    }


def _per_1000_tokens(times: Sequence[float]) -> float:
    return statistics.median(times) * 1e6 * 1000 / _NUM_HASHED_TOKENS


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--peer", type=Path, help="Python with vLLM installed; without it ours alone")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024], help="running decodes")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each system")
    parser.add_argument("--steps", type=int, default=112, help="measured steps of a turn")
    parser.add_argument("--lead-in", type=int, default=8, help="steps of a turn that are not measured")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
