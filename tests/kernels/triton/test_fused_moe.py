"""Mixtures of experts in Triton against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from triptych_kernels import REFERENCE, ExpertBiases
from triptych_kernels.triton import fused_moe
from triptych_kernels.triton.fused_moe import pack_experts

# (tokens, experts, experts of a token, hidden, features)
SHAPES = [(1, 4, 2, 32, 48), (63, 4, 2, 31, 17), (129, 3, 1, 64, 65), (3, 34, 8, 16, 16), (70, 1, 1, 1, 1)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass
class MoeCase:
    """Arguments of `pack_experts` and of what it returns."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    biases: ExpertBiases

    def run(self, pack, **options) -> Tensor:
        experts = pack(self.gate_up, self.down, **options)
        return experts(self.x, self.expert_ids, self.expert_weights)

    def run_clamped(self, pack, **options) -> Tensor:
        return self.run(pack, biases=self.biases, gate="clamped_swiglu", **options)


def moe_case(shape, device, dtype=torch.float32, *, num_chosen_from: int | None = None) -> MoeCase:
    """Noise; each token chooses different experts out of the first `num_chosen_from`."""
    num_tokens, num_experts, num_per_token, hidden, num_features = shape
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = [
        torch.randperm(num_chosen_from or num_experts, generator=generator)[:num_per_token]
        for _ in range(num_tokens)
    ]
    gate_up = torch.randn(num_experts, 2 * num_features, hidden, generator=generator) / hidden**0.5
    down = torch.randn(num_experts, hidden, num_features, generator=generator) / num_features**0.5
    weights = torch.rand(num_tokens, num_per_token, generator=generator)
    return MoeCase(
        x=torch.randn(num_tokens, hidden, generator=generator).to(device, dtype),
        gate_up=gate_up.to(device, dtype),
        down=down.to(device, dtype),
        expert_ids=torch.stack(chosen).to(device),
        expert_weights=weights.to(device),
        biases=ExpertBiases(
            (6.0 * torch.randn(num_experts, 2 * num_features, generator=generator)).to(device, dtype),
            torch.randn(num_experts, hidden, generator=generator).to(device, dtype),
        ),
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "deterministic"),
    [
        *((shape, torch.float32, False) for shape in SHAPES),
        (SHAPES[1], torch.bfloat16, False),
        (SHAPES[1], torch.float16, True),
        (SHAPES[3], torch.float16, True),
    ],
    ids=str,
)
def test_pack_experts_equals_the_reference(shape, dtype, deterministic, device):
    case = moe_case(shape, device, dtype)
    output = case.run(pack_experts, deterministic=deterministic)
    assert output.dtype is dtype
    expected = case.run(REFERENCE.pack_experts)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES[:3]), (SHAPES[1], torch.bfloat16)],
    ids=str,
)
def test_biases_are_added_and_gates_clamped_as_in_the_reference(shape, dtype, device):
    case = moe_case(shape, device, dtype)
    output = case.run_clamped(pack_experts)
    # Products are rounded there before the limits.
    tolerance = 2 * TOLERANCE[dtype] * (1.0 + case.biases.gate_up.abs().max().item())
    torch.testing.assert_close(output, case.run_clamped(REFERENCE.pack_experts), rtol=0.0, atol=tolerance)


def test_experts_with_biases_are_taken_and_joined(device):
    case = moe_case((33, 6, 2, 32, 24), device)
    experts = pack_experts(case.gate_up, case.down, biases=case.biases, gate="clamped_swiglu")
    again = experts.take(0, 2).join(experts.take(2, 6))
    arguments = case.x, case.expert_ids, case.expert_weights
    assert torch.equal(again(*arguments), experts(*arguments))
    with pytest.raises(ValueError, match="cannot be joined with experts without"):
        experts.take(0, 2).join(pack_experts(case.gate_up, case.down, first_expert=2))


@pytest.mark.parametrize("first_expert", [0, 1, 5, 9])
def test_experts_of_other_ranks_add_nothing(first_expert, device):
    case = moe_case((50, 4, 3, 32, 24), device, num_chosen_from=12)
    output = case.run(pack_experts, first_expert=first_expert)
    expected = case.run(REFERENCE.pack_experts, first_expert=first_expert)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    is_elsewhere = ((case.expert_ids < first_expert) | (case.expert_ids >= first_expert + 4)).all(1)
    assert is_elsewhere.any()
    assert not output[is_elsewhere].any()


