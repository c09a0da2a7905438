"""Machines with the faults another system had, each in the form that its users met. They must be found."""

from __future__ import annotations

from coordinator_svc.data_parallel.wave import Start, Wave, WaveStatus
from engine_svc.data_parallel.wave import LockstepState, WaveMachine
from tests.explorer.broken import Promise
from tests.explorer.system import Setup


class StartsWhileQuiet(WaveMachine):
    """vllm #36594: a START_DP_WAVE that comes after the agreed pause arms the loop again."""

    def start(self, wave: int) -> bool:
        if self._state is LockstepState.QUIET:
            self._state = LockstepState.PAUSED
        return super().start(wave)

    def all_resumed(self) -> None:
        if self._state is LockstepState.QUIET:
            super().all_resumed()


class PausesAlone(WaveMachine):
    """vllm #39366, what it was made for: a rank that is asked to pause stops at once, without the others.

    To ignore starts from then on was the simpler remedy that was rejected there.
    """

    def start(self, wave: int) -> bool:
        """Refuse while its own operator wants it to stand still."""
        return not self._is_pausing and super().start(wave)

    def wants_step(self, has_work: bool) -> bool:
        """Not for the sake of a vote about the pause."""
        return super().wants_step(has_work) and not (
            self._state is LockstepState.PAUSED and self._is_pausing and not has_work
        )


class WaitsForItsOwnStart(WaveMachine):
    """vllm #39366, what it brought: a rank with work asks for a start, and does not begin before it comes."""

    def may_step(self, has_work: bool) -> bool:
        if self._state is LockstepState.PAUSED and (has_work or self._has_news):
            self.asks = True
            return False
        return super().may_step(has_work)


class ExcludesRequester(Wave):
    """The other half of it: the coordinator starts all but the one that asks."""

    def due(self, now: float) -> list[Start]:
        """Those that are missing, without those that ask."""
        asking = {engine_id for engine_id, status in self._statuses.items() if status.asks}
        return [start for start in super().due(now) if start.engine_id not in asking]


class PredictsRunning(Wave):
    """vllm #51481: a rank that was asked to start counts as running until a wave is seen to end."""

    def report(self, engine_id: str, stand: WaveStatus) -> None:
        """Only the end of the wave takes the prediction back."""
        if stand.wave > self.number:
            self._sent_starts.clear()
        super().report(engine_id, stand)

    def due(self, now: float) -> list[Start]:
        sent = dict(self._sent_starts)
        starts = [start for start in super().due(now) if start.engine_id not in sent]
        for start in starts:
            sent[start.engine_id] = type(self._sent_starts[start.engine_id])(start.wave, float("inf"))
        self._sent_starts.clear()
        self._sent_starts.update(sent)
        return starts


# Each with the smallest setup in which it shows, and the promise that it breaks.
RACES: dict[str, tuple[Setup, Promise]] = {
    "36594: a late start is obeyed after an agreed pause": (
        Setup(num_senders=1, machine=StartsWhileQuiet),
        Promise.QUIET,
    ),
    "39366: a rank pauses without the others": (
        Setup(num_pauses=1, num_pausers=1, machine=PausesAlone),
        Promise.NO_LONELY_STEP,
    ),
    "39366: who asks for a start is left out of it": (
        Setup(num_pauses=0, num_senders=1, machine=WaitsForItsOwnStart, wave=ExcludesRequester),
        Promise.NO_LOST_START,
    ),
    "51481: a rank that was asked to start counts as running": (
        Setup(num_senders=1, wave=PredictsRunning),
        Promise.NO_LOST_START,
    ),
}
