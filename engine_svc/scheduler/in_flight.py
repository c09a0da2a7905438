"""The steps that were planned and whose results are still to come. Knows no plans and no blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine_svc.request import Request, RequestStatus
from engine_svc.sampling_params import SamplingParams


class _Step:
    """The rows of one step. By request, not by id: an id may be used again."""

    __slots__ = ("_num_tokens_of", "num_tokens", "rows", "step_number")

    def __init__(self, step_number: int, rows: list[Request], num_tokens: Sequence[int]) -> None:
        self.step_number = step_number
        self.rows = rows
        self.num_tokens = num_tokens
        self._num_tokens_of: dict[Request, int] | None = None

    def num_tokens_of(self, request: Request) -> int:
        """What the step computes of a request. Few ask, so the table for it is made when one does."""
        if self._num_tokens_of is None:
            self._num_tokens_of = dict(zip(self.rows, self.num_tokens, strict=True))
        return self._num_tokens_of.get(request, 0)


class StepsInFlight:
    """A queue of steps: results come in the order of the plans."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        # Who rows belong to when nobody wants their tokens any more: it has ended, so they are dropped.
        self._nobody = Request("", [], 0, SamplingParams(max_tokens=1))
        self._nobody.move_to(RequestStatus.FINISHED)

    def newest_of(self, request: Request) -> int:
        """The number of the last step that computes something of a request; 0 where none does."""
        numbers = (step.step_number for step in reversed(self._steps) if step.num_tokens_of(request))
        return next(numbers, 0)

    def push(self, step_number: int, rows: list[Request], num_tokens: Sequence[int]) -> None:
        """A step was planned."""
        self._steps.append(_Step(step_number, rows, num_tokens))

    def pop(self, step_number: int) -> list[Request]:
        """The result of the oldest step is there: its rows."""
        step = self._steps.popleft()
        assert step.step_number == step_number, "results come in the order of the plans"
        return step.rows

    def num_tokens_of(self, request: Request) -> int:
        """How many tokens of a request are being computed."""
        return sum(step.num_tokens_of(request) for step in self._steps)

    def forget(self, request: Request) -> None:
        """Drop what is in flight for a request: its rows yield tokens that nobody gets."""
        for step in self._steps:
            step.rows[:] = [self._nobody if row is request else row for row in step.rows]
