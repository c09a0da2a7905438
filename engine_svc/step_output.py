"""What one frontend session gets of steps, as columns, and how unread steps become one. Knows no wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine_svc.request import FinishReason
from engine_svc.told import Told

# Below this, unread steps are kept as they are: a reader that is merely busy finds a handful.
_MAX_UNFOLDED_STEPS = 16


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """How the request of one row ended; `stop_token_id` where a token did it, `message` for an error."""

    row: int
    reason: FinishReason
    stop_token_id: int | None = None
    message: str = ""


@dataclass(slots=True)
class StepOutput:
    """What one session gets of one or several steps, as parallel columns; no handle occurs twice."""

    step_number: int
    handles: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # all rows' tokens, one after the other
    finished: list[FinishedRow] = field(default_factory=list)
    first: list[tuple[int, int]] = field(
        default_factory=list
    )  # (row, cached tokens) of requests that begin here
    # (row, tokens of each step) of rows whose tokens came in several, so that merging changes nothing.
    parts: list[tuple[int, list[int]]] = field(default_factory=list)
    told: Told | None = None  # by handle, of requests that asked; None: nobody did

    def tell(self, told: Told) -> None:
        """Add what is told of the tokens that the rows have. Who gets no token gets a row for its prompt."""
        counts = dict(zip(self.handles, self.num_tokens, strict=True))
        sampled = {
            handle: part.part(0, counts[handle])
            for handle, part in told.sampled.items()
            if counts.get(handle)
        }
        new = [handle for handle in told.prompts if handle not in counts]
        self.handles += new
        self.num_tokens += [0] * len(new)
        self.told = Told(sampled, told.prompts)


class UnreadSteps:
    """Steps that nobody has read yet. Adding one costs what its rows cost, however many wait already."""

    def __init__(self) -> None:
        self.size_bytes = 0  # about what they weigh on the wire
        self._recent: list[StepOutput] = []
        self._tokens: dict[int, list[int]] = {}
        self._counts: dict[int, list[int]] = {}
        self._finished: dict[int, FinishedRow] = {}
        self._first: dict[int, int] = {}
        self._told: Told | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._recent and not self._tokens

    def add(self, output: StepOutput) -> None:
        """Append `output`, folding older steps together so that their number never grows."""
        self.size_bytes += 12 * len(output.handles) + 4 * len(output.token_ids)
        if output.told is not None:
            self.size_bytes += output.told.size_bytes
        if len(self._recent) == _MAX_UNFOLDED_STEPS:
            self._fold()
        self._recent.append(output)

    def merged(self) -> StepOutput:
        """One step that says what all say one after the other; it carries the number of the last."""
        if len(self._recent) == 1 and not self._tokens:
            return self._recent[0]
        merged = StepOutput(self._recent[-1].step_number)
        self._fold()
        merged.told = self._told
        for row, (handle, token_ids) in enumerate(self._tokens.items()):
            merged.handles.append(handle)
            merged.num_tokens.append(len(token_ids))
            merged.token_ids.extend(token_ids)
            if len(self._counts[handle]) > 1:
                merged.parts.append((row, self._counts[handle]))
            if handle in self._finished:
                merged.finished.append(replace(self._finished[handle], row=row))
            if handle in self._first:
                merged.first.append((row, self._first[handle]))
        return merged

    def _fold(self) -> None:
        for alike in _runs(self._recent):
            if len(alike) > 1:
                self._fold_columns(alike)
            else:
                self._fold_rows(alike[0])
            for output in alike:
                self._finished.update((output.handles[row.row], row) for row in output.finished)
                self._first.update((output.handles[row], num_cached) for row, num_cached in output.first)
                if output.told is not None:
                    self._told = self._told or Told()
                    self._told.add(output.told)
        self._recent.clear()
        self.size_bytes = sum(12 + 4 * len(token_ids) for token_ids in self._tokens.values())
        if self._told is not None:
            self.size_bytes += self._told.size_bytes

    def _fold_rows(self, output: StepOutput) -> None:
        start = 0
        for handle, num_tokens in zip(output.handles, output.num_tokens, strict=True):
            self._tokens.setdefault(handle, []).extend(output.token_ids[start : start + num_tokens])
            counts = self._counts.setdefault(handle, [])
            if num_tokens:
                counts.append(num_tokens)
            start += num_tokens
        for row, parts in output.parts:
            # The row came as one with what it has of several steps.
            self._counts[output.handles[row]][-1:] = parts

    def _fold_columns(self, alike: Sequence[StepOutput]) -> None:
        """The same for steps that have a token each of the same rows: a tenth of the time."""
        ones = [1] * len(alike)
        columns = zip(*(output.token_ids for output in alike), strict=True)
        for handle, token_ids in zip(alike[0].handles, columns, strict=True):
            self._tokens.setdefault(handle, []).extend(token_ids)
            self._counts.setdefault(handle, []).extend(ones)


def _runs(outputs: Iterable[StepOutput]) -> Iterator[list[StepOutput]]:
    """Consecutive steps together where they have a token each of the same rows, others by themselves."""
    run: list[StepOutput] = []
    for output in outputs:
        is_plain = not output.parts and output.num_tokens.count(1) == len(output.handles)
        if run and not (is_plain and output.handles == run[0].handles):
            yield run
            run = []
        run.append(output)
        if not is_plain:
            yield run
            run = []
    if run:
        yield run
