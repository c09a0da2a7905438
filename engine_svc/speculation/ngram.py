"""Proposes what followed the same tokens earlier in the request: prompt lookup."""

from __future__ import annotations

from engine_svc.core.step import AdmittedRequest
from engine_svc.speculation.text_index import IntArray, TextIndex


class NgramProposer:
    """Keeps an index of the tokens of each row, from its first proposal on."""

    def __init__(self) -> None:
        self._indexes: dict[int, TextIndex] = {}

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._indexes[row] = TextIndex()

    def remove_row(self, row: int, token_ids: IntArray) -> None:
        del self._indexes[row]

    def propose(self, row: int, token_ids: IntArray, limit: int) -> list[int]:
        index = self._indexes[row]
        index.extend(token_ids[len(index.tokens) :].tolist())
        match = index.find_own_end()
        return [] if match is None else match.following(limit)
