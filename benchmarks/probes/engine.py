"""Seconds of `LLM.generate` with one pinned thread: python engine.py MODEL CORE [NAME=JSON...]

NAME=JSON are further options of the engine.

Each line of the input is a cell and a seed, `{"cell": "64", "seed": 1}`; the answer is its time and rate. A
cell is a number of requests, as in 64, or in 64+ where each asks for log probabilities and penalties.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from typing import Any

from triptych import LLM, SamplingParams

_PROMPT_TOKENS = 32
# Of each request: so many that a turn takes about half a second.
_OUTPUT_TOKENS = {1: 96, 8: 48, 64: 16}
_MAX_MODEL_LEN = 256
_KV_BYTES = 1 << 29
# Ids that the model has, and that are no special tokens.
_FIRST_ID, _END_ID = 10, 16_000
_OPTIONS = {"logprobs": 5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}


def main() -> None:
    model, core = sys.argv[1], int(sys.argv[2])
    pairs = dict(option.split("=", 1) for option in sys.argv[3:])
    llm = LLM(
        model,
        **{
            "dtype": "bfloat16",
            "num_threads": 1,
            "max_model_len": _MAX_MODEL_LEN,
            "max_num_batched_tokens": 4096,
            "kv_cache_memory": _KV_BYTES,
            **{name: json.loads(value) for name, value in pairs.items()},
        },
    )
    threads = [each.native_id for each in threading.enumerate() if each.name == "model" and each.native_id]
    if len(threads) != 1:
        raise SystemExit(f"{len(threads)} threads are named 'model', there must be one to pin")
    os.sched_setaffinity(threads[0], {core})
    print(json.dumps({"model": model}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"output_tokens_per_s": _rate(llm, **json.loads(line))}), flush=True)
    llm.close()


def _rate(llm: LLM, cell: str, seed: int) -> float:
    """Of requests whose prompts are drawn from the seed: none is cached."""
    choose = random.Random(seed)
    num_requests = int(cell.rstrip("+"))
    prompts = [
        {"prompt_token_ids": [choose.randrange(_FIRST_ID, _END_ID) for _ in range(_PROMPT_TOKENS)]}
        for _ in range(num_requests)
    ]
    num_tokens = _OUTPUT_TOKENS[num_requests]
    options: dict[str, Any] = {} if cell[-1] != "+" else _OPTIONS
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options)
    started_at = time.perf_counter()
    results = llm.generate(prompts, sampling, progress=False)
    elapsed_s = time.perf_counter() - started_at
    if any(len(result.outputs[0].token_ids) != num_tokens for result in results):
        raise SystemExit(f"a request did not produce {num_tokens} tokens")
    return num_requests * num_tokens / elapsed_s


if __name__ == "__main__":
    main()
