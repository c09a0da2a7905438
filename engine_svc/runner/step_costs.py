"""Measures what steps cost by their number of positions, at start: what a limit of drafts decides by."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.core.step import StepCosts
from engine_svc.runner.step_drafts import StepDrafts
from triptych_kernels import Ops, uniform_noise

# Numbers of positions that are measured.
_POSITIONS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# On a GPU reading the weights takes longer than computing these.
_POSITIONS_ON_GPU = (48, 64, 96, 128, 192, 256, 384, 512)
_NUM_REPETITIONS = 4  # the shortest counts
_LONG_CONTEXT = 1024
_NUM_ROWS = 8  # for costs per row


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Times the parts of a step on a device, in seconds.

    compute: logits of rows with the given numbers of new tokens at a context length.
    rehearse: runs a whole step of rows with the given number of drafts each, returns when it is done.
    """

    ops: Ops
    device: torch.device
    vocab_size: int
    compute: Callable[[Sequence[int], int], Tensor]
    drafting: StepDrafts
    rehearse: Callable[[int, int], None]

    def decode(self, num_rows: int, context_length: int) -> float:
        """One decode step."""
        return self._shortest(lambda: self.ops.greedy(self.compute([1] * num_rows, context_length).float()))

    def draw(self, num_rows: int) -> float:
        """Drawing a token for each row."""
        logits = torch.randn(num_rows, self.vocab_size, device=self.device)
        numbers = torch.arange(num_rows, device=self.device)
        ones = torch.ones(num_rows, device=self.device)
        zeros, no_min_p = torch.zeros_like(numbers), torch.zeros_like(ones)

        def run() -> None:
            self.ops.sample(logits, ones, zeros, ones, no_min_p, uniform_noise(numbers, numbers, draw=0))

        return self._shortest(run)

    def propose(self, num_rows: int) -> float:
        """Proposing one draft for each row."""
        return self._shortest(lambda: self.drafting.rehearse(num_rows))

    def host_of_drafts(self, num_rows: int) -> float:
        """One draft for each row, beside the forwards of what proposes and of what verifies it."""
        drafted = self._shortest(lambda: self.rehearse(num_rows, 1))
        plain = self._shortest(lambda: self.rehearse(num_rows, 0))
        verified = self.decode(2 * num_rows, 1) - self.decode(num_rows, 1)
        proposed = self.propose(num_rows) if self.drafting.costs_time else 0.0
        return max(0.0, drafted - plain - max(0.0, verified) - proposed)

    def _shortest(self, run: Callable[[], object]) -> float:
        return min(self._timed(run) for _ in range(_NUM_REPETITIONS))

    def _timed(self, run: Callable[[], object]) -> float:
        began_at = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began_at


def measure_costs(timer: StepTimer, max_positions: int, max_num_seqs: int, max_model_len: int) -> StepCosts:
    """Step times by number of positions, up to `max_positions`, and costs per row on top of them."""
    positions = _POSITIONS if timer.device.type == "cpu" else _POSITIONS + _POSITIONS_ON_GPU
    counts = [count for count in positions if count <= max_positions]
    proposing: list[float] = []
    if timer.drafting.costs_time:
        proposing = [timer.propose(min(count, max_num_seqs)) for count in counts]
    num_rows, long = min(_NUM_ROWS, max_positions), min(_LONG_CONTEXT, max_model_len)
    reads = timer.decode(num_rows, long) - timer.decode(num_rows, 1)
    num_drafted = min(_NUM_ROWS, max_num_seqs)
    of_one, of_several = timer.host_of_drafts(1), timer.host_of_drafts(num_drafted)
    per_row = max(0.0, of_several - of_one) / max(1, num_drafted - 1)
    return StepCosts(
        tuple(counts),
        _ascending([timer.decode(count, 1) for count in counts]),
        seconds_per_read=max(0.0, reads) / (num_rows * long),
        seconds_per_draw=timer.draw(num_rows) / num_rows,
        proposal_seconds=_ascending(proposing),
        seconds_per_drafted_step=max(0.0, of_one - per_row),
        seconds_per_drafted_row=per_row,
    )


def _ascending(seconds: Sequence[float]) -> tuple[float, ...]:
    """Each no more than a larger step took: a disturbed measurement must not make larger steps look free."""
    return tuple(min(seconds[index:]) for index in range(len(seconds)))
