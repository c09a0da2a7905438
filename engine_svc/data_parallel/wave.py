"""State machine of one rank's waves: when the ranks of a group step. Knows no wire, no tensors and no clock.

Ranks that share experts have to launch the same steps, so a rank without requests launches empty steps while
another rank has work. Such a period is a wave. It begins when a rank has work, and ends when all ranks find
together, in a vote at regular intervals, that none has. No rank decides by assumptions about the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine_svc.core.errors import InvalidTransition


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one rank, or the verdict of all ranks."""

    wave: int
    has_work: bool  # in a verdict: whether any rank has
    is_pausing: bool  # in a verdict: whether all ranks are
    generation: int  # the newest that the rank is ready to change to; in a verdict: the oldest of these

    @staticmethod
    def count(votes: Sequence[Vote]) -> Vote:
        """The verdict of the votes of all ranks."""
        return Vote(
            wave=max(vote.wave for vote in votes),
            has_work=any(vote.has_work for vote in votes),
            is_pausing=all(vote.is_pausing for vote in votes),
            generation=min(vote.generation for vote in votes),
        )


# Steps from one vote to the next; the ranks wait for each other there.
VOTE_INTERVAL = 32


class LockstepState(Enum):
    """Whether this rank steps with the others."""

    APART = "apart"  # in no process group: not formed yet, a rank was lost, or the generation changes
    PAUSED = "paused"  # between two waves
    RUNNING = "running"  # in a wave
    QUIET = "quiet"  # all ranks have agreed to pause until all of them resume


_TRANSITIONS: dict[LockstepState, frozenset[LockstepState]] = {
    LockstepState.APART: frozenset({LockstepState.PAUSED}),
    LockstepState.PAUSED: frozenset({LockstepState.RUNNING, LockstepState.APART}),
    LockstepState.RUNNING: frozenset({LockstepState.PAUSED, LockstepState.QUIET, LockstepState.APART}),
    LockstepState.QUIET: frozenset({LockstepState.PAUSED, LockstepState.APART}),
}


