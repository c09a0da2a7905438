"""Outputs of steps for one frontend session, as columns: built, merged while unread, split for the wire.

Knows no wire format, only about how many bytes things take there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine_svc.core.extras import Extras, merge_extras
from engine_svc.core.request import DraftUse, FinishReason, FirstOutput
from engine_svc.core.step import TokenLogprobs

# A sixteenth of the largest message that either side accepts: heartbeats wait behind a long message.
MAX_PIECE_BYTES = 4 * 1024 * 1024
# Upper limits on the wire: a row with all that it has once, a token with its share of the per-step counts,
# one logprob with its token id or rank.
_ROW_BYTES = 128
_TOKEN_BYTES = 5
_ENTRY_BYTES = 8
_DETAILS_BYTES = 2048
# Up to this many unread steps are kept unmerged: a reader that is only busy finds a handful.
_MAX_UNMERGED_STEPS = 16


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """How the request of one row, or its turn, ended: `stop_token_id` if by a stop token, `message` if by an
    error.

    code: the name of the error's gRPC status code, if it has one, with a reason for programs and the field of
    the ADD that it refuses, if any.  error_fields: rules of the request that leave no token, if that is it.
    drafts: None if none was verified.  turn_ended: the request takes further input.
    """

    row: int
    reason: FinishReason
    stop_token_id: int | None = None
    message: str = ""
    code: str = ""
    drafts: DraftUse | None = None
    error_reason: str = ""
    error_field: str = ""
    error_fields: tuple[str, ...] = ()
    turn_ended: bool = False


@dataclass(slots=True)
class LogprobDeltas:
    """Logprobs of the tokens that steps add, by handle: one entry for each new token."""

    sampled: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Approximate size on the wire."""
        return sum(
            _ENTRY_BYTES * (len(column.ranks) + len(column.top_token_ids)) for column in self.sampled.values()
        )

    def merge(self, later: LogprobDeltas) -> None:
        """Append the logprobs of a later step, which stay unchanged and share no list that grows."""
        for handle, token_logprobs in later.sampled.items():
            if handle in self.sampled:
                self.sampled[handle].extend(token_logprobs)
            else:
                self.sampled[handle] = token_logprobs.part(0, len(token_logprobs.ranks))

    def row(self, handle: int) -> LogprobDeltas:
        """The logprobs of one handle; the lists are shared."""
        return LogprobDeltas({handle: self.sampled[handle]} if handle in self.sampled else {})

    def slice(self, handle: int, start: int, end: int) -> LogprobDeltas | None:
        """The logprobs of the handle's new tokens from `start` to `end`; None if it has none."""
        if handle not in self.sampled:
            return None
        return LogprobDeltas({handle: self.sampled[handle].part(start, end)})


@dataclass(slots=True)
class StepOutput:
    """One session's part of one or more steps, as parallel columns. A handle has at most one row."""

    step_number: int
    handles: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of all rows, one row after the other
    finished: list[FinishedRow] = field(default_factory=list)
    # (row, what it says of the prompt) of requests whose first output this is.
    first: list[tuple[int, FirstOutput]] = field(default_factory=list)
    # (row, tokens of each step) of rows whose tokens are of several steps, so that merging loses nothing.
    parts: list[tuple[int, list[int]]] = field(default_factory=list)
    token_logprobs: LogprobDeltas | None = None  # of requests that asked for them; None: no request did
    extras: dict[int, Extras] = field(default_factory=dict)  # of features, by handle
    # When the newest of its steps ended, on the engine's clock; None: no step produced the rows.
    ended_at: float | None = None

    def add_logprobs(self, token_logprobs: LogprobDeltas) -> None:
        """Add the logprobs of the rows' tokens."""
        counts = dict(zip(self.handles, self.num_tokens, strict=True))
        self.token_logprobs = LogprobDeltas(
            {
                handle: part.part(0, counts[handle])
                for handle, part in token_logprobs.sampled.items()
                if counts.get(handle)
            }
        )

    def rows(self) -> Iterator[StepOutput]:
        """Each row as a step of its own."""
        first, parts = dict(self.first), dict(self.parts)
        finished = {end.row: replace(end, row=0) for end in self.finished}
        start = 0
        for row, (handle, num_tokens) in enumerate(zip(self.handles, self.num_tokens, strict=True)):
            yield StepOutput(
                self.step_number,
                [handle],
                [num_tokens],
                self.token_ids[start : start + num_tokens],
                [finished[row]] if row in finished else [],
                [(0, first[row])] if row in first else [],
                [(0, parts[row])] if row in parts else [],
                None if self.token_logprobs is None else self.token_logprobs.row(handle),
                {handle: self.extras[handle]} if handle in self.extras else {},
            )
            start += num_tokens

    def append(self, other: StepOutput) -> None:
        """Add the rows of a step that has none of these handles."""
        row = len(self.handles)
        self.handles += other.handles
        self.num_tokens += other.num_tokens
        self.token_ids += other.token_ids
        self.finished += [replace(end, row=row + end.row) for end in other.finished]
        self.first += [(row + index, first) for index, first in other.first]
        self.parts += [(row + index, counts) for index, counts in other.parts]
        if other.token_logprobs is not None:
            self.token_logprobs = self.token_logprobs or LogprobDeltas()
            self.token_logprobs.merge(other.token_logprobs)
        self.extras |= other.extras


