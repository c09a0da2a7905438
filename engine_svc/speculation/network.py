"""Proposes what a small network predicts: a model of its own, or a head over the target's hidden states.

Its KV is a cache of its own by row, so that prefix hits, preemption and migration of the target's KV do not
concern it: a row begins again with what its tokens, or the hidden states at hand, give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.core.step import AdmittedRequest
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.facts import KVShape, ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.speculation.row_cache import BLOCK_SIZE, RowCache, cache_bytes

Ints = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]
# Chooses tokens [N] int64 from logits [N, V], for `rows` at `positions`, with the noise of those positions.
Draw = Callable[[Tensor, Ints, Ints], Tensor]

# Hidden states of so many tokens of a row are kept until its next drafts; with more, the row begins again.
_MOST_PENDING = 64


class DraftNetwork(Protocol):
    """Predicts the next token from each of a few.

    hidden_size: of the target's hidden states that it reads for each token; 0: none.  hidden_layers: before
    which of the target's layers they are taken, () for those that the target's logits are computed from.
    """

    kv_shapes: tuple[KVShape, ...]
    dtype: torch.dtype
    max_position: int
    vocab_size: int
    hidden_size: int
    hidden_layers: tuple[int, ...]

    def enter(self, hidden: Tensor) -> Tensor:
        """The target's hidden states [T, hidden_size] in the form that `forward` takes."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
        rows: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [N, V] of the tokens at `rows`, and their hidden states, for the tokens that follow them.

        token_ids, positions: [T] int64.  hidden: of the token before each of them.
        """


class ModelNetwork:
    """A model of its own, which reads tokens alone."""

    hidden_size: int = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: Model, facts: ModelFacts) -> None:
        self._model = model
        self.kv_shapes = facts.kv_shapes
        self.dtype: torch.dtype = getattr(torch, facts.dtype)
        self.max_position, self.vocab_size = facts.max_position, facts.vocab_size

    def enter(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
        rows: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, None]:
        return self._model.forward(token_ids, positions, rows, context), None


class NetworkProposer:
    """Proposes for several rows at once, one forward for each draft of the row with most."""

    def __init__(
        self,
        make_network: Callable[[Model, Checkpoint], DraftNetwork],
        model: Model,
        checkpoint: Checkpoint,
        *,
        num_rows: int,
        num_drafts: int,
        vocab_size: int,
        window: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        """make_network: makes it for a target and its checkpoint, also after these were replaced.
        num_drafts: at most, of a row.  window: tokens of a row that the network attends to.  max_tokens: at
        most, of a forward.
        """
        self._make_network = make_network
        network = make_network(model, checkpoint)
        self._network: DraftNetwork | None = network
        self.num_bytes = cache_bytes(network.kv_shapes, network.dtype, num_rows, window)
        self._num_drafts, self._vocab_size, self._device = num_drafts, vocab_size, device
        self._cache = RowCache(network.kv_shapes, network.dtype, num_rows, window, device)
        # A head reads a token together with the hidden state before it, so it is one token behind.
        self._shift = 1 if network.hidden_size else 0
        self._chunk = min(max_tokens, max(1, self._cache.capacity - 2 * BLOCK_SIZE - num_drafts))
        self._max_tokens = max_tokens
        self._max_position, self._last_token = network.max_position, network.vocab_size - 1
        self._num_pending = max(_MOST_PENDING, 2 * (num_drafts + 1))
        size = (num_rows, self._num_pending, network.hidden_size)
        self._hidden = torch.zeros(
            size, dtype=network.dtype, device=device
        )  # of a position, by its remainder
        self._hidden_ends: Ints = np.zeros(num_rows, dtype=np.int64)
        self._drafts = np.zeros(num_rows, dtype=bool)

    @property
    def hidden_layers(self) -> tuple[int, ...] | None:
        network = self._network
        return network.hidden_layers if network is not None and network.hidden_size else None

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._cache.begin(row, 0)
        self._hidden_ends[row] = 0
        self._drafts[row] = admitted.sampling.max_draft_tokens != 0

    def remove_row(self, row: int, token_ids: TokenIds) -> None: ...

    def observe(
        self, token_ids: TokenIds, rows: Ints, starts: Ints, counts: Ints, lengths: Ints, hidden: Tensor
    ) -> None:
        """Take the target's hidden states [T, hidden_size] of a step, for a network that reads them.

        rows, starts, counts: [R], as in StepInputs.  lengths: [R], how many tokens of each row are known.
        """
        ends = starts + counts
        # Without what came before, as after a prefix hit: the row begins here.
        for row, start in zip(
            *(column[starts > self._hidden_ends[rows]] for column in (rows, starts)), strict=True
        ):
            self._cache.begin(row, start)
        self._hidden_ends[rows] = ends
        of_rows, positions = np.repeat(rows, counts), _positions(starts, counts)
        newest = (positions >= np.repeat(ends, counts) - self._num_pending).nonzero()[0]
        if len(newest) < len(positions):
            if self._network is not None:
                self._read_chunks(self._network, token_ids, rows, starts, counts, lengths, hidden)
            of_rows, positions = of_rows[newest], positions[newest]
            hidden = hidden.index_select(0, self._send(newest))
        self._hidden[self._send(of_rows), self._send(positions % self._num_pending)] = hidden

    def propose(
        self, token_ids: TokenIds, rows: Ints, lengths: Ints, limits: Ints, draw: Draw
    ) -> list[list[int]]:
        """Up to `limits` tokens for each of `rows`, 1 or more, to follow the `lengths` known ones.

        token_ids: [all rows, L].  rows, lengths, limits: [R].
        """
        network, cache = self._network, self._cache
        proposed: list[list[int]] = [[] for _ in rows]
        if network is None:
            return proposed
        if self._shift:
            for row in rows[cache.ends[rows] < self._hidden_ends[rows] - self._num_pending]:
                cache.begin(row, self._hidden_ends[row] - self._num_pending)
        ends = lengths - self._shift
        missing = np.where(ends + self._num_drafts < self._max_position, ends - cache.ends[rows], 0)
        counts = np.minimum(missing, self._chunk)
        counts = np.clip(self._max_tokens - (np.cumsum(counts) - counts), 0, counts)
        # Rows with most drafts first: each forward computes the first so many.
        order = np.argsort(-limits, kind="stable")
        order = order[counts[order] > 0]
        if not len(order):
            return proposed
        is_ready = counts[order] == missing[order]
        found_rows, counts = rows[order], counts[order]
        hidden = self._pending(network, found_rows, counts)
        logits, hidden = self._advance(network, token_ids, found_rows, counts, hidden, is_ready)
        order = order[is_ready]
        if not len(order):
            return proposed
        rows, lengths, ends, limits = rows[order], lengths[order], ends[order], limits[order]
        tokens = draw(logits[:, : self._vocab_size].float(), rows, lengths)
        columns = [tokens]
        for depth in range(1, int(limits[0])):
            num_rows = int((limits > depth).sum())
            rows, tokens = rows[:num_rows], tokens[:num_rows]
            positions = ends[:num_rows] + depth - 1
            logits, hidden = network.forward(
                tokens.clamp(max=self._last_token),
                self._send(positions),
                None if hidden is None else hidden[:num_rows],
                torch.arange(num_rows, device=self._device),
                cache.context(rows, np.ones_like(rows), ahead=depth - 1),
            )
            tokens = draw(logits[:, : self._vocab_size].float(), rows, lengths[:num_rows] + depth)
            columns.append(tokens)
        for column in columns:
            for index, token in zip(order.tolist(), column.tolist(), strict=False):
                proposed[index].append(token)
        return proposed

    def rehearse(self, num_rows: int) -> None:
        """Compute a draft for so many rows, none of them in use."""
        network, rows = self._network, np.arange(num_rows)
        if network is None:
            return
        nothing = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        hidden = network.enter(self._hidden[:num_rows, 0]) if self._shift else None
        network.forward(
            nothing,
            nothing,
            hidden,
            torch.arange(num_rows, device=self._device),
            self._cache.context(rows, np.ones_like(rows)),
        )

    def release(self) -> None:
        """Release weights and memory. No row may be in use."""
        self._network = None
        self._cache.release()

    def restore(self, model: Model, checkpoint: Checkpoint) -> None:
        """Load the weights, for a target that is on the device; the present ones are dropped.

        Raises CheckpointError or UnsupportedModel; then nothing is proposed.
        """
        self.release()
        self._network = self._make_network(model, checkpoint)
        self._cache.allocate()

    def _read_chunks(
        self,
        network: DraftNetwork,
        token_ids: TokenIds,
        rows: Ints,
        starts: Ints,
        counts: Ints,
        lengths: Ints,
        hidden: Tensor,
    ) -> None:
        """Compute the KV of rows of which more hidden states came than are kept."""
        firsts = np.cumsum(counts) - counts
        for index in (counts > self._num_pending).nonzero()[0]:
            row, start = rows[index : index + 1], int(starts[index])
            if not self._drafts[row[0]]:
                continue
            if self._cache.ends[row[0]] != start:
                self._cache.begin(int(row[0]), start)
            # The last token of a prompt is followed by one that is not known yet.
            end = min(start + int(counts[index]), int(lengths[index]) - 1)
            for first in range(start, end, self._chunk):
                count = min(self._chunk, end - first)
                offset = int(firsts[index]) + first - start
                part = network.enter(hidden[offset : offset + count])
                self._advance(network, token_ids, row, np.array([count]), part, np.zeros(1, dtype=bool))

    def _advance(
        self,
        network: DraftNetwork,
        token_ids: TokenIds,
        rows: Ints,
        counts: Ints,
        hidden: Tensor | None,
        is_read: npt.NDArray[np.bool_],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the next `counts` tokens of each row, and keep their KV; results of those rows' last."""
        cache = self._cache
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            cache.make_room(row, count + self._num_drafts)
        positions = _positions(cache.ends[rows], counts)
        tokens = token_ids[np.repeat(rows, counts), positions + self._shift].astype(np.int64)
        found = network.forward(
            self._send(np.clip(tokens, 0, self._last_token)),
            self._send(positions),
            hidden,
            self._send(np.cumsum(counts)[is_read] - 1),
            cache.context(rows, counts),
        )
        cache.advance(rows, counts)
        return found

    def _pending(self, network: DraftNetwork, rows: Ints, counts: Ints) -> Tensor | None:
        if not self._shift:
            return None
        positions = _positions(self._cache.ends[rows], counts) % self._num_pending
        return network.enter(self._hidden[self._send(np.repeat(rows, counts)), self._send(positions)])

    def _send(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _positions(starts: Ints, counts: Ints) -> Ints:
    """Of each row, `counts` positions from its start, one row after the other."""
    positions: Ints = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return positions
