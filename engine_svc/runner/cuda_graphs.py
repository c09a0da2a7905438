"""Decode steps recorded once for a few batch sizes and replayed: one launch per step instead of hundreds.

Knows no plan and no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_svc.model.context import ForwardContext, LayerCache
from engine_svc.runner.input_batch import StepInputs
from triptych_kernels import AttentionBatch, StateBatch

# Records what a function does on the device; the result repeats it.
Record = Callable[[Callable[[], None]], Callable[[], None]]


class _Model(Protocol):
    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor: ...


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to record: 1, 2, 4, then multiples of 8, with larger gaps from 256 on."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 32, 32)]
    return sorted({min(size, max_num_seqs) for size in sizes})


class DecodeGraphs:
    """One recorded forward per size; a batch is padded to the next size.

    Padding rows have one token, at position 0 of the placeholder block; they read no state and store nothing.
    """

    def __init__(
        self,
        model: _Model,
        layers: Sequence[LayerCache],
        *,
        sizes: Sequence[int],
        num_groups: int,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        record: Record,
        state_layers: Sequence[tuple[Tensor, ...]] = (),
    ) -> None:
        """state_layers: see ForwardContext."""
        largest = max(sizes)
        self._model, self._layers, self._state_layers = model, layers, state_layers
        self._sizes = sorted(sizes)
        self._block_size, self._max_model_len = block_size, max_model_len
        num_columns = -(-(max_model_len + 2) // block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._token_ids, self._positions = zeros(largest), zeros(largest)
        self._slots = [zeros(largest).fill_(-1) for _ in range(num_groups)]
        self._tables = [zeros(largest, num_columns, dtype=torch.int32) for _ in range(num_groups)]
        self._totals = zeros(largest, dtype=torch.int32).fill_(1)
        self._read_slots = zeros(largest, dtype=torch.int32).fill_(-1)
        self._write_slots = self._read_slots.clone()
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(largest, device=device)
        # One buffer for all sizes: a result per size would stay allocated as long as its graph.
        self._logits = zeros(largest, vocab_size, dtype=torch.float32)
        # The largest first, so that the smaller ones reuse its memory.
        self._replays = {size: self._record(size, record) for size in reversed(self._sizes)}

    def has_room(self, num_rows: int) -> bool:
        return num_rows <= self._sizes[-1]

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [N, V] of the rows that sample; they may be written, and are valid until the next call."""
        num_rows = len(inputs.rows)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._fill(inputs, num_rows, size)
        self._replays[size]()
        if len(inputs.sampling_rows) == num_rows == len(inputs.logit_rows):
            # No other rows in the step. Its sampling comes before the next replay on the same stream.
            return self._logits[:num_rows]
        return self._logits[inputs.logit_rows]

    def _fill(self, inputs: StepInputs, num_rows: int, size: int) -> None:
        self._token_ids[:num_rows] = inputs.token_ids
        self._positions[:num_rows] = inputs.positions
        self._positions[num_rows:size] = 0
        self._totals[:num_rows] = inputs.attention[0].total_lengths
        self._totals[num_rows:size] = 1
        # Without groups there is a batch for the rows' lengths alone.
        groups = zip(self._slots, self._tables, inputs.slot_mappings, inputs.attention, strict=False)
        for slots, tables, slot_mapping, attention in groups:
            slots[:num_rows] = slot_mapping
            slots[num_rows:size] = -1
            tables[:num_rows, : attention.block_tables.shape[1]] = attention.block_tables
            tables[num_rows:size, 0] = 0
        if inputs.states is not None:
            self._read_slots[:num_rows] = inputs.states.read_slots
            self._write_slots[:num_rows] = inputs.states.write_slots
            self._read_slots[num_rows:size] = -1
            self._write_slots[num_rows:size] = -1

    def _record(self, size: int, record: Record) -> Callable[[], None]:
        def forward() -> None:
            self._logits[:size] = self._model.forward(
                self._token_ids[:size], self._positions[:size], self._rows[:size], self._context(size)
            )

        return record(forward)

    def _context(self, size: int) -> ForwardContext:
        # Made for each recording: what an op keeps in a batch for all layers has to be part of the recording.
        return ForwardContext(
            self._layers,
            [slots[:size] for slots in self._slots],
            [
                AttentionBatch(
                    block_tables=table[:size],
                    query_starts=self._starts[: size + 1],
                    total_lengths=self._totals[:size],
                    block_size=self._block_size,
                    max_query_length=1,
                    max_total_length=self._max_model_len,
                )
                for table in self._tables
            ],
            states=self._states(size),
            state_layers=self._state_layers,
        )

    def _states(self, size: int) -> StateBatch | None:
        if not self._state_layers:
            return None
        return StateBatch(
            query_starts=self._starts[: size + 1],
            total_lengths=self._totals[:size],
            read_slots=self._read_slots[:size],
            write_slots=self._write_slots[:size],
            max_query_length=1,
        )


class CudaRecorder:
    """Records with CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A separate stream, shared by all graphs. cuBLAS keeps a workspace per stream, which no memory
        # statistics show, and that of the stream on which torch records by default may be freed with its
        # graphs.
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` once, so that kernels are compiled, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay
