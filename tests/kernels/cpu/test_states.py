"""Native ops that keep a state per row: right, and the same bits however a row is cut and accompanied."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.state_cases import (
    ALL_SHAPES,
    NUM_MIXED,
    NUM_SLOTS,
    SHAPES,
    StateCase,
    mixed_step,
    noise,
    state_case,
)
from triptych_kernels import REFERENCE, StateBatch
from triptych_kernels.ops import Ops

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NAN = float("nan")
LENGTH = 150
# Of each op a shape with several heads or tasks, and one with columns beyond whole vectors.
INVARIANCE = [("causal_conv", (300, 3)), ("causal_conv", (37, 4))] + [
    (op, SHAPES[op][index]) for op in ("ssd_scan", "gated_delta_rule") for index in (2, 3, 4)
]


@functools.cache
def expected(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the reference gives for a mixed step: output and states."""
    case = state_case(op, shape, NUM_MIXED, dtype)
    states, batch = mixed_step(case)
    return case.run(REFERENCE, states, batch), states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), ALL_SHAPES, ids=str)
def test_every_shape_matches_the_reference(ops, op, shape, dtype):
    case = state_case(op, shape, NUM_MIXED, dtype)
    states, batch = mixed_step(case)
    output = case.run(ops, states, batch)
    twin, twin_states = expected(op, shape, dtype)
    assert output.dtype is (torch.float32 if op == "ssd_scan" else dtype)
    torch.testing.assert_close(output, twin, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(states, twin_states, rtol=2e-5, atol=2e-5, equal_nan=True)


def slots_of(case: StateCase) -> Tensor:
    return torch.full((NUM_SLOTS, *case.state_shape), NAN)


def in_chunks(ops: Ops, case: StateCase, size: int) -> tuple[Tensor, Tensor]:
    """Output and last state of a row, `size` tokens a step, from one slot to another and back."""
    states = slots_of(case)
    length, parts = len(case.tokens[0]), []
    read_slot = -1
    for start in range(0, length, size):
        end = min(start + size, length)
        write_slot = 4 + start // size // 2 % 2
        batch = StateBatch.of([end - start], [end], [read_slot], [write_slot])
        parts.append(case.part(slice(start, end)).run(ops, states, batch))
        read_slot = write_slot
    return torch.cat(parts), states[read_slot]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_a_token_has_the_same_bits_alone_and_in_chunks_of_every_size(ops, op, shape, dtype):
    case = state_case(op, shape, LENGTH, dtype)
    output, state = in_chunks(ops, case, LENGTH)
    for size in (1, 7, 16, 37, 64, 149):
        parts, last = in_chunks(ops, case, size)
        assert torch.equal(parts, output), size
        assert torch.equal(last, state), size


@pytest.mark.parametrize("shape", SHAPES["ssd_scan"], ids=str)
def test_what_a_scan_of_bf16_finds_is_not_rounded(ops, shape):
    case = state_case("ssd_scan", shape, NUM_MIXED, torch.bfloat16)
    wide = replace(case, tokens=tuple(x.float() for x in case.tokens))
    (states, batch), (wide_states, _) = mixed_step(case), mixed_step(case)
    assert torch.equal(case.run(ops, states, batch), wide.run(ops, wide_states, batch))
    torch.testing.assert_close(states, wide_states, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_states_kept_in_the_middle_are_those_of_a_row_that_ends_there(ops, op, shape, dtype):
    case = state_case(op, shape, LENGTH, dtype)
    output, last = in_chunks(ops, case, LENGTH)
    states = slots_of(case)
    states[3] = in_chunks(ops, case.part(slice(0, 10)), 10)[1]
    # The first one replaces the state that the row began with.
    kept = [(0, 1, 3), (0, 2, 7), (0, 64, 1)]
    batch = StateBatch.of([LENGTH - 10], [LENGTH], [3], [2], kept=kept)
    assert torch.equal(case.part(slice(10, LENGTH)).run(ops, states, batch), output[10:])
    assert torch.equal(states[2], last)
    for _, num_tokens, slot in kept:
        end = 10 + num_tokens
        assert torch.equal(states[slot], in_chunks(ops, case.part(slice(0, end)), end)[1]), num_tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_a_row_has_the_same_bits_in_every_company_and_slot(ops, use_threads, op, shape, dtype):
    case = state_case(op, shape, LENGTH, dtype)
    whole, last = in_chunks(ops, case, LENGTH)
    pieces = [(140, 150), (3, 4), (0, 3), (77, 78), (4, 60), (0, 150), (149, 150)]
    states = slots_of(case)
    reads = [-1 if start == 0 else 2 * row for row, (start, _) in enumerate(pieces)]
    for (start, _), slot in zip(pieces, reads, strict=True):
        if start:
            states[slot] = in_chunks(ops, case.part(slice(0, start)), start)[1]
    before = states.clone()
    writes = [2 * row + 1 for row in range(len(pieces))]
    lengths, totals = [end - start for start, end in pieces], [end for _, end in pieces]
    step = case.part(*(slice(start, end) for start, end in pieces))
    for num_threads in (1, 2, 3):
        use_threads(num_threads)
        states.copy_(before)
        output = step.run(ops, states, StateBatch.of(lengths, totals, reads, writes))
        assert torch.equal(output, torch.cat([whole[start:end] for start, end in pieces]))
        assert torch.equal(states[writes[0]], last) and torch.equal(states[writes[5]], last)
        # What is read alone stays.
        assert torch.equal(states[::2].nan_to_num(), before[::2].nan_to_num())


@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_a_row_with_nan_reaches_no_other(ops, op, shape):
    case = state_case(op, shape, NUM_MIXED)
    states, batch = mixed_step(case)
    clean = case.run(ops, states, batch)
    poisoned, _ = mixed_step(case)
    poisoned[int(batch.read_slots[6])] = NAN
    output = case.run(ops, poisoned, batch)
    own = slice(*batch.query_starts[6:8].tolist())
    assert output[own].isnan().all()
    output[own] = clean[own]
    assert torch.equal(output, clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_inputs_may_lie_in_a_packed_projection(ops, op, shape, dtype):
    case = state_case(op, shape, 9, dtype)
    output, _ = in_chunks(ops, case, 9)
    widths = [x[0].numel() for x in case.tokens]
    packed = torch.full((9, sum(widths) + 3), NAN, dtype=dtype)
    columns = packed[:, 1:-2].split(widths, dim=1)
    for column, x in zip(columns, case.tokens, strict=True):
        column.copy_(x.flatten(1))
    views = tuple(column.unflatten(1, x.shape[1:]) for column, x in zip(columns, case.tokens, strict=True))
    assert torch.equal(case.call(ops, views, slots_of(case), StateBatch.of([9], [9], [-1], [0])), output)


@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_tokens_behind_the_last_row_are_zero(ops, op, shape):
    case = state_case(op, shape, 9)
    states = slots_of(case)
    batch = StateBatch.of([4, 5], [4, 5], [-1, -1], [0, -1])
    batch.query_starts[2] = 4
    output = case.run(ops, states, batch)
    assert not output[:4].isnan().any()
    assert torch.equal(output[4:], torch.zeros_like(output[4:]))


@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_an_empty_step_gives_an_empty_output(ops, op, shape):
    case = state_case(op, shape, 0)
    assert len(case.run(ops, slots_of(case), StateBatch.of([], [], [], []))) == 0


@pytest.mark.parametrize(("op", "shape"), INVARIANCE, ids=str)
def test_other_dtypes_go_to_the_reference(ops, op, shape):
    case = state_case(op, shape, 9, torch.float16)
    outputs = []
    for table in (ops, REFERENCE):
        states = slots_of(case)
        outputs.append((case.run(table, states, StateBatch.of([9], [9], [-1], [0])), states[0]))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


@pytest.mark.parametrize(
    ("reads", "writes", "kept", "message"),
    [
        ([-1, NUM_SLOTS], [0, 1], [], "a slot to read does not exist"),
        ([-1, 2], [0, NUM_SLOTS], [], "a slot to write does not exist"),
        ([-1, 2], [1, 1], [], "a slot is written twice"),
        ([-1, 2], [0, 1], [(1, 2, 0)], "a slot is written twice"),
        ([-1, 2], [2, 1], [], "a row reads a slot that another writes"),
    ],
)
@pytest.mark.parametrize(("op", "shape"), INVARIANCE[::3], ids=str)
def test_slots_that_do_not_fit_are_refused_before_anything_is_written(
    ops, op, shape, reads, writes, kept, message
):
    case = state_case(op, shape, 9)
    states = noise(NUM_SLOTS, *case.state_shape, seed=1)
    before = states.clone()
    with pytest.raises(ValueError, match=message):
        case.run(ops, states, StateBatch.of([4, 5], [4, 9], reads, writes, kept=kept))
    assert torch.equal(states, before)


@pytest.mark.parametrize(("op", "shape"), INVARIANCE[::3], ids=str)
def test_tokens_that_do_not_fit_are_refused(ops, op, shape):
    case = state_case(op, shape, 9)
    with pytest.raises(ValueError, match="8 write_slots for 9 tokens"):
        case.run(ops, slots_of(case), StateBatch.of([8], [8], [-1], [0]))
    batch = StateBatch.of([9], [9], [-1], [0])
    batch.query_starts[1] = 10
    with pytest.raises(ValueError, match="query_starts do not fit the tokens"):
        case.run(ops, slots_of(case), batch)
    with pytest.raises(ValueError, match=re.escape(f"states (3, 1, {case.state_shape[-1]}")):
        case.run(ops, torch.zeros(3, 1, *case.state_shape[-1:], 1), StateBatch.of([9], [9], [-1], [0]))


def test_time_steps_of_extreme_inputs(ops):
    raw = torch.tensor([-200.0, -90.0, -17.0, -5.0, -0.3, 0.0, 1e-6, 0.7, 16.0, 25.0, 1e4, NAN])
    ones, states = torch.ones(1, 1, 1), torch.zeros(1, 1, 1, 1)
    for index, number in enumerate(raw):
        y = ops.ssd_scan(
            ones, number.view(1, 1), ones, ones, states, StateBatch.of([1], [1], [-1], [-1]),
            A=torch.zeros(1), D=None, dt_bias=torch.zeros(1),
        )  # fmt: skip
        wanted = torch.nn.functional.softplus(raw[index].double(), threshold=100.0)
        torch.testing.assert_close(y[0, 0, 0].double(), wanted, rtol=3e-7, atol=1e-38, equal_nan=True)


def test_a_long_row_forgets_and_stays_finite(ops):
    case = state_case("gated_delta_rule", (2, 1, 64, 64), 3000, torch.bfloat16)
    output, state = in_chunks(ops, case, 3000)
    twin_states = slots_of(case)
    twin = case.run(REFERENCE, twin_states, StateBatch.of([3000], [3000], [-1], [0]))
    torch.testing.assert_close(output, twin, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(state, twin_states[0], rtol=1e-4, atol=1e-4)