class UnreadSteps:
    """Steps that the session has not read yet. Adding one costs its rows, however many are unread."""

    def __init__(self) -> None:
        self.size_bytes = 0  # approximate size on the wire
        self._recent: list[StepOutput] = []
        # All older steps, merged, by handle.
        self._tokens: dict[int, list[int]] = {}
        self._counts: dict[int, list[int]] = {}
        self._finished: dict[int, FinishedRow] = {}
        self._first: dict[int, FirstOutput] = {}
        self._token_logprobs: LogprobDeltas | None = None
        self._extras: dict[int, Extras] = {}

    @property
    def is_empty(self) -> bool:
        return not self._recent and not self._tokens

    def add(self, output: StepOutput) -> None:
        """Append `output`; older steps are merged, so that the number kept stays limited."""
        self.size_bytes += 12 * len(output.handles) + 4 * len(output.token_ids)
        if output.token_logprobs is not None:
            self.size_bytes += output.token_logprobs.size_bytes
        if output.extras:
            self.size_bytes += _extras_bytes(output.extras)
        if len(self._recent) == _MAX_UNMERGED_STEPS:
            self._merge_recent()
        self._recent.append(output)

    def merged(self) -> StepOutput:
        """All steps as one, with the number of the last."""
        if len(self._recent) == 1 and not self._tokens:
            return self._recent[0]
        merged = StepOutput(self._recent[-1].step_number)
        ends = [output.ended_at for output in self._recent if output.ended_at is not None]
        merged.ended_at = ends[-1] if ends else None
        self._merge_recent()
        merged.token_logprobs = self._token_logprobs
        merged.extras = self._extras
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

    def _merge_recent(self) -> None:
        for run in _runs(self._recent):
            if len(run) > 1:
                self._merge_columns(run)
            else:
                self._merge_rows(run[0])
            for output in run:
                for end in output.finished:
                    self._note_end(output.handles[end.row], end)
                self._first.update((output.handles[row], first) for row, first in output.first)
                if output.token_logprobs is not None:
                    self._token_logprobs = self._token_logprobs or LogprobDeltas()
                    self._token_logprobs.merge(output.token_logprobs)
                for handle, extras in output.extras.items():
                    self._extras[handle] = merge_extras(self._extras.get(handle, {}), extras)
        self._recent.clear()
        self.size_bytes = sum(12 + 4 * len(token_ids) for token_ids in self._tokens.values())
        if self._token_logprobs is not None:
            self.size_bytes += self._token_logprobs.size_bytes
        self.size_bytes += _extras_bytes(self._extras)

    def _note_end(self, handle: int, end: FinishedRow) -> None:
        """Keep how a turn has ended where its request has ended behind it, as no row has two ends."""
        turn = self._finished.get(handle)
        if turn is not None and turn.turn_ended and end.reason is FinishReason.ABORT:
            end = replace(turn, turn_ended=False)
        self._finished[handle] = end

    def _merge_rows(self, output: StepOutput) -> None:
        start = 0
        for handle, num_tokens in zip(output.handles, output.num_tokens, strict=True):
            self._tokens.setdefault(handle, []).extend(output.token_ids[start : start + num_tokens])
            counts = self._counts.setdefault(handle, [])
            if num_tokens:
                counts.append(num_tokens)
            start += num_tokens
        for row, parts in output.parts:
            # The row has tokens of several steps, counted as one above.
            self._counts[output.handles[row]][-1:] = parts

    def _merge_columns(self, run: Sequence[StepOutput]) -> None:
        """The same for steps of equal handles with one token each, in a tenth of the time."""
        ones = [1] * len(run)
        columns = zip(*(output.token_ids for output in run), strict=True)
        for handle, token_ids in zip(run[0].handles, columns, strict=True):
            self._tokens.setdefault(handle, []).extend(token_ids)
            self._counts.setdefault(handle, []).extend(ones)


def _extras_bytes(extras: dict[int, Extras]) -> int:
    return sum(extra.size_bytes for of_row in extras.values() for extra in of_row.values())


def _runs(outputs: Iterable[StepOutput]) -> Iterator[list[StepOutput]]:
    """Consecutive steps of equal handles with one token each as one run, every other step by itself."""
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


