"""What an engine can do next, and what becomes of the world then: its loop, its collectives, its operator."""

from __future__ import annotations

from collections.abc import Iterator

from engine_svc.data_parallel.wave import LockstepState, Vote, WaveMachine
from tests.explorer.broken import Promise, expect
from tests.explorer.moves import Kind, Move
from tests.explorer.world import Answer, Commit, Down, Gone, Mode, Rank, World

MAX_REPORTS_UNDER_WAY = 1
MAX_IN_FLIGHT = 2


def engine_moves(world: World, index: int) -> Iterator[Move]:
    rank = world.ranks[index]
    if rank.machine is None:
        return
    if rank.has_session and len(rank.up) < MAX_REPORTS_UNDER_WAY and rank.reported != rank.report():
        yield Move("report", index)
    if rank.machine.asks and not rank.has_session and not _has_signaled(world, rank):
        yield Move("ring", index)
    match rank.mode:
        case Mode.FREE:
            yield from _free_moves(world, index, rank, rank.machine)
        case Mode.FINISHING | Mode.SETTLING:
            if _is_oldest_done(world, rank):
                yield Move("finish", index)
            if world.is_broken(rank):
                yield Move("lose", index)
        case Mode.VOTING:
            if world.is_broken(rank):
                yield Move("lose", index)
        case Mode.VERDICT:
            yield Move("take", index)
            if world.is_broken(rank):
                yield Move("lose", index)


def _free_moves(world: World, index: int, rank: Rank, machine: WaveMachine) -> Iterator[Move]:
    if rank.flight or machine.state in (LockstepState.PAUSED, LockstepState.RUNNING):
        yield Move("turn", index)
    if (rank.inbox or rank.down) and len(rank.up) <= MAX_REPORTS_UNDER_WAY:
        yield Move("obey", index)
    if rank.is_resuming:
        if world.is_broken(rank):
            yield Move("lose", index)
        elif all(peer.num_resumed >= rank.num_resumed for peer in world.group_of(rank)):
            yield Move("all resumed", index)
    if machine.state is LockstepState.PAUSED and _receives_signal(world, rank, machine):
        yield Move("hear", index)
    if _can_form(world, rank, machine) and index == rank.commit.members[0]:
        yield Move("form", index)
    if rank.is_paused:
        yield Move("resume", index, Kind.OPERATOR)
    elif world.num_pauses[index]:
        yield Move("pause", index, Kind.OUTSIDE)


def send_signal(world: World, index: int) -> None:
    """Set the wake signal in the group's store, as there is no coordinator that would start the others."""
    rank = world.ranks[index]
    world.signals |= {(rank.group, _machine(rank).wave)}


def receive_signal(world: World, index: int) -> None:
    machine = _machine(world.ranks[index])
    machine.start(machine.wave)


def report(world: World, index: int) -> None:
    rank = world.ranks[index]
    rank.reported = rank.report()
    rank.up += (rank.reported,)


def obey(world: World, index: int) -> None:
    rank = world.ranks[index]
    command: Down
    if rank.inbox:
        command, rank.inbox = rank.inbox[0], rank.inbox[1:]
        _do(rank, command)
        return
    command, rank.down = rank.down[0], rank.down[1:]
    answer = _do(rank, command)
    if answer is not None:
        rank.up += (answer,)


def _do(rank: Rank, command: Down) -> Answer | None:
    machine = _machine(rank)
    if isinstance(command, Commit):
        rank.commit = max(rank.commit, command)
        machine.get_ready(command.generation)
        return None
    return Answer(command.wave, machine.start(command.wave))


def turn(world: World, index: int) -> None:
    """Launch a step where the machine lets it, and vote where it has to; else take the oldest back."""
    rank = world.ranks[index]
    machine = _machine(rank)
    if not machine.may_step(rank.has_work):
        if rank.flight:
            rank.mode = Mode.FINISHING
        return
    if world.is_broken(rank):
        leave_group(world, index)
        return
    expect(not rank.may_sleep, Promise.QUIET, f"rank {index} launches a step")
    computes = rank.has_work
    rank.num_steps_left -= computes
    rank.flight += (computes,)
    rank.num_launched += 1
    vote = machine.on_step_launched(rank.has_work)
    if vote is None:
        _wait_or_go_on(rank)
        return
    rank.mode, rank.ballot = Mode.VOTING, vote
    group = world.group_of(rank)
    if all(peer.mode is Mode.VOTING for peer in group):
        _count(group)


def _count(group: list[Rank]) -> None:
    num_launched_by_rank = {peer.num_launched for peer in group}
    expect(
        len(num_launched_by_rank) == 1,
        Promise.PAIRED,
        f"ranks vote after {sorted(num_launched_by_rank)} steps",
    )
    verdict = Vote.count([peer.ballot for peer in group if peer.ballot is not None])
    for peer in group:
        peer.mode, peer.ballot = Mode.VERDICT, verdict


