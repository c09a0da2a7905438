"""Native experts: right, and the same bits for a token whatever it is batched with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu.test_linear import INT8_ROWS, codes_of
from triptych_kernels import ExpertBiases, as_tensor
from triptych_kernels.ops import Experts, Ops
from triptych_kernels.quantized import ExpertWeights, QuantizedWeight, Weight
from triptych_kernels.reference import REFERENCE

# Experts, hidden, F, experts a token, first expert.
SHAPES = [(8, 256, 512, 2, 0), (3, 63, 129, 2, 1), (4, 33, 1, 1, 0), (5, 1, 40, 3, 2), (16, 129, 96, 4, 4)]
# Of the codes of gate_up and down; with several, the experts have each in turn, and one has numbers.
MIXED = ("4-bit-minima", "8-bit-zeros", "4-bit", "")
CLAMPED = "clamped"  # gates and ups are, and all projections have a bias
KINDS = [
    pytest.param(torch.bfloat16, (), id="bf16"),
    pytest.param(torch.float32, (), id="fp32"),
    pytest.param(torch.bfloat16, ("4-bit-minima",), id="4-bit-bf16"),
    pytest.param(torch.float32, ("8-bit",), id="8-bit-fp32"),
    pytest.param(torch.bfloat16, MIXED, id="mixed-bf16"),
    pytest.param(torch.float32, MIXED, id="mixed-fp32"),
    pytest.param(torch.bfloat16, (*MIXED, INT8_ROWS), id="int8-rows"),
    pytest.param(torch.bfloat16, ("4-bit-minima", CLAMPED), id="clamped-bf16"),
    pytest.param(torch.float32, ("", CLAMPED), id="clamped-fp32"),
]


@dataclass
class Case:
    """Experts' weights, tokens, and which experts they chose."""

    gate_up: ExpertWeights
    down: ExpertWeights
    first_expert: int
    x: Tensor
    ids: Tensor
    weights: Tensor
    activations: str = "exact"
    biases: ExpertBiases | None = None
    gate: str = "silu"

    def packed(self, ops: Ops) -> Experts:
        return ops.pack_experts(
            self.gate_up,
            self.down,
            biases=self.biases,
            gate=self.gate,
            first_expert=self.first_expert,
            activations=self.activations,
        )

    def expected(self) -> Tensor:
        numbers = [torch.stack([_exact(each) for each in weights]) for weights in (self.gate_up, self.down)]
        biases = self.biases and ExpertBiases(self.biases.gate_up.double(), self.biases.down.double())
        experts = REFERENCE.pack_experts(
            *numbers, biases=biases, gate=self.gate, first_expert=self.first_expert
        )
        return experts(self.x.double(), self.ids, self.weights)


def _exact(weight: Weight) -> Tensor:
    return as_tensor(
        weight.to(dtype=torch.float32) if isinstance(weight, QuantizedWeight) else weight
    ).double()


