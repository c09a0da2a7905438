"""python -m benchmarks.contestants.triptych MODEL DTYPE CORES [NAME=VALUE...]: our engine by `LLM.generate`.

NAME=VALUE are further options of the engine, e.g. `steps_in_flight=1`.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from benchmarks.contestants.jobs import Job, Prompts, serve
from triptych_cli.llm import LLM, SamplingParams, StructuredOutput

_KV_BYTES = 4 << 30


def main() -> None:
    model, dtype, cores, *options = sys.argv[1:]
    pinned = {int(core) for core in cores.split(",")}
    pairs = dict(option.split("=", 1) for option in options)
    llm = LLM(
        model,
        **{
            "dtype": dtype,
            "num_threads": len(pinned),
            "max_model_len": 2176,
            "max_num_batched_tokens": 4096,
            "kv_cache_memory": _KV_BYTES,
            **{name: json.loads(value) for name, value in pairs.items()},
        },
    )
    for thread in threading.enumerate():
        if thread.name == "model" and thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, pinned)

    facts: dict[str, float] = {}

    def generate(prompts: Prompts, job: Job) -> list[list[int]]:
        sampling = [
            SamplingParams(
                temperature=job.temperature,
                seed=seed,
                max_tokens=job.num_output_tokens,
                ignore_eos=True,
                structured_output=StructuredOutput(json_schema=job.json_schema) if job.json_schema else None,
            )
            for seed in range(len(prompts))
        ]
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, progress=False)
        facts["accepted_drafts"] = sum(result.usage.num_accepted_draft_tokens or 0 for result in results)
        return [list(result.outputs[0].token_ids) for result in results]

    try:
        serve("triptych", generate, facts)
    finally:
        llm.close()


if __name__ == "__main__":
    main()
