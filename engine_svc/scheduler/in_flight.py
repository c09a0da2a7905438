"""The steps that were planned and have no result yet. Knows no plans and no blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.sampling_params import SamplingParams


class _Step:
    """The rows of one step, by request and not by id, which may be used again."""

    __slots__ = ("_row_of", "block_ids", "num_tokens", "released", "rows", "step_number")

    def __init__(
        self,
        step_number: int,
        rows: list[Request],
        num_tokens: Sequence[int],
        released: Sequence[str],
        block_ids: Sequence[int],
    ) -> None:
        self.step_number = step_number
        self.rows = rows
        self.num_tokens = num_tokens
        self.released = released
        self.block_ids = block_ids
        self._row_of: dict[Request, int] | None = None

    def num_tokens_of(self, request: Request) -> int:
        """How many tokens of a request the step computes."""
        row = self._rows_by_request().get(request)
        return 0 if row is None else self.num_tokens[row]

    def replace(self, request: Request, other: Request) -> None:
        """Assign the row of a request, if it has one, to another."""
        row = self._rows_by_request().pop(request, None)
        if row is not None:
            self.rows[row] = other

    def _rows_by_request(self) -> dict[Request, int]:
        """Made at the first call, as it is rarely needed."""
        if self._row_of is None:
            self._row_of = {request: row for row, request in enumerate(self.rows)}
        return self._row_of


@dataclass(slots=True)
class Withdrawn:
    """The rows and blocks of steps that were rolled back, for the next plan to settle."""

    rows: dict[Request, None] = field(default_factory=dict)  # as an ordered set
    released: list[str] = field(default_factory=list)  # rows to free
    block_ids: list[int] = field(default_factory=list)  # registered blocks to fill


class PlannedSteps:
    """A queue of steps: results come in the order of the plans."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        # Owner of rows whose tokens are to be dropped: tokens of a finished request are.
        self._discarded = Request("", [], 0, SamplingParams(max_tokens=1))
        self._discarded.move_to(RequestStatus.FINISHED)

    def newest_of(self, request: Request) -> int:
        """The number of the last step that computes tokens of a request; 0 if none does."""
        numbers = (step.step_number for step in reversed(self._steps) if step.num_tokens_of(request))
        return next(numbers, 0)

    def push(
        self,
        step_number: int,
        rows: list[Request],
        num_tokens: Sequence[int],
        released: Sequence[str] = (),
        block_ids: Sequence[int] = (),
    ) -> None:
        """Add a planned step, which frees the rows of `released` and fills the registered `block_ids`."""
        self._steps.append(_Step(step_number, rows, num_tokens, released, block_ids))

    def pop(self, step_number: int) -> list[Request]:
        """Remove the oldest step, whose result has come; returns its rows."""
        step = self._steps.popleft()
        assert step.step_number == step_number, "results come in the order of the plans"
        return step.rows

    def num_tokens_of(self, request: Request) -> int:
        """How many tokens of a request are in flight."""
        return sum(step.num_tokens_of(request) for step in self._steps)

    def withdraw(self) -> Withdrawn:
        """Remove every step: no result follows."""
        withdrawn = Withdrawn()
        for step in self._steps:
            # In the order of admission, as rows are.
            withdrawn.rows.update(dict.fromkeys(step.rows))
            withdrawn.released += step.released
            withdrawn.block_ids += step.block_ids
        withdrawn.rows.pop(self._discarded, None)
        self._steps.clear()
        return withdrawn

    def forget(self, request: Request, full_block_ids: Collection[int] = ()) -> None:
        """Drop what is in flight for a request: the tokens of its rows are ignored.

        full_block_ids: registered blocks that keep their content even if the steps are rolled back.
        """
        for step in self._steps:
            step.replace(request, self._discarded)
            if full_block_ids:
                step.block_ids = [block_id for block_id in step.block_ids if block_id not in full_block_ids]
