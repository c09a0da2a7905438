"""Twins of the ops, one token and one head at a time in float64: what the ops must equal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels import AttentionBatch

_WORD = (1 << 64) - 1


def naive_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    share = query.shape[1] // key_cache.shape[1]
    rows, token = [], 0
    for row, (num_tokens, total) in enumerate(
        zip(batch.query_lengths.tolist(), batch.total_lengths.tolist(), strict=True)
    ):
        for position in range(total - num_tokens, total):
            first = 0 if window is None else max(0, position - window + 1)
            if chunk is not None:
                first = position // chunk * chunk
            slots = [divmod(key_position, batch.block_size) for key_position in range(first, position + 1)]
            blocks = [int(batch.block_tables[row, block]) for block, _ in slots]
            offsets = [offset for _, offset in slots]
            heads = []
            for head in range(query.shape[1]):
                keys = key_cache[blocks, head // share, offsets].double()
                values = value_cache[blocks, head // share, offsets].double()
                scores = keys @ query[token, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                weights = scores.exp()
                total_weight = weights.sum() + (0.0 if sinks is None else math.exp(float(sinks[head])))
                heads.append((weights / total_weight) @ values)
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


def naive_uniform(seed: int, position: int, draw: int) -> float:
    bits = _mix((_mix((_mix(seed) + position) & _WORD) + draw) & _WORD)
    return (bits >> 12) * 2.0**-52


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)


def naive_sample(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """One row of `sample`, by sorting all of it."""
    highest = max(logits)
    weights = [math.exp((value - highest) / temperature) for value in logits]
    weights = [weight if weight >= min_p else 0.0 for weight in weights]
    if top_k:
        smallest = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [weight if weight >= smallest else 0.0 for weight in weights]
    needed, reached = top_p * sum(weights), 0.0
    for smallest in sorted(weights, reverse=True):
        reached += smallest
        if reached >= needed:
            break
    if top_p < 1.0:
        weights = [weight if weight >= smallest else 0.0 for weight in weights]
    target, reached = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > target:
            return token
    raise AssertionError("uniform is below 1")
