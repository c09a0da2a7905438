"""The requests being run, as rows of columns that persist, and a step's inputs made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.step import AdmittedRequest, StepPlan
from triptych_kernels import AttentionBatch

_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """A step's rows flattened: first the tokens of the plan's row 0, then of row 1, and so on.

    token_ids, positions, slot_mapping: [T] int64.  logit_rows: [N] int64, last tokens of rows that sample.
    sampling_rows: [N], those rows of the batch.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionBatch
    logit_rows: Tensor
    sampling_rows: _Ints


class InputBatch:
    """A row per admitted request; the row is free again once the request is released.

    Columns are indexed by row. `lengths` counts known tokens, sampled ones included.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Never touched memory costs nothing, so every row may have the longest length.
        self.token_ids = np.empty((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.lengths = np.zeros(max_num_seqs, dtype=np.int64)
        self._block_tables = np.zeros((max_num_seqs, -(-(max_model_len + 1) // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        # Below this length a row may not end; 0 where that is no matter.
        self.min_lengths = np.zeros(max_num_seqs, dtype=np.int64)
        self.end_token_ids: list[list[int]] = [[] for _ in range(max_num_seqs)]

    def apply(self, plan: StepPlan) -> list[int]:
        """Release, admit and extend as the plan says. Returns the ids of blocks that came without KV."""
        for request_id in plan.released:
            self._free_rows.append(self._row_of.pop(request_id))
        for admitted in plan.admitted:
            self._enter(admitted)
        fresh: list[int] = []
        for request_id, block_ids, num_computed in zip(
            plan.request_ids, plan.new_block_ids, plan.num_computed_tokens, strict=True
        ):
            if block_ids:
                fresh += self._extend(self._row_of[request_id], block_ids[0], num_computed)
        return fresh

    def _enter(self, admitted: AdmittedRequest) -> None:
        assert admitted.request_id not in self._row_of, f"{admitted.request_id} is already in the batch"
        row = self._row_of[admitted.request_id] = self._free_rows.pop()
        sampling = admitted.sampling
        length = len(admitted.token_ids)
        self.token_ids[row, :length] = admitted.token_ids
        self.lengths[row] = length
        # One group: all layers share a block table.
        (block_ids,) = admitted.block_ids
        self._block_tables[row, : len(block_ids)] = block_ids
        self._num_blocks[row] = len(block_ids)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.seeds[row] = np.uint64(sampling.seed & (2**64 - 1)).astype(np.int64)
        ends = sorted(token_id for token_id in sampling.end_token_ids if 0 <= token_id < self._vocab_size)
        self.end_token_ids[row] = ends
        self.min_lengths[row] = admitted.num_prompt_tokens + sampling.min_tokens if ends else 0

    def _extend(self, row: int, block_ids: list[int], num_computed: int) -> list[int]:
        start = int(self._num_blocks[row])
        end = start + len(block_ids)
        self._block_tables[row, start:end] = block_ids
        self._num_blocks[row] = end
        num_with_kv = -(-num_computed // self._block_size)
        return block_ids[max(0, num_with_kv - start) :]

    def gather(self, plan: StepPlan) -> StepInputs:
        """The inputs of the plan's rows, which must have been applied."""
        rows = np.array([self._row_of[request_id] for request_id in plan.request_ids], dtype=np.int64)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        starts = np.array(plan.num_computed_tokens, dtype=np.int64)
        samples = np.array(plan.samples, dtype=bool)
        totals = starts + counts
        ends = np.cumsum(counts)
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(totals - ends, counts)
        blocks = self._block_tables[row_of_token, positions // self._block_size].astype(np.int64)
        num_columns = -(-int(totals.max()) // self._block_size)
        return StepInputs(
            token_ids=torch.from_numpy(self.token_ids[row_of_token, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * self._block_size + positions % self._block_size),
            attention=AttentionBatch(
                block_tables=torch.from_numpy(self._block_tables[rows, :num_columns]),
                query_lengths=torch.from_numpy(counts),
                total_lengths=torch.from_numpy(totals),
                block_size=self._block_size,
            ),
            logit_rows=torch.from_numpy((ends - 1)[samples]),
            sampling_rows=rows[samples],
        )

    def append(self, rows: _Ints, token_ids: _Ints) -> None:
        """Add one sampled token to each of the rows."""
        self.token_ids[rows, self.lengths[rows]] = token_ids
        self.lengths[rows] += 1
