"""What the tests of proposers share: admitted requests and short texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest
from engine_svc.speculation.proposer import RowProposer

END = 99


def ids(*token_ids: int) -> npt.NDArray[np.int32]:
    return np.array(token_ids, dtype=np.int32)


def admitted(prompt: Sequence[int], salt: str = "") -> AdmittedRequest:
    sampling = SamplingParams(max_tokens=100, eos_token_id=END)
    return AdmittedRequest("request", list(prompt), len(prompt), sampling, [[]], {}, salt)


def proposed(proposer: RowProposer, *text: int, limit: int = 4, salt: str = "") -> list[int]:
    """What it proposes behind a text, in a row that has no other calls."""
    proposer.add_row(0, admitted(text, salt))
    draft = list(proposer.propose(0, ids(*text), limit))
    proposer.remove_row(0, ids(*text))
    return draft


def answer(proposer: RowProposer, *output: int, salt: str) -> None:
    """A request with this output runs and ends."""
    proposer.add_row(7, admitted([1, 2, 3], salt))
    proposer.remove_row(7, ids(1, 2, 3, *output))
