"""The running requests as rows that persist on the device, and the inputs of a step made from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.core.extras import Extras
from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.runner.sampling.transfer import Ints, to_device
from engine_svc.runner.state_rows import StateRows
from triptych_kernels import AttentionBatch, StateBatch

_NO_DRAFT: Ints = np.array([-1], dtype=np.int64)

# The items have 4 bytes or more, so that a column begins at a multiple of 16 bytes.
_ALIGNED_ITEMS = 4


@dataclass(frozen=True, slots=True)
class DraftEntries:
    """The drafts among a step's N sampled tokens. A row with D drafts has D + 1 entries, one after the other.

    following: [N] int64, the draft that the sampled token has to equal for the next entry to count; -1 in the
    last entry of each row.
    """

    following: Ints

    @property
    def preceding(self) -> Ints:
        """[N] int64, the draft before the token to be sampled; -1 in the first entry of each row."""
        return np.concatenate((_NO_DRAFT, self.following[:-1]))

    def find_valid(self, token_ids: Ints, is_finite: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Mask [N] of the sampled tokens that count: those after drafts that were sampled as well.

        A token without a finite logit counts only as a row's first: the next step repeats it there.
        """
        is_first = self.preceding < 0
        is_met = (token_ids == self.following) & is_finite
        num_misses = np.cumsum(~is_met) - ~is_met  # before each entry
        in_own_row = num_misses - num_misses[is_first].repeat(
            np.diff(is_first.nonzero()[0], append=len(is_met))
        )
        is_after_hits: npt.NDArray[np.bool_] = in_own_row == 0
        return is_after_hits & (is_finite | is_first)


