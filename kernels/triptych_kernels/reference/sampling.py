"""Drawing tokens, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.ops import Linear

# Greedy except for ties, and far from making logits overflow.
MIN_TEMPERATURE = 1e-6
_CDF_CHUNK = 128
_MAX_WEIGHTS = 1 << 20


def uniform_noise(seeds: Tensor, positions: Tensor, draw: int) -> Tensor:
    """One uniform number in [0, 1) per row: a pure function of (seed, position, draw), on every machine.

    The output function of SplitMix64, applied to the seed, then after adding the position, then the draw.
    seeds: [N] int64, the bits of an unsigned seed.  positions: [N] int64.  draw: index among the draws at a
    position. Returns [N] float64, a multiple of 2^-52.
    Source: Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators.
    """
    state = _mix(_mix(_mix(seeds) + positions) + draw)
    return _logical_shift(state, 12).double() * 2.0**-52


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's step on [N] int64 with wrap-around; the published constants as signed numbers."""
    state = state + -0x61C8864680B583EB
    state = (state ^ _logical_shift(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _logical_shift(state, 27)) * -0x6B2FB644ECCEEE15
    return state ^ _logical_shift(state, 31)


def _logical_shift(bits: Tensor, num_bits: int) -> Tensor:
    return (bits >> num_bits) & ((1 << (64 - num_bits)) - 1)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), cut by min-p, then top-k, then top-p.

    By inverse CDF in vocabulary order. Min-p keeps what has at least min_p times the largest probability,
    top-k the k largest, top-p the fewest largest of the rest that reach top_p of its mass; ties of the
    smallest kept stay in. A row's token is a pure function of the row.
    logits: [N, V] fp32, finite maximum.  temperature: [N] fp32 above 0.  top_k: [N] int64, 0 = all.
    top_p: [N] fp32 in (0, 1].  min_p: [N] fp32 in [0, 1].  uniforms: [N] float64 in [0, 1).
    Returns [N] int64; any token for a row without a finite maximum.
    """
    columns = (logits, temperature, top_k, top_p, min_p, uniforms)
    # Some rows at a time, so that intermediate results stay in the cache.
    parts = zip(*(column.split(max(1, _MAX_WEIGHTS // logits.shape[1])) for column in columns), strict=True)
    return torch.cat([_draw(kept_weights(*part[:5]), part[5]) for part in parts])


def kept_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The weights that `sample` draws by: probabilities [N, V] fp32 before the cuts, 0 where cut."""
    weights = torch.softmax(logits / temperature.clamp(min=MIN_TEMPERATURE)[:, None], dim=-1)
    # Each cut costs only the rows that request it.
    rows = (min_p > 0.0).nonzero().squeeze(1)
    if len(rows):
        part = weights.index_select(0, rows)
        weights.index_copy_(0, rows, _cut(part, (part.amax(-1) * min_p[rows])[:, None]))
    rows = (((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1.0)).nonzero().squeeze(1)
    if len(rows):
        part = weights.index_select(0, rows)
        weights.index_copy_(0, rows, _cut(part, _smallest_kept(part, top_k[rows], top_p[rows])))
    return weights


def _cut(weights: Tensor, smallest: Tensor) -> Tensor:
    """Set weights below smallest [N, 1] to 0, in place. By arithmetic, as masks are not vectorized."""
    return weights.mul_(weights.clone().ge_(smallest))


def _smallest_kept(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[N, 1] the smallest weight that top-k, then top-p keeps."""
    vocab_size = weights.shape[1]
    largest = _sorted(weights)
    num_kept = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    smallest = largest.gather(1, num_kept[:, None] - 1)
    is_cut = (top_p < 1.0)[:, None]
    if is_cut.any():
        kept = _cut(largest, smallest)
        index = _first_index(kept, _total(kept) * top_p[:, None], torch.lt)
        smallest = torch.where(is_cut, kept.gather(1, index[:, None]), smallest)
    return smallest


def _sorted(weights: Tensor) -> Tensor:
    """Each row sorted in descending order."""
    if weights.device.type != "cpu":
        return weights.sort(dim=-1, descending=True).values
    # Torch's sort also sorts indices, and without vector instructions, which takes fifty times as long.
    return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[N] the first token where the running sum of weights exceeds uniform * total."""
    return _first_index(weights, uniforms[:, None] * _total(weights), torch.le)


def _by_chunk(weights: Tensor) -> Tensor:
    """[N, chunks, _CDF_CHUNK]: sums of chunks are the same for one row and for many, unlike long sums."""
    num_rows, vocab_size = weights.shape
    num_chunks = -(-vocab_size // _CDF_CHUNK)
    if vocab_size < num_chunks * _CDF_CHUNK:
        weights = F.pad(weights, (0, num_chunks * _CDF_CHUNK - vocab_size))
    return weights.view(num_rows, num_chunks, _CDF_CHUNK)


def _total(weights: Tensor) -> Tensor:
    """[N, 1] float64, as the running sum has it, so that rounding cannot put a share of it beyond the end."""
    return _by_chunk(weights).sum(-1).cumsum(-1, dtype=torch.float64)[:, -1:]


def _first_index(weights: Tensor, target: Tensor, is_before: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[N] the first index whose running sum of weights is not before target [N, 1]: by chunk, then inside."""
    chunks = _by_chunk(weights)
    reached = chunks.sum(-1).cumsum(-1, dtype=torch.float64)
    chunk = is_before(reached, target).sum(-1, keepdim=True).clamp_(max=reached.shape[1] - 1)
    before = torch.where(chunk > 0, reached.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inner = chunks[torch.arange(len(weights), device=weights.device), chunk.squeeze(1)].cumsum(
        -1, dtype=torch.float64
    )
    index = is_before(inner, target - before).sum(-1)
    # Sums taken in two orders differ by a rounding: never step past the chunk's last token with weight.
    last = (inner < inner[:, -1:]).sum(-1)
    return chunk.squeeze(1) * _CDF_CHUNK + torch.minimum(index, last)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the first token that has it; NaN where a row has any NaN.

    logits: [N, V], any float dtype.  Returns [N] fp32 and [N] int64.
    """
    highest, tokens = logits.float().max(dim=-1)
    return highest, tokens


def greedy_linear(linear: Linear, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The products x W^T + b of the rows `kept`, and the result of `greedy` for those of all rows.

    x: [N, in_features].  kept: [K] int64, ascending.  Returns [K, V] in the linear's dtype, [N] fp32 and
    [N] int64.
    """
    logits = linear(x)
    highest, tokens = greedy(logits)
    return logits.index_select(0, kept), highest, tokens
