"""A frontend of an engine loop: what comes into its outbox, by handle."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine_svc.core.request import FinishReason
from engine_svc.loop.mailbox import Outbox
from engine_svc.loop.step_output import FinishedRow, StepOutput
from tests.engine_svc.fakes import LIMIT_S


class Frontend:
    """Reads an outbox into tokens and ends. `on_step` sees each step that is read."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.outbox = Outbox(max_bytes=1 << 24, wake=self.woken.set)
        self.tokens: dict[int, list[int]] = {}
        self.ends: list[tuple[int, FinishReason]] = []
        self.end_of: dict[int, FinishedRow] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.on_step: Callable[[StepOutput], None] = lambda step: None

    def read(self) -> bool:
        """Read one step; returns False if there is none."""
        step = self.outbox.take()
        if step is None:
            return False
        self.on_step(step)
        start = 0
        for handle, num_tokens in zip(step.handles, step.num_tokens, strict=True):
            self.tokens.setdefault(handle, []).extend(step.token_ids[start : start + num_tokens])
            start += num_tokens
        for row in step.finished:
            self.ends.append((step.handles[row.row], row.reason))
            self.end_of[step.handles[row.row]] = row
        if step.token_logprobs is not None:
            for handle, part in step.token_logprobs.sampled.items():
                self.logprobs.setdefault(handle, []).extend(part.logprobs)
        self.cached |= {step.handles[row]: first.num_cached_tokens for row, first in step.first}
        return True

    def read_all(self) -> None:
        while self.read():
            pass

    def read_until_ended(self, num_requests: int) -> None:
        """Read until that many requests have ended, of all that were ever read."""
        while len(self.ends) < num_requests:
            assert self.woken.wait(LIMIT_S)
            self.woken.clear()
            self.read_all()