class WaveMachine:
    """The waves of one rank. Belongs to the engine thread.

    The loop checks `may_step` before it plans a step, and calls `on_step_launched` for it. If that returns a
    vote, it is cast, and the verdict of all ranks is given to `take` before the next launch.
    """

    def __init__(self, *, interval: int = VOTE_INTERVAL) -> None:
        self._interval = interval
        self._state = LockstepState.APART
        self._num_steps = 0  # of this wave
        self._num_in_flight = 0
        self._num_earlier = 0  # of these, steps of an earlier wave
        self._start_next = 0  # a wave that was started elsewhere while the one before it ran here
        self._is_pausing = False
        self._has_resumed = False  # since all ranks agreed to pause
        self._ready_generation = 0
        # A vote is needed without work: for a pause, or another generation.
        self._has_news = False
        self._formed_generation = 0  # the last formed one
        self.wave = 1  # the one that runs, or the next
        self.generation = 0  # of the process group; 0: none
        # This rank is in the wave and does not know yet whether the others are.
        self.asks = False

    @property
    def state(self) -> LockstepState:
        """May be read by any thread."""
        return self._state

    @property
    def needs_idle_step(self) -> bool:
        """Whether this rank has to step even without requests of its own."""
        return self._state is LockstepState.RUNNING

    @property
    def switch_to(self) -> int:
        """The generation to be formed now, as this rank is in no group and ready for it; 0: none."""
        is_ready = self._state is LockstepState.APART and self._ready_generation > self._formed_generation
        return self._ready_generation if is_ready else 0

    def wants_step(self, has_work: bool) -> bool:
        """Whether `may_step` would return True now; changes nothing."""
        if self._state is LockstepState.PAUSED:
            return has_work or self._has_news
        return self._state is LockstepState.RUNNING

    def may_step(self, has_work: bool) -> bool:
        """Whether a step may be launched now. Begins a wave if this rank has a reason for one."""
        if self._state is LockstepState.PAUSED and self.wants_step(has_work):
            self._begin(self.wave)
        return self._state is LockstepState.RUNNING

    def on_step_launched(self, has_work: bool) -> Vote | None:
        """Note a step. Returns this rank's vote if one is due, at regular intervals of a wave."""
        self._num_steps += 1
        self._num_in_flight += 1
        if self._num_steps % self._interval:
            return None
        self._has_news = False
        return Vote(self.wave, has_work, self._is_pausing, self._ready_generation)

    def on_step_done(self) -> None:
        """Note that the oldest step in flight has ended: all ranks have taken part in it."""
        self._num_in_flight -= 1
        if self._num_earlier:
            self._num_earlier -= 1
        else:
            self.asks = False

    def take(self, verdict: Vote) -> None:
        """Apply the verdict, which is the same for all ranks."""
        self.asks = False
        self.wave = verdict.wave
        if verdict.generation > self.generation:
            self._end(LockstepState.APART)
            self.generation = 0
        elif not verdict.has_work:
            if verdict.is_pausing:
                self._end(LockstepState.QUIET)
                self._has_resumed = False
                return
            self._end(LockstepState.PAUSED)
            # A start that came during the vote is for the wave that follows it.
            if self._start_next >= self.wave:
                self._begin(self._start_next)

    def start(self, wave: int) -> bool:
        """Join a wave that another rank has begun or will begin. False if it is over, or if none can run."""
        if wave < self.wave or self._state in (LockstepState.APART, LockstepState.QUIET):
            return False
        if self._state is LockstepState.RUNNING:
            self._start_next = max(self._start_next, wave)
        else:
            self._begin(wave)
        return True

    def pause(self) -> None:
        """Vote for a pause from now on; the ranks agree once all of them do."""
        if not self._is_pausing:
            self._is_pausing = self._has_news = True

    def resume(self) -> bool:
        """Stop voting for a pause. True if all had agreed: then no rank steps before `all_resumed`.

        True once per agreement, however often a rank that waits for the others pauses and resumes.
        """
        self._is_pausing = False
        if self._state is not LockstepState.QUIET or self._has_resumed:
            return False
        self._has_resumed = True
        return True

    def all_resumed(self) -> None:
        """Every rank has resumed since they agreed to pause."""
        self._move_to(LockstepState.PAUSED)
        # A rank may have paused again while it waited for the others.
        self._has_news = self._is_pausing or self._ready_generation > self.generation

    def get_ready(self, generation: int) -> None:
        """This rank can change to another generation, as soon as all ranks of its present one can."""
        if generation > self._ready_generation:
            self._ready_generation = generation
            self._has_news = True

    def leave_group(self) -> None:
        """The process group is gone, and with it the wave and the steps in flight."""
        if self._state is not LockstepState.APART:
            self._end(LockstepState.APART)
        self.generation = self._num_in_flight = 0

    def form(self, generation: int, wave: int) -> None:
        """A process group was formed. wave: the greatest of all ranks, so that no rank's number decreases."""
        if wave < self.wave:
            raise InvalidTransition(f"wave {wave} cannot follow wave {self.wave}")
        self._move_to(LockstepState.PAUSED)
        self.generation = self._formed_generation = generation
        self._ready_generation = max(generation, self._ready_generation)
        self.wave = wave
        self._has_news = self._is_pausing or self._ready_generation > generation

    def _begin(self, wave: int) -> None:
        self._move_to(LockstepState.RUNNING)
        self.wave = wave
        self._num_steps = self._start_next = 0
        self._num_earlier = self._num_in_flight
        self.asks = True

    def _end(self, state: LockstepState) -> None:
        self._move_to(state)
        self.wave += 1
        self._num_steps = 0
        self.asks = False

    def _move_to(self, state: LockstepState) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise InvalidTransition(f"a rank that is {self._state.value} cannot become {state.value}")
        self._state = state
