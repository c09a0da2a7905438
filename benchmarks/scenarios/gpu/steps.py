"""How long steps take, two of them in flight as in an engine, and how long the device is idle in between."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.scenarios.gpu.model import prefill_plan
from engine_svc.core.step import StepPlan
from engine_svc.runner.model_runner import ModelRunner
from engine_svc.runner.running_step import RunningStep

# Kernels of one recording follow each other faster; what is longer is the host's doing.
_GAP_US = 10.0
_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    step_ms: float  # median from result to result
    idle_percent: float | None  # of the time in which the device does nothing; None where it was not traced
    gap_percent: float | None  # of the time in such stretches of more than 10 us


def time_decode(
    runner: ModelRunner, plans: Sequence[StepPlan], *, num_lead_in: int, is_traced: bool
) -> DecodeTimes:
    """Run the plans, each launched before the one before is read; where asked, the last third is traced."""
    num_traced = len(plans) // 3 if is_traced else 0
    timed, traced = plans[: len(plans) - num_traced], plans[len(plans) - num_traced :]
    times: list[float] = []
    running: RunningStep | None = None
    for plan in timed:
        launched = runner.execute(plan)
        if running is not None:
            running.result()
        times.append(time.perf_counter())
        running = launched
    steps = [
        after - before for before, after in zip(times[num_lead_in:], times[num_lead_in + 1 :], strict=False)
    ]
    assert running is not None
    running.result()
    idle = _idle_shares(runner, traced) if traced else (None, None)
    return DecodeTimes(statistics.median(steps) * 1e3, *idle)


def time_prefill(runner: ModelRunner, length: int, *, num_repeats: int) -> float:
    """Milliseconds from the plan of a prompt to its first token, at the median."""
    times = []
    for step in range(num_repeats + 2):
        plan = prefill_plan(step, length)
        started_at = time.perf_counter()
        runner.execute(plan).result()
        times.append(time.perf_counter() - started_at)
    return statistics.median(times[2:]) * 1e3


def _idle_shares(runner: ModelRunner, plans: Sequence[StepPlan]) -> tuple[float | None, float | None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        running: RunningStep | None = None
        for plan in plans:
            launched = runner.execute(plan)
            if running is not None:
                running.result()
            running = launched
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    work = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _DEVICE_WORK]
    return idle_shares(work)


def idle_shares(work: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Percent of the time from the first to the last of these intervals, in us, that none covers.

    First all of it, then what lies in stretches of more than 10 us. None where nothing was traced: not every
    machine lets a process look.
    """
    if not work:
        return None, None
    ordered = sorted(work)
    begin = end = ordered[0][0]
    idle = gaps = 0.0
    for started_at, ended_at in ordered:
        stretch = max(0.0, started_at - end)
        idle += stretch
        gaps += stretch if stretch > _GAP_US else 0.0
        end = max(end, ended_at)
    span = end - begin
    return 100 * idle / span, 100 * gaps / span
