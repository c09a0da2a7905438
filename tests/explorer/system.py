"""A group, its coordinator and what may happen to them: the moves of a world, and what each makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from coordinator_svc.data_parallel.wave import Wave
from engine_svc.core.errors import InvalidTransition
from engine_svc.data_parallel.wave import LockstepState, WaveMachine
from tests.explorer import coordinator_moves, engine_moves
from tests.explorer.broken import BrokenPromise, Promise, expect
from tests.explorer.codec import Codec
from tests.explorer.moves import Kind, Move
from tests.explorer.world import Commit, Frozen, Mode, Rank, World


@dataclass(frozen=True, slots=True)
class Setup:
    """How much may happen, and which machines it happens to: the real ones, or such as have a known fault."""

    num_ranks: int = 2
    num_requests: int = 1  # of each rank that gets any
    num_senders: int = 8  # ranks that get requests: the first so many
    num_pauses: int = 1  # of each rank that is paused
    num_pausers: int = 8  # ranks that are paused: the last so many
    num_hints: int = 0
    num_crashes: int = 0
    interval: int = 1
    has_slow_reports: bool = False  # whether they are on their way for a while; late they may be anyway
    has_slow_ends: bool = False  # whether a step that all have launched is in flight for a while
    is_formed: bool = True  # whether it begins with a group that rests; else with engines without peers
    machine: type[WaveMachine] = WaveMachine
    wave: type[Wave] = Wave


class System:
    """The worlds of one setup, and how they follow each other."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._codec = Codec(setup.machine, setup.wave, interval=setup.interval)
        self._moves: dict[str, Callable[[World, int], None]] = {
            "report": engine_moves.report,
            "ring": engine_moves.send_signal,
            "hear": engine_moves.receive_signal,
            "turn": engine_moves.turn,
            "obey": engine_moves.obey,
            "take": engine_moves.take,
            "finish": engine_moves.finish,
            "lose": engine_moves.leave_group,
            "form": engine_moves.form,
            "pause": engine_moves.pause,
            "resume": engine_moves.resume,
            "all resumed": engine_moves.all_resumed,
            "request": engine_moves.request,
            "crash": engine_moves.crash,
            "return": self._return,
            "register": coordinator_moves.register,
            "hear up": coordinator_moves.receive_report,
            "hint": coordinator_moves.hint,
            "hear hint": coordinator_moves.receive_hint,
            "tell again": coordinator_moves.resend_start,
            "cut": coordinator_moves.cut,
            "coordinator crash": coordinator_moves.coordinator_crash,
            "coordinator crash late": partial(coordinator_moves.coordinator_crash, keep=True),
            "coordinator return": self._return_coordinator,
        }

    def start(self) -> Frozen:
        setup = self.setup
        count = range(setup.num_ranks)
        world = World(
            ranks=[self._new_rank() for _ in count],
            wave=setup.wave(),
            num_requests=tuple(setup.num_requests * (index < setup.num_senders) for index in count),
            num_pauses=tuple(
                setup.num_pauses * (setup.num_ranks - index <= setup.num_pausers) for index in count
            ),
            num_hints=setup.num_hints,
            num_crashes=setup.num_crashes,
            has_slow_reports=setup.has_slow_reports,
        )
        if setup.is_formed:
            world.last_generation = 1
            world.target = Commit(1, tuple(count))
            for rank in world.ranks:
                assert rank.machine is not None
                rank.commit = world.target
                rank.machine.get_ready(1)
            engine_moves.form(world, 0)
        for index in count:
            coordinator_moves.register(world, index)
        for index in count:
            if setup.is_formed:
                engine_moves.report(world, index)
                coordinator_moves.receive_all(world, index)
            world.ranks[index].down = ()
        return self._codec.freeze(world)

    def thaw(self, frozen: Frozen) -> World:
        return self._codec.thaw(frozen)

    def moves(self, world: World) -> Iterator[Move]:
        for index in range(len(world.ranks)):
            yield from engine_moves.engine_moves(world, index)
        yield from coordinator_moves.coordinator_moves(world)

    def after(self, frozen: Frozen, move: Move) -> Frozen:
        """The world that follows. Raises BrokenPromise."""
        world = self._codec.thaw(frozen)
        before = [None if rank.machine is None else rank.machine.wave for rank in world.ranks]
        number = 0 if world.wave is None else world.wave.number
        try:
            self._moves[move.name](world, move.rank)
            if not self.setup.has_slow_ends:
                engine_moves.finish_all(world)
            if move.rank >= 0 and not world.has_slow_reports:
                coordinator_moves.receive_all(world, move.rank)
        except InvalidTransition as error:
            raise BrokenPromise(Promise.POSSIBLE, str(error)) from error
        for index, (rank, wave) in enumerate(zip(world.ranks, before, strict=True)):
            if rank.machine is not None and wave is not None and rank.machine.wave < wave:
                raise BrokenPromise(
                    Promise.MONOTONE, f"rank {index} goes from wave {wave} to wave {rank.machine.wave}"
                )
        if world.wave is not None:
            expect(world.wave.number >= number, Promise.MONOTONE, f"the coordinator goes back from {number}")
        return self._codec.freeze(world)

    def _new_rank(self) -> Rank:
        return Rank(machine=self.setup.machine(interval=self.setup.interval))

    def _return(self, world: World, index: int) -> None:
        world.ranks[index] = self._new_rank()

    def _return_coordinator(self, world: World, index: int) -> None:
        world.wave = self.setup.wave()


