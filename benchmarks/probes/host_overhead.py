"""Microseconds between the forwards of two decode steps of 256 rows, in `LLM.generate`.

python host_overhead.py MODEL CORE

With one step in flight this is all that a step costs beside its forward: results, scheduler, rows and inputs,
sampling. With two it is what does not hide behind a forward.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from engine_svc.model.native.decoder import NativeDecoder
from triptych import LLM, SamplingParams

_NUM_ROWS = 256
_PROMPT_TOKENS = 16
_OUTPUT_TOKENS = 64
_REPEATS = 3
_KV_BYTES = 1 << 29
_FIRST_ID, _END_ID = 10, 16_000

Span = tuple[float, float]


def main() -> None:
    model, core = sys.argv[1], int(sys.argv[2])
    decodes: list[Span] = []
    for name in ("forward", "forward_greedy"):
        setattr(NativeDecoder, name, _timed(getattr(NativeDecoder, name), core, decodes))
    print(
        json.dumps(
            {f"us_between_forwards_{depth}_in_flight": _gap_us(model, depth, decodes) for depth in (1, 2)}
        )
    )


def _timed(forward: Callable[..., Any], core: int, decodes: list[Span]) -> Callable[..., Any]:
    def timed(self: NativeDecoder, token_ids: Any, *arguments: Any) -> Any:
        # The thread that computes, whichever it is.
        os.sched_setaffinity(0, {core})
        started_at = time.perf_counter()
        result = forward(self, token_ids, *arguments)
        # Only steps in which every row decodes.
        if token_ids.shape[0] == _NUM_ROWS:
            decodes.append((started_at, time.perf_counter()))
        return result

    return timed


def _gap_us(model: str, depth: int, decodes: list[Span]) -> float:
    llm = LLM(
        model,
        dtype="bfloat16",
        num_threads=1,
        max_model_len=_PROMPT_TOKENS + _OUTPUT_TOKENS,
        max_num_seqs=_NUM_ROWS,
        max_num_batched_tokens=_NUM_ROWS * _PROMPT_TOKENS,
        kv_cache_memory=_KV_BYTES,
        steps_in_flight=depth,
    )
    medians = [_median_gap(llm, seed, decodes) for seed in range(_REPEATS)]
    llm.close()
    # The first repetition warms up; what else runs on the machine only adds time.
    return 1e6 * min(medians[1:])


def _median_gap(llm: LLM, seed: int, decodes: list[Span]) -> float:
    choose = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [choose.randrange(_FIRST_ID, _END_ID) for _ in range(_PROMPT_TOKENS)]}
        for _ in range(_NUM_ROWS)
    ]
    decodes.clear()
    llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True), progress=False
    )
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(decodes)]
    if len(gaps) < _OUTPUT_TOKENS // 2:
        raise SystemExit(f"only {len(gaps)} steps had {_NUM_ROWS} rows")
    return statistics.median(gaps)


if __name__ == "__main__":
    main()
