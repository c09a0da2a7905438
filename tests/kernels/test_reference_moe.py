"""The reference of mixtures of experts against one token and one expert at a time."""

from __future__ import annotations

import math

import pytest
import torch

from triptych_kernels import REFERENCE

_GENERATOR_SEED = 5


def naive_token(x, gate_up, down, expert_ids, expert_weights, first_expert):
    """One token's output in Python numbers."""
    num_features = down.shape[2]
    output = [0.0] * down.shape[1]
    for expert, weight in zip(expert_ids, expert_weights, strict=True):
        local = expert - first_expert
        if not 0 <= local < down.shape[0]:
            continue
        projected = [sum(w * v for w, v in zip(row, x, strict=True)) for row in gate_up[local].tolist()]
        gates, ups = projected[:num_features], projected[num_features:]
        hidden = [gate / (1 + math.exp(-gate)) * up for gate, up in zip(gates, ups, strict=True)]
        for place, row in enumerate(down[local].tolist()):
            output[place] += weight * sum(w * h for w, h in zip(row, hidden, strict=True))
    return output


@pytest.mark.parametrize("first_expert", [0, 2])
@pytest.mark.parametrize(("num_tokens", "num_per_token"), [(1, 1), (7, 2), (12, 4)])
def test_experts_equal_the_naive_loop(num_tokens, num_per_token, first_expert):
    generator = torch.Generator().manual_seed(_GENERATOR_SEED)
    x = torch.randn(num_tokens, 6, generator=generator)
    gate_up = torch.randn(4, 10, 6, generator=generator)
    down = torch.randn(4, 6, 5, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:num_per_token] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, num_per_token, generator=generator)

    output = REFERENCE.pack_experts(gate_up, down, first_expert=first_expert)(x, ids, weights)

    expected = [
        naive_token(row.tolist(), gate_up, down, row_ids.tolist(), row_weights.tolist(), first_expert)
        for row, row_ids, row_weights in zip(x, ids, weights, strict=True)
    ]
    torch.testing.assert_close(output, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_sum_over_experts_is_rounded_once():
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    gate_up = torch.ones(3, 2, 1, dtype=torch.bfloat16)
    down = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    # Each of the small parts alone would vanish when it is added to the first in bf16.
    weights = torch.tensor([[1.0, 2**-9, 2**-9]])
    part = float(torch.sigmoid(torch.tensor(1.0)).to(torch.bfloat16))
    output = REFERENCE.pack_experts(gate_up, down)(x, torch.tensor([[0, 1, 2]]), weights)
    assert output.item() == float(torch.tensor(part * (1 + 2**-8)).to(torch.bfloat16))
    assert output.item() > part


def test_num_bytes_is_what_the_weights_take():
    experts = REFERENCE.pack_experts(torch.zeros(2, 8, 3), torch.zeros(2, 3, 4))
    assert experts.num_bytes == 4 * (2 * 8 * 3 + 2 * 3 * 4)


def test_experts_taken_and_joined_are_those_that_were_packed_together():
    generator = torch.Generator().manual_seed(_GENERATOR_SEED)
    gate_up, down = torch.randn(4, 10, 6, generator=generator), torch.randn(4, 6, 5, generator=generator)
    experts = REFERENCE.pack_experts(gate_up, down, first_expert=2)
    x, ids, weights = torch.ones(1, 6), torch.tensor([[2, 5]]), torch.ones(1, 2)
    again = experts.take(2, 3).join(experts.take(3, 6))
    assert again.expert_range == experts.expert_range == (2, 6)
    assert torch.equal(again(x, ids, weights), experts(x, ids, weights))
    with pytest.raises(ValueError, match="do not follow"):
        experts.take(2, 3).join(experts.take(4, 6))
