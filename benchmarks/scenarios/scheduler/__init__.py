"""Microseconds of a running decode in the scheduler, in a step, beside vLLM's on the same requests.

    taskset -c 1 python -m benchmarks scheduler --peer VENV/bin/python --json scheduler.json

Real schedulers whose steps have a token at once; timed are planning a step and taking in its result. Both
systems take turns on the same core, first step by step, then with two steps in flight. Prompts have 64 to 79
tokens, so that every step fills some blocks, as in service. `in_phase` is the same for prompts of exactly 64,
where all requests fill their blocks in the same step. The garbage collector is as in an engine: on, and what
was alive before the first request came is frozen. Where another process was given the core meanwhile, the
time is that of the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import Report, percentile
from benchmarks.rig.lines import LineProcess
from benchmarks.scenarios.scheduler.load import LoadShape, SchedulerLoad, Timings, WrongLoad

_PROMPT_SPREAD = 16  # a block: as many requests at each offset of one
_PEER_SCRIPT = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often and how long both systems take turns."""

    num_rounds: int
    num_steps: int  # measured, of a round
    num_lead_in: int  # not measured, at the beginning of a round: the other system has used the core's caches


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", type=Path, help="Python with vLLM installed; without it ours alone")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024], help="running decodes")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each system")
    parser.add_argument("--steps", type=int, default=112, help="measured steps of a turn")
    parser.add_argument("--lead-in", type=int, default=8, help="steps of a turn that are not measured")


def run(options: argparse.Namespace) -> Report:
    rounds = Rounds(options.rounds, options.steps, options.lead_in)
    with running_peer(options.peer) as peer:
        rows = [
            compare(num_running, overlapped, rounds, peer)
            for overlapped in (False, True)
            for num_running in options.running
        ]
        peer_name = f"vLLM {peer.facts['version']}" if peer else None
    settings = asdict(LoadShape(0, overlapped=False, prompt_spread=_PROMPT_SPREAD)) | asdict(rounds)
    del settings["num_running"], settings["overlapped"]
    return Report("scheduler", settings | {"peer": peer_name}, rows)


@contextlib.contextmanager
def running_peer(python: Path | None) -> Iterator[LineProcess | None]:
    """The peer's scheduler in a process of its own Python; None without one."""
    if python is None:
        yield None
        return
    # Isolated: nothing of this repository or of the caller's environment gets among the peer's modules.
    with LineProcess([str(python), "-I", str(_PEER_SCRIPT)]) as peer:
        yield peer


def compare(num_running: int, overlapped: bool, rounds: Rounds, peer: LineProcess | None) -> dict[str, Any]:
    """One row: the same load in both systems."""
    in_phase = LoadShape(num_running, overlapped)
    row = {"running": num_running, "overlapped": overlapped}
    row |= _take_turns(replace(in_phase, prompt_spread=_PROMPT_SPREAD), rounds, peer)
    figures = _take_turns(in_phase, replace(rounds, num_rounds=-(-rounds.num_rounds // 2)), peer)
    names = ("per_decode_us", "p99_us", "peer_per_decode_us", "peer_p99_us")
    return row | {f"in_phase_{name}": figures[name] for name in names}


def _take_turns(shape: LoadShape, rounds: Rounds, peer: LineProcess | None) -> dict[str, Any]:
    ours, theirs = Timings(), Timings()
    load = SchedulerLoad(shape)
    if peer is not None:
        peer.ask(load=asdict(shape))
    # First the prompts, until every request decodes.
    num_prefill_steps = 2 + 2 * shape.num_running * shape.max_prompt_tokens // shape.max_num_batched_tokens
    for round_index in range(rounds.num_rounds):
        num_lead_in = rounds.num_lead_in + (0 if round_index else num_prefill_steps)
        ours.extend(load.measure(num_lead_in, rounds.num_steps))
        if peer is not None:
            theirs.extend(Timings(**peer.ask(lead_in=num_lead_in, steps=rounds.num_steps)))
    load.close()
    return summarize(ours, theirs if peer else None, shape.num_running)


def summarize(ours: Timings, theirs: Timings | None, num_running: int) -> dict[str, float | None]:
    """The times of both systems, and how many times what ours takes the peer takes."""
    times: dict[str, float | None] = {**_times_of(ours, num_running)}
    if theirs is None:
        return times | {f"peer_{name}": None for name in times} | {"ratio": None}
    ratio = statistics.median(theirs.total_s) / statistics.median(ours.total_s)
    peer_times = {f"peer_{name}": value for name, value in _times_of(theirs, num_running).items()}
    return times | peer_times | {"ratio": ratio}


def _times_of(timings: Timings, num_running: int) -> dict[str, float]:
    """Microseconds of a step, or of a decode in it. Every step must have had all requests."""
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
