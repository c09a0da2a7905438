"""PYTHON -m benchmarks.contestants.hf MODEL DTYPE: `generate` of transformers, one static batch a job."""

from __future__ import annotations

import os
import sys

from benchmarks.contestants.jobs import Job, Prompts, serve


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model_path, dtype = sys.argv[1:3]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    ).eval()

    def generate(prompts: Prompts, job: Job) -> list[list[int]]:
        if job.json_schema:
            raise SystemExit("transformers has no constraints")
        longest = max(map(len, prompts))
        rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            max_new_tokens=job.num_output_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        output = model.generate(rows, attention_mask=mask, generation_config=config)
        answers: list[list[int]] = output[:, longest:].tolist()
        return answers

    serve("hf", generate)


if __name__ == "__main__":
    main()
