"""Lockstep groups through crashes, restarts, cuts and scalings by chance, with books that no process has."""

from __future__ import annotations

import pytest

from tests.coordinator_svc.data_parallel.lockstep_world import World

_NUM_TURNS = 600
_MAX_TURNS_TO_FORM = 6000


def _disturb(world: World) -> None:
    """Sometimes something goes wrong, or somebody wants another size."""
    engine = world.random.choice(world.engines)
    choice = world.random.random()
    if choice < 0.010:
        world.kill(engine)
    elif choice < 0.040 and not engine.is_alive:
        engine.restart()
    elif choice < 0.050:
        world.disconnect(engine)
    elif choice < 0.055:
        world.restart_coordinator()
    elif choice < 0.060:
        size = world.random.randint(1, world.size)
        world.formation.resize(size, [one.engine_id for one in world.engines[size:]])


def _turn(world: World) -> None:
    engine = world.random.choice(world.engines)
    if engine.is_alive:
        world.move(engine)
    world.advance(world.random.choice((0.0, 0.01, 0.05, 0.2)))


def _is_one_group(world: World) -> bool:
    generations = {engine.generation for engine in world.engines}
    return len(generations) == 1 and 0 not in generations and world.formation.is_settled


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_no_number_is_given_twice_and_all_end_in_one_group(seed: int, size: int) -> None:
    world = World(seed, size)
    for _ in range(_NUM_TURNS):
        _turn(world)
        _disturb(world)
    world.formation.resize(None)
    for engine in world.engines:
        if not engine.is_alive or engine.is_leaving:
            world.kill(engine)
            engine.restart()
    num_turns = 0
    while not _is_one_group(world) and num_turns < _MAX_TURNS_TO_FORM:
        _turn(world)
        num_turns += 1
    assert _is_one_group(world), f"{world.engines} {world.formation.last_failure}"
    assert world.formation.members == tuple(engine.engine_id for engine in world.engines)


def test_the_world_has_seen_what_it_is_there_for() -> None:
    num_generations = num_changed = 0
    for seed in range(20):
        world = World(seed, 3)
        for _ in range(_NUM_TURNS):
            _turn(world)
            _disturb(world)
        num_generations += len(world.met)
        num_changed += len({len(members) for members in world.met.values()}) > 1
    assert num_generations > 20
    assert num_changed > 5
