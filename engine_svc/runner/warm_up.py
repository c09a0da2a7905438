"""Computations before the first request, so that no step has to wait for one-time work.

A step that takes seconds counts as hung, and kernels for a GPU are compiled when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepCosts
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


# Of the steps that are measured, each so often; the shortest counts.
_POSITIONS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# A GPU reads the weights for longer than it computes so many.
_POSITIONS_ON_GPU = (48, 64, 96, 128, 192, 256, 384, 512)
_NUM_REPETITIONS = 4
_LONG_CONTEXT = 1024
_SOME_POSITIONS = 8


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


def measure_costs(
    measure: Callable[[int, int], float],
    draw: Callable[[int], float],
    propose: Callable[[int], float] | None,
    max_positions: int,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
) -> StepCosts:
    """What steps take by their positions.

    measure: seconds of a step of so many rows, each with one token that attends to so many.  draw: seconds to
    draw so many tokens.  propose: seconds to propose one draft for each of so many rows; None:
    that takes none.
    """

    def shortest(function: Callable[..., float], *arguments: int) -> float:
        return min(function(*arguments) for _ in range(_NUM_REPETITIONS))

    positions = _POSITIONS if device.type == "cpu" else _POSITIONS + _POSITIONS_ON_GPU
    counts = [count for count in positions if count <= max_positions]
    seconds = _ascending([shortest(measure, count, 1) for count in counts])
    proposing: list[float] = []
    if propose is not None:
        proposing = _ascending([shortest(propose, min(count, max_num_seqs)) for count in counts])
    some, long = min(_SOME_POSITIONS, max_positions), min(_LONG_CONTEXT, max_model_len)
    reads = shortest(measure, some, long) - shortest(measure, some, 1)
    return StepCosts(
        tuple(counts),
        tuple(seconds),
        seconds_per_read=max(0.0, reads) / (some * long),
        seconds_per_draw=shortest(draw, some) / some,
        proposal_seconds=tuple(proposing),
    )


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


def _ascending(seconds: list[float]) -> list[float]:
    """No step is slower than a larger one. What was disturbed meanwhile would make others look free."""
    return [min(seconds[index:]) for index in range(len(seconds))]


def _doubled(first: int, end: int) -> list[int]:
    """first, twice that, and so on below `end`."""
    lengths = []
    while first < end:
        lengths.append(first)
        first *= 2
    return lengths
