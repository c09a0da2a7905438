"""Native norms, rotary positions, stores, activations and greedy choice against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from triptych_kernels import REFERENCE
from triptych_kernels.ops import Ops
from triptych_kernels.reference.activation import GATED, sigmoid_and_mul

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
# Of rows and of the weights of norms.
DTYPES_OF_NORMS = [
    pytest.param(torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bf16"),
    pytest.param(torch.bfloat16, torch.float32, id="bf16-by-fp32"),
]
REFERENCES = {**GATED, "sigmoid": sigmoid_and_mul}
GATES = list(REFERENCES)
NUM_ROWS = [0, 1, 63, 129]
WIDTHS = [1, 8, 40, 320, 576]
NAN = float("nan")


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided_rows(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    rows = torch.full((num_rows, width + 3), NAN, dtype=dtype)
    rows[:, :width] = noise(num_rows, width, dtype=dtype, seed=seed)
    return rows[:, :width]


def assert_close(output: Tensor, expected: Tensor, units: int = 4) -> None:
    """Equal up to some units of the last place, which are relative to 1."""
    assert output.dtype == expected.dtype
    rtol = {torch.float32: 2.0**-23 * units, torch.bfloat16: 2.0**-7}[output.dtype]
    torch.testing.assert_close(output, expected, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES_OF_NORMS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_rms_norm_matches_the_reference(ops, num_rows, width, dtype, weight_dtype):
    x, weight = strided_rows(num_rows, width, dtype), noise(width, dtype=weight_dtype, seed=1)
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    assert_close(
        ops.rms_norm(x.contiguous().view(-1, 1, 1, width), weight, 1e-5), expected.view(-1, 1, 1, width)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_a_packed_projection(ops, dtype):
    packed, weight = noise(7, 9, 40, dtype=dtype), noise(40, dtype=dtype, seed=1)
    assert_close(ops.rms_norm(packed[:, 2:5], weight, 1e-6), REFERENCE.rms_norm(packed[:, 2:5], weight, 1e-6))
    assert_close(ops.rms_norm(packed[0, 0], weight, 1e-6), REFERENCE.rms_norm(packed[0, 0], weight, 1e-6))


def test_rows_of_bf16_are_normed_by_fp32_as_if_they_were_fp32(ops):
    x, weight = noise(5, 100, dtype=torch.bfloat16), noise(100, seed=1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x.float(), weight, 1e-6).bfloat16())


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES_OF_NORMS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_add_rms_norm_matches_the_reference(ops, num_rows, width, dtype, weight_dtype):
    x, weight = strided_rows(num_rows, width, dtype), noise(width, dtype=weight_dtype, seed=1)
    residual = strided_rows(num_rows, width, dtype, seed=2)
    other = residual.clone()
    assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), REFERENCE.add_rms_norm(x, other, weight, 1e-5))
    assert torch.equal(residual, other)


def gate_and_mul(ops: Ops, gate: str, x: Tensor) -> Tensor:
    activate: Callable[[Tensor], Tensor] = getattr(ops, f"{gate}_and_mul")
    return activate(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_gates_match_the_reference(ops, num_rows, width, gate, dtype):
    x = strided_rows(num_rows, 2 * width, dtype) * 5.0
    # The reference has 1 + tanh, in which the tanh of a negative gate cancels.
    assert_close(gate_and_mul(ops, gate, x), REFERENCES[gate](x), units=32 if gate == "gelu_tanh" else 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates(ops, gate, dtype):
    gates = torch.tensor([-1e30, -1e4, -100.0, -88.8, -20.0, -9.5, -0.0, 1e-30, 20.0, 1e4, 1e30, NAN])
    x = torch.cat([gates, torch.ones(12)])[None].to(dtype)
    assert_close(gate_and_mul(ops, gate, x), REFERENCES[gate](x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(ops: Ops, use_threads: Callable[[int], None], dtype):
    x, weight = noise(400, 1000, dtype=dtype), noise(1000, dtype=dtype, seed=1)
    use_threads(2)
    normed, activated = ops.rms_norm(x, weight, 1e-5), [gate_and_mul(ops, gate, x) for gate in GATES]
    use_threads(1)
    for rows in (slice(0, 1), slice(3, 10), slice(390, 400)):
        assert torch.equal(ops.rms_norm(x[rows], weight, 1e-5), normed[rows])
        for gate, expected in zip(GATES, activated, strict=True):
            assert torch.equal(gate_and_mul(ops, gate, x[rows]), expected[rows])


def test_other_dtypes_go_to_the_reference(ops):
    x, weight = noise(3, 40, dtype=torch.float16), noise(40)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert torch.equal(
        ops.add_rms_norm(x, x.clone(), weight, 1e-5), REFERENCE.add_rms_norm(x, x.clone(), weight, 1e-5)
    )
    for gate in GATES:
        assert torch.equal(gate_and_mul(ops, gate, x), REFERENCES[gate](x))
    assert torch.equal(ops.greedy(x)[1], REFERENCE.greedy(x)[1])


# (heads, kv heads), head_dim, rotary_dim
HEADS = [
    ((1, 1), 2, 2),
    ((4, 2), 8, 8),
    ((3, 1), 40, 20),
    ((9, 3), 64, 64),
    ((4, 1), 128, 64),
    ((2, 2), 192, 0),
]


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES_OF_NORMS)
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 63])
def test_rotary_kv_write_matches_the_reference(ops, num_tokens, heads, is_normed, dtype, weight_dtype):
    (num_heads, num_kv_heads), head_dim, rotary_dim = heads
    generator = torch.Generator().manual_seed(3)
    qkv = strided_rows(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype)
    positions = torch.randint(0, 50, (num_tokens,), generator=generator)
    slots = torch.randperm(72, generator=generator)[:num_tokens]
    norms = {
        "query_norm": noise(head_dim, dtype=weight_dtype, seed=4),
        "key_norm": noise(head_dim, dtype=weight_dtype, seed=5),
        "eps": 1e-5,
    }
    results = []
    for table in (ops, REFERENCE):
        own = qkv.clone()
        caches = [torch.full((24, num_kv_heads, 3, head_dim), NAN, dtype=dtype) for _ in range(2)]
        options = norms if is_normed else {}
        cos_sin = noise(50, rotary_dim, seed=6)
        table.rotary_kv_write(own, positions, cos_sin, slots, *caches, num_heads=num_heads, **options)
        results.append((own, *caches))
    (queries, keys, values), expected = results
    assert torch.equal(values.nan_to_num(), expected[2].nan_to_num())
    if is_normed:
        assert_close(queries, expected[0], units=16)
        assert_close(keys, expected[1], units=16)
    else:
        assert torch.equal(queries, expected[0])
        assert torch.equal(keys.nan_to_num(), expected[1].nan_to_num())
        assert torch.equal(keys.isnan(), expected[1].isnan())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_tokens_turn_alike_by_one_thread_and_by_two(ops, use_threads, num_threads):
    use_threads(num_threads)
    qkv, slots = noise(300, 3 * 64, dtype=torch.bfloat16), torch.arange(300).flip(0)
    other, cos_sin, positions = qkv.clone(), noise(300, 64, seed=1), torch.arange(300)
    caches = [torch.zeros(30, 1, 10, 64, dtype=torch.bfloat16) for _ in range(4)]
    ops.rotary_kv_write(qkv, positions, cos_sin, slots, *caches[:2], num_heads=1)
    REFERENCE.rotary_kv_write(other, positions, cos_sin, slots, *caches[2:], num_heads=1)
    assert torch.equal(qkv, other)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_a_negative_slot_stores_nothing(ops):
    qkv, slots = noise(4, 3 * 8), torch.tensor([-1, 5, -1, 0])
    caches = [torch.full((4, 1, 2, 8), NAN) for _ in range(2)]
    ops.rotary_kv_write(qkv, torch.zeros(4, dtype=torch.int64), noise(1, 8), slots, *caches, num_heads=1)
    written = torch.tensor([0, 5])
    for cache in caches:
        rows = cache.view(8, 8)
        assert not rows[written].isnan().any()
        assert rows.isnan().sum() == 6 * 8
    ops.kv_write(noise(4, 1, 8, seed=1), noise(4, 1, 8, seed=2), *caches, slots)
    assert torch.equal(caches[0].view(8, 8)[written], noise(4, 1, 8, seed=1)[[3, 1], 0])
    assert caches[1].view(8, 8).isnan().sum() == 6 * 8


def test_positions_and_slots_that_do_not_exist_are_refused_before_anything_is_written(ops):
    qkv, caches = noise(2, 3 * 8), [torch.zeros(4, 1, 2, 8) for _ in range(2)]
    before = qkv.clone()
    for positions, slots in (([0, 5], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 8])):
        with pytest.raises(IndexError, match="a position is not below 5, a slot not below 8"):
            ops.rotary_kv_write(
                qkv, torch.tensor(positions), noise(5, 8), torch.tensor(slots), *caches, num_heads=1
            )
    with pytest.raises(IndexError, match="a slot is not below 8"):
        ops.kv_write(noise(2, 1, 8), noise(2, 1, 8), *caches, torch.tensor([0, 8]))
    assert torch.equal(qkv, before)
    assert all(torch.equal(cache, torch.zeros_like(cache)) for cache in caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 24])
def test_kv_write_matches_the_reference(ops, num_tokens, dtype):
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:num_tokens]
    keys = noise(2, num_tokens, 5, dtype=dtype).transpose(0, 1)
    values = noise(num_tokens, 4, 2, dtype=dtype).transpose(1, 2)
    written = []
    for table in (ops, REFERENCE):
        caches = torch.full((8, 2, 3, 5), NAN, dtype=dtype), torch.full((8, 2, 3, 4), NAN, dtype=dtype)
        table.kv_write(keys, values, *caches, slots)
        written.append(caches)
    for output, expected in zip(*written, strict=True):
        torch.testing.assert_close(output, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 64, 1000, 1024, 5003])
@pytest.mark.parametrize("num_rows", [0, 1, 63])
def test_greedy_matches_the_reference(ops, num_rows, width, dtype):
    # In bf16 the largest is often there more than once: the first counts.
    logits = strided_rows(num_rows, width, dtype)
    highest, tokens = ops.greedy(logits)
    expected_highest, expected_tokens = REFERENCE.greedy(logits)
    assert torch.equal(highest, expected_highest)
    assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 70, 1500, 2046])
def test_greedy_reports_a_row_with_nan(ops, column, dtype):
    logits = noise(3, 2047, dtype=dtype)
    logits[1, column] = NAN
    highest, tokens = ops.greedy(logits)
    assert highest.isnan().tolist() == [False, True, False]
    assert torch.equal(tokens[[0, 2]], logits[[0, 2]].float().argmax(-1))
    assert 0 <= int(tokens[1]) < 2047


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_of_masked_rows(ops, dtype):
    logits = torch.full((3, 2100), float("-inf"), dtype=dtype)
    logits[1, 2099] = -1e30
    logits[2, 1030] = float("inf")
    highest, tokens = ops.greedy(logits)
    assert tokens.tolist() == [0, 2099, 1030]
    assert torch.equal(highest, logits.float().max(-1).values)
