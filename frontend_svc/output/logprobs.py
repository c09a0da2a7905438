"""Logprobs of a request's tokens, with their texts. Knows no step message and no collector."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from frontend_svc.text.tokenize.token_text import MAX_CONTEXT_TOKENS, TokenTexts
from triptych.common.v1 import output_pb2


@dataclass(slots=True)
class Logprobs:
    """Logprobs of consecutive positions as parallel columns; `top_*` have a list per position, best first.

    NaN and rank 0 mark positions without a value: the first one of a prompt, and tokens whose engine and
    frontend were both lost. The texts are empty lists if the request wants no text. Large columns are packed
    arrays, as they may wait for a reader.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_ids: list[array[int]] = field(default_factory=list)
    top_logprobs: list[array[float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    top_texts: list[list[str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, more: Logprobs) -> None:
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.top_ids += more.top_ids
        self.top_logprobs += more.top_logprobs
        self.texts += more.texts
        self.top_texts += more.top_texts

    def after(self, num_positions: int) -> Logprobs:
        """The positions after the first `num_positions`."""
        rest = slice(num_positions, None)
        return Logprobs(
            self.token_ids[rest],
            self.logprobs[rest],
            self.ranks[rest],
            self.top_ids[rest],
            self.top_logprobs[rest],
            self.texts[rest],
            self.top_texts[rest],
        )


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """A step's logprobs of consecutive positions; the top columns have `k` entries per position."""

    logprobs: array[float]
    ranks: array[int]
    k: int = 0
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def part(self, start: int, end: int) -> LogprobColumns:
        """The positions `start:end`."""
        top = slice(start * self.k, end * self.k)
        return LogprobColumns(
            self.logprobs[start:end], self.ranks[start:end], self.k, self.top_ids[top], self.top_logprobs[top]
        )


class LogprobReader:
    """Converts the columns of one request to the client's logprobs, and accumulates their sum.

    has_top: the request asked for alternatives beside the chosen token; each position then has a list.
    context: the last tokens before the first position, for the text that a token adds to them.
    """

    __slots__ = ("_context", "_has_top", "_sum", "_texts")

    def __init__(self, texts: TokenTexts | None, context: Sequence[int] = (), *, has_top: bool) -> None:
        self._texts = texts
        self._has_top = has_top
        self._context = list(context[-MAX_CONTEXT_TOKENS:])
        self._sum = 0.0

    @property
    def cumulative(self) -> float | None:
        """The sum of all values read; None, as it is unknown, once a position without a value was read."""
        return None if math.isnan(self._sum) else self._sum

    def read(self, token_ids: Sequence[int], columns: LogprobColumns) -> Logprobs:
        """Logprobs of `token_ids`, which follow those of the previous call."""
        read = Logprobs(list(token_ids), list(columns.logprobs), list(columns.ranks))
        self._sum += sum(read.logprobs)
        if self._has_top:
            _add_top(read, columns)
        if self._texts is not None:
            self._add_texts(read, self._texts)
        return read

    def _add_texts(self, read: Logprobs, texts: TokenTexts) -> None:
        for index, token_id in enumerate(read.token_ids):
            read.texts.append(texts.added(self._context, token_id))
            if read.top_ids:
                read.top_texts.append(texts.added_each(self._context, read.top_ids[index]))
            self._context = [*self._context[1 - MAX_CONTEXT_TOKENS :], token_id]


def _add_top(read: Logprobs, columns: LogprobColumns) -> None:
    """One list per position. The columns are as wide as the step's widest request: NaN padding is removed."""
    for index in range(len(read)):
        start = index * columns.k
        values = columns.top_logprobs[start : start + columns.k]
        while values and math.isnan(values[-1]):
            values.pop()
        read.top_ids.append(columns.top_ids[start : start + len(values)])
        read.top_logprobs.append(values)


def fill_logprobs(message: output_pb2.Logprobs, logprobs: Logprobs) -> None:
    """Write log probabilities into an empty submessage, which is set even if there are none."""
    message.SetInParent()
    message.token_ids.extend(logprobs.token_ids)
    message.logprobs.extend(logprobs.logprobs)
    message.ranks.extend(logprobs.ranks)
    message.texts.extend(logprobs.texts)
    for index, (ids, values) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)):
        texts = logprobs.top_texts[index] if logprobs.top_texts else ()
        message.top.add(token_ids=ids, logprobs=values, texts=texts)