@dataclass(slots=True)
class StepInputs:
    """A step's rows flattened: first the tokens of the plan's row 0, then of row 1, and so on.

    token_ids, positions: [T] int64.  slot_mappings: per group, [T] int64.  logit_rows: [N] int64, the indices
    of the last tokens of rows that sample, with drafts also of those before.  rows: [R], the batch's row of
    each of the plan's rows.  counts, starts: [R], their tokens in the step, and those with KV before it.
    sampling_rows: [N], those that sample, once for each token; sampling_positions: [N], the positions of the
    tokens to sample.  drafts: None if the step has none.  states: None for a model without states.
    extras: the parts of the plan that features' scheduler halves attached.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: list[Tensor]
    attention: list[AttentionBatch]
    logit_rows: Tensor
    rows: Ints
    counts: Ints
    starts: Ints
    sampling_rows: Ints
    sampling_positions: Ints
    drafts: DraftEntries | None = None
    states: StateBatch | None = None
    extras: Extras = field(default_factory=dict)

    def with_logits_of(self, more: Sequence[Ints]) -> StepInputs:
        """The same with the logits of further tokens of the step, after those of the rows that sample."""
        indices = to_device(np.concatenate(more), self.logit_rows.device)
        return replace(self, logit_rows=torch.cat([self.logit_rows, indices]))

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one token."""
        return len(self.rows) == self.token_ids.shape[0]

    @property
    def verifies_alone(self) -> bool:
        """Whether every token is the last of a row or one of its drafts: the step has no prompt's."""
        return self.drafts is not None and len(self.sampling_rows) == self.token_ids.shape[0]

    def by_token(self) -> StepInputs:
        """The same with a row for each token, as a decode step has them; all share their row's blocks.

        A layer writes the KV of all tokens before any of them attends, so results are the same.
        """
        device, num_tokens = self.token_ids.device, self.token_ids.shape[0]
        of_token = np.repeat(np.arange(len(self.rows)), self.counts)
        indices = to_device(of_token, device)
        query_starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        total_lengths = (self.positions + 1).int()
        attention = [
            AttentionBatch(
                batch.block_tables.index_select(0, indices),
                query_starts,
                total_lengths,
                batch.block_size,
                1,
                batch.max_total_length,
            )
            for batch in self.attention
        ]
        within = np.arange(num_tokens) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return replace(
            self,
            attention=attention,
            rows=self.rows[of_token],
            counts=np.ones_like(of_token),
            starts=self.starts[of_token] + within,
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """The part of a step's inputs that depends on its rows and token counts alone, without drafts.

    Tensors are on the device.  counts, rows: [R].  row_of_token: [T].  ends: [R], ends of the rows' tokens.
    sampling_tokens: [N], the tokens after which one is sampled; None if that is the last of each row.
    tables: per group, of `rows`, kept on a host until a row changes.
    """

    request_ids: list[str]
    num_tokens: list[int]
    sampling: list[bool]
    rows: Ints
    counts: Ints
    row_of_token: Ints
    ends: Ints
    sampling_tokens: Ints | None
    sampling_rows: Ints
    device_rows: Tensor  # row_of_token
    batch_rows: Tensor
    logit_rows: Tensor
    query_starts: Tensor
    max_count: int
    tables: list[Tensor] = field(default_factory=list)

    def is_of(self, plan: StepPlan) -> bool:
        """Whether the plan has the same rows and counts. Consecutive decode steps mostly do."""
        return (
            plan.num_tokens == self.num_tokens
            and plan.samples == self.sampling
            and plan.request_ids == self.request_ids
        )


class InputBatch:
    """One row per admitted request; the row is free again once the request is released.

    Token ids are kept on the device: sampled ones are written there without waiting for the host. Block
    tables are kept on the host, where plans change them; changed rows are copied to the device.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
        states: StateRows | None = None,
        device: torch.device | None = None,
    ) -> None:
        """num_groups: of attention.  states: for a model with states, whose group is after these."""
        self.device = device or torch.device("cpu")
        self._block_size = block_size
        self.num_groups = num_groups
        self._groups = range(num_groups)
        self._states = states
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # A step planned before the end of the longest sequence is known samples one more token. Untouched
        # memory costs nothing, so every row has room for the maximum length.
        self.token_ids = torch.empty(max_num_seqs, max_model_len + 2, dtype=torch.int32, device=self.device)
        self._is_on_host = self.device.type == "cpu"
        # The same memory as a numpy array, which writes a few elements faster.
        self._host_token_ids = (
            self.token_ids.numpy() if self._is_on_host else np.empty((0, 0), dtype=np.int32)
        )
        num_columns = -(-(max_model_len + 2) // block_size)
        self._tables = np.zeros((num_groups, max_num_seqs, num_columns), dtype=np.int32)
        self._num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self._no_blocks = torch.zeros(max_num_seqs, 0, dtype=torch.int32, device=self.device)
        self._device_tables = torch.from_numpy(self._tables).to(self.device)
        self._changed_rows: set[int] = set()
        self._layout: _Layout | None = None

    def release(self, request_ids: Iterable[str]) -> list[int]:
        """Free the rows of requests; returns them. Skips requests without one, as failed steps leave them."""
        rows = [self.row_of.pop(request_id) for request_id in request_ids if request_id in self.row_of]
        if rows:
            self._layout = None
            self._free_rows += rows
        return rows

    def enter(self, admitted: AdmittedRequest) -> int:
        """Give a request a row; returns the row."""
        self._layout = None
        return self._enter(admitted)

    def extend(self, plan: StepPlan) -> list[int]:
        """Append the blocks that the plan's rows gain; returns those that came without KV."""
        fresh: list[int] = []
        if self._states is not None:
            self._states.begin_step()
        for index, block_ids in enumerate(plan.new_block_ids):
            if block_ids:
                row = self.row_of[plan.request_ids[index]]
                for group in self._groups:
                    if gained := block_ids[group]:
                        fresh += self._extend(group, row, gained, plan.num_computed_tokens[index])
                if self._states is not None and block_ids[-1]:
                    self._states.extend(row, block_ids[-1], plan.num_computed_tokens[index])
        return fresh

    def _enter(self, admitted: AdmittedRequest) -> int:
        assert admitted.request_id not in self.row_of, f"{admitted.request_id} is already in the batch"
        row = self.row_of[admitted.request_id] = self._free_rows.pop()
        known = np.array(admitted.token_ids, dtype=np.int32)
        self.token_ids[row, : len(admitted.token_ids)] = to_device(known, self.device)
        for group in self._groups:
            block_ids = admitted.block_ids[group]
            self._tables[group, row, : len(block_ids)] = block_ids
            self._num_blocks[group, row] = len(block_ids)
        if self._states is not None:
            self._states.enter(row, admitted.block_ids[-1])
        self._changed_rows.add(row)
        return row

    def _extend(self, group: int, row: int, block_ids: list[int], num_computed: int) -> list[int]:
        start = int(self._num_blocks[group, row])
        end = start + len(block_ids)
        self._tables[group, row, start:end] = block_ids
        self._num_blocks[group, row] = end
        self._changed_rows.add(row)
        num_with_kv = -(-num_computed // self._block_size)
        return block_ids[max(0, num_with_kv - start) :]

    def gather(self, plan: StepPlan) -> StepInputs:
        """The inputs of the plan's rows, which must have been applied."""
        layout, drafts = self._layout, None
        if any(plan.draft_token_ids):
            layout, drafts = self._lay_out(plan), _entries_of(plan)
            self._layout = None
        elif layout is None or not layout.is_of(plan):
            layout = self._layout = self._lay_out(plan)
        counts, row_of_token = layout.counts, layout.row_of_token
        starts = np.array(plan.num_computed_tokens, dtype=np.int64)
        totals = starts + counts
        if layout.max_count == 1:
            positions = starts
        else:
            positions = np.arange(len(row_of_token)) + np.repeat(totals - layout.ends, counts)
        size = self._block_size
        columns = positions // size
        offsets = positions - columns * size
        slots = [table[row_of_token, columns] * np.int64(size) + offsets for table in self._tables]
        device_positions, *device_slots = self._send([positions, *slots])
        (total_lengths,) = self._send([totals.astype(np.int32)])
        max_total = int(totals.max())
        # Without groups there is one batch without blocks, for the rows' lengths.
        tables = self._gathered_tables(layout, -(-max_total // size)) or [self._no_blocks[: len(counts)]]
        num_common = plan.num_common_blocks or itertools.repeat(0)
        states = self._states
        return StepInputs(
            token_ids=self._known_tokens(row_of_token, positions, layout.device_rows, device_positions),
            positions=device_positions,
            slot_mappings=device_slots,
            attention=[
                AttentionBatch(
                    table, layout.query_starts, total_lengths, size, layout.max_count, max_total, num_blocks
                )
                for table, num_blocks in zip(tables, num_common, strict=False)
            ],
            states=None if states is None else self._state_batch(states, layout, starts, total_lengths),
            logit_rows=layout.logit_rows,
            rows=layout.rows,
            counts=counts,
            starts=starts,
            sampling_rows=layout.sampling_rows,
            sampling_positions=(
                totals if layout.sampling_tokens is None else positions[layout.sampling_tokens] + 1
            ),
            drafts=drafts,
            extras=plan.extras,
        )

    def _state_batch(
        self, states: StateRows, layout: _Layout, starts: Ints, total_lengths: Tensor
    ) -> StateBatch:
        slots = states.gather(layout.rows, starts, layout.ends)
        read, write = self._send([slots.read.astype(np.int32), slots.write.astype(np.int32)])
        return StateBatch(layout.query_starts, total_lengths, read, write, layout.max_count)

    def _lay_out(self, plan: StepPlan) -> _Layout:
        num_rows = len(plan.request_ids)
        rows = np.fromiter(map(self.row_of.__getitem__, plan.request_ids), np.int64, num_rows)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        ends = np.cumsum(counts)
        max_count = int(counts.max())
        row_of_token = rows if max_count == 1 else np.repeat(rows, counts)
        sampling_tokens, sampling_rows = None, rows
        if not all(plan.samples) or any(plan.draft_token_ids):
            num_drafts = np.fromiter(map(len, plan.draft_token_ids), np.int64, num_rows)
            num_sampled = np.where(plan.samples, 1 + num_drafts, 0)
            before_end = num_sampled.cumsum().repeat(num_sampled) - np.arange(num_sampled.sum())
            sampling_tokens = ends.repeat(num_sampled) - before_end
            sampling_rows = rows.repeat(num_sampled)
        device_rows, batch_rows, logit_rows, query_starts = self._send(
            [
                row_of_token,
                rows,
                ends - 1 if sampling_tokens is None else sampling_tokens,
                np.concatenate(([0], ends)),
            ]
        )
        return _Layout(
            request_ids=plan.request_ids,
            num_tokens=plan.num_tokens,
            sampling=plan.samples,
            rows=rows,
            counts=counts,
            row_of_token=row_of_token,
            ends=ends,
            sampling_tokens=sampling_tokens,
            sampling_rows=sampling_rows,
            device_rows=device_rows,
            batch_rows=batch_rows,
            logit_rows=logit_rows,
            query_starts=query_starts.int(),
            max_count=max_count,
        )

    def append(self, rows: Ints, positions: Ints, token_ids: Tensor) -> None:
        """Write tokens at their positions in rows. token_ids: [N] int64, on the device."""
        if self._is_on_host:
            self._host_token_ids[rows, positions] = token_ids.numpy()
        else:
            indices = self._send([rows, positions])
            self.token_ids[indices[0], indices[1]] = token_ids.int()

    def _known_tokens(
        self, rows: Ints, positions: Ints, device_rows: Tensor, device_positions: Tensor
    ) -> Tensor:
        if self._is_on_host:
            return torch.from_numpy(self._host_token_ids[rows, positions].astype(np.int64))
        return self.token_ids[device_rows, device_positions].long()

    def table(self, group: int, row: int) -> list[int]:
        """The block ids of a row."""
        ids: list[int] = self._tables[group, row, : self._num_blocks[group, row]].tolist()
        return ids

    def _gathered_tables(self, layout: _Layout, num_columns: int) -> Sequence[Tensor]:
        if self._is_on_host:
            gathered = layout.tables
            if self._changed_rows or not gathered or gathered[0].shape[1] != num_columns:
                gathered[:] = [torch.from_numpy(table[layout.rows, :num_columns]) for table in self._tables]
                self._changed_rows.clear()
            return gathered
        if self._changed_rows:
            changed = np.fromiter(self._changed_rows, dtype=np.int64)
            content = torch.from_numpy(self._tables[:, changed]).pin_memory()
            (indices,) = self._send([changed])
            self._device_tables.index_copy_(1, indices, content.to(self.device, non_blocking=True))
            self._changed_rows.clear()
        return list(self._device_tables.index_select(1, layout.batch_rows)[:, :, :num_columns].unbind(0))

    def _send(self, columns: Sequence[npt.NDArray[np.integer]]) -> list[Tensor]:
        """The columns, all of one dtype, as tensors on the device, in one copy."""
        if self._is_on_host:
            return [torch.from_numpy(column) for column in columns]
        # Kernels are compiled again for addresses with another alignment.
        widths = [-(-len(column) // _ALIGNED_ITEMS) * _ALIGNED_ITEMS for column in columns]
        room = np.zeros(sum(widths), dtype=columns[0].dtype)
        starts = np.cumsum([0, *widths[:-1]]).tolist()
        for start, column in zip(starts, columns, strict=True):
            room[start : start + len(column)] = column
        packed = torch.from_numpy(room).pin_memory().to(self.device, non_blocking=True)
        return [packed[start : start + len(column)] for start, column in zip(starts, columns, strict=True)]


def _entries_of(plan: StepPlan) -> DraftEntries:
    following: list[int] = []
    for samples, drafts in zip(plan.samples, plan.draft_token_ids, strict=True):
        if samples:
            following += drafts
            following.append(-1)
    return DraftEntries(np.array(following, dtype=np.int64))
