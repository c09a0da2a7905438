"""Proposes what a small network predicts: a model of its own, or a head over the target's hidden states.

Its KV is a cache of its own by row, so that prefix hits, preemption and migration of the target's KV do not
concern it: of a row it reads what its tokens, or the hidden states at hand, give, and leaves out the rest.
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
from engine_svc.runner.sampling.transfer import Ints
from engine_svc.speculation.proposer import Draw, IntArray, Proposer
from engine_svc.speculation.row_cache import BLOCK_SIZE, RowCache, cache_bytes

# The newest tokens since a row's last drafts that are read before its next ones. Older ones are left out, as
# reading them costs about what drafts can gain.
_MOST_PENDING = 64


class DraftNetwork(Protocol):
    """Predicts the next token from each of a few.

    hidden_size: of the target's hidden states that it reads for each token; 0: none.  hidden_layers: before
    which of the target's layers they are taken, () for those that the target's logits are computed from.
    shared_bytes: of its weights, see LoadedModel.
    """

    kv_shapes: tuple[KVShape, ...]
    dtype: torch.dtype
    max_position: int
    vocab_size: int
    hidden_size: int
    hidden_layers: tuple[int, ...]
    shared_bytes: int

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

    def __init__(self, model: Model, facts: ModelFacts, shared_bytes: int = 0) -> None:
        self._model = model
        self.shared_bytes = shared_bytes
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


class NetworkProposer(Proposer):
    """Proposes for several rows at once, one forward for each draft of the row with most."""

    has_network = True

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
        self._use(network)
        self._num_drafts, self._vocab_size, self._device = num_drafts, vocab_size, device
        window = max(window, num_drafts + 3 * BLOCK_SIZE)
        self._cache = RowCache(network.kv_shapes, network.dtype, num_rows, window, device)
        # A head reads a token together with the hidden state before it, so it is one token behind.
        self._shift = 1 if network.hidden_size else 0
        self._chunk = min(max_tokens, self._cache.capacity - 2 * BLOCK_SIZE - num_drafts)
        self._max_tokens = max_tokens
        self._max_position, self._last_token = network.max_position, network.vocab_size - 1
        self._num_pending = max(_MOST_PENDING, 2 * (num_drafts + 1))
        # The target's hidden state at a position, at the remainder of the position.
        self._hidden_shape = (num_rows, self._num_pending, network.hidden_size)
        self._hidden = torch.zeros(self._hidden_shape, dtype=network.dtype, device=device)
        self._hidden_ends: Ints = np.zeros(num_rows, dtype=np.int64)
        self.num_bytes = network.shared_bytes + self._hidden.nbytes
        self.num_bytes += cache_bytes(network.kv_shapes, network.dtype, num_rows, window)
        self._wants_drafts = np.zeros(num_rows, dtype=bool)
        self._had_drafts = np.zeros(num_rows, dtype=bool)

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._cache.clear(row)
        self._hidden_ends[row] = 0
        self._wants_drafts[row] = admitted.sampling.max_draft_tokens != 0
        self._had_drafts[row] = False

    def remove_row(self, row: int, token_ids: IntArray) -> None: ...

    def observe(
        self, token_ids: IntArray, rows: Ints, starts: Ints, counts: Ints, lengths: Ints, hidden: Tensor
    ) -> None:
        """Take the target's hidden states [T, hidden_size] of a step, for a network that reads them.

        rows, starts, counts: [R], as in StepInputs.  lengths: [R], how many tokens of each row are known.
        """
        ends = starts + counts
        # What came before is not at hand, as after a prefix hit.
        is_cut = starts > self._hidden_ends[rows]
        self._cache.ends[rows[is_cut]] = starts[is_cut]
        self._hidden_ends[rows] = ends
        of_rows, positions = np.repeat(rows, counts), _positions(starts, counts)
        newest = (positions >= np.repeat(ends, counts) - self._num_pending).nonzero()[0]
        if len(newest) < len(positions):
            if self._network is not None:
                self._read_chunks(self._network, token_ids, rows, starts, counts, lengths, hidden)
            of_rows, positions = of_rows[newest], positions[newest]
            hidden = hidden.index_select(0, self._send(newest))
        if self._network is not None:
            self._hidden[self._send(of_rows), self._send(positions % self._num_pending)] = hidden

    def propose(
        self, token_ids: IntArray, rows: Ints, lengths: Ints, limits: Ints, draw: Draw
    ) -> list[list[int]]:
        """Up to `limits` tokens for each of `rows`, 1 or more, to follow the `lengths` known ones.

        token_ids: [all rows, L].  rows, lengths, limits: [R].
        """
        network, cache = self._network, self._cache
        proposed: list[list[int]] = [[] for _ in rows]
        if network is None:
            return proposed
        ends = lengths - self._shift
        counts = self._counts_to_read(rows, ends)
        is_last = cache.ends[rows] + counts == ends
        # Rows with most drafts first: each forward computes the first so many.
        order = np.argsort(-limits, kind="stable")
        order = order[counts[order] > 0]
        if not len(order):
            return proposed
        is_ready = is_last[order]
        found_rows, counts = rows[order], counts[order]
        hidden = self._pending(network, found_rows, counts)
        logits, hidden = self._advance(network, token_ids, found_rows, counts, hidden, is_ready)
        order = order[is_ready]
        if not len(order):
            return proposed
        rows, lengths, ends, limits = rows[order], lengths[order], ends[order], limits[order]
        self._had_drafts[rows] = True
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

    def release_cache(self) -> None:
        self._cache.release()
        self._hidden = self._hidden.new_zeros(0)

    def allocate_cache(self) -> None:
        if not self._cache.is_allocated:
            self._cache.allocate()
            self._hidden = self._hidden.new_zeros(self._hidden_shape)

    def attach(self, model: Model, checkpoint: Checkpoint) -> None:
        self._use(self._make_network(model, checkpoint))
        # What rows had is of the weights before.
        self._cache.num_kept[:] = 0
        self._cache.ends[:] = self._hidden_ends

    def detach(self) -> None:
        self._use(None)

    def _use(self, network: DraftNetwork | None) -> None:
        self._network = network
        self.hidden_layers = network.hidden_layers if network is not None and network.hidden_size else None

    def _counts_to_read(self, rows: Ints, ends: Ints) -> Ints:
        """How many tokens of each row to read now, [R], to have read all before `ends`.

        Leaves out what is too far back: the cache has no room for it, or it is not worth its time.
        """
        cache = self._cache
        most = np.where(self._had_drafts[rows], min(_MOST_PENDING, self._chunk), self._chunk)
        if self._shift:
            oldest = np.maximum(ends - most, self._hidden_ends[rows] - self._num_pending)
        else:
            # A long prompt's first tokens are read on their own, one step before its last ones.
            oldest = np.where(cache.num_kept[rows] > 0, ends - most, 0)
        cache.ends[rows] = np.maximum(cache.ends[rows], oldest)
        counts = ends - cache.ends[rows]
        counts = np.where(counts > self._chunk, BLOCK_SIZE, counts)
        counts = np.where(ends + self._num_drafts < self._max_position, counts, 0)
        left: Ints = np.clip(self._max_tokens - (np.cumsum(counts) - counts), 0, counts)
        return left

    def _read_chunks(
        self,
        network: DraftNetwork,
        token_ids: IntArray,
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
            if not self._wants_drafts[row[0]]:
                continue
            self._cache.ends[row] = start
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
        token_ids: IntArray,
        rows: Ints,
        counts: Ints,
        hidden: Tensor | None,
        is_read: npt.NDArray[np.bool_],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the next `counts` tokens of each row, and keep their KV; results of those rows' last."""
        cache = self._cache
        cache.make_room(rows, counts + self._num_drafts)
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
