"""What proposes drafts. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine_svc.core.step import AdmittedRequest
from engine_svc.model.decoder import Model
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.runner.sampling.transfer import Ints

IntArray = npt.NDArray[np.int32]


class Proposer(Protocol):
    """Proposes the tokens that may follow those of a row. A pure function of tokens, so that ranks agree."""

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        """From now on `row` belongs to the request, whose known tokens are in it."""

    def remove_row(self, row: int, token_ids: IntArray) -> None:
        """token_ids: [L] every known token of the row, maybe with some after its end."""

    def propose(self, row: int, token_ids: IntArray, limit: int) -> Sequence[int]:
        """Up to `limit` tokens, 1 or more, that may follow token_ids [L], all known tokens of the row.

        Not called in every step; between two calls a row only gains tokens.
        """


@runtime_checkable
class BatchProposer(Protocol):
    """Proposes with a network, for all rows of a step at once, by their tokens and hidden states alone."""

    @property
    def hidden_layers(self) -> tuple[int, ...] | None:
        """Before which of the model's layers it reads hidden states; (): the last ones; None: none at all."""

    @property
    def num_bytes(self) -> int:
        """Memory of its cache, in addition to what its weights take."""

    def add_row(self, row: int, admitted: AdmittedRequest) -> None: ...

    def remove_row(self, row: int, token_ids: IntArray) -> None: ...

    def observe(
        self, token_ids: IntArray, rows: Ints, starts: Ints, counts: Ints, lengths: Ints, hidden: Tensor
    ) -> None:
        """Take hidden states [T, hidden_size] of a step.

        token_ids: [all rows, L].  rows, starts, counts: [R], as in StepInputs.  lengths: [R], how many tokens
        of each row are known.
        """

    def propose(
        self,
        token_ids: IntArray,
        rows: Ints,
        lengths: Ints,
        limits: Ints,
        draw: Callable[[Tensor, Ints, Ints], Tensor],
    ) -> Sequence[Sequence[int]]:
        """For each of `rows`, up to `limits` tokens, 1 or more, that may follow its `lengths` known ones.

        draw: chooses tokens [N] from logits [N, V] for rows at positions, with the noise of these.
        """

    def rehearse(self, num_rows: int) -> None:
        """Compute one draft for so many rows, none of them in use."""

    def release_cache(self) -> None:
        """Release the memory of its cache. No row may be in use."""

    def allocate_cache(self) -> None:
        """Allocate it again, if it was released."""

    def attach(self, model: Model, checkpoint: Checkpoint) -> None:
        """Load its weights, for a model that was loaded from there.

        Raises CheckpointError or UnsupportedModel.
        """

    def detach(self) -> None:
        """Drop its weights, and what refers to the model's; until it is attached it proposes nothing."""