def case(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    num_tokens: int = 200,
    kinds: tuple[str, ...] = (),
) -> Case:
    num_experts, hidden, ffn, per_token, first_expert = shape
    generator = torch.Generator().manual_seed(0)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    known = first_expert + num_experts + 1  # of the model: some before and one behind this rank's
    ids = torch.stack([torch.randperm(known, generator=generator)[:per_token] for _ in range(num_tokens)])

    def weights(num_outputs: int, num_inputs: int) -> ExpertWeights:
        numbers = (noise(num_experts, num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
        if not kinds:
            return numbers
        names = [kind for kind in kinds if kind not in (INT8_ROWS, CLAMPED)]
        chosen = [names[expert % len(names)] for expert in range(num_experts)]
        return [
            codes_of(num_inputs, num_outputs, dtype, kind, seed=expert) if kind else numbers[expert]
            for expert, kind in enumerate(chosen)
        ]

    biases = None
    if CLAMPED in kinds:
        # Wide enough for the limits.
        wide = 6.0 * noise(num_experts, 2 * ffn).to(dtype)
        biases = ExpertBiases(wide, noise(num_experts, hidden).to(dtype))
    return Case(
        gate_up=weights(2 * ffn, hidden),
        down=weights(hidden, ffn),
        biases=biases,
        gate="silu" if biases is None else "clamped_swiglu",
        first_expert=first_expert,
        x=noise(num_tokens, hidden).to(dtype),
        ids=ids,
        weights=torch.rand(num_tokens, per_token, generator=generator),
        activations="int8" if INT8_ROWS in kinds else "exact",
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "kinds"), KINDS)
def test_the_sum_is_that_of_fp64_up_to_rounding(ops, shape, dtype, kinds):
    some, tolerance = case(shape, dtype, kinds=kinds), 2.0**-5 if dtype is torch.bfloat16 else 3e-5
    result = some.packed(ops)(some.x, some.ids, some.weights)
    assert result.dtype is dtype
    difference = result.double() - some.expected().double()
    if INT8_ROWS in kinds:
        # How they are rounded is tested with projections.
        assert difference.norm() <= 0.02 * some.expected().norm()
        return
    if CLAMPED in kinds:
        # What is summed, and rounded before, is up to 56 times as large.
        tolerance *= 8
    assert (difference.abs() <= tolerance * (1 + some.expected().abs())).all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize(("dtype", "kinds"), KINDS)
def test_a_token_has_the_same_bits_in_every_batch_and_position(ops, shape, dtype, kinds):
    some = case(shape, dtype, kinds=kinds)
    experts = some.packed(ops)
    together = experts(some.x, some.ids, some.weights)
    for size in (1, 2, 3, 7, 8, 12, 13, 31, 64, 200):
        first, last = slice(None, size), slice(200 - size, None)
        for part in (first, last):
            assert torch.equal(experts(some.x[part], some.ids[part], some.weights[part]), together[part])


@pytest.mark.parametrize(("dtype", "kinds"), KINDS)
def test_the_number_of_threads_changes_no_bit(ops, use_threads, dtype, kinds):
    some = case((8, 128, 96, 2, 0), dtype, kinds=kinds)
    experts = some.packed(ops)
    for size in (1, 200):
        arguments = some.x[:size], some.ids[:size], some.weights[:size]
        use_threads(1)
        alone = experts(*arguments)
        for num_threads in (2, 5):
            use_threads(num_threads)
            assert torch.equal(experts(*arguments), alone), f"{size} tokens, {num_threads} threads"


def test_more_tokens_than_are_taken_at_once_are_complete(ops: Ops) -> None:
    some = case((4, 16, 32, 2, 0), torch.float32, num_tokens=5000)
    result = some.packed(ops)(some.x, some.ids, some.weights)
    torch.testing.assert_close(result.double(), some.expected(), atol=3e-5, rtol=3e-5)


def test_ids_of_both_widths_mean_the_same(ops: Ops) -> None:
    some = case(SHAPES[1], torch.float32)
    experts = some.packed(ops)
    assert torch.equal(
        experts(some.x, some.ids.to(torch.int32), some.weights), experts(some.x, some.ids, some.weights)
    )


def test_experts_of_other_ranks_add_nothing_even_with_a_weight_that_is_not_a_number(ops: Ops) -> None:
    some = case((3, 32, 32, 2, 4), torch.float32)
    experts = some.packed(ops)
    elsewhere = torch.tensor([[-1, 3], [7, 2**31 - 1]])
    weights = torch.full((2, 2), torch.nan)
    assert torch.equal(experts(some.x[:2], elsewhere, weights), torch.zeros(2, 32))


def test_numbers_that_are_not_finite_stay_in_their_token(ops: Ops) -> None:
    some = case(SHAPES[1], torch.bfloat16)
    experts = some.packed(ops)
    some.ids[[4, 90]] = some.first_expert
    clean = experts(some.x, some.ids, some.weights)
    some.x[4, 3], some.x[90, 62] = torch.nan, torch.inf
    poisoned = experts(some.x, some.ids, some.weights)
    others = [token for token in range(200) if token not in (4, 90)]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[4].isnan().all() and not poisoned[90].isfinite().all()


def test_tokens_may_lie_apart(ops: Ops) -> None:
    some = case(SHAPES[1], torch.bfloat16)
    experts = some.packed(ops)
    apart = torch.full((200, 80), torch.nan, dtype=torch.bfloat16)
    apart[:, 5:68] = some.x
    assert torch.equal(
        experts(apart[:, 5:68], some.ids, some.weights), experts(some.x, some.ids, some.weights)
    )


def test_no_tokens_give_no_tokens(ops: Ops) -> None:
    some = case(SHAPES[1], torch.float32)
    result = some.packed(ops)(some.x[:0], some.ids[:0], some.weights[:0])
    assert result.shape == (0, 63)


def test_arguments_of_another_form_are_refused(ops: Ops) -> None:
    some = case(SHAPES[1], torch.float32)
    experts = some.packed(ops)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        experts(some.x.bfloat16(), some.ids, some.weights)
    with pytest.raises(ValueError, match="expert_ids"):
        experts(some.x, some.ids[:5], some.weights[:5])
    with pytest.raises(ValueError, match="fp32"):
        experts(some.x, some.ids, some.weights.double())
    with pytest.raises(ValueError, match="gate_up has shape"):
        ops.pack_experts(torch.ones(2, 8, 4), torch.ones(2, 4, 3))
    biases = ExpertBiases(torch.ones(2, 8), torch.ones(2, 3))
    with pytest.raises(ValueError, match="biases have shapes"):
        ops.pack_experts(torch.ones(2, 8, 4), torch.ones(2, 4, 4), biases=biases)


@pytest.mark.parametrize(("dtype", "kinds"), KINDS)
def test_experts_taken_and_joined_are_those_that_were_packed_together(ops, dtype, kinds) -> None:
    some = case(SHAPES[4], dtype, kinds=kinds)
    experts = some.packed(ops)
    first, end = experts.expert_range
    assert (first, end) == (4, 20)
    parts = [experts.take(first, 9), experts.take(9, 10), experts.take(10, end)]
    assert sum(part.num_bytes for part in parts) == experts.num_bytes
    again = parts[0].join(parts[1]).join(parts[2])
    assert again.expert_range == (first, end)
    assert torch.equal(again(some.x, some.ids, some.weights), experts(some.x, some.ids, some.weights))
    only = parts[1](some.x, some.ids, some.weights)
    assert torch.equal(only, experts(some.x, some.ids.masked_fill(some.ids != 9, -1), some.weights))


def test_experts_that_are_not_there_or_do_not_follow_are_refused(ops: Ops) -> None:
    experts = case(SHAPES[4], torch.float32).packed(ops)
    with pytest.raises(ValueError, match="experts 3 to 5 are not all among 4 to 20"):
        experts.take(3, 5)
    with pytest.raises(ValueError, match="experts from 12 on do not follow those up to 10"):
        experts.take(4, 10).join(experts.take(12, 20))
    with pytest.raises(ValueError, match="cannot follow"):
        experts.take(4, 10).join(case(SHAPES[1], torch.float32).packed(ops))


def test_codes_of_experts_keep_their_width(ops: Ops) -> None:
    some = case((4, 256, 128, 2, 0), torch.bfloat16, kinds=("4-bit",))
    num_numbers = 4 * 3 * 256 * 128
    assert 0 <= some.packed(ops).num_bytes - num_numbers * 4.5 / 8 <= 4 * 2 * 64  # tables
