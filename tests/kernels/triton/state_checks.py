"""What the tests of the ops that keep a state per row have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from tests.kernels.state_cases import NUM_MIXED, NUM_SLOTS, SHAPES, mixed_step, noise, state_case
from tests.kernels.triton.fresh_memory import with_nan_memory
from triptych_kernels import REFERENCE, Ops, StateBatch

Op = Callable[..., Tensor]


def cases(name: str, dtypes: Iterable[torch.dtype]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Every shape with the first dtype, and one shape with each of the others."""
    first, *others = dtypes
    return [(shape, first) for shape in SHAPES[name]] + [(SHAPES[name][1], dtype) for dtype in others]


def table(op: Op, name: str) -> Ops:
    """The reference with this op in place of its own, in fresh memory full of NaN."""

    def call(*arguments: object, **options: object) -> Tensor:
        output: Tensor = with_nan_memory(op, *arguments, **options)
        return output

    return dataclasses.replace(REFERENCE, **{name: call})


def assert_equals_the_reference(
    op: Op, name: str, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    case = state_case(name, shape, NUM_MIXED, dtype, device)
    states, batch = mixed_step(case, device)
    twin_states = states.clone()
    output = case.run(table(op, name), states, batch)
    assert output.dtype is (torch.float32 if name == "ssd_scan" else dtype)
    wide = dataclasses.replace(case, tokens=tuple(x.float() for x in case.tokens))
    twin = wide.run(REFERENCE, twin_states, batch)
    torch.testing.assert_close(output.float(), twin, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states, twin_states, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_decodes_like_the_reference(
    op: Op, name: str, shape: tuple[int, ...], device: torch.device
) -> None:
    """A step of single tokens, padded with rows that have none."""
    case = state_case(name, shape, 5, device=device)
    states = noise(NUM_SLOTS, *case.state_shape, seed=1).to(device)
    twin_states = states.clone()
    batch = StateBatch.of([1, 1, 1], [9, 1, 30], [4, -1, 7], [4, 5, 8], device=device)
    # As in a recorded step.
    padding = torch.full((2,), -1, dtype=torch.int32, device=device)
    starts = torch.cat([batch.query_starts, batch.query_starts[-1:].expand(2)])
    slots = torch.cat([batch.read_slots, padding]), torch.cat([batch.write_slots, padding])
    batch = StateBatch(starts, torch.cat([batch.total_lengths, padding]), *slots, max_query_length=1)
    output = case.run(table(op, name), states, batch)
    twin = case.run(REFERENCE, twin_states, batch)
    torch.testing.assert_close(output[:3], twin[:3], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(states, twin_states, rtol=2e-5, atol=2e-5)


def assert_keeps_the_read_state(op: Op, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """States after one and two tokens, of which the first replaces the one that is read."""
    case = state_case(name, shape, 40, device=device)
    states = noise(NUM_SLOTS, *case.state_shape, seed=1).to(device)
    twin_states = states.clone()
    batch = StateBatch.of([40], [55], [3], [9], kept=[(0, 1, 3), (0, 2, 4)], device=device)
    output = case.run(table(op, name), states, batch)
    twin = case.run(REFERENCE, twin_states, batch)
    torch.testing.assert_close(output, twin, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(states, twin_states, rtol=2e-5, atol=2e-5)


def assert_refuses_other_states(op: Op, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    case = state_case(name, shape, 2, device=device)
    states = torch.zeros(4, *(size + 1 for size in case.state_shape), device=device)
    with pytest.raises(ValueError, match="do not fit"):
        case.run(table(op, name), states, StateBatch.of([2], [2], [-1], [0], device=device))