def split(output: StepOutput, max_bytes: int = MAX_PIECE_BYTES) -> list[StepOutput]:
    """`output` as a list of steps with the same number and, one after the other, the same content.

    Each takes at most `max_bytes` as a message, except where a single position alone takes more.
    """
    if _WireSize.of(output).num_bytes <= max_bytes:
        return [output]
    parts = [part for row in output.rows() for part in _split_row(row, max_bytes)]
    # In one message the logprob columns of all rows are as wide as the widest row's. Sorting keeps the parts
    # of a row in order: extras have no such column, and all tokens of a request have the same width.
    parts.sort(key=lambda part: _WireSize.of(part).num_entries)
    pieces = list(_packed(parts, max_bytes))
    for piece in pieces:
        piece.ended_at = output.ended_at
    return pieces


def _details_bytes(end: FinishedRow) -> int:
    """A limit of the details of an error, whose texts are cut."""
    return _DETAILS_BYTES if end.error_reason else 0


@dataclass(frozen=True, slots=True)
class _WireSize:
    """An upper limit of what a step takes on the wire."""

    num_fixed_bytes: int = 0  # without the logprob columns of new tokens
    num_tokens: int = 0
    num_entries: int = 0  # in these columns, for each token

    @staticmethod
    def of(output: StepOutput) -> _WireSize:
        num_tokens = len(output.token_ids)
        num_bytes = _ROW_BYTES * len(output.handles) + _TOKEN_BYTES * num_tokens
        # A character takes at most four bytes.
        num_bytes += sum(4 * len(end.message) + _details_bytes(end) for end in output.finished)
        num_bytes += _extras_bytes(output.extras)
        if output.token_logprobs is None:
            return _WireSize(num_bytes, num_tokens)
        widths = (1 + column.k for column in output.token_logprobs.sampled.values())
        return _WireSize(num_bytes, num_tokens, max(widths, default=0))

    @property
    def num_bytes(self) -> int:
        return self.num_fixed_bytes + self.num_tokens * self.num_entries * _ENTRY_BYTES

    def plus(self, other: _WireSize) -> _WireSize:
        """The size of both in one message."""
        return _WireSize(
            self.num_fixed_bytes + other.num_fixed_bytes,
            self.num_tokens + other.num_tokens,
            max(self.num_entries, other.num_entries),
        )


def _split_row(row: StepOutput, max_bytes: int) -> Iterator[StepOutput]:
    """One row as several steps: its extras, then its tokens; the last one ends it."""
    (handle,), token_logprobs = row.handles, row.token_logprobs or LogprobDeltas()
    for kind, extra in row.extras.get(handle, {}).items():
        for part in extra.split(max_bytes - _ROW_BYTES):
            yield StepOutput(row.step_number, [handle], [0], extras={handle: {kind: part}})
    if row.extras and not (row.token_ids or row.finished or row.first):
        return
    bare = replace(row, token_ids=[], token_logprobs=None, extras={})
    num_fixed_bytes = _WireSize.of(bare).num_fixed_bytes
    token_bytes = _TOKEN_BYTES + _WireSize.of(row).num_entries * _ENTRY_BYTES
    counts = row.parts[0][1] if row.parts else row.num_tokens
    groups = list(_group_counts(counts, max(1, (max_bytes - num_fixed_bytes) // token_bytes)))
    end = 0
    for index, group in enumerate(groups):
        start, end = end, end + sum(group)
        yield StepOutput(
            row.step_number,
            [handle],
            [end - start],
            row.token_ids[start:end],
            row.finished if index == len(groups) - 1 else [],
            row.first if index == 0 else [],
            [(0, group)] if len(group) > 1 else [],
            token_logprobs.slice(handle, start, end),
        )


def _group_counts(counts: Iterable[int], max_tokens: int) -> Iterator[list[int]]:
    """Steps' token counts in groups of at most `max_tokens`. Only a step with more than that is cut."""
    group: list[int] = []
    num_tokens = 0
    for count in counts:
        if group and num_tokens + count > max_tokens:
            yield group
            group, num_tokens = [], 0
        while count > max_tokens:
            yield [max_tokens]
            count -= max_tokens
        group.append(count)
        num_tokens += count
    yield group


def _packed(parts: Iterable[StepOutput], max_bytes: int) -> Iterator[StepOutput]:
    """The parts in messages, filled as far as they fit, but never with two of one row."""
    packed, size, handles = StepOutput(0), _WireSize(), set[int]()
    for part in parts:
        part_size = _WireSize.of(part)
        both = size.plus(part_size)
        if handles and (both.num_bytes > max_bytes or part.handles[0] in handles):
            yield packed
            handles.clear()
        if not handles:
            packed, both = StepOutput(part.step_number), part_size
        size = both
        handles.update(part.handles)
        packed.append(part)
    yield packed
