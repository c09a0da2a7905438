"""Low-rank additions in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import REFERENCE, LowRank, Ops
from triptych_kernels.triton import triton_ops
from triptych_kernels.triton.low_rank import expand, shrink

# (tokens, slots, rank, hidden or outputs)
SHAPES = [(1, 1, 8, 63), (19, 4, 16, 129), (33, 3, 1, 1), (7, 5, 70, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def mixed_slots(num_tokens, num_slots, device, dtype=torch.int64):
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(-1, num_slots, (num_tokens,), generator=generator).to(device, dtype)


def noise(*shape, device, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def plain_shrink(x, weights, slots):
    """x A^T of each token's slot."""
    chosen = weights[slots.long().clamp(min=0)].float()
    return torch.einsum("th,trh->tr", x.float(), chosen).masked_fill((slots < 0)[:, None], 0.0)


def plain_expand(x, weights, slots, scales, out):
    """out += scale * x B^T of each token's slot."""
    safe = slots.long().clamp(min=0)
    product = torch.einsum("tr,tnr->tn", x, weights[safe].float()) * scales[safe][:, None]
    out.add_(product.masked_fill_((slots < 0)[:, None], 0.0).to(out.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shrunk_rows_are_those_of_torch(shape, dtype, device):
    num_tokens, num_slots, rank, hidden = shape
    x = noise(num_tokens, hidden, device=device, dtype=dtype)
    weights = noise(num_slots, rank, hidden, device=device, dtype=dtype, seed=1)
    slots = mixed_slots(num_tokens, num_slots, device)
    shrunk = shrink(x, weights, slots)
    assert shrunk.dtype is torch.float32
    torch.testing.assert_close(shrunk, plain_shrink(x, weights, slots), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expanded_rows_are_those_of_torch(shape, dtype, device):
    num_tokens, num_slots, rank, num_outputs = shape
    x = noise(num_tokens, rank, device=device)
    weights = noise(num_slots, num_outputs, rank, device=device, dtype=dtype, seed=1)
    scales = noise(num_slots, device=device, seed=2)
    slots = mixed_slots(num_tokens, num_slots, device)
    out = noise(num_tokens, num_outputs, device=device, dtype=dtype, seed=3)
    expected = out.clone()
    expand(x, weights, slots, scales, out)
    plain_expand(x, weights, slots, scales, expected)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def filled(ops: Ops, hidden: int, widths: list[int], num_slots: int, dtype, device) -> LowRank:
    """Slots of ranks 1, 2 and so on; the second lacks its first part."""
    low_rank = ops.make_low_rank(hidden, widths, num_slots, num_slots + 1, dtype, device)
    for slot in range(num_slots):
        low_rank.put(
            slot,
            [
                None
                if slot == 1 and index == 0
                else ops.pack_low_rank(
                    noise(slot + 1, hidden, device=device, dtype=dtype, seed=slot),
                    noise(width, slot + 1, device=device, dtype=dtype, seed=index),
                    0.5 + slot,
                )
                for index, width in enumerate(widths)
            ],
        )
    return low_rank


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_make_low_rank_equals_the_reference(shape, dtype, deterministic, device):
    num_tokens, num_slots, width, hidden = shape
    widths = [width, 65]
    ours = filled(triton_ops(deterministic=deterministic), hidden, widths, num_slots, dtype, device)
    theirs = filled(REFERENCE, hidden, widths, num_slots, dtype, device)
    assert (ours.in_features, ours.out_features) == (hidden, width + 65)
    x, slots = (
        noise(num_tokens, hidden, device=device, dtype=dtype),
        mixed_slots(num_tokens, num_slots, device),
    )
    added = ours(x, slots)
    torch.testing.assert_close(added, theirs(x, slots), rtol=1e-4, atol=1e-3)
    assert not added[slots < 0].any()


def test_a_slot_has_what_was_put_into_it_last(device):
    ops = triton_ops()
    low_rank = filled(ops, 20, [8], 3, torch.float32, device)
    x, slots = noise(4, 20, device=device), torch.full((4,), 2, device=device)
    down, up = noise(1, 20, device=device), noise(8, 1, device=device)
    low_rank.put(2, [ops.pack_low_rank(down, up, 2.0)])
    torch.testing.assert_close(low_rank(x, slots), 2.0 * x @ down.T @ up.T, rtol=1e-5, atol=1e-5)
    low_rank.clear(2)
    assert not low_rank(x, slots).any()


def test_matrices_that_do_not_fit_are_refused_and_change_nothing(device):
    ops = triton_ops()
    low_rank = filled(ops, 20, [8], 3, torch.float32, device)
    x, slots = noise(4, 20, device=device), torch.full((4,), 2, device=device)
    before = low_rank(x, slots)
    large = ops.pack_low_rank(noise(5, 20, device=device), noise(8, 5, device=device), 1.0)
    with pytest.raises(ValueError, match="the rank is 5, at most 4 fits"):
        low_rank.put(2, [large])
    with pytest.raises(IndexError, match="slot 3 is not below 3"):
        low_rank.clear(3)
    assert torch.equal(low_rank(x, slots), before)
    assert low_rank.num_bytes == 4 * 3 * (4 * 20 + 8 * 4 + 1)


def test_matrices_in_fp32_serve_activations_in_bf16(device):
    x, weights = noise(5, 40, device=device, dtype=torch.bfloat16), noise(2, 8, 40, device=device)
    slots = torch.tensor([0, 1, -1, 1, 0], device=device)
    expected = plain_shrink(x, weights, slots)
    torch.testing.assert_close(shrink(x, weights, slots), expected, rtol=1e-5, atol=1e-5)


def test_tokens_without_a_slot_are_left_as_they_were(device):
    slots = torch.full((20,), -1, dtype=torch.int32, device=device)
    x, weights = noise(20, 32, device=device), torch.full((2, 8, 32), float("nan"), device=device)
    shrunk = shrink(x, weights, slots)
    assert torch.equal(shrunk, torch.zeros(20, 8, device=device))
    out = noise(20, 32, device=device)
    before = out.clone()
    expand(shrunk, weights.transpose(1, 2).contiguous(), slots, torch.ones(2, device=device), out)
    assert torch.equal(out, before)


def test_a_token_has_the_same_bits_alone_and_in_company(device):
    x, weights = noise(40, 33, device=device), noise(3, 8, 33, device=device, seed=1)
    ups, scales = noise(3, 50, 8, device=device, seed=2), noise(3, device=device, seed=3)
    slots = mixed_slots(40, 3, device)
    shrunk = shrink(x, weights, slots)
    out = torch.zeros(40, 50, device=device)
    expand(shrunk, ups, slots, scales, out)
    for token in (0, 7, 16, 39):
        own = slice(token, token + 1)
        alone = shrink(x[own], weights, slots[own])
        out_alone = torch.zeros(1, 50, device=device)
        expand(alone, ups, slots[own], scales, out_alone)
        assert torch.equal(alone, shrunk[own])
        assert torch.equal(out_alone, out[own])


def test_a_broken_slot_harms_only_its_own_tokens(device):
    x, weights = noise(20, 32, device=device), noise(3, 8, 32, device=device, seed=1)
    slots = mixed_slots(20, 3, device)
    clean = shrink(x, weights, slots)
    weights[1] = float("nan")
    shrunk = shrink(x, weights, slots)
    assert shrunk[slots == 1].isnan().all()
    assert torch.equal(shrunk[slots != 1], clean[slots != 1])


def test_columns_of_a_wider_result_may_be_added_to(device):
    x, weights = noise(6, 8, device=device), noise(2, 20, 8, device=device, seed=1)
    slots, scales = mixed_slots(6, 2, device), noise(2, device=device, seed=2)
    wide = torch.zeros(6, 50, device=device)
    expand(x, weights, slots, scales, wide[:, 10:30])
    expected = torch.zeros(6, 50, device=device)
    plain_expand(x, weights, slots, scales, expected[:, 10:30])
    torch.testing.assert_close(wide, expected, rtol=1e-5, atol=1e-5)


def test_an_empty_step_adds_nothing(device):
    none = torch.zeros(0, dtype=torch.int32, device=device)
    weights, out = noise(2, 8, 32, device=device), torch.zeros(0, 8, device=device)
    assert shrink(torch.zeros(0, 32, device=device), weights, none).shape == (0, 8)
    expand(torch.zeros(0, 32, device=device), weights, none, torch.ones(2, device=device), out)


def test_what_does_not_fit_together_is_refused(device):
    x, weights = noise(3, 32, device=device), noise(2, 8, 32, device=device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="not contiguous rows of 31"):
        shrink(x[:, :31], weights, slots)
    with pytest.raises(ValueError, match="their stride is 3"):
        shrink(x.t().contiguous().t(), weights, slots)
    with pytest.raises(ValueError, match="3 tokens have"):
        shrink(x, weights, slots[:2])
    with pytest.raises(ValueError, match="not rows of 8"):
        expand(x, weights, slots, torch.ones(2, device=device), torch.zeros(3, 7, device=device))
