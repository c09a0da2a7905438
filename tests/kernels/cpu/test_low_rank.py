"""Low-rank additions by native kernels: right, and the same bits for a row whatever it is batched with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu.test_linear import KINDS, noise, weight_and_bias
from triptych_kernels import REFERENCE, LowRank, LowRankMatrices, Ops

NUM_SLOTS, MAX_RANK = 5, 128
RANKS = (4, 8, 16, 24, 128)  # of each slot; the last but one has other ranks for other parts
DTYPES = [torch.bfloat16, torch.float32]
CPU = torch.device("cpu")
# (inputs, widths of the parts)
SHAPES = [(1, (1,)), (63, (31,)), (72, (72, 24, 24)), (576, (96, 33)), (321, (104, 104))]
BATCHES = (1, 2, 3, 4, 5, 8, 13, 33, 71)


def parts_of(ops: Ops, slot: int, num_inputs: int, widths: Sequence[int], dtype: torch.dtype) -> list:
    """The matrices of a slot; slots 1 and 3 lack parts, or have others' ranks there."""
    parts: list = []
    for index, width in enumerate(widths):
        rank = RANKS[slot] if slot != 3 else max(1, RANKS[slot] - 9 * index)
        if slot == 1 and index == 0 and len(widths) > 1:
            parts.append(None)
            continue
        down = noise(rank, num_inputs, dtype=dtype, seed=10 * slot + index) / num_inputs**0.5
        up = noise(width, rank, dtype=dtype, seed=100 * slot + index) / rank**0.5
        parts.append(ops.pack_low_rank(down, up, 0.5 + slot))
    return parts


def filled(
    ops: Ops, num_inputs: int, widths: Sequence[int], dtype: torch.dtype, slots: Sequence[int] = range(5)
) -> LowRank:
    low_rank = ops.make_low_rank(num_inputs, widths, NUM_SLOTS, MAX_RANK, dtype, CPU)
    for slot in slots:
        low_rank.put(slot, parts_of(ops, slot, num_inputs, widths, dtype))
    return low_rank


