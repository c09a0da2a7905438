"""PYTHON -m benchmarks.contestants.vllm_cpu MODEL DTYPE eager|compile: vLLM's offline engine, CPU build.

Runs in vLLM's own environment, so it imports nothing of ours but what it is asked by.
"""

from __future__ import annotations

import sys

from benchmarks.contestants.jobs import Job, Prompts, serve


def main() -> None:
    """Serve jobs with vLLM; the process's environment says how many threads and where."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    model, dtype, mode = sys.argv[1:4]
    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=mode == "eager",
        max_model_len=2176,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
        # The grammar engine that ours has.
        structured_outputs_config={"backend": "guidance"},
    )

    def generate(prompts: Prompts, job: Job) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=job.num_output_tokens,
            ignore_eos=True,
            structured_outputs=StructuredOutputsParams(json=job.json_schema) if job.json_schema else None,
        )
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    serve(f"vllm-cpu-{mode}", generate)


if __name__ == "__main__":
    main()
