"""Proposers that look up the newest tokens of a row in texts. They know tokens alone."""

from __future__ import annotations

from collections import OrderedDict

from engine_svc.core.step import AdmittedRequest
from engine_svc.speculation.text_index import SEPARATOR, IntArray, Match, TextIndex

# Of finished answers, in two halves of which the older is dropped when the newer is full: of one salt, and
# of all together.
_HALF_TOKENS = 1 << 15
_MAX_TOKENS = 1 << 19


class NgramProposer:
    """Proposes what followed the same tokens earlier in the request: prompt lookup.

    Keeps an index of the tokens of each row, from its first proposal on.
    """

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


class SuffixProposer:
    """Proposes what followed the same tokens in the request, or in finished answers that it may see.

    Answers are kept by cache salt; those of requests without one are not kept.
    """

    def __init__(self, *, half_tokens: int = _HALF_TOKENS, max_tokens: int = _MAX_TOKENS) -> None:
        self._half_tokens = half_tokens
        self._max_tokens = max_tokens
        self._indexes: dict[int, TextIndex] = {}
        self._admitted: dict[int, AdmittedRequest] = {}
        self._answers: OrderedDict[str, list[TextIndex]] = OrderedDict()  # newest last, in both orders
        self.num_kept = 0  # tokens of answers

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._indexes[row] = TextIndex()
        self._admitted[row] = admitted

    def remove_row(self, row: int, token_ids: IntArray) -> None:
        del self._indexes[row]
        admitted = self._admitted.pop(row)
        if admitted.cache_salt:
            answer = token_ids[admitted.num_prompt_tokens :].tolist()
            ends = admitted.sampling.end_token_ids
            end = next((index for index, token in enumerate(answer, 1) if token in ends), len(answer))
            self._keep(admitted.cache_salt, answer[:end])

    def propose(self, row: int, token_ids: IntArray, limit: int) -> list[int]:
        index = self._indexes[row]
        index.extend(token_ids[len(index.tokens) :].tolist())
        match = index.find_own_end()
        for answers in reversed(self._answers.get(self._admitted[row].cache_salt, ())):
            match = _longer(match, answers.find_end_of(index.tokens))
        return [] if match is None else match.following(limit)

    def _keep(self, salt: str, answer: list[int]) -> None:
        answers = self._answers.setdefault(salt, [TextIndex()])
        self._answers.move_to_end(salt)
        if len(answers[-1].tokens) + len(answer) >= self._half_tokens and answers[-1].tokens:
            answers.append(TextIndex())
            if len(answers) > 2:
                self.num_kept -= len(answers.pop(0).tokens)
        kept = [*answer[-self._half_tokens :], SEPARATOR]
        answers[-1].extend(kept)
        self.num_kept += len(kept)
        while self.num_kept > self._max_tokens and len(self._answers) > 1:
            _, oldest = self._answers.popitem(last=False)
            self.num_kept -= sum(len(one.tokens) for one in oldest)


def _longer(first: Match | None, second: Match | None) -> Match | None:
    """The first where both are as long."""
    if first is None or (second is not None and second.length > first.length):
        return second
    return first
