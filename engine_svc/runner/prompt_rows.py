"""Finds the prompt positions whose logprobs a step returns, and computes them from their logits.

Knows no cache and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.step import StepPlan
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampler import Sampler
from engine_svc.runner.sampling.logprobs import PromptLogprobs
from engine_svc.runner.sampling.transfer import to_device


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of the plan with prompt logprobs."""

    index: int  # in the plan
    row: int  # in the batch
    positions: range  # each needs the logits of the position before it
    first_token: int  # index in the step of the token before the first position


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The prompt logprobs of one row in a step. On the host, to be read once the device is done."""

    index: int
    first_position: int
    logprobs: PromptLogprobs


def find_prompt_rows(plan: StepPlan, inputs: StepInputs, sampler: Sampler) -> list[PromptRow]:
    """The rows that get prompt logprobs in this step."""
    found = []
    starts = (inputs.counts.cumsum() - inputs.counts).tolist()
    for index, (row, start) in enumerate(zip(inputs.rows.tolist(), plan.num_computed_tokens, strict=True)):
        positions = sampler.prompt_positions(row, start, start + plan.num_tokens[index])
        if positions is not None:
            found.append(PromptRow(index, row, positions, starts[index]))
    return found


def with_prompt_logits(inputs: StepInputs, prompts: Sequence[PromptRow], device: torch.device) -> StepInputs:
    """The inputs with the logits that `prompts` need, after those of the rows that sample."""
    parts = [np.arange(prompt.first_token, prompt.first_token + len(prompt.positions)) for prompt in prompts]
    more = to_device(np.concatenate(parts), device)
    return replace(inputs, logit_rows=torch.cat([inputs.logit_rows, more]))


def compute_prompt_logprobs(
    prompts: Sequence[PromptRow], logits: Tensor, token_ids: Tensor, sampler: Sampler
) -> list[PromptPart]:
    """Logprobs of the tokens that follow, from the logits [M, V] of all positions, prompt by prompt."""
    prompt_parts = []
    for prompt, part in zip(prompts, logits.split([len(one.positions) for one in prompts]), strict=True):
        following = token_ids[prompt.row, prompt.positions.start : prompt.positions.stop].long()
        logprobs = sampler.prompt_logprobs(part, following, prompt.row)
        prompt_parts.append(PromptPart(prompt.index, prompt.positions.start, logprobs))
    return prompt_parts
