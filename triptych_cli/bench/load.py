"""Sends conversations when they are due and records when their tokens arrive. Computes no statistics.

It must not delay what it measures: requests are built before they are due, and answers are only timestamped,
counted and, if the next turn needs them, stored. Every timeline has the generator's own delay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from triptych_cli.bench.dataset import Conversation, Turn
from triptych_cli.bench.metrics import OK, Timeline
from triptych_cli.bench.transport import AnswerFailed, Transport
from triptych_kit.clock import Clock


class LoadGenerator:
    """Runs a load once over a transport.

    `timelines` has every request sent so far, in order of sending, also during the run and after it was
    cancelled; a request that has not ended has an empty code.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        concurrency: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._slots = _Slots(concurrency)
        self._timeout_s = timeout_s
        self.timelines: list[Timeline] = []
        self.num_ended = 0
        self.num_unsent = 0  # turns not sent, because an earlier turn of the conversation failed

    async def run(self, conversations: Sequence[Conversation], offsets: Sequence[float]) -> None:
        """Begin each conversation at its offset in s from now, and wait for all of them."""
        indexes = _first_indexes(conversations)
        requests = [
            self._transport.build(turns[0].token_ids, turns[0].num_output_tokens, index)
            for turns, index in zip(conversations, indexes, strict=True)
        ]
        began_at = self._clock.now()
        async with asyncio.TaskGroup() as tasks:
            for turns, request, offset, index in zip(conversations, requests, offsets, indexes, strict=True):
                due_at = began_at + offset
                # Even if it is late: the event loop must send the last request before the next one is begun.
                await asyncio.sleep(max(0.0, due_at - self._clock.now()))
                tasks.create_task(self._converse(turns, request, due_at, index))

    async def send_one(self, turn: Turn, index: int) -> Timeline:
        """Send one request now, and wait for its end; it is not in `timelines`."""
        timeline = Timeline(self._clock.now(), self._clock.now(), len(turn.token_ids))
        request = self._transport.build(turn.token_ids, turn.num_output_tokens, index)
        await self._generate(request, timeline, index, None)
        return timeline

    async def _converse(self, turns: Conversation, request: bytes, due_at: float, index: int) -> None:
        history = list(turns[0].token_ids) if len(turns) > 1 else None
        num_prompt_tokens = len(turns[0].token_ids)
        for turn_index, turn in enumerate(turns):
            if turn_index and history is not None:
                history += turn.token_ids
                num_prompt_tokens = len(history)
                request = self._transport.build(history, turn.num_output_tokens, index + turn_index)
            due_at = max(due_at, await self._slots.take())
            timeline = Timeline(due_at, self._clock.now(), num_prompt_tokens)
            self.timelines.append(timeline)
            try:
                await self._generate(request, timeline, index + turn_index, history)
            finally:
                self._slots.give(self._clock.now())
            self.num_ended += 1
            if timeline.code != OK:
                self.num_unsent += len(turns) - turn_index - 1
                return
            due_at = timeline.ended_at

    async def _generate(
        self, request: bytes, timeline: Timeline, index: int, history: list[int] | None
    ) -> None:
        try:
            async with contextlib.aclosing(self._transport.answer(request, index, self._timeout_s)) as parts:
                async for part in parts:
                    now = self._clock.now()
                    if part.num_tokens:
                        timeline.token_times.append(now)
                        timeline.token_counts.append(part.num_tokens)
                        if history is not None:
                            history.extend(part.token_ids)
                    if part.code:
                        timeline.ended_at = now
                        timeline.code, timeline.num_cached_tokens = part.code, part.num_cached_tokens
                        if timeline.token_counts:
                            timeline.token_counts[-1] += part.num_uncounted
        except AnswerFailed as error:
            timeline.code, timeline.message = error.code, error.message
            timeline.ended_at = self._clock.now()
        else:
            if not timeline.code:
                timeline.code, timeline.message = "INCOMPLETE", "the stream ended before its output did"
                timeline.ended_at = self._clock.now()


class _Slots:
    """A limit of requests in flight, first come first served; 0 is no limit."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._is_limited = num_slots > 0
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def take(self) -> float:
        """Wait for a slot. Returns when it became free, or minus infinity if it was free already."""
        if not self._is_limited:
            return float("-inf")
        if self._num_free:
            self._num_free -= 1
            return float("-inf")
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return await future

    def give(self, now: float) -> None:
        """Release a slot."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(now)
                return
        self._num_free += 1


def _first_indexes(conversations: Sequence[Conversation]) -> list[int]:
    indexes, total = [], 0
    for turns in conversations:
        indexes.append(total)
        total += len(turns)
    return indexes