def take(world: World, index: int) -> None:
    rank = world.ranks[index]
    machine, verdict = _machine(rank), rank.ballot
    assert verdict is not None
    rank.ballot = None
    machine.take(verdict)
    rank.may_sleep = machine.state is LockstepState.QUIET
    _wait_or_go_on(rank)


def _wait_or_go_on(rank: Rank) -> None:
    # The loop waits where as many steps as it may have are in flight, or where it had nothing to plan.
    must_wait = len(rank.flight) >= MAX_IN_FLIGHT or not rank.flight[-1]
    rank.mode = Mode.FINISHING if must_wait else Mode.FREE


def finish_all(world: World) -> None:
    """Roll back every step that all have launched and some rank waits for."""
    for index, rank in enumerate(world.ranks):
        while rank.mode in (Mode.FINISHING, Mode.SETTLING) and _is_oldest_done(world, rank):
            finish(world, index)


def finish(world: World, index: int) -> None:
    rank = world.ranks[index]
    rank.flight = rank.flight[1:]
    _machine(rank).on_step_done()
    if rank.mode is Mode.FINISHING:
        rank.mode = Mode.FREE
    elif not rank.flight:
        _pause_machine(rank)


def leave_group(world: World, index: int) -> None:
    """Leave a process group in which a rank is missing; what was in flight runs again."""
    rank = world.ranks[index]
    rank.num_steps_left += sum(rank.flight)
    rank.flight, rank.ballot, rank.group = (), None, 0
    rank.is_resuming = rank.may_sleep = False
    _machine(rank).leave_group()
    is_settling = rank.mode is Mode.SETTLING
    rank.mode = Mode.FREE
    if is_settling:
        _pause_machine(rank)


def form(world: World, index: int) -> None:
    generation, members = world.ranks[index].commit
    ranks = [world.ranks[member] for member in members]
    wave = max(_machine(rank).wave for rank in ranks)
    for rank in ranks:
        _machine(rank).form(generation, wave)
        rank.group = rank.formed = generation
        rank.members = members
        rank.num_launched = rank.num_resumed = 0


def pause(world: World, index: int) -> None:
    """An operator wants it to stand still: the steps in flight come to their end first."""
    rank = world.ranks[index]
    world.num_pauses = _less(world.num_pauses, index)
    if rank.flight:
        rank.mode = Mode.SETTLING
    else:
        _pause_machine(rank)


def _pause_machine(rank: Rank) -> None:
    rank.mode, rank.is_paused = Mode.FREE, True
    _machine(rank).pause()


def resume(world: World, index: int) -> None:
    rank = world.ranks[index]
    rank.is_paused = rank.may_sleep = False
    if _machine(rank).resume():
        rank.num_resumed += 1
        rank.is_resuming = True


def all_resumed(world: World, index: int) -> None:
    """Learn that the others have resumed as well."""
    rank = world.ranks[index]
    rank.is_resuming = False
    expect(not rank.may_sleep, Promise.QUIET, f"rank {index} leaves the pause")
    _machine(rank).all_resumed()


def request(world: World, index: int) -> None:
    world.num_requests = _less(world.num_requests, index)
    world.ranks[index].num_steps_left += 1


def crash(world: World, index: int) -> None:
    dead = world.ranks[index]
    world.num_crashes -= 1
    world.ranks[index] = Rank(num_launched=dead.num_launched, group=0, members=())
    if dead.has_session:
        world.ranks[index].has_session = True
        world.ranks[index].up = (*dead.up, Gone())


def _less(budget: tuple[int, ...], index: int) -> tuple[int, ...]:
    return tuple(left - (place == index) for place, left in enumerate(budget))


def _machine(rank: Rank) -> WaveMachine:
    assert rank.machine is not None
    return rank.machine


def _has_signaled(world: World, rank: Rank) -> bool:
    return (rank.group, _machine(rank).wave) in world.signals


def _receives_signal(world: World, rank: Rank, machine: WaveMachine) -> bool:
    return (rank.group, machine.wave) in world.signals and not world.is_broken(rank)


def _is_oldest_done(world: World, rank: Rank) -> bool:
    oldest = rank.num_launched - len(rank.flight) + 1
    return all(peer.num_launched >= oldest for peer in world.group_of(rank))


def _can_form(world: World, rank: Rank, machine: WaveMachine) -> bool:
    generation = machine.switch_to
    if not generation or rank.commit.generation != generation:
        return False
    members = [world.ranks[index] for index in rank.commit.members]
    return all(
        peer.machine is not None
        and peer.machine.switch_to == generation
        and peer.mode is Mode.FREE
        and not peer.flight
        for peer in members
    )
