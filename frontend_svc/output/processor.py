"""The one pass over a step message: columns in, deltas into each request's collector. Knows no stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from frontend_svc.output.collector import Ending
from frontend_svc.output.logprobs import LogprobColumns
from frontend_svc.output.loss import Loss
from service_kit.errors import ServiceError
from triptych.common.v1 import tensor_pb2

_Value = TypeVar("_Value")

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Receiver(Protocol):
    """One request in flight, as steps see it."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether it takes what a step tells of its tokens."""
        ...

    def advance(
        self, token_ids: list[int], ending: Ending | None, columns: LogprobColumns | None = None
    ) -> Ending | None:
        """Take a step's tokens and the end the engine tells; returns how it ended, if it did."""
        ...

    def note_cached(self, num_cached_tokens: int) -> None:
        """Take how much of the prompt came from the prefix cache."""
        ...

    def add_prompt_logprobs(self, first_position: int, columns: LogprobColumns) -> None:
        """Take what a step tells of the prompt's places."""
        ...

    def add_pooled(self, tensor: tensor_pb2.Tensor) -> None:
        """Take the result of pooling."""
        ...

    def fail(self, error: ServiceError) -> None:
        """End with `error`."""
        ...

    def lose(self, loss: Loss) -> None:
        """No more comes from the engine that had it: go on elsewhere, or end with the loss's error."""
        ...


# Not frozen: pieces are made several times a step, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class StepColumns:
    """One step's outputs as parallel columns; mappings are by row, where there is something. Never changed.

    `logprobs` has a place for each of `token_ids`, `prompts` the places of prompts by their first position.
    `parts` are the tokens of each step, of rows that were merged from several.
    """

    handles: Sequence[int]
    num_tokens: Sequence[int]
    token_ids: list[int]
    endings: Mapping[int, Ending]
    cached: Mapping[int, int]
    logprobs: LogprobColumns | None = None
    prompts: Mapping[int, list[tuple[int, LogprobColumns]]] = field(default_factory=dict)
    pooled: Mapping[int, tensor_pb2.Tensor] = field(default_factory=dict)
    parts: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def slices(self, max_rows: int) -> Iterator[StepColumns]:
        """The same in pieces of at most `max_rows` consecutive rows, each of which is whole by itself.

        The first piece begins with the first request that begins, and what stands before that one comes last:
        a client waits for its first token longer than for any other.
        """
        num_rows = len(self.handles)
        if num_rows <= max_rows and not self.cached:
            yield self
            return
        cut = min(self.cached, default=0)
        ends: Sequence[int] = range(num_rows + 1)
        if self.num_tokens.count(1) != num_rows:
            ends = (0, *accumulate(self.num_tokens))
        for first in (*range(cut, num_rows, max_rows), *range(0, cut, max_rows)):
            stop = min(first + max_rows, cut if first < cut else num_rows)
            yield self._piece(first, stop, ends[first], ends[stop])

    def _piece(self, first: int, stop: int, start: int, end: int) -> StepColumns:
        """The rows from `first` to `stop`, whose tokens are those from `start` to `end`."""
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
        if self.endings or self.cached or self.prompts or self.pooled or self.parts:
            rows = range(first, stop)
            piece.endings, piece.cached = _of_rows(self.endings, rows), _of_rows(self.cached, rows)
            piece.prompts, piece.pooled = _of_rows(self.prompts, rows), _of_rows(self.pooled, rows)
            piece.parts = _of_rows(self.parts, rows)
        return piece


class OutputProcessor:
    """The requests in flight on one engine stream, by handle, and what a step does to them.

    `on_end` gets the handle of each request once, when no more output of it can come, whatever the cause.
    """

    def __init__(self, *, on_end: Callable[[int], None]) -> None:
        self._states: dict[int, Receiver] = {}
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, handle: int) -> bool:
        return handle in self._states

    def register(self, handle: int, state: Receiver) -> None:
        """Expect output for `handle`. Done before the request is sent, so that none can come too early."""
        assert handle not in self._states, "a handle is in use once"
        self._states[handle] = state

    def hand_over(self, handle: int, state: Receiver) -> None:
        """Let `state` have what is still to come for `handle`, if anything is."""
        if handle in self._states:
            self._states[handle] = state

    def process(self, step: StepColumns) -> list[int]:
        """Hand each row to its request; returns the handles that ended here and not in the engine.

        Rows of handles that are not known (any more) are dropped: an abort and an output may cross.
        """
        self._add_prompt_logprobs(step)
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
            columns = logprobs.part(start, end) if logprobs is not None and state.wants_logprobs else None
            if not count and engine_ending is None:
                continue
            if row in step.parts:
                ending = self._advance_by_parts(
                    handle, state, token_ids[start:end], step.parts[row], engine_ending, columns
                )
            else:
                ending = state.advance(token_ids[start:end], engine_ending, columns)
            # A reader that is too slow has its request aborted, and so forgotten, from within.
            if ending is not None and self.forget(handle) and engine_ending is None:
                to_abort.append(handle)
        return to_abort

    def _process_tokens(self, step: StepColumns) -> list[int]:
        """The same for a step, as most are, that has tokens and nothing else."""
        to_abort: list[int] = []
        get_state, token_ids = self._states.get, step.token_ids
        end = 0
        for handle, count in zip(step.handles, step.num_tokens, strict=True):
            start = end
            end += count
            state = get_state(handle)
            if state is None or not count:
                continue
            if state.advance(token_ids[start:end], None) is not None and self.forget(handle):
                to_abort.append(handle)
        return to_abort

    def forget(self, handle: int) -> bool:
        """Drop a request without telling its reader; returns whether it was in flight."""
        if self._states.pop(handle, None) is None:
            return False
        self._on_end(handle)
        return True

    def end(self, handle: int, ending: Ending) -> bool:
        """End one request as the engine might have; returns whether it was in flight."""
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
        """Tell every request that its engine is lost, and forget it here; returns their handles."""
        handles = list(self._states)
        for handle in handles:
            state = self._states.get(handle)
            if state is None:
                # Ended by what was told of it just now.
                continue
            # Forgotten first: who hears of the loss may send the request on at once.
            self.forget(handle)
            state.lose(loss)
        return handles

    def _add_prompt_logprobs(self, step: StepColumns) -> None:
        if not (step.cached or step.prompts or step.pooled):
            return
        for row, num_cached in step.cached.items():
            state = self._states.get(step.handles[row])
            if state is not None:
                state.note_cached(num_cached)
        for row, parts in step.prompts.items():
            state = self._states.get(step.handles[row])
            for first_position, columns in parts:
                if state is not None:
                    state.add_prompt_logprobs(first_position, columns)
        for row, tensor in step.pooled.items():
            state = self._states.get(step.handles[row])
            if state is not None:
                state.add_pooled(tensor)

    def _advance_by_parts(
        self,
        handle: int,
        state: Receiver,
        token_ids: list[int],
        counts: Sequence[int],
        engine_ending: Ending | None,
        columns: LogprobColumns | None,
    ) -> Ending | None:
        """Take each step's tokens by themselves: what a stop string leaves must not depend on merging."""
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
    """What is there of `rows`, by the place of a row among them."""
    if not by_row:
        return by_row
    if len(by_row) > len(rows):
        return {new_row: by_row[row] for new_row, row in enumerate(rows) if row in by_row}
    return {row - rows.start: value for row, value in by_row.items() if row in rows}
