"""Whether anything the scheduler does costs more than linearly: long queues, full pools, many ends at once.

    taskset -c 1 python -m benchmarks.scheduler_scaling --json scheduler_scaling.json

A row is one situation at one size; `us` must stay flat as `size` grows. It is per request for what happens to
each once, per step for a step that finds the queue and can admit nobody, per row of a step under pressure.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report, Row, print_table
from benchmarks.scheduler_load import LoadShape, SchedulerLoad, Timings, make_request

_NUM_RUNNING = 64  # beside the queue
_NUM_STEPS = 100
_BLOCKS_UNDER_PRESSURE = 6  # of the pool, for each request; all prompts fit, half of the output does not
_OUTPUT_UNDER_PRESSURE = 64


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark, print its table and write its report."""
    arguments = _parse(words)
    rows: list[Row] = []
    for situation, sizes in (
        (with_waiting, arguments.waiting),
        (under_pressure, arguments.running),
        (ending_together, arguments.running),
    ):
        for policy in arguments.policies:
            for size in sizes:
                rows += _medians(situation, size, policy, arguments.repeats)
    print_table(rows)
    if arguments.json:
        settings = {"repeats": arguments.repeats, "running_beside_queue": _NUM_RUNNING}
        Report("scheduler_scaling", settings, rows).write(arguments.json)


def with_waiting(num_waiting: int, policy: str) -> Iterator[Row]:
    """A queue grows behind requests that decode, is looked at by steps, shrinks by aborts, and is served."""
    shape = LoadShape(_NUM_RUNNING, overlapped=False, max_num_seqs=_NUM_RUNNING, num_blocks=40_000)
    load = SchedulerLoad(shape, policy)
    scheduler = load.core.scheduler
    load.measure(2, 0)
    queued = [
        make_request(_NUM_RUNNING + index, replace(shape, max_tokens=2)) for index in range(2 * num_waiting)
    ]
    for place, request in enumerate(queued):
        request.priority = place * 7919 % 101
    timings = Timings()
    added_s = sum(timings.time(scheduler.add, request)[1] for request in queued[:num_waiting])
    yield _row("add to the queue", num_waiting, policy, added_s / num_waiting)
    steps = load.measure(4, _NUM_STEPS)
    yield _row("step before the queue", num_waiting, policy, statistics.median(steps.total_s))
    for request in queued[num_waiting:]:
        scheduler.add(request)
    aborted = [request.request_id for request in queued[1::2]]
    _, aborted_s = timings.time(scheduler.abort, aborted, 0.0)
    yield _row("abort from the queue", num_waiting, policy, aborted_s / num_waiting)
    scheduler.abort(scheduler.running_ids, 0.0)
    served = load.measure_until_idle()
    yield _row("serve from the queue", num_waiting, policy, sum(served.total_s) / num_waiting)
    load.close()


def under_pressure(num_running: int, policy: str) -> Iterator[Row]:
    """More output than the pool holds: requests are preempted, wait, and are computed again."""
    shape = LoadShape(
        num_running,
        overlapped=False,
        max_tokens=_OUTPUT_UNDER_PRESSURE,
        num_blocks=num_running * _BLOCKS_UNDER_PRESSURE + 1,
    )
    load = SchedulerLoad(shape, policy)
    timings = load.measure_until_idle()
    load.close()
    num_preemptions = load.core.scheduler.stats().num_preemptions
    yield _row(
        "row under pressure",
        num_running,
        policy,
        sum(timings.total_s) / sum(timings.num_rows),
        num_preemptions,
    )


def ending_together(num_running: int, policy: str) -> Iterator[Row]:
    """All running requests reach their last token in the same step."""
    load = SchedulerLoad(
        LoadShape(num_running, overlapped=False, max_tokens=20, max_num_batched_tokens=65_536), policy
    )
    timings = load.measure_until_idle()
    load.close()
    yield _row("end in one step", num_running, policy, timings.update_s[-1] / num_running)


def _medians(
    situation: Callable[[int, str], Iterator[Row]], size: int, policy: str, num_repeats: int
) -> Iterator[Row]:
    repeats = [list(situation(size, policy)) for _ in range(num_repeats)]
    for rows in zip(*repeats, strict=True):
        yield {**rows[0], "us": statistics.median(row["us"] for row in rows)}


def _row(what: str, size: int, policy: str, seconds: float, num_preemptions: int | None = None) -> Row:
    return {
        "what": what,
        "policy": policy,
        "size": size,
        "us": seconds * 1e6,
        "num_preemptions": num_preemptions,
    }


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument(
        "--waiting", type=int, nargs="+", default=[256, 1024, 4096], help="lengths of the queue"
    )
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024], help="running requests")
    parser.add_argument("--policies", nargs="+", default=["fcfs", "priority", "least-recompute"])
    parser.add_argument("--repeats", type=int, default=3, help="a figure is the median of so many")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
