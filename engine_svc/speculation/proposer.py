"""The protocol of proposers of drafts, and the one that other packages offer. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine_svc.core.step import AdmittedRequest
from engine_svc.model.decoder import Model
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.runner.sampling.transfer import Ints

IntArray = npt.NDArray[np.int32]
# Chooses tokens [N] int64 from logits [N, V], for `rows` at `positions`, with the noise of those positions.
Draw = Callable[[Tensor, Ints, Ints], Tensor]


class Proposer:
    """Proposes drafts for the rows of a step. A pure function of tokens and weights, so that ranks agree.

    has_network: whether it takes time on the device, which is measured, and memory, which sleep releases.
    num_bytes: memory that it will use in addition to its weights, and that of weights in pages of a file.
    hidden_layers: the model's layers before which it reads hidden states; (): the last hidden states; None:
    it reads none.
    """

    has_network: bool = False
    num_bytes: int = 0
    hidden_layers: tuple[int, ...] | None = None

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        """From now on `row` belongs to the request, whose known tokens are in it."""

    def remove_row(self, row: int, token_ids: IntArray) -> None:
        """token_ids: [L] every known token of the row, maybe with some after its end."""

    def observe(
        self, token_ids: IntArray, rows: Ints, starts: Ints, counts: Ints, lengths: Ints, hidden: Tensor
    ) -> None:
        """Take hidden states [T, hidden_size] of a step.

        token_ids: [all rows, L].  rows, starts, counts: [R], as in StepInputs.  lengths: [R], the number of
        known tokens of each row.
        """

    def propose(
        self, token_ids: IntArray, rows: Ints, lengths: Ints, limits: Ints, draw: Draw
    ) -> Sequence[Sequence[int]]:
        """For each of `rows`, up to `limits` (1 or more) tokens that may follow its `lengths` known ones.

        token_ids: [all rows, L].  Not called in every step; between two calls a row only gains tokens.
        """
        return [()] * len(rows)

    def rehearse(self, num_rows: int) -> None:
        """Compute one draft for each of `num_rows` rows that are not in use."""

    def release_cache(self) -> None:
        """Release the memory of its cache. No row may be in use."""

    def allocate_cache(self) -> None:
        """Allocate the cache again, if it was released."""

    def attach(self, model: Model, checkpoint: Checkpoint) -> None:
        """Load its weights, for a model that was loaded from `checkpoint`.

        Raises CheckpointError or UnsupportedModel.
        """

    def detach(self) -> None:
        """Drop its weights, and references to the model's; until it is attached it proposes nothing."""


class RowProposer(Protocol):
    """Proposes for one row at a time, from its tokens alone: what `triptych.proposers` entry points make."""

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        """From now on `row` belongs to the request, whose known tokens are in it."""

    def remove_row(self, row: int, token_ids: IntArray) -> None:
        """token_ids: [L] every known token of the row, maybe with some after its end."""

    def propose(self, row: int, token_ids: IntArray, limit: int) -> Sequence[int]:
        """Up to `limit` (1 or more) tokens that may follow token_ids [L], all known tokens of the row."""


class ByRow(Proposer):
    """The proposals of a RowProposer, row by row."""

    def __init__(self, proposer: RowProposer) -> None:
        self._proposer = proposer

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._proposer.add_row(row, admitted)

    def remove_row(self, row: int, token_ids: IntArray) -> None:
        self._proposer.remove_row(row, token_ids)

    def propose(
        self, token_ids: IntArray, rows: Ints, lengths: Ints, limits: Ints, draw: Draw
    ) -> Sequence[Sequence[int]]:
        columns = zip(rows.tolist(), lengths.tolist(), limits.tolist(), strict=True)
        return [
            self._proposer.propose(row, token_ids[row, :length], limit)[:limit]
            for row, length, limit in columns
        ]
