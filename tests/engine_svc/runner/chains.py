"""A scripted feature: after a token only a few others may follow. It relies on every member of the seam."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from torch import Tensor

from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra
from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.feature import HostTokens, LogitRows, RunnerFeature
from engine_svc.runner.sampling.transfer import Ints, to_device

LIMIT_S = 60.0


@dataclass(frozen=True)
class Chain(Extra):
    """After token t may follow t + 1 to t + width, modulo the vocabulary. how: it is prepared."""

    width: int
    how: str = "good"
    blocker: str = "chain"

    def keeps(self, token_ids: list[int], num_prompt_tokens: int, vocab_size: int) -> bool:
        """Whether every output token was allowed after the one before it."""
        pairs = pairwise(token_ids[num_prompt_tokens - 1 :])
        return all(1 <= (token - before) % vocab_size <= self.width for before, token in pairs)


@dataclass(slots=True)
class _Row:
    width: int
    token_ids: list[int]
    texts: dict[int, list[int]] = field(default_factory=dict)  # with drafts, by position in the step


@dataclass
class ChainRows(RunnerFeature):
    """Knows of its rows only what the seam gives it."""

    vocab_size: int
    gate: threading.Event = field(default_factory=threading.Event)  # opened for those that hang
    preparing_threads: set[int] = field(default_factory=set)
    calls: list[tuple[int, int]] = field(default_factory=list)  # numbers of tokens and of rows of `on_tokens`
    rows: dict[int, _Row] = field(default_factory=dict)
    raises_for: int = -1  # length of a row at which `on_tokens` raises
    ends_at: int = -1  # at which it ends the row

    prepares = Chain

    def prepare(self, extra: Chain) -> int:
        self.preparing_threads.add(threading.get_ident())
        if extra.how == "hangs":
            assert self.gate.wait(LIMIT_S)
        if extra.how == "bad":
            raise RequestFailed("INVALID_ARGUMENT", "the chain is bad")
        return extra.width

    def uses(self, admitted: AdmittedRequest) -> bool:
        return Chain in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        assert row not in self.rows
        width = admitted.extras[Chain]
        if isinstance(width, Chain):
            assert not width.blocker, "what was prepared stands in the place of the extra"
            width = width.width
        self.rows[row] = _Row(width, list(admitted.token_ids))

    def remove_row(self, row: int) -> None:
        del self.rows[row]

    def on_tokens(self, tokens: HostTokens) -> dict[int, str]:
        self.calls.append((len(tokens.rows), len(tokens.sampling_rows)))
        for row, token in zip(tokens.rows.tolist(), tokens.token_ids.tolist(), strict=True):
            self.rows[row].token_ids.append(token)
        ended = {}
        columns = tokens.sampling_rows.tolist(), tokens.positions.tolist(), tokens.drafts.tolist()
        for number, position, draft in zip(*columns, strict=True):
            row = self.rows[number]
            row.texts[position] = row.token_ids if draft < 0 else [*row.texts[position - 1], draft]
            if draft >= 0:
                continue
            if len(row.token_ids) == self.raises_for:
                raise ValueError("no luck")
            if len(row.token_ids) == self.ends_at:
                ended[number] = "the chain ends here"
        return ended

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        for entry, number, position in zip(
            logit_rows.entries.tolist(), logit_rows.rows.tolist(), positions.tolist(), strict=True
        ):
            row = self.rows[number]
            text = row.texts.pop(position)
            assert text == token_ids[number, :position].tolist(), "a token was lost or came twice"
            following = np.arange(text[-1] + 1, text[-1] + 1 + row.width)
            allowed = to_device(following % self.vocab_size, logits.device)
            kept = logits[entry].index_select(0, allowed)
            logits[entry].fill_(float("-inf")).index_copy_(0, allowed, kept)
