"""What a step costs beside its forward: scheduler, rows, inputs, sampling, results, with the real runner.

python -m benchmarks.host_overhead --model FOLDER [--rows 256] [--penalised 16]

The forward is timed inside of the runner; what is left of the time between two steps' results is the host's:
with two steps in flight, as by default, what does not hide behind a forward, and with one, all of it.

A forward that also finds each row's largest logit does a part of the sampling. So the forward that is taken
off is the one that writes all logits and looks at none: what finding them adds to it, or saves, is measured
by running the last step again both ways, told apart as `choosing_ms`, and counted in `host_ms`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Report, Row, print_table
from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.loop.engine import Executor, PendingStep
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Largest
from engine_svc.model.loading.loader import LoadedModel, LoadWishes, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.runner.executor import InlineExecutor, ThreadExecutor
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.scheduler import Scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 64
_WARM_STEPS = 10
_SWITCH_INTERVAL_S = 0.0005
_NUM_REPEATS = 25


class TimedModel:
    """A native model, and the seconds that its forwards took."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert isinstance(loaded.model, NativeDecoder)
        self._model = loaded.model
        self.seconds: list[float] = []
        self._latest: tuple[Tensor, Tensor, Tensor, ForwardContext, Tensor] | None = None

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """As the model does it."""
        started_at = time.perf_counter()
        logits = self._model.forward(token_ids, positions, logit_rows, context)
        self.seconds.append(time.perf_counter() - started_at)
        return logits

    def forward_greedy(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext, kept: Tensor
    ) -> Largest:
        """As the model does it."""
        self._latest = token_ids, positions, logit_rows, context, kept
        started_at = time.perf_counter()
        largest = self._model.forward_greedy(*self._latest)
        self.seconds.append(time.perf_counter() - started_at)
        return largest

    @torch.inference_mode()
    def choosing_seconds(self) -> float:
        """What the last step's forward takes more than one that writes all logits and looks at none."""
        assert self._latest is not None
        differences = []
        for _ in range(_NUM_REPEATS):
            started_at = time.perf_counter()
            self._model.forward(*self._latest[:4])
            between = time.perf_counter()
            self._model.forward_greedy(*self._latest)
            differences.append(time.perf_counter() - between - (between - started_at))
        return statistics.median(differences)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the command line says."""
    options = _parse(arguments)
    # As in the service.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    loaded = load_model(options.model, LoadWishes(num_threads=1))
    rows = [
        _measure(loaded, options.rows, penalised, options.steps, depth)
        for depth in (2, 1)
        for penalised in (0, options.penalised)
    ]
    print_table(rows)
    if options.json is not None:
        settings = {"model": options.model.name, "steps": options.steps, "prompt_tokens": _PROMPT_TOKENS}
        Report("host_overhead", settings, rows).write(options.json)


def _measure(loaded: LoadedModel, num_rows: int, num_penalised: int, num_steps: int, depth: int) -> Row:
    model = TimedModel(loaded)
    max_model_len = _PROMPT_TOKENS + num_steps + _WARM_STEPS + 2
    num_blocks = num_rows * (-(-max_model_len // _BLOCK_SIZE) + 1) + 1
    core = build_core(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * _PROMPT_TOKENS,
            async_scheduling=depth > 1,
            max_steps_in_flight=depth,
        ),
        CacheConfig(num_blocks=num_blocks, groups=(FullAttention(_BLOCK_SIZE),)),
    )
    runner = ModelRunner(
        model,
        loaded.facts,
        KVTensors(loaded.facts, KVSizing(num_blocks, _BLOCK_SIZE, 0)),
        RunnerConfig(num_rows, max_model_len, _BLOCK_SIZE),
        loaded.ops,
    )
    executor = ThreadExecutor(runner) if depth > 1 else InlineExecutor(runner)
    choose = random.Random(1)
    for row in range(num_rows):
        penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        sampling = SamplingParams(
            max_tokens=num_steps + _WARM_STEPS,
            temperature=0.0,
            ignore_eos=True,
            **(penalties if row < num_penalised else {}),
        )
        prompt = [choose.randrange(loaded.facts.vocab_size) for _ in range(_PROMPT_TOKENS)]
        core.scheduler.add(Request(f"r{row}", prompt, _PROMPT_TOKENS, sampling))
    finished_at = _run(core.scheduler, executor, depth)
    executor.shutdown()
    steps = range(_WARM_STEPS, min(len(finished_at), len(model.seconds)))
    beside = [finished_at[step] - finished_at[step - 1] - model.seconds[step] for step in steps]
    rest, choosing = statistics.median(beside), model.choosing_seconds()
    return {
        "rows": num_rows,
        "penalised": num_penalised,
        "steps_in_flight": depth,
        "host_ms": 1e3 * (rest + choosing),
        "choosing_ms": 1e3 * choosing,
        "rest_ms": 1e3 * rest,
        "forward_ms": 1e3 * statistics.median(model.seconds[_WARM_STEPS:]),
    }


def _run(scheduler: Scheduler, executor: Executor, depth: int) -> list[float]:
    """Run what was added to its end; when each step's result was there."""
    in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
    finished_at: list[float] = []
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule(0.0)
        if plan.request_ids:
            in_flight.append((plan, executor.launch(plan)))
        if len(in_flight) == depth or not plan.request_ids:
            oldest, pending = in_flight.popleft()
            result = pending.result()
            finished_at.append(time.perf_counter())
            scheduler.update(oldest, result, 0.0)
    return finished_at


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--penalised", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