def mixed(num_rows: int) -> Tensor:
    return torch.randint(-1, NUM_SLOTS, (num_rows,), generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize(("num_inputs", "widths"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_additions_are_those_of_the_reference(ops: Ops, num_inputs, widths, dtype):
    ours, theirs = filled(ops, num_inputs, widths, dtype), filled(REFERENCE, num_inputs, widths, dtype)
    assert (ours.in_features, ours.out_features) == (num_inputs, sum(widths))
    for size in BATCHES:
        x, slots = noise(size, num_inputs, dtype=dtype), mixed(size)
        expected = theirs(x, slots)
        # In bf16 A x is rounded.
        rounding = 2**-8 * float(expected.abs().max()) if dtype is torch.bfloat16 else 0.0
        torch.testing.assert_close(ours(x, slots), expected, atol=3e-5 + rounding, rtol=3e-5)


@pytest.mark.parametrize(("num_inputs", "widths"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_a_row_has_the_same_bits_in_every_batch_and_position(
    ops: Ops, use_threads, num_inputs, widths, dtype
):
    low_rank = filled(ops, num_inputs, widths, dtype)
    x, slots = noise(71, num_inputs, dtype=dtype), mixed(71)
    alone = torch.cat([low_rank(x[row : row + 1], slots[row : row + 1]) for row in range(71)])
    for num_threads in (1, 2):
        use_threads(num_threads)
        for size in BATCHES:
            assert torch.equal(low_rank(x[-size:], slots[-size:]), alone[-size:]), f"{size} rows"
        one = torch.full((71,), 2)
        assert torch.equal(low_rank(x, one)[slots == 2], alone[slots == 2])


def test_rows_without_a_slot_and_empty_slots_add_nothing(ops: Ops):
    low_rank = filled(ops, 40, (16, 20), torch.float32, slots=(0, 2))
    slots = torch.tensor([-1, 1, 0, 3, -1, 2])
    added = low_rank(noise(6, 40, dtype=torch.float32), slots)
    assert not added[[0, 1, 3, 4]].any()
    assert added[[2, 5]].all()
    low_rank.clear(2)
    low_rank.clear(1)
    assert not low_rank(noise(6, 40, dtype=torch.float32), torch.full((6,), 2)).any()


def test_a_slot_has_what_was_put_into_it_last(ops: Ops):
    low_rank = filled(ops, 72, (72, 24, 24), torch.bfloat16)
    x = noise(3, 72, dtype=torch.bfloat16)
    wanted = low_rank(x, torch.tensor([4, 4, 4]))
    low_rank.put(1, parts_of(ops, 4, 72, (72, 24, 24), torch.bfloat16))
    assert torch.equal(low_rank(x, torch.tensor([1, 1, 1])), wanted)


def test_matrices_may_be_in_several_slots_and_are_kept_alive(ops: Ops):
    low_rank = ops.make_low_rank(64, (64,), 2, 16, torch.float32, CPU)
    matrices = ops.pack_low_rank(torch.ones(16, 64), torch.ones(64, 16), 1.0)
    assert matrices.num_bytes >= 4 * 2 * 16 * 64
    low_rank.put(0, [matrices])
    low_rank.put(1, [matrices])
    low_rank.clear(0)
    del matrices
    others = [torch.full((1 << 12,), float("nan")) for _ in range(64)]
    assert torch.equal(low_rank(torch.ones(1, 64), torch.tensor([1])), torch.full((1, 64), 1024.0))
    assert len(others) == 64


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_an_addend_is_added_before_the_sum_is_rounded(ops: Ops, dtype, quantization, has_bias):
    weight, bias = weight_and_bias(63, 130, dtype)
    chosen = bias if has_bias else None
    linear = ops.pack_linear(weight, chosen, quantization=quantization)
    exact = ops.pack_linear(weight, chosen, quantization=quantization, out_dtype=torch.float32)
    for size in (1, 3, 12, 13, 33, 40, 71):
        x, addend = noise(size, 63, dtype=dtype), noise(size, 130, dtype=torch.float32, seed=4)
        assert torch.equal(linear(x, addend), (exact(x) + addend).to(dtype)), f"{size} rows"


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("F", [31, 104, 48])
def test_gates_and_ups_have_their_addends_before_the_activation(ops: Ops, dtype, quantization, F):
    weight, bias = weight_and_bias(63, 2 * F, dtype)
    gated = ops.pack_gated_linear(weight, bias, quantization=quantization)
    linear = ops.pack_linear(weight, bias, quantization=quantization)
    for size in (1, 3, 12, 13, 33, 40, 71):
        x, addend = noise(size, 63, dtype=dtype), noise(size, 2 * F, dtype=torch.float32, seed=4)
        assert torch.equal(gated(x, addend), ops.silu_and_mul(linear(x, addend))), f"{size} rows"


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("packed", ["pack_linear", "pack_gated_linear"])
def test_rows_without_additions_keep_their_bits(ops: Ops, packed, dtype, quantization):
    linear = getattr(ops, packed)(*weight_and_bias(72, 2 * 65, dtype), quantization=quantization)
    low_rank = filled(ops, 72, (65, 65), dtype)
    x, slots = noise(71, 72, dtype=dtype), mixed(71)
    base = linear(x)
    added = linear(x, low_rank(x, slots))
    assert torch.equal(added[slots < 0], base[slots < 0])
    assert not torch.equal(added, base)


def test_other_dtypes_go_to_the_reference(ops: Ops):
    down, up = noise(4, 6, dtype=torch.float16), noise(5, 4, dtype=torch.float16)
    low_rank = ops.make_low_rank(6, (5,), 1, 4, torch.float16, CPU)
    low_rank.put(0, [ops.pack_low_rank(down, up, 1.0)])
    x, slots = noise(3, 6, dtype=torch.float16), torch.tensor([0, -1, 0])
    expected = x.float() @ down.float().T @ up.float().T
    expected[1] = 0
    torch.testing.assert_close(low_rank(x, slots), expected, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused_in_words(ops: Ops):
    for table in (ops, REFERENCE):
        check_refusals(table)


def check_refusals(ops: Ops) -> None:
    low_rank = ops.make_low_rank(6, (5, 3), 2, 4, torch.float32, CPU)

    def matrices(rank: int = 4, num_inputs: int = 6, width: int = 5, dtype=torch.float32) -> LowRankMatrices:
        return ops.pack_low_rank(
            torch.ones(rank, num_inputs, dtype=dtype), torch.ones(width, rank, dtype=dtype), 1.0
        )

    with pytest.raises(IndexError, match="slot 2 is not below 2"):
        low_rank.put(2, [None, None])
    with pytest.raises(IndexError, match="slot -1 is not below 2"):
        low_rank.clear(-1)
    with pytest.raises(ValueError, match="matrices of 1 parts for 2"):
        low_rank.put(0, [None])
    with pytest.raises(ValueError, match="7 inputs to 5 outputs, the projection 6 to 5"):
        low_rank.put(0, [matrices(num_inputs=7), None])
    with pytest.raises(ValueError, match="6 inputs to 5 outputs, the projection 6 to 3"):
        low_rank.put(0, [None, matrices()])
    with pytest.raises(ValueError, match="the rank is 5, at most 4 fits"):
        low_rank.put(0, [matrices(rank=5), None])
    with pytest.raises(ValueError, match=r"matrices are torch\.bfloat16, not"):
        low_rank.put(0, [matrices(dtype=torch.bfloat16), None])
    with pytest.raises(ValueError, match=r"A is \(4, 6\) and B \(5, 3\)"):
        ops.pack_low_rank(torch.ones(4, 6), torch.ones(5, 3), 1.0)
    with pytest.raises(ValueError, match=r"A is torch\.float32 and B torch\.bfloat16"):
        ops.pack_low_rank(torch.ones(4, 6), torch.ones(5, 4, dtype=torch.bfloat16), 1.0)
    x, slots = torch.ones(3, 6), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x is torch.float32 \(3, 5\): expected torch.float32 \[T, 6\]"):
        low_rank(x[:, :5], slots)
    with pytest.raises(ValueError, match="their stride is 3"):
        low_rank(x.T.contiguous().T, slots)
    with pytest.raises(ValueError, match=r"slots are torch.int64 \(2,\) for 3 tokens"):
        low_rank(x, slots[:2])
    with pytest.raises(IndexError, match="a low-rank slot is not below 2"):
        low_rank(x, slots + 2)
    assert not low_rank(x, slots).any()


def test_matrices_of_another_device_are_refused(ops: Ops):
    ours = ops.make_low_rank(6, (5,), 1, 4, torch.float32, CPU)
    theirs = REFERENCE.make_low_rank(6, (5,), 1, 4, torch.float32, CPU)
    down, up = torch.ones(4, 6), torch.ones(5, 4)
    with pytest.raises(ValueError, match="PlainMatrices, packed for another device"):
        ours.put(0, [REFERENCE.pack_low_rank(down, up, 1.0)])
    with pytest.raises(ValueError, match="NativeMatrices, packed for another device"):
        theirs.put(0, [ops.pack_low_rank(down, up, 1.0)])


def test_an_addend_that_does_not_fit_is_refused(ops: Ops):
    gated = ops.pack_gated_linear(torch.ones(8, 6))
    with pytest.raises(
        ValueError, match=r"addend is torch.float32 \(3, 4\): expected torch.float32 \(3, 8\)"
    ):
        gated(torch.ones(3, 6), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"addend is torch.bfloat16"):
        gated(torch.ones(3, 6), torch.ones(3, 8, dtype=torch.bfloat16))


def test_no_rows_give_no_additions(ops: Ops):
    low_rank = filled(ops, 40, (16, 20), torch.float32)
    assert low_rank(torch.empty(0, 40), torch.empty(0, dtype=torch.int64)).shape == (0, 36)
