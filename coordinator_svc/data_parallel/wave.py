"""Decides which engines of a lockstep group must be started in a wave. Knows no streams and no protos.

The state of a group is what its engines report; nothing is assumed beyond that. An engine that has begun a
wave requests the others in every report until they have joined, so a start is never lost for good, neither
with a message nor with a coordinator.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# A start without an answer is sent again after this time.
START_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class WaveStatus:
    """The wave state that an engine reports."""

    wave: int  # the one it runs, or the next
    is_running: bool
    asks: bool = False  # it waits in `wave` for the others
    is_apart: bool = False  # it has no process group, so it cannot begin a wave


@dataclass(frozen=True, slots=True)
class Start:
    """An order to one engine to begin a wave."""

    engine_id: str
    wave: int
    exclude: tuple[str, ...]  # engines that run already


@dataclass(frozen=True, slots=True)
class _SentStart:
    wave: int
    again_at: float  # inf: answered


class Wave:
    """The wave of one group: its number, whether it runs, and which engines to start.

    `number` never decreases.
    """

    def __init__(self) -> None:
        self.number = 0  # of the wave that runs, or of the next; 0: no engine has reported one
        self._statuses: dict[str, WaveStatus] = {}
        self._sent_starts: dict[str, _SentStart] = {}
        # The engine that got a request while no wave ran, and the wave it will begin.
        self._hinted: tuple[str, int] | None = None

    @property
    def is_running(self) -> bool:
        return any(status.is_running for status in self._statuses.values())

    def report(self, engine_id: str, status: WaveStatus) -> None:
        self._statuses[engine_id] = status
        sent = self._sent_starts.get(engine_id)
        # The engine may have dropped an accepted start together with its process group: its report wins.
        if sent is not None and sent.again_at == float("inf") and self._can_join(status, sent.wave):
            del self._sent_starts[engine_id]
        self.number = max(self.number, status.wave)
        if self._hinted is not None and self._hinted[1] < self.number:
            self._hinted = None

    def leave(self, engine_id: str) -> None:
        self._statuses.pop(engine_id, None)
        self._sent_starts.pop(engine_id, None)
        if self._hinted is not None and self._hinted[0] == engine_id:
            self._hinted = None

    def reconnect(self, engine_id: str) -> None:
        """An engine has another session: a start that was sent in the one before may be lost."""
        self._sent_starts.pop(engine_id, None)

    def hint(self, engine_id: str, wave: int) -> None:
        """A frontend has sent a request to `engine_id` and assumes that `wave` is the next one.

        A late hint is ignored: the engine that got the request requests the others itself.
        """
        if engine_id in self._statuses and wave >= self.number and not self.is_running:
            self._hinted = (engine_id, self.number)

    def answer(self, engine_id: str, wave: int, *, is_taken: bool) -> None:
        """An engine has accepted a start, or refused it; its reports give the reason.

        A refused start is sent again: the obstacle may be gone before the engine's next report.
        """
        sent = self._sent_starts.get(engine_id)
        if is_taken and sent is not None and sent.wave == wave:
            self._sent_starts[engine_id] = _SentStart(wave, float("inf"))
        if not is_taken and self._hinted is not None and self._hinted[1] == wave:
            self._hinted = None

    def due(self, now: float) -> list[Start]:
        """The starts to send now. An unanswered one is due again after `START_RETRY_S`."""
        wanted = self._wanted()
        if wanted is None:
            self._sent_starts.clear()
            return []
        running = tuple(sorted(id_ for id_, status in self._statuses.items() if status.is_running))
        starts = []
        for engine_id in self._missing(wanted):
            sent = self._sent_starts.get(engine_id)
            if sent is None or sent.wave != wanted or sent.again_at <= now:
                self._sent_starts[engine_id] = _SentStart(wanted, now + START_RETRY_S)
                starts.append(Start(engine_id, wanted, running))
        return starts

    def next_at(self) -> float | None:
        """When to call `due` if there is no event before; None: only after an event."""
        waiting = [sent.again_at for sent in self._sent_starts.values() if sent.again_at != float("inf")]
        return min(waiting, default=None)

    def _wanted(self) -> int | None:
        """The wave to start: one that an engine requests, else one that was hinted."""
        # The requested wave, not `number`: a request for a wave that has ended since must not begin the next.
        requested = max((status.wave for status in self._statuses.values() if status.asks), default=None)
        if requested is not None:
            return requested
        return self._hinted[1] if self._hinted is not None else None

    def _missing(self, wanted: int) -> Collection[str]:
        """The engines that can join that wave and are not in it."""
        return [
            engine_id
            for engine_id, status in sorted(self._statuses.items())
            if self._can_join(status, wanted)
        ]

    @staticmethod
    def _can_join(status: WaveStatus, wave: int) -> bool:
        return not status.is_running and not status.is_apart and status.wave <= wave
