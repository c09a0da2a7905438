"""What proposes drafts. Knows no scheduler and no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_svc.core.step import AdmittedRequest

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
