"""Who of a lockstep group has to be told to begin a wave. Knows no streams, no protos and no other rule.

What a group does is what its engines say of themselves; nothing here runs ahead of it. An engine that has
begun a wave asks, in every report, for the others until they have joined, so a start cannot be lost for good:
not with a message, and not with a coordinator.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# A start that was neither taken nor refused by then is sent again.
START_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class WaveStatus:
    """Where an engine says that it stands."""

    wave: int  # the one it runs, or the next
    is_running: bool
    asks: bool = False  # it waits in `wave` for the others
    is_apart: bool = False  # it has no process group, so it can begin nothing


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine has to be told."""

    engine_id: str
    wave: int
    exclude: tuple[str, ...]  # who runs already


@dataclass(frozen=True, slots=True)
class _SentStart:
    wave: int
    again_at: float  # inf: answered


class Wave:
    """The wave of one group: its number, whether it runs, and whom to start. `number` never falls."""

    def __init__(self) -> None:
        self.number = 0  # of the wave that runs, or of the next; 0: no engine has said
        self._statuses: dict[str, WaveStatus] = {}
        self._sent_starts: dict[str, _SentStart] = {}
        self._hinted: tuple[str, int] | None = (
            None  # who was sent a request while nothing ran, and which wave
        )

    @property
    def is_running(self) -> bool:
        """Whether any engine says that it is in a wave."""
        return any(status.is_running for status in self._statuses.values())

    def report(self, engine_id: str, status: WaveStatus) -> None:
        """Take in where an engine stands."""
        self._statuses[engine_id] = status
        sent = self._sent_starts.get(engine_id)
        # What it has taken it may have had to drop, with its process group: its word now counts for more.
        if sent is not None and sent.again_at == float("inf") and self._can_join(status, sent.wave):
            del self._sent_starts[engine_id]
        self.number = max(self.number, status.wave)
        if self._hinted is not None and self._hinted[1] < self.number:
            self._hinted = None

    def leave(self, engine_id: str) -> None:
        """Forget an engine that is no member any more."""
        self._statuses.pop(engine_id, None)
        self._sent_starts.pop(engine_id, None)
        if self._hinted is not None and self._hinted[0] == engine_id:
            self._hinted = None

    def reconnect(self, engine_id: str) -> None:
        """An engine has another session: what it was told by the one before may be lost."""
        self._sent_starts.pop(engine_id, None)

    def hint(self, engine_id: str, wave: int) -> None:
        """A frontend has sent a request to `engine_id` and believes that `wave` is the next.

        A hint that is late is nothing to go by: the engine that got the request asks for itself.
        """
        if engine_id in self._statuses and wave >= self.number and not self.is_running:
            self._hinted = (engine_id, self.number)

    def answer(self, engine_id: str, wave: int, *, is_taken: bool) -> None:
        """An engine has taken a start, or refused it, which its reports will give the reason for.

        One that refuses is told again: what kept it may have passed before its next report.
        """
        sent = self._sent_starts.get(engine_id)
        if is_taken and sent is not None and sent.wave == wave:
            self._sent_starts[engine_id] = _SentStart(wave, float("inf"))
        if not is_taken and self._hinted is not None and self._hinted[1] == wave:
            self._hinted = None

    def due(self, now: float) -> list[Start]:
        """Who has to be told now, each once until a while has passed without an answer."""
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
        """When `due` should be asked again if nothing comes before; None: only when something comes."""
        waiting = [sent.again_at for sent in self._sent_starts.values() if sent.again_at != float("inf")]
        return min(waiting, default=None)

    def _wanted(self) -> int | None:
        """The wave that somebody waits for: an engine by its own word first."""
        # The wave that they ask for, not `number`: what one asked for before it told of the end of that wave
        # must not begin the next.
        asked = max((status.wave for status in self._statuses.values() if status.asks), default=None)
        if asked is not None:
            return asked
        return self._hinted[1] if self._hinted is not None else None

    def _missing(self, wanted: int) -> Collection[str]:
        """Who could be in that wave and is not. Who was hinted at begins it by itself, after the others."""
        return [
            engine_id
            for engine_id, status in sorted(self._statuses.items())
            if self._can_join(status, wanted)
        ]

    @staticmethod
    def _can_join(status: WaveStatus, wave: int) -> bool:
        return not status.is_running and not status.is_apart and status.wave <= wave
