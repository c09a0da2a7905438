"""A step that is too large for one message, in several: cut between rows, and rows between places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from engine_svc.step import PromptPlaces
from engine_svc.step_output import StepOutput
from engine_svc.told import Told

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
    if output.told is None:
        return _Weight(num_bytes, num_tokens)
    num_bytes += sum(_run_bytes(run) for runs in output.told.prompts.values() for run in runs)
    num_entries = max((1 + told.k for told in output.told.sampled.values()), default=0)
    return _Weight(num_bytes, num_tokens, num_entries)


def _run_bytes(run: PromptPlaces) -> int:
    # The place before all others is added on the wire.
    return _RUN_BYTES + (1 + len(run.told.ranks)) * (1 + run.told.k) * _ENTRY_BYTES


def _rows(output: StepOutput) -> Iterator[StepOutput]:
    """Each row as a step of its own."""
    first, parts = dict(output.first), dict(output.parts)
    finished = {end.row: replace(end, row=0) for end in output.finished}
    told, start = output.told or Told(), 0
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
        alone.told = Told(
            {handle: told.sampled[handle]} if handle in told.sampled else {},
            {handle: told.prompts[handle]} if handle in told.prompts else {},
        )
        yield alone


def _parts_of(row: StepOutput, max_bytes: int) -> Iterator[StepOutput]:
    """One row as several steps: what is told of its prompt, then its tokens, with its end at the last."""
    (handle,), told = row.handles, row.told or Told()
    for runs in _grouped_runs(told.prompts.get(handle, ()), max_bytes - _ROW_BYTES):
        yield StepOutput(row.step_number, [handle], [0], told=Told(prompts={handle: runs}))
    if told.prompts and not (row.token_ids or row.finished or row.first):
        return
    weight = _weigh(replace(row, token_ids=[], told=None))
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
        if handle in told.sampled:
            part.told = Told({handle: told.sampled[handle].part(start, end)})
        yield part


def _grouped_runs(runs: Iterable[PromptPlaces], max_bytes: int) -> Iterator[list[PromptPlaces]]:
    """Places of a prompt, in runs that are no longer than may be, as many together as may be."""
    group: list[PromptPlaces] = []
    num_bytes = 0
    for run in runs:
        max_places = max(1, (max_bytes - _RUN_BYTES) // ((1 + run.told.k) * _ENTRY_BYTES) - 1)
        for first in range(0, max(1, len(run.told.ranks)), max_places):
            places = PromptPlaces(run.first_position + first, run.told.part(first, first + max_places))
            size = _run_bytes(places)
            if group and num_bytes + size > max_bytes:
                yield group
                group, num_bytes = [], 0
            group.append(places)
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
    if part.told is not None:
        packed.told = packed.told or Told()
        packed.told.add(part.told)
