"""A request's way from engine to engine, over engines that are plain objects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.failover import MAX_PLANNED_MOVES, Failover, Moves, Wish
from frontend_svc.output.loss import LossKind
from service_kit.clock import FakeClock
from service_kit.errors import ServiceError, Unavailable

LOST = Unavailable("lost")


class Engine:
    """What `Moves` looks at of a client."""

    model = None

    def __init__(self, address: str) -> None:
        self.address = address
        self.received: list[str] = []
        self.is_long_at_a_step = False
        self.looks = 0
        self.on_look: Callable[[], None] = lambda: None

    @property
    def step_age_s(self) -> float:
        self.looks += 1
        self.on_look()
        return 9.0 if self.is_long_at_a_step else 0.0


class Engines:
    """A directory with one ready engine at a time, the first that is left."""

    reconnect_window_s = 10.0

    def __init__(self, num_engines: int) -> None:
        self.left = [Engine(f"engine:{index}") for index in range(num_engines)]

    def pick(
        self, *args: object, is_allowed: Callable[[Engine], bool] = lambda engine: True, **wishes: object
    ) -> Engine:
        if self.left and is_allowed(self.left[0]):
            return self.left[0]
        raise Unavailable("no engine is ready")

    def ready_for(self, *args: object, **wishes: object) -> list[Engine]:
        return self.left[:1]

    def expected_until(self, model: object) -> float | None:
        return None


class NoChance(random.Random):
    """Has nobody wait before a move."""

    def random(self) -> float:
        return 0.0


class World:
    """Requests by name over these engines."""

    def __init__(
        self, *, num_engines: int, proof_s: float = 2.0, chance: random.Random | None = None
    ) -> None:
        self.engines = Engines(num_engines)
        chance = chance or random.Random(3)
        self.failover = Failover(self.engines, FakeClock(), chance, proof_s=proof_s)
        self.moves: dict[str, Moves] = {}
        self.errors: dict[str, ServiceError] = {}
        self.changed = asyncio.Event()

    def start(self, name: str) -> None:
        def send(engine: Engine) -> None:
            engine.received.append(name)
            self.changed.set()

        def fail(error: ServiceError) -> None:
            self.errors[name] = error
            self.changed.set()

        self.moves[name] = Moves(self.failover, Wish(None, RoutingRequest()), send=send, fail=fail)
        self.moves[name].start()

    def lose_first(self, cause: LossKind = LossKind.DEATH, *, had_output: bool = False) -> None:
        """The engine that is used is lost, where not said otherwise before any output of it."""
        lost = self.engines.left.pop(0)
        for moves in list(self.moves.values()):
            if moves.client is not None and moves.client.address == lost.address:
                moves.lose(cause, LOST, has_begun=had_output, had_output=had_output)
        self.failover.engines_changed()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


async def test_nobody_follows_a_suspect_whose_step_may_hang_and_it_is_known_by_the_next_death():
    world = World(num_engines=3, proof_s=0.05)
    for name in ("a", "b", "c"):
        world.start(name)
    world.lose_first()
    second = world.engines.left[0]
    second.is_long_at_a_step, second.on_look = True, world.changed.set
    await world.until(lambda: second.looks == 5)
    assert len(second.received) == 1
    world.lose_first()
    (poison,) = second.received
    await world.until(lambda: poison in world.errors)
    assert world.errors[poison].reason == "QUARANTINED"
    third = world.engines.left[0]
    await world.until(lambda: len(third.received) == 2)
    assert poison not in third.received
    world.failover.close()


async def test_others_follow_a_suspect_that_is_merely_slow():
    world = World(num_engines=2, proof_s=0.05)
    for name in ("a", "b", "c"):
        world.start(name)
    world.lose_first()
    second = world.engines.left[0]
    await world.until(lambda: len(second.received) == 3)
    assert sorted(second.received) == ["a", "b", "c"]
    world.failover.close()


async def test_a_request_that_is_about_to_be_sent_on_ends_with_the_frontend():
    world = World(num_engines=2, proof_s=0.05)
    world.start("a")
    world.lose_first()
    world.failover.close()
    await world.until(lambda: "a" in world.errors)
    assert world.errors["a"] is LOST
    assert world.engines.left[0].received == []


async def test_engines_that_are_told_to_stop_use_up_neither_moves_nor_the_budget():
    world = World(num_engines=9, chance=NoChance())
    world.start("a")
    for _ in range(5):
        world.lose_first(LossKind.LEFT)
        await world.until(lambda: bool(world.engines.left[0].received))
    assert world.failover.budget.left == 1024
    for _ in range(3):
        world.lose_first(had_output=True)
        await world.until(lambda: bool(world.engines.left[0].received))
        world.moves["a"].prove()
    assert world.failover.budget.left == 1021
    world.lose_first(had_output=True)
    assert world.errors == {"a": LOST}


async def test_planned_moves_have_a_limit_too():
    world = World(num_engines=MAX_PLANNED_MOVES + 2, chance=NoChance())
    world.start("a")
    for _ in range(MAX_PLANNED_MOVES):
        world.lose_first(LossKind.LEFT)
        await world.until(lambda: bool(world.engines.left[0].received))
    assert world.errors == {}
    world.lose_first(LossKind.LEFT)
    assert world.errors == {"a": LOST}


async def test_an_engine_that_lives_and_gives_up_a_session_may_do_so_for_a_fault():
    """As one whose step cannot be told: where that goes on and on, it is to end."""
    world = World(num_engines=5, chance=NoChance())
    world.start("a")
    for _ in range(3):
        world.lose_first(LossKind.DISMISSAL)
        await world.until(lambda: bool(world.engines.left[0].received))
    assert world.failover.budget.left == 1021
    world.lose_first(LossKind.DISMISSAL)
    assert world.errors == {"a": LOST}
