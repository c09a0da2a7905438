"""Log probabilities as plain data, one record per token. Knows no request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.common.v1 import output_pb2


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most likely tokens at a position. `text` is None if detokenize was false."""

    token_id: int
    logprob: float
    text: str | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, sampled or given.

    `logprob` and `rank` (1 for the most likely) are None if there is none, as for the first token of a
    prompt, or if they were lost with an engine and a frontend. `text` is the text that the token adds, empty
    if it only begins a character, None if detokenize was false. `top` are the most likely tokens at its
    position, best first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    text: str | None
    top: tuple[TopToken, ...]


def read_logprobs(columns: output_pb2.Logprobs) -> tuple[TokenLogprob, ...]:
    """A record for each index of the API's parallel columns."""
    has_texts, has_top = len(columns.texts) > 0, len(columns.top) > 0
    return tuple(
        TokenLogprob(
            token_id,
            None if math.isnan(logprob) else logprob,
            rank or None,
            columns.texts[index] if has_texts else None,
            _top(columns.top[index]) if has_top else (),
        )
        for index, (token_id, logprob, rank) in enumerate(
            zip(columns.token_ids, columns.logprobs, columns.ranks, strict=True)
        )
    )


def _top(top: output_pb2.TopLogprobs) -> tuple[TopToken, ...]:
    texts: list[str | None] = [*top.texts] or [None] * len(top.token_ids)
    return tuple(
        TopToken(token_id, logprob, text)
        for token_id, logprob, text in zip(top.token_ids, top.logprobs, texts, strict=True)
    )
