"""Virtual time: an asyncio loop whose clock jumps to the next thing that happens. Knows no cluster."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Callable
from typing import Any


class Agenda:
    """What happens when, outside of asyncio: cheaper than a timer, and in a fixed order. Also the clock.

    It is the `Clock` of service_kit for all code that is simulated. `spent` reads the processor time where
    the agenda's cost is to be told; on some systems that is slow.
    """

    def __init__(self, spent: Callable[[], float] = lambda: 0.0) -> None:
        self.spent = spent
        self.stirred = False  # something was handed to asyncio, which has to run before time goes on
        self.own_cpu_s = 0.0  # processor time of what was on the agenda, as opposed to asyncio's tasks
        self._now_s = 0.0
        self._order = itertools.count()
        self._entries: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def at(self, when_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call `act(*arguments)` at `when_s`, or now if that is past."""
        heapq.heappush(self._entries, (max(when_s, self._now_s), next(self._order), act, arguments))

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call `act(*arguments)` in `delay_s`."""
        self.at(self._now_s + delay_s, act, *arguments)

    def run_until(self, end_s: float) -> None:
        """Let time pass to `end_s`, or only until something was handed to asyncio."""
        began = self.spent()
        self.stirred = False
        entries = self._entries
        while entries and entries[0][0] <= end_s and not self.stirred:
            self._now_s, _, act, arguments = heapq.heappop(entries)
            act(*arguments)
        if not self.stirred:
            if end_s == float("inf"):
                raise RuntimeError("nothing is on the agenda any more, and a task waits for ever")
            self._now_s = max(self._now_s, end_s)
        self.own_cpu_s += self.spent() - began


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: where it would, `agenda` goes on to the next timer of a task."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__(_Selector(agenda))
        self._agenda = agenda

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._agenda.now()

    def call_soon(  # type: ignore[override]  # which is generic in the arguments
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """As every loop's; and the agenda stops for it."""
        self._agenda.stirred = True
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As every loop's; and the agenda looks anew how far it may go."""
        self._agenda.stirred = True
        return super().call_at(when, callback, *args, context=context)


class _Selector(selectors.SelectSelector):
    """Waits for nothing: files are never ready in virtual time."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__()
        self._agenda = agenda

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._agenda.run_until(float("inf") if timeout is None else self._agenda.now() + timeout)
        return []
