"""Output tokens per second of `LLM.generate` with one pinned thread.

python engine.py MODEL CORE REQUESTS...

REQUESTS is a number of requests, as in 64, or in 64+ where each asks for log probabilities and penalties.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
from typing import Any

from triptych import LLM, SamplingParams

_PROMPT_TOKENS = 128
_OUTPUT_TOKENS = 64
_MAX_MODEL_LEN = 256
_KV_BYTES = 1 << 29
_MIN_REPEATS, _MAX_REPEATS = 2, 10
_CELL_S = 1.5
# Ids that the model has, and that are no special tokens.
_FIRST_ID, _END_ID = 10, 16_000
_OPTIONS = {"logprobs": 5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}


def main() -> None:
    model, core, cells = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    llm = LLM(
        model,
        dtype="bfloat16",
        num_threads=1,
        max_model_len=_MAX_MODEL_LEN,
        max_num_batched_tokens=4096,
        kv_cache_memory=_KV_BYTES,
    )
    threads = [each.native_id for each in threading.enumerate() if each.name == "model" and each.native_id]
    if len(threads) != 1:
        raise SystemExit(f"{len(threads)} threads are named 'model', there must be one to pin")
    os.sched_setaffinity(threads[0], {core})
    seeds = itertools.count()
    _generate(llm, max(cells, key=_num_requests), next(seeds))
    rates = {f"output_tokens_per_s_{cell}": _rate(llm, cell, seeds) for cell in cells}
    llm.close()
    print(json.dumps(rates))


def _num_requests(cell: str) -> int:
    return int(cell.rstrip("+"))


def _rate(llm: LLM, cell: str, seeds: itertools.count[int]) -> float:
    """Of the fastest repetition: what else runs on the machine only adds time. No prompt is cached."""
    times: list[float] = []
    while len(times) < _MIN_REPEATS or (sum(times) < _CELL_S and len(times) < _MAX_REPEATS):
        times.append(_generate(llm, cell, next(seeds)))
    return _num_requests(cell) * _OUTPUT_TOKENS / min(times)


def _generate(llm: LLM, cell: str, seed: int) -> float:
    choose = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [choose.randrange(_FIRST_ID, _END_ID) for _ in range(_PROMPT_TOKENS)]}
        for _ in range(_num_requests(cell))
    ]
    options: dict[str, Any] = {} if cell[-1] != "+" else _OPTIONS
    sampling = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, **options)
    started_at = time.perf_counter()
    results = llm.generate(prompts, sampling, progress=False)
    elapsed_s = time.perf_counter() - started_at
    if any(len(result.outputs[0].token_ids) != _OUTPUT_TOKENS for result in results):
        raise SystemExit(f"a request did not produce {_OUTPUT_TOKENS} tokens")
    return elapsed_s


if __name__ == "__main__":
    main()
