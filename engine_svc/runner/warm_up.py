"""Computations before the first request, so that no step has to wait for one-time work.

A step that takes seconds counts as hung, and kernels for a GPU are compiled when they are first used.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.feature import RunnerFeatures
from engine_svc.runner.sampler import Sampler

# Uses every kernel of a CPU, and is fast.
_USUAL_PROMPT = 64
_EVERYTHING = SamplingParams(
    max_tokens=1,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    min_tokens=1,
    eos_token_id=0,
    logprobs=1,
)


def rows_to_compute(num_tokens: int, max_model_len: int, device: torch.device) -> list[tuple[int, int]]:
    """Rows, each a step of its own, as (tokens to compute, tokens with KV afterwards).

    num_tokens: the maximum that a step computes.
    On a CPU one row is enough: weights have to be read, but nothing is compiled. A GPU has kernels for
    prompts by their length, and for single tokens by the number of tokens that they attend to.
    """
    longest = min(num_tokens, max_model_len)
    if device.type == "cpu":
        usual = min(_USUAL_PROMPT, longest)
        return [(usual, usual)]
    rows = [(longest, longest)]
    rows += [(length, length) for length in _doubled(1, longest)]
    return rows + [(1, total) for total in _doubled(2, max_model_len + 1)]


def warm_up_sampler(sampler: Sampler, features: RunnerFeatures, vocab_size: int, token_ids: Tensor) -> None:
    """Sample for row 0 with all parameters for which there are kernels. token_ids: of the runner's rows."""
    admitted = AdmittedRequest("warm-up", [0], 1, _EVERYTHING, [[]], features.examples())
    features.add_row(0, admitted)
    sampler.enter(0, admitted)
    # Before requests enter, the rows hold no valid token ids.
    known = torch.zeros_like(token_ids[:1])
    logits = torch.zeros(1, vocab_size, device=token_ids.device)
    rows = np.zeros(1, np.int64)
    positions = np.ones(1, np.int64)
    features.on_tokens(rows, positions)
    sampler.choose(logits, rows, positions, known)
    sampler.leave(0)
    features.remove_row(0)


def _doubled(first: int, end: int) -> list[int]:
    """first, twice that, and so on below `end`."""
    lengths = []
    while first < end:
        lengths.append(first)
        first *= 2
    return lengths
