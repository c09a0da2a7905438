"""The attention heads the embedded model starts with, so that it copies words before it has learned any.

Copying takes two heads in a row: one that notes, at each token, which token stood before it, and one that
looks for places whose note is the token at hand, and repeats what stands there. Training finds such pairs by
itself, but only after more steps than this model has. Given at the start, they copy four of five tokens.
Source: Olsson et al. 2022, In-context learning and induction heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

_EMBEDDING_STD = 0.08
# All embeddings have this many standard deviations in one place: looking back by distance alone needs
# something that every token shares.
_SHARED_PLACE = 0
_SHARED_SIZE = 4.0
_DISTANCES = (1, 2, 3)
_LOOK_BACK_STRENGTH = 9.0
# Only pairs that turn fast tell a token from its neighbours; the others would add the embedding's
# length as noise.
_NUM_FAST_PAIRS = 6
# Only pairs that turn slowly, in radians a token, see the same match at any distance.
_SLOW_TURN = 0.02
_MATCH_STRENGTH = 3.0
_NOTE_SIZE = 2.0
_COPY_SIZE = 8.0


@torch.no_grad()
def give_first_heads(model: LlamaForCausalLM, rope_theta: float) -> None:
    """Write the heads into the first two layers of a freshly made model; the rest keeps its random weights.

    The first layer's heads note the tokens one, two and three back. The second layer's match the token at
    hand with the first note, and each note with the next.
    """
    size = model.config.hidden_size // model.config.num_attention_heads
    turns = _turns(size, rope_theta)
    shared = _share_a_place(model.model.embed_tokens.weight)
    looking, matching = (layer.self_attn for layer in model.model.layers[:2])
    seen = [_directions(size, model.config.hidden_size)]  # how a token is seen, then how each note is
    for head, distance in enumerate(_DISTANCES):
        rows = slice(head * size, (head + 1) * size)
        _look_back(looking.q_proj.weight[rows], looking.k_proj.weight[rows], turns, distance, shared)
        note = _directions(size, model.config.hidden_size)
        looking.v_proj.weight[rows] = seen[0]
        looking.o_proj.weight[:, rows] = _NOTE_SIZE * _EMBEDDING_STD * note.T
        seen.append(note)
    slow = torch.nonzero(turns < _SLOW_TURN).flatten()
    slow = torch.cat((slow, slow + size // 2))
    for head in range(len(_DISTANCES)):
        rows = slice(head * size, (head + 1) * size)
        for projection, wanted in ((matching.q_proj, seen[head]), (matching.k_proj, seen[head + 1])):
            projection.weight[rows] = 0
            projection.weight[head * size + slow] = _MATCH_STRENGTH * wanted[slow]
        copied = _directions(size, model.config.hidden_size)
        matching.v_proj.weight[rows] = copied
        matching.o_proj.weight[:, rows] = _COPY_SIZE * _EMBEDDING_STD * copied.T


def _turns(head_size: int, theta: float) -> Tensor:
    """Radians by which rotary embedding turns each pair of places from a token to the next."""
    half = head_size // 2
    turns: Tensor = theta ** -(torch.arange(half) / half)
    return turns


def _share_a_place(embeddings: Tensor) -> float:
    """Give all embeddings the same value in one place; returns its size after normalisation."""
    torch.nn.init.normal_(embeddings, std=_EMBEDDING_STD)
    embeddings[:, _SHARED_PLACE] = _SHARED_SIZE * _EMBEDDING_STD
    hidden_size = embeddings.shape[1]
    return _SHARED_SIZE / math.sqrt((hidden_size - 1 + _SHARED_SIZE**2) / hidden_size)


def _look_back(query: Tensor, key: Tensor, turns: Tensor, distance: int, shared: float) -> None:
    """Make scores greatest `distance` tokens back: the sum over fast pairs of cos((d - distance) * turn)."""
    half = len(turns)
    fast = turns[:_NUM_FAST_PAIRS]
    strength = _LOOK_BACK_STRENGTH / shared
    query.zero_()
    key.zero_()
    query[: len(fast), _SHARED_PLACE] = strength
    key[: len(fast), _SHARED_PLACE] = strength * torch.cos(distance * fast)
    key[half : half + len(fast), _SHARED_PLACE] = strength * torch.sin(distance * fast)


def _directions(count: int, hidden_size: int) -> Tensor:
    """Random directions at right angles to each other and to the shared place: [count, hidden]."""
    directions = torch.linalg.qr(torch.randn(hidden_size - 1, count))[0].T
    return torch.nn.functional.pad(directions, (1, 0))
