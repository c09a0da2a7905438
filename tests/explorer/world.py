"""What a lockstep group and its coordinator are at one moment, as values that can be compared and put back.

The machines in it are the real ones; around them is only what they need: channels, a loop, collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from coordinator_svc.data_parallel.wave import Wave, WaveStatus
from engine_svc.data_parallel.wave import LockstepState, Vote, WaveMachine

# Any tuple of plain values; two worlds are the same if and only if these are equal.
Frozen: TypeAlias = tuple[object, ...]


class Mode(IntEnum):
    """What the loop of a rank is doing."""

    FREE = 0  # between two turns
    FINISHING = 1  # waits for its oldest step
    SETTLING = 2  # waits for all of its steps, to pause then
    VOTING = 3  # waits for the votes of the others
    VERDICT = 4  # all have voted; it has not taken the verdict yet


class Report(NamedTuple):
    """What an engine reports to its coordinator."""

    stand: WaveStatus
    generation: int
    formed: int  # the last generation that it has formed


class Start(NamedTuple):
    """A command: begin this wave."""

    wave: int


class Commit(NamedTuple):
    """A command: change over to this generation with these ranks."""

    generation: int
    members: tuple[int, ...]


class Answer(NamedTuple):
    """What became of a start."""

    wave: int
    is_taken: bool


class Gone(NamedTuple):
    """The end of a session: the engine is dead."""


Up: TypeAlias = Report | Answer | Gone
Down: TypeAlias = Start | Commit

NO_COMMIT = Commit(0, ())


@dataclass(slots=True)
class Rank:
    """One engine: the real machine, and what its loop, its scheduler and its operator have on their minds."""

    machine: WaveMachine | None = None  # None: dead
    mode: Mode = Mode.FREE
    num_steps_left: int = 0  # what its requests still need and was not launched
    flight: tuple[bool, ...] = ()  # steps in flight; whether each computes a request
    ballot: Vote | None = None  # its vote, or the verdict
    is_paused: bool = False  # by its operator
    is_resuming: bool = False  # has resumed, and waits for the others
    may_sleep: bool = False  # all have agreed to stand still, and its operator has not resumed
    formed: int = 0  # the last generation that it has formed
    group: int = 0  # the generation of its process group; 0: it has left it
    members: tuple[int, ...] = ()
    num_launched: int = 0  # steps in this group
    num_resumed: int = 0  # barriers in this group
    commit: Commit = NO_COMMIT
    has_session: bool = False
    inbox: tuple[Down, ...] = ()  # from a session that is no more
    up: tuple[Up, ...] = ()
    down: tuple[Down, ...] = ()
    reported: Report | None = None

    def report(self) -> Report:
        machine = self.machine
        assert machine is not None
        state = machine.state
        stand = WaveStatus(
            machine.wave, state is LockstepState.RUNNING, machine.asks, state is LockstepState.APART
        )
        return Report(stand, machine.generation, self.formed)

    @property
    def has_work(self) -> bool:
        """Whether a step planned now would compute something."""
        return self.num_steps_left > 0 and not self.is_paused


@dataclass(slots=True)
class World:
    """All of it. The budgets are what may still come from outside."""

    ranks: list[Rank]
    wave: Wave | None  # None: the coordinator is away
    generations: dict[int, Report] = field(default_factory=dict)  # what each rank has reported last
    target: Commit = NO_COMMIT  # what the coordinator wants the group to be
    last_generation: int = 0
    hints: tuple[tuple[int, int], ...] = ()  # on their way: rank and wave
    signals: frozenset[tuple[int, int]] = frozenset()  # generation and wave
    num_requests: tuple[int, ...] = ()  # that may still come, for each rank
    num_pauses: tuple[int, ...] = ()
    num_hints: int = 0
    num_crashes: int = 0
    has_slow_reports: bool = True  # False: what an engine reports arrives at once, but is still sent late

    def group_of(self, rank: Rank) -> list[Rank]:
        """The ranks that its process group began with."""
        return [self.ranks[index] for index in rank.members]

    def is_broken(self, rank: Rank) -> bool:
        """Whether a rank of its process group is dead or has left it."""
        return any(peer.machine is None or peer.group != rank.group for peer in self.group_of(rank))
