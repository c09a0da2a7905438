"""Arguments of the ops that keep a state per row, and steps whose slots are NaN where nothing may be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych_kernels import Ops, StateBatch

NUM_SLOTS = 24
# (tokens to compute, whether the row has a state already)
MIXED = [(1, True), (5, False), (0, True), (33, True), (1, False), (70, False), (2, True), (1, True)]
# causal_conv: channels, width.  The others: heads, groups, state size or key dim, head dim or value dim.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "causal_conv": [(1, 4), (37, 4), (300, 3), (16, 2), (5, 1)],
    "ssd_scan": [(1, 1, 1, 1), (4, 2, 16, 8), (3, 1, 17, 33), (2, 2, 128, 64), (1, 1, 40, 144)],
    "gated_delta_rule": [(1, 1, 1, 1), (4, 2, 16, 8), (3, 1, 17, 33), (2, 2, 64, 128), (1, 1, 40, 144)],
}
ALL_SHAPES = [(op, shape) for op, shapes in SHAPES.items() for shape in shapes]


@dataclass
class StateCase:
    """The tokens of a step, and an op bound to its parameters: call(ops, tokens, states, batch)."""

    tokens: tuple[Tensor, ...]  # [T, ...] each
    call: Callable[[Ops, tuple[Tensor, ...], Tensor, StateBatch], Tensor]
    state_shape: tuple[int, ...]

    def part(self, *pieces: slice) -> StateCase:
        """The case with these tokens alone."""
        return replace(self, tokens=tuple(torch.cat([x[piece] for piece in pieces]) for x in self.tokens))

    def run(self, ops: Ops, states: Tensor, batch: StateBatch) -> Tensor:
        """[T, ...]; states are written."""
        return self.call(ops, self.tokens, states, batch)


def noise(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def state_case(
    op: str,
    shape: tuple[int, ...],
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> StateCase:
    def parameter(*size: int, seed: int) -> Tensor:
        return noise(*size, seed=seed).to(device)

    def tokens(*sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(
            noise(num_tokens, *size, seed=10 + index).to(device, dtype) for index, size in enumerate(sizes)
        )

    if op == "causal_conv":
        channels, width = shape
        weight, bias = parameter(width, channels, seed=1), parameter(channels, seed=2)
        return StateCase(
            tokens((channels,)),
            lambda ops, inputs, states, batch: ops.causal_conv(
                inputs[0], weight, bias if width % 2 == 0 else None, states, batch, silu=width > 2
            ),
            (width - 1, channels),
        )
    heads, groups, size, dim = shape
    rates, dt_bias = -parameter(heads, seed=3).exp(), parameter(heads, seed=4)
    if op == "ssd_scan":
        skips = parameter(heads, seed=5) if heads > 1 else None
        x, dt, B, C = tokens((heads, dim), (heads,), (groups, size), (groups, size))
        return StateCase(
            (x, dt, B * size**-0.5, C),
            lambda ops, inputs, states, batch: ops.ssd_scan(
                *inputs, states, batch, A=rates, D=skips, dt_bias=dt_bias, dt_limit=(0.05, 3.0)
            ),
            (heads, size, dim),
        )
    return StateCase(
        tokens((groups, size), (groups, size), (heads, dim), (heads,), (heads,)),
        lambda ops, inputs, states, batch: ops.gated_delta_rule(
            *inputs, states, batch, A=rates, dt_bias=dt_bias
        ),
        (heads, size, dim),
    )


def mixed_step(case: StateCase, device: torch.device | str = "cpu") -> tuple[Tensor, StateBatch]:
    """Slots and a batch for the rows of MIXED: some go on in the slot that they read, some in another.

    Slots that are not read are NaN.
    """
    states = torch.full((NUM_SLOTS, *case.state_shape), float("nan"))
    reads = [3 * row if has_state else -1 for row, (_, has_state) in enumerate(MIXED)]
    for row, slot in enumerate(reads):
        if slot >= 0:
            states[slot] = noise(*case.state_shape, seed=100 + row)
    writes = [3 * row + row % 2 for row in range(len(MIXED))]
    lengths = [count for count, _ in MIXED]
    totals = [count + (20 + row if has_state else 0) for row, (count, has_state) in enumerate(MIXED)]
    # The longest rows also keep states in the middle: one of them where it began.
    kept = [(3, 1, 9), (3, 20, 11), (5, 64, 17)]
    batch = StateBatch.of(lengths, totals, reads, writes, kept=kept, device=device)
    return states.to(device), batch


NUM_MIXED = sum(count for count, _ in MIXED)
