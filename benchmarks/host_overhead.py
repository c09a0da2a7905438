"""What a step costs beside its forward: scheduler, rows, inputs, sampling, results, with the real runner.

python -m benchmarks.host_overhead --model FOLDER [--rows 256] [--penalised 16]

One step at a time in one thread, so that nothing hides behind anything. The forward is timed inside of the runner;
what is left of the step's time is the host's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks.report import Report, Row, print_table
from engine_svc.build import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.model.context import ForwardContext
from engine_svc.model.loader import LoadedModel, LoadWishes, load_model
from engine_svc.request import Request
from engine_svc.runner.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.sampling_params import SamplingParams
from engine_svc.scheduler.config import SchedulerConfig

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 64
_WARM_STEPS = 10


class TimedModel:
    """The model, and the seconds that its last forward took."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self.seconds = 0.0

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """As the model does it."""
        started_at = time.perf_counter()
        logits = self._model.forward(token_ids, positions, logit_rows, context)
        self.seconds = time.perf_counter() - started_at
        return logits


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the command line says."""
    options = _parse(arguments)
    loaded = load_model(options.model, LoadWishes(num_threads=1))
    rows = [
        _measure(loaded, options.rows, penalised, options.steps) for penalised in (0, options.penalised)
    ]
    print_table(rows)
    if options.json is not None:
        settings = {"model": options.model.name, "steps": options.steps, "prompt_tokens": _PROMPT_TOKENS}
        Report("host_overhead", settings, rows).write(options.json)


def _measure(loaded: LoadedModel, num_rows: int, num_penalised: int, num_steps: int) -> Row:
    model = TimedModel(loaded)
    max_model_len = _PROMPT_TOKENS + num_steps + _WARM_STEPS + 2
    num_blocks = num_rows * (-(-max_model_len // _BLOCK_SIZE) + 1) + 1
    core = build_core(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * _PROMPT_TOKENS,
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
    host, forward = [], []
    for step in range(num_steps + _WARM_STEPS):
        started_at = time.perf_counter()
        plan = core.scheduler.schedule(started_at)
        core.scheduler.update(plan, runner.execute(plan).result(), started_at)
        whole = time.perf_counter() - started_at
        if step >= _WARM_STEPS:
            host.append(whole - model.seconds)
            forward.append(model.seconds)
    return {
        "rows": num_rows,
        "penalised": num_penalised,
        "host_ms": 1e3 * statistics.median(host),
        "host_best_ms": 1e3 * min(host),
        "forward_ms": 1e3 * statistics.median(forward),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--penalised", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