def test_the_shares_of_two_ranks_make_the_whole(device):
    case = moe_case((33, 6, 2, 32, 24), device)
    whole = case.run(pack_experts)
    shares = []
    for first in (0, 3):
        experts = pack_experts(
            case.gate_up[first : first + 3], case.down[first : first + 3], first_expert=first
        )
        shares.append(experts(case.x, case.expert_ids, case.expert_weights))
    torch.testing.assert_close(shares[0] + shares[1], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [0, 2], ids=["the first", "the last"])
def test_every_token_may_choose_the_same_expert(chosen, device):
    case = moe_case((200, 3, 1, 16, 16), device)
    case.expert_ids.fill_(chosen)
    torch.testing.assert_close(case.run(pack_experts), case.run(REFERENCE.pack_experts), rtol=1e-5, atol=1e-5)


def test_more_pairs_than_one_pass_orders(device, monkeypatch):
    monkeypatch.setattr(fused_moe, "_PAIRS_PER_PASS", 16)
    case = moe_case((30, 5, 2, 8, 8), device)
    torch.testing.assert_close(case.run(pack_experts), case.run(REFERENCE.pack_experts), rtol=1e-5, atol=1e-5)


def test_a_deterministic_token_has_the_same_bits_in_every_batch(device):
    case = moe_case((80, 4, 2, 40, 24), device)
    experts = pack_experts(case.gate_up, case.down, deterministic=True)
    together = experts(case.x, case.expert_ids, case.expert_weights)
    for own in (slice(0, 1), slice(17, 18), slice(30, 60)):
        alone = experts(case.x[own], case.expert_ids[own], case.expert_weights[own])
        assert torch.equal(alone, together[own])


def test_a_token_with_nan_reaches_no_other(device):
    case = moe_case((40, 4, 2, 32, 24), device)
    clean = case.run(pack_experts)
    case.x[11] = float("nan")
    output = case.run(pack_experts)
    assert output[11].isnan().all()
    others = torch.arange(40, device=device) != 11
    assert torch.equal(output[others], clean[others])


def test_ids_may_be_int32_and_x_a_view(device):
    case = moe_case((9, 4, 2, 32, 24), device)
    expected = case.run(REFERENCE.pack_experts)
    wide = torch.full((9, 50), float("nan"), device=device)
    wide[:, 5:37] = case.x
    case.x, case.expert_ids = wide[:, 5:37], case.expert_ids.int()
    torch.testing.assert_close(case.run(pack_experts), expected, rtol=1e-5, atol=1e-5)


def test_an_empty_step_gives_an_empty_output(device):
    case = moe_case((1, 4, 2, 32, 24), device)
    case.x, case.expert_ids, case.expert_weights = (
        case.x[:0],
        case.expert_ids[:0],
        case.expert_weights[:0],
    )
    assert case.run(pack_experts).shape == (0, 32)


def test_what_does_not_fit_together_is_refused(device):
    case = moe_case((3, 4, 2, 32, 24), device)
    with pytest.raises(ValueError, match="does not go with down"):
        pack_experts(case.gate_up[:, :-2], case.down)
    experts = pack_experts(case.gate_up, case.down)
    with pytest.raises(ValueError, match="3 tokens have expert ids"):
        experts(case.x, case.expert_ids[:2], case.expert_weights)
    with pytest.raises(ValueError, match="their stride is 3"):
        experts(case.x.t().contiguous().t(), case.expert_ids, case.expert_weights)


def test_experts_taken_and_joined_are_those_that_were_packed_together(device):
    case = moe_case((63, 4, 2, 31, 17), device)
    experts = pack_experts(case.gate_up, case.down, first_expert=3)
    arguments = case.x, case.expert_ids + 3, case.expert_weights
    again = experts.take(3, 4).join(experts.take(4, 7))
    assert again.expert_range == experts.expert_range == (3, 7)
    assert torch.equal(again(*arguments), experts(*arguments))
    with pytest.raises(ValueError, match="not all among 3 to 7"):
        experts.take(2, 4)
