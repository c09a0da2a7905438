"""Runs many calls with a bounded number in flight; answers in order of submission. Knows no message."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from triptych_kit.errors import ResourceExhausted, ServiceError

_T = TypeVar("_T")

_MAX_REFUSALS = 100
_MIN_RETRY_S = 0.05


async def run_all(
    calls: Sequence[Callable[[], Awaitable[_T]]],
    *,
    window: int,
    field: str,
    on_answer: Callable[[_T], None],
) -> list[_T]:
    """Make all calls, at most `window` at once, started in order; returns the answers in that order.

    The first error cancels the others and is raised with the prefix `field[index]`. `on_answer` gets each
    answer when it arrives.
    """
    answers: dict[int, _T] = {}
    turns = itertools.count()

    async def work() -> None:
        # Workers take calls from a shared counter, so that 100,000 calls do not need as many tasks.
        for index in turns:
            if index >= len(calls):
                return
            try:
                answers[index] = await _with_retry(calls[index])
            except ServiceError as error:
                raise _at(f"{field}[{index}]", error) from error.__cause__
            on_answer(answers[index])

    workers = [asyncio.ensure_future(work()) for _ in range(min(window, len(calls)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [answers[index] for index in range(len(calls))]


async def _with_retry(call: Callable[[], Awaitable[_T]]) -> _T:
    """Make a call; retry it while a shared server is at its limits and returns a retry delay."""
    for _ in range(_MAX_REFUSALS):
        try:
            return await call()
        except ResourceExhausted as error:
            if error.retry_after_ms is None:
                raise
            await asyncio.sleep(max(_MIN_RETRY_S, error.retry_after_ms / 1000) * random.uniform(0.5, 1.0))
    return await call()


def _at(prefix: str, error: ServiceError) -> ServiceError:
    error.message = f"{prefix}: {error.message}"
    error.args = (error.message,)
    return error