def is_done(world: World) -> bool:
    """Whether nothing is left to be done: no work but what is held, no step, no wave, no rank that waits."""
    return not any(_is_busy(world, rank) for rank in world.ranks if rank.machine is not None)


def _is_busy(world: World, rank: Rank) -> bool:
    machine = rank.machine
    assert machine is not None
    return (
        rank.has_work
        or bool(rank.flight)
        or rank.mode is not Mode.FREE
        or machine.state is LockstepState.RUNNING
        or rank.is_resuming
    )


def must_come(world: World, move: Move) -> bool:
    """Whether a move will be made sooner or later, if nothing else comes from outside."""
    if move.kind is Kind.OPERATOR:
        # An operator that has paused a whole group has to resume all of it before any rank can go on.
        return any(
            rank.machine is not None and rank.machine.state is LockstepState.QUIET for rank in world.ranks
        )
    return move.kind in (Kind.OWN, Kind.REPAIR)


def why_stuck(world: World) -> Promise:
    """Which promise a world breaks from which no rank can finish."""
    alive = [(rank, rank.machine) for rank in world.ranks if rank.machine is not None]
    has_work = any(rank.has_work or any(rank.flight) for rank, _ in alive)
    if has_work and not any(rank.is_paused for rank, _ in alive):
        return Promise.NO_LOST_START
    waits = [rank for rank, machine in alive if machine.state is LockstepState.RUNNING]
    if waits and len(waits) < len(alive):
        return Promise.NO_LONELY_STEP
    return Promise.NO_DEADLOCK


def describe(world: World) -> str:
    return "; ".join(_describe_rank(index, rank) for index, rank in enumerate(world.ranks))


def _describe_rank(index: int, rank: Rank) -> str:
    if rank.machine is None:
        return f"rank {index} is dead"
    words = [f"rank {index} is {rank.machine.state.value} at wave {rank.machine.wave}"]
    words += [f"with {rank.num_steps_left} steps to do"] if rank.num_steps_left else []
    words += [f"has {len(rank.flight)} in flight"] if rank.flight else []
    words += [rank.mode.name.lower()] if rank.mode is not Mode.FREE else []
    words += ["paused by its operator"] if rank.is_paused else []
    words += ["waiting for the others to resume"] if rank.is_resuming else []
    words += ["asking"] if rank.machine.asks else []
    return ", ".join(words)
