"""What the coordinator and the frontends can do next.

The waves are the real object. Membership is decided simply: all that are there, whenever that changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator_svc.data_parallel.wave import START_RETRY_S, Wave
from engine_svc.data_parallel.wave import LockstepState
from tests.explorer.codec import forget_time
from tests.explorer.moves import Kind, Move
from tests.explorer.world import NO_COMMIT, Answer, Commit, Gone, Rank, Report, Start, World

_ENGINES = tuple(f"engine-{index}" for index in range(8))


def coordinator_moves(world: World) -> Iterator[Move]:
    """All that can happen to the coordinator, to sessions and to dead ranks now."""
    if world.wave is None:
        kind = Kind.REPAIR if needs_coordinator(world) else Kind.OUTSIDE
        yield Move("coordinator return", -1, kind)
    elif world.wave.next_at() is not None:
        yield Move("tell again", -1)
    for index, rank in enumerate(world.ranks):
        if world.wave is not None and rank.has_session and rank.up:
            yield Move("hear up", index)
        if world.wave is not None and not rank.has_session and rank.machine is not None:
            yield Move("register", index)
        if rank.machine is None and not rank.has_session:
            yield Move("return", index, Kind.OUTSIDE)
        yield from _faults(world, index, rank)
        yield from _frontend_moves(world, index, rank)
    if world.num_crashes and world.wave is not None:
        yield Move("coordinator crash", -1, Kind.OUTSIDE)
        if any(rank.down for rank in world.ranks):
            yield Move("coordinator crash late", -1, Kind.OUTSIDE)


def _faults(world: World, index: int, rank: Rank) -> Iterator[Move]:
    if world.num_crashes and rank.machine is not None:
        yield Move("crash", index, Kind.OUTSIDE)
        if rank.has_session and (rank.up or rank.down):
            yield Move("cut", index, Kind.OUTSIDE)


def _frontend_moves(world: World, index: int, rank: Rank) -> Iterator[Move]:
    if world.num_requests[index] and rank.machine is not None:
        yield Move("request", index, Kind.OUTSIDE)
    if world.num_hints and world.wave is not None and world.wave.number:
        yield Move("hint", index, Kind.OUTSIDE)
    if any(each[0] == index for each in world.hints):
        yield Move("hear hint", index)


def needs_coordinator(world: World) -> bool:
    """Whether ranks have no whole process group, which they cannot form by themselves."""
    alive = [rank for rank in world.ranks if rank.machine is not None]
    return any(
        (rank.machine is not None and rank.machine.state is LockstepState.APART) or world.is_broken(rank)
        for rank in alive
    )


def receive_all(world: World, index: int) -> None:
    """Take in all that a living engine has said."""
    while world.wave is not None and world.ranks[index].up and world.ranks[index].machine is not None:
        receive_report(world, index)


def receive_report(world: World, index: int) -> None:
    """Take in a report, an answer, or the end of a session."""
    rank, wave = world.ranks[index], _wave(world)
    message, rank.up = rank.up[0], rank.up[1:]
    match message:
        case Report():
            world.generations[index] = message
            wave.report(_ENGINES[index], message.stand)
            _consider(world)
        case Answer():
            wave.answer(_ENGINES[index], message.wave, is_taken=message.is_taken)
        case Gone():
            rank.has_session = False
            world.generations.pop(index, None)
            wave.leave(_ENGINES[index])
            _consider(world)
    _send_starts(world, 0.0)


def register(world: World, index: int) -> None:
    """A session begins; the first report follows."""
    rank = world.ranks[index]
    rank.has_session, rank.reported = True, None
    _wave(world).reconnect(_ENGINES[index])
    _send_commit(world, index)


def cut(world: World, index: int) -> None:
    """A session breaks; both sides notice at once."""
    rank = world.ranks[index]
    world.num_crashes -= 1
    rank.has_session, rank.up, rank.down = False, (), ()


def hint(world: World, index: int) -> None:
    """A frontend has sent a request while nothing ran, as far as it knows."""
    world.num_hints -= 1
    world.hints += ((index, _wave(world).number),)


def receive_hint(world: World, index: int) -> None:
    place = next(place for place, each in enumerate(world.hints) if each[0] == index)
    wave = world.hints[place][1]
    world.hints = world.hints[:place] + world.hints[place + 1 :]
    _wave(world).hint(_ENGINES[index], wave)
    _send_starts(world, 0.0)


def resend_start(world: World, index: int) -> None:
    _send_starts(world, START_RETRY_S)
    forget_time(_wave(world))


def coordinator_crash(world: World, index: int, *, keep: bool = False) -> None:
    """The coordinator dies. keep: the commands have reached the engines, the answers are lost."""
    world.num_crashes -= 1
    world.wave, world.generations, world.target, world.hints = None, {}, NO_COMMIT, ()
    for rank in world.ranks:
        if keep:
            rank.inbox += rank.down
        rank.up = rank.down = ()
        rank.has_session = False


def _wave(world: World) -> Wave:
    assert world.wave is not None
    return world.wave


def _send_starts(world: World, now: float) -> None:
    for start in _wave(world).due(now):
        rank = world.ranks[_ENGINES.index(start.engine_id)]
        command = Start(start.wave)
        if rank.has_session and rank.machine is not None and command not in rank.down:
            rank.down += (command,)


def _consider(world: World) -> None:
    """Want another generation where ranks have lost theirs, or where others are there than are wanted."""
    reported = tuple(sorted(world.generations))
    reports = world.generations
    is_lost = any(
        reports[index].generation == 0
        and (index not in world.target.members or reports[index].formed >= world.target.generation)
        for index in reported
    )
    members = tuple(index for index, rank in enumerate(world.ranks) if rank.has_session)
    if members != reported:
        return
    has_changed = reported != world.target.members
    if not reported or not (is_lost or (has_changed and world.target.generation)):
        return
    world.last_generation += 1
    world.target = Commit(world.last_generation, reported)
    for index in reported:
        _send_commit(world, index)


def _send_commit(world: World, index: int) -> None:
    rank = world.ranks[index]
    if rank.has_session and rank.machine is not None and index in world.target.members:
        rank.down += (world.target,)
