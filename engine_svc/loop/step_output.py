"""What one frontend session gets of steps, as columns, and how unread steps become one. Knows no wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from engine_svc.core.request import FinishReason
from engine_svc.core.step import PromptTokenLogprobs, StepPlan, StepResult, TokenLogprobs

_Session = TypeVar("_Session")


@dataclass(slots=True)
class LogprobDeltas:
    """Of the tokens that a step brings to a handle, one entry a token; of places of its prompt, in order."""

    sampled: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompts: dict[int, list[PromptTokenLogprobs]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """About what it weighs on the wire."""
        parts = [
            *self.sampled.values(),
            *(one.token_logprobs for many in self.prompts.values() for one in many),
        ]
        return sum(8 * (len(part.ranks) + len(part.top_token_ids)) for part in parts)

    def add(self, later: LogprobDeltas) -> None:
        """Take in what a later step tells. `later` stays as it is, and shares no list that grows."""
        for handle, token_logprobs in later.sampled.items():
            if handle in self.sampled:
                self.sampled[handle].extend(token_logprobs)
            else:
                self.sampled[handle] = token_logprobs.part(0, len(token_logprobs.ranks))
        for handle, prompt in later.prompts.items():
            self.prompts.setdefault(handle, []).extend(prompt)


class LogprobRouter:
    """Finds who is to be told what a result has, and tells each place of a prompt once.

    A preempted request computes its prompt again: what has been told of it by then is left out.
    """

    def __init__(self) -> None:
        self._next_position: dict[str, int] = {}  # of a prompt that is told of, by request id

    def route(
        self, plan: StepPlan, result: StepResult, routes: Mapping[str, tuple[_Session, int]]
    ) -> dict[_Session, LogprobDeltas]:
        """By session, what the result of `plan` tells those who are still there."""
        if not result.logprobs and not result.prompt_logprobs:
            return {}
        found: dict[_Session, LogprobDeltas] = {}
        for row, token_logprobs in result.logprobs.items():
            if (route := routes.get(plan.request_ids[row])) is not None:
                found.setdefault(route[0], LogprobDeltas()).sampled[route[1]] = token_logprobs
        for row, prompt in result.prompt_logprobs.items():
            request_id = plan.request_ids[row]
            route = routes.get(request_id)
            # Nothing is noted of a request that has ended: nobody would forget it.
            if route is not None and (news := self._news(request_id, prompt)) is not None:
                found.setdefault(route[0], LogprobDeltas()).prompts[route[1]] = [news]
        return found

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._next_position.pop(request_id, None)

    def _news(self, request_id: str, prompt: PromptTokenLogprobs) -> PromptTokenLogprobs | None:
        first, num_positions = prompt.first_position, len(prompt.token_logprobs.ranks)
        start = self._next_position.get(request_id)
        self._next_position[request_id] = max(start or 0, first + num_positions)
        if start is None:
            return prompt
        if start >= first + num_positions:
            return None
        if start <= first:
            return prompt
        return PromptTokenLogprobs(start, prompt.token_logprobs.part(start - first, num_positions))


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
    token_logprobs: LogprobDeltas | None = None  # by handle, of requests that asked; None: nobody did

    def add_logprobs(self, token_logprobs: LogprobDeltas) -> None:
        """Add what is told of the tokens that the rows have. Who gets no token gets a row for its prompt."""
        counts = dict(zip(self.handles, self.num_tokens, strict=True))
        sampled = {
            handle: part.part(0, counts[handle])
            for handle, part in token_logprobs.sampled.items()
            if counts.get(handle)
        }
        new = [handle for handle in token_logprobs.prompts if handle not in counts]
        self.handles += new
        self.num_tokens += [0] * len(new)
        self.token_logprobs = LogprobDeltas(sampled, token_logprobs.prompts)


class UnreadSteps:
    """Steps that nobody has read yet. Adding one costs what its rows cost, however many wait already."""

    def __init__(self) -> None:
        self.size_bytes = 0  # about what they weigh on the wire
        self._recent: list[StepOutput] = []
        self._tokens: dict[int, list[int]] = {}
        self._counts: dict[int, list[int]] = {}
        self._finished: dict[int, FinishedRow] = {}
        self._first: dict[int, int] = {}
        self._token_logprobs: LogprobDeltas | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._recent and not self._tokens

    def add(self, output: StepOutput) -> None:
        """Append `output`, folding older steps together so that their number never grows."""
        self.size_bytes += 12 * len(output.handles) + 4 * len(output.token_ids)
        if output.token_logprobs is not None:
            self.size_bytes += output.token_logprobs.size_bytes
        if len(self._recent) == _MAX_UNFOLDED_STEPS:
            self._fold()
        self._recent.append(output)

    def merged(self) -> StepOutput:
        """One step that says what all say one after the other; it carries the number of the last."""
        if len(self._recent) == 1 and not self._tokens:
            return self._recent[0]
        merged = StepOutput(self._recent[-1].step_number)
        self._fold()
        merged.token_logprobs = self._token_logprobs
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
                if output.token_logprobs is not None:
                    self._token_logprobs = self._token_logprobs or LogprobDeltas()
                    self._token_logprobs.add(output.token_logprobs)
        self._recent.clear()
        self.size_bytes = sum(12 + 4 * len(token_ids) for token_ids in self._tokens.values())
        if self._token_logprobs is not None:
            self.size_bytes += self._token_logprobs.size_bytes

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


# A sixteenth of what either side takes in one message: a longer one would keep heartbeats waiting for it.
MAX_PIECE_BYTES = 4 * 1024 * 1024
# What these take on the wire, at most: a row with all that stands once for it, a token with its part in the
# counts of steps, a run of a prompt's places, what is told of one place by itself or beside it.
_ROW_BYTES = 64
_TOKEN_BYTES = 5
_RUN_BYTES = 64
_ENTRY_BYTES = 8


def pieces(output: StepOutput, max_bytes: int = MAX_PIECE_BYTES) -> list[StepOutput]:
    """`output` as steps of the same number, which say one after the other what it says.

    None takes more than `max_bytes` as a message, but for one place alone that does by itself.
    """
    if _weigh(output).size_bytes <= max_bytes:
        return [output]
    parts = [part for row in _rows(output) for part in _parts_of(row, max_bytes)]
    # In one message the columns of all rows are as wide as the widest. The parts of a row stay in order:
    # nothing stands beside a prompt, and all tokens of a request are told of alike.
    parts.sort(key=lambda part: _weigh(part).num_entries)
    return list(_packed(parts, max_bytes))


@dataclass(frozen=True, slots=True)
class _Weight:
    """What a step takes on the wire; `num_entries` is what its columns have for each token."""

    num_bytes: int = 0  # of all but these columns
    num_tokens: int = 0
    num_entries: int = 0

    @property
    def size_bytes(self) -> int:
        return self.num_bytes + self.num_tokens * self.num_entries * _ENTRY_BYTES

    def plus(self, other: _Weight) -> _Weight:
        """Of both in one message."""
        return _Weight(
            self.num_bytes + other.num_bytes,
            self.num_tokens + other.num_tokens,
            max(self.num_entries, other.num_entries),
        )


def _weigh(output: StepOutput) -> _Weight:
    num_tokens = len(output.token_ids)
    num_bytes = _ROW_BYTES * len(output.handles) + _TOKEN_BYTES * num_tokens
    # A character takes four bytes at most.
    num_bytes += sum(4 * len(finished.message) for finished in output.finished)
    if output.token_logprobs is None:
        return _Weight(num_bytes, num_tokens)
    num_bytes += sum(_run_bytes(run) for runs in output.token_logprobs.prompts.values() for run in runs)
    num_entries = max(
        (1 + token_logprobs.k for token_logprobs in output.token_logprobs.sampled.values()), default=0
    )
    return _Weight(num_bytes, num_tokens, num_entries)


def _run_bytes(run: PromptTokenLogprobs) -> int:
    # The place before all others is added on the wire.
    return _RUN_BYTES + (1 + len(run.token_logprobs.ranks)) * (1 + run.token_logprobs.k) * _ENTRY_BYTES


def _rows(output: StepOutput) -> Iterator[StepOutput]:
    """Each row as a step of its own."""
    first, parts = dict(output.first), dict(output.parts)
    finished = {end.row: replace(end, row=0) for end in output.finished}
    token_logprobs, start = output.token_logprobs or LogprobDeltas(), 0
    for row, (handle, num_tokens) in enumerate(zip(output.handles, output.num_tokens, strict=True)):
        alone = StepOutput(
            output.step_number, [handle], [num_tokens], output.token_ids[start : start + num_tokens]
        )
        start += num_tokens
        if row in finished:
            alone.finished.append(finished[row])
        if row in first:
            alone.first.append((0, first[row]))
        if row in parts:
            alone.parts.append((0, parts[row]))
        alone.token_logprobs = LogprobDeltas(
            {handle: token_logprobs.sampled[handle]} if handle in token_logprobs.sampled else {},
            {handle: token_logprobs.prompts[handle]} if handle in token_logprobs.prompts else {},
        )
        yield alone


def _parts_of(row: StepOutput, max_bytes: int) -> Iterator[StepOutput]:
    """One row as several steps: what is told of its prompt, then its tokens, with its end at the last."""
    (handle,), token_logprobs = row.handles, row.token_logprobs or LogprobDeltas()
    for runs in _grouped_runs(token_logprobs.prompts.get(handle, ()), max_bytes - _ROW_BYTES):
        yield StepOutput(row.step_number, [handle], [0], token_logprobs=LogprobDeltas(prompts={handle: runs}))
    if token_logprobs.prompts and not (row.token_ids or row.finished or row.first):
        return
    weight = _weigh(replace(row, token_ids=[], token_logprobs=None))
    token_bytes = _TOKEN_BYTES + _weigh(row).num_entries * _ENTRY_BYTES
    counts = row.parts[0][1] if row.parts else row.num_tokens
    groups = list(_grouped_counts(counts, max(1, (max_bytes - weight.num_bytes) // token_bytes)))
    end = 0
    for index, group in enumerate(groups):
        start, end = end, end + sum(group)
        part = StepOutput(row.step_number, [handle], [end - start], row.token_ids[start:end])
        if len(group) > 1:
            part.parts.append((0, group))
        if index == 0:
            part.first = row.first
        if index == len(groups) - 1:
            part.finished = row.finished
        if handle in token_logprobs.sampled:
            part.token_logprobs = LogprobDeltas({handle: token_logprobs.sampled[handle].part(start, end)})
        yield part


def _grouped_runs(runs: Iterable[PromptTokenLogprobs], max_bytes: int) -> Iterator[list[PromptTokenLogprobs]]:
    """Places of a prompt, in runs that are no longer than may be, as many together as may be."""
    group: list[PromptTokenLogprobs] = []
    num_bytes = 0
    for run in runs:
        max_positions = max(1, (max_bytes - _RUN_BYTES) // ((1 + run.token_logprobs.k) * _ENTRY_BYTES) - 1)
        for first in range(0, max(1, len(run.token_logprobs.ranks)), max_positions):
            prompt = PromptTokenLogprobs(
                run.first_position + first, run.token_logprobs.part(first, first + max_positions)
            )
            size = _run_bytes(prompt)
            if group and num_bytes + size > max_bytes:
                yield group
                group, num_bytes = [], 0
            group.append(prompt)
            num_bytes += size
    if group:
        yield group


def _grouped_counts(counts: Iterable[int], max_tokens: int) -> Iterator[list[int]]:
    """Tokens of steps, as many together as may be. A step is cut only where it is too long by itself."""
    group: list[int] = []
    num_tokens = 0
    for count in counts:
        if group and num_tokens + count > max_tokens:
            yield group
            group, num_tokens = [], 0
        *whole, left = _cut(count, max_tokens)
        yield from ([part] for part in whole)
        group.append(left)
        num_tokens += left
    yield group


def _cut(count: int, max_tokens: int) -> list[int]:
    num_whole = max(0, count - 1) // max_tokens
    return [max_tokens] * num_whole + [count - num_whole * max_tokens]


def _packed(parts: Iterable[StepOutput], max_bytes: int) -> Iterator[StepOutput]:
    """As many together as may be; two of one row never."""
    packed, weight, handles = StepOutput(0), _Weight(), set[int]()
    for part in parts:
        both = weight.plus(_weigh(part))
        if handles and (both.size_bytes > max_bytes or part.handles[0] in handles):
            yield packed
            handles.clear()
        if not handles:
            packed, both = StepOutput(part.step_number), _weigh(part)
        weight = both
        handles.update(part.handles)
        _append(packed, part)
    yield packed


def _append(packed: StepOutput, part: StepOutput) -> None:
    row = len(packed.handles)
    packed.handles += part.handles
    packed.num_tokens += part.num_tokens
    packed.token_ids += part.token_ids
    packed.finished += [replace(finished, row=row) for finished in part.finished]
    packed.first += [(row, num_cached_tokens) for _, num_cached_tokens in part.first]
    packed.parts += [(row, counts) for _, counts in part.parts]
    if part.token_logprobs is not None:
        packed.token_logprobs = packed.token_logprobs or LogprobDeltas()
        packed.token_logprobs.add(part.token_logprobs)
