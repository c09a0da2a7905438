"""Processes step messages in one pass: passes each row's columns to its request. Knows no stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from frontend_svc.output.collector import Ending
from frontend_svc.output.engine_times import Progress
from frontend_svc.output.logprobs import LogprobColumns
from frontend_svc.output.loss import Loss
from frontend_svc.output.pace import COST_OF_END
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import ServiceError

_Value = TypeVar("_Value")

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Receiver(Protocol):
    """One request in flight. `advance` returns how it ended, if it did; see `RequestState`."""

    @property
    def wants_logprobs(self) -> bool: ...

    @property
    def has_stop_strings(self) -> bool: ...

    def advance(
        self, token_ids: list[int], ending: Ending | None, columns: LogprobColumns | None = None
    ) -> Ending | None: ...

    def note_cached(self, num_cached_tokens: int) -> None: ...

    def note_progress(self, progress: Progress) -> None: ...

    def add_extra(self, extra: step_pb2.StepExtra) -> None: ...

    def fail(self, error: ServiceError) -> None: ...

    def lose(self, loss: Loss) -> None: ...


# Not frozen: slices are created several times a step, and a frozen dataclass takes three times as long.
@dataclass(slots=True)
class StepColumns:
    """One step's outputs as parallel columns. Mappings are keyed by row and sparse. Never modified.

    logprobs: one entry per entry of `token_ids`.
    extras: what the row has beside tokens, which `Receiver.add_extra` gets before them.
    parts: number of tokens per step, for rows merged from several steps.
    progress: what happened to the request in the engine, as of the arrival of the step.
    """

    handles: Sequence[int]
    num_tokens: Sequence[int]
    token_ids: list[int]
    endings: Mapping[int, Ending]
    cached: Mapping[int, int]
    logprobs: LogprobColumns | None = None
    extras: Mapping[int, Sequence[step_pb2.StepExtra]] = field(default_factory=dict)
    parts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    progress: Mapping[int, Progress] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """What it takes to pass the rows to their readers, in rows that end nothing."""
        return len(self.handles) + (COST_OF_END - 1) * len(self.endings)

    def slices(self, max_cost: int) -> Iterator[StepColumns]:
        """Slices of consecutive rows, each a complete `StepColumns`: a row, or as many as cost `max_cost`.

        The first slice starts at the first row with a first token, and the rows before that come last: a
        client waits longer for its first token than for any other.
        """
        if self.cost <= max_cost and not self.cached:
            yield self
            return
        num_rows = len(self.handles)
        cut = min(self.cached, default=0)
        ends: Sequence[int] = range(num_rows + 1)
        if self.num_tokens.count(1) != num_rows:
            ends = (0, *accumulate(self.num_tokens))
        for first, stop in chain(self._cuts(cut, num_rows, max_cost), self._cuts(0, cut, max_cost)):
            yield self._piece(first, stop, ends[first], ends[stop])

    def _cuts(self, first: int, end: int, max_cost: int) -> Iterator[tuple[int, int]]:
        """The rows `first:end` in ranges that cost at most `max_cost`, or have one row."""
        if not self.endings:
            for start in range(first, end, max_cost):
                yield start, min(start + max_cost, end)
            return
        cost = 0
        for row in range(first, end):
            row_cost = COST_OF_END if row in self.endings else 1
            if cost and cost + row_cost > max_cost:
                yield first, row
                first, cost = row, 0
            cost += row_cost
        if first < end:
            yield first, end

    def _piece(self, first: int, stop: int, start: int, end: int) -> StepColumns:
        """The rows `first:stop`, with the tokens `start:end`."""
        piece = StepColumns(
            self.handles[first:stop],
            self.num_tokens[first:stop],
            self.token_ids[start:end],
            _NOTHING,
            _NOTHING,
            None,
            _NOTHING,
            _NOTHING,
            _NOTHING,
        )
        if self.logprobs is not None:
            piece.logprobs = self.logprobs.part(start, end)
        if self.endings or self.cached or self.extras or self.parts or self.progress:
            rows = range(first, stop)
            piece.endings, piece.cached = _of_rows(self.endings, rows), _of_rows(self.cached, rows)
            piece.extras, piece.parts = _of_rows(self.extras, rows), _of_rows(self.parts, rows)
            piece.progress = _of_rows(self.progress, rows)
        return piece


class OutputProcessor:
    """The requests in flight on one engine stream, by handle.

    on_end: called once with each request's handle, when it can produce no more output, for any reason.
    """

    def __init__(self, *, on_end: Callable[[int], None]) -> None:
        self._states: dict[int, Receiver] = {}
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, handle: int) -> bool:
        return handle in self._states

    def register(self, handle: int, state: Receiver) -> None:
        """Register a request. Called before it is sent, so that no output can arrive too early."""
        assert handle not in self._states, "a handle is in use once"
        self._states[handle] = state

    def hand_over(self, handle: int, state: Receiver) -> None:
        """Replace the receiver of `handle`, if the request is still in flight."""
        if handle in self._states:
            self._states[handle] = state

    def process(self, step: StepColumns) -> list[int]:
        """Pass each row to its request; returns the handles that ended here but not in the engine.

        Rows of unknown handles are dropped: an abort and an output may cross.
        """
        self._add_extras(step)
        if step.logprobs is None and not step.endings and not step.parts:
            return self._process_tokens(step)
        to_abort: list[int] = []
        states, endings, token_ids, logprobs = self._states, step.endings, step.token_ids, step.logprobs
        end = 0
        for row, (handle, count) in enumerate(zip(step.handles, step.num_tokens, strict=True)):
            start, end = end, end + count
            state = states.get(handle)
            if state is None:
                continue
            engine_ending = endings.get(row)
            if engine_ending is not None and engine_ending.failure is not None:
                self.fail(handle, engine_ending.failure)
                continue
            columns = logprobs.part(start, end) if logprobs is not None and state.wants_logprobs else None
            if not count and engine_ending is None:
                continue
            parts = [1] * count if count > 1 and state.has_stop_strings else step.parts.get(row)
            if parts is not None:
                ending = self._advance_by_parts(
                    handle, state, token_ids[start:end], parts, engine_ending, columns
                )
            else:
                ending = state.advance(token_ids[start:end], engine_ending, columns)
            # `advance` may abort, and thereby forget, the request of a slow reader.
            if ending is not None and self.forget(handle) and engine_ending is None:
                to_abort.append(handle)
        return to_abort

    def _process_tokens(self, step: StepColumns) -> list[int]:
        """Like `process`, for the common case of a step with nothing but tokens."""
        to_abort: list[int] = []
        get_state, token_ids = self._states.get, step.token_ids
        end = 0
        for handle, count in zip(step.handles, step.num_tokens, strict=True):
            start = end
            end += count
            state = get_state(handle)
            if state is None or not count:
                continue
            if count > 1 and state.has_stop_strings:
                ending = self._advance_by_parts(handle, state, token_ids[start:end], [1] * count, None, None)
            else:
                ending = state.advance(token_ids[start:end], None)
            if ending is not None and self.forget(handle):
                to_abort.append(handle)
        return to_abort

    def forget(self, handle: int) -> bool:
        """Drop a request without notifying its reader; returns whether it was in flight."""
        if self._states.pop(handle, None) is None:
            return False
        self._on_end(handle)
        return True

    def end(self, handle: int, ending: Ending) -> bool:
        """End one request with `ending`; returns whether it was in flight."""
        state = self._states.get(handle)
        if state is None:
            return False
        state.advance([], ending)
        self.forget(handle)
        return True

    def fail(self, handle: int, error: ServiceError) -> bool:
        """End one request with `error`; returns whether it was in flight."""
        state = self._states.get(handle)
        if state is None:
            return False
        state.fail(error)
        self.forget(handle)
        return True

    def lose_all(self, loss: Loss) -> list[int]:
        """Notify every request that its engine is lost, and forget it; returns their handles."""
        handles = list(self._states)
        for handle in handles:
            state = self._states.get(handle)
            if state is None:
                # Ended as a consequence of an earlier notification.
                continue
            # Forgotten first: the receiver may send the request to another engine at once.
            self.forget(handle)
            state.lose(loss)
        return handles

    def _add_extras(self, step: StepColumns) -> None:
        """Pass on what rows have before their tokens."""
        if not (step.cached or step.extras or step.progress):
            return
        for row, progress in step.progress.items():
            state = self._states.get(step.handles[row])
            if state is not None:
                state.note_progress(progress)
        for row, num_cached in step.cached.items():
            state = self._states.get(step.handles[row])
            if state is not None:
                state.note_cached(num_cached)
        for row, extras in step.extras.items():
            state = self._states.get(step.handles[row])
            if state is not None:
                for extra in extras:
                    state.add_extra(extra)

    def _advance_by_parts(
        self,
        handle: int,
        state: Receiver,
        token_ids: list[int],
        counts: Sequence[int],
        engine_ending: Ending | None,
        columns: LogprobColumns | None,
    ) -> Ending | None:
        """Add each part's tokens separately: where a stop string ends must not depend on what came with it.

        Several tokens come at once where steps were merged, or where a step accepted drafts.
        """
        end = 0
        for index, count in enumerate(counts):
            start, end = end, end + count
            part = None if columns is None else columns.part(start, end)
            ending = state.advance(
                token_ids[start:end], engine_ending if index == len(counts) - 1 else None, part
            )
            if ending is not None or handle not in self._states:
                return ending
        return None


def _of_rows(by_row: Mapping[int, _Value], rows: range) -> Mapping[int, _Value]:
    """The entries of `rows`, keyed by index within `rows`."""
    if not by_row:
        return by_row
    if len(by_row) > len(rows):
        return {new_row: by_row[row] for new_row, row in enumerate(rows) if row in by_row}
    return {row - rows.start: value for row, value in by_row.items() if row in rows}
