"""The scenarios as data, and what each does when its streams are where it wants them."""

from __future__ import annotations

import asyncio
import time

from benchmarks.rig import faults
from benchmarks.rig.faults import FaultMissed
from benchmarks.rig.processes import StartFailed
from frontend_svc.generation.failover import MAX_MOVES
from tests.chaos import checks
from tests.chaos.fault_plugin import EngineFault
from tests.chaos.faults import cut, kill_rank, partition, struck
from tests.chaos.proxy import Direction
from tests.chaos.scene import Scenario, Scene
from tests.chaos.stacks import StackPlan

STANDARD = StackPlan(num_frontends=2)
PROXIED = StackPlan(has_proxies=True)
# A drain that is cut so soon that streams are still on the engine.
FAULTY = StackPlan(has_plugin=True, engine_flags=("--drain-deadline-s=0.3",))
DIVIDED = StackPlan(tensor_parallel_size=2, num_streams=16)

STOPPED_S = 5.0
DROPPED_S = 3.0
_EXIT_LIMIT_S = 30.0


async def _kill_engine(scene: Scene) -> None:
    scene.find_victims(scene.engines[0])
    scene.note_instant("struck")
    await faults.kill(scene.engines[0])


async def _terminate_engine(scene: Scene) -> None:
    engine = scene.engines[0]
    scene.find_victims(engine)
    scene.note_instant("struck")
    await faults.terminate(engine)
    scene.notes["exit_status_0"] = await engine.ended(_EXIT_LIMIT_S)
    scene.notes["ended_s"] = time.monotonic() - scene.instants["struck"]


async def _stop_engine(scene: Scene) -> None:
    engine = scene.engines[0]
    scene.find_victims(engine)
    scene.note_instant("struck")
    await faults.stop(engine)
    await asyncio.sleep(STOPPED_S)
    await faults.resume(engine)


async def _await_hang(scene: Scene) -> None:
    await struck(scene.stack.folder, EngineFault.HANG)
    scene.note_instant("struck")
    hung = await _first_to_end(scene)
    scene.notes["hung_engine"] = hung
    scene.notes["exit_status"] = scene.engines[hung].exit_status or 0
    scene.notes["ended_s"] = time.monotonic() - scene.instants["struck"]


async def _first_to_end(scene: Scene) -> int:
    ends = [asyncio.ensure_future(engine.ended(_EXIT_LIMIT_S)) for engine in scene.engines]
    done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if all(each.exception() for each in done):
        raise FaultMissed(f"no engine ended within {_EXIT_LIMIT_S:g} s")
    return next(index for index, each in enumerate(ends) if each in done)


async def _ended_by_its_watchdog(scene: Scene) -> list[str]:
    engine = scene.engines[int(scene.notes["hung_engine"])]
    text = engine.log_file.read_text(errors="replace")
    problems = []
    if scene.notes["exit_status"] <= 0:
        problems.append(f"the hung engine ended with {scene.notes['exit_status']:g}")
    if "most recent call first" not in text and "fault_plugin.py" not in text:
        problems.append("the hung engine dumped no stacks")
    return problems


async def _await_raise(scene: Scene) -> None:
    await struck(scene.stack.folder, EngineFault.RAISE)


async def _await_nan(scene: Scene) -> None:
    await struck(scene.stack.folder, EngineFault.NAN)


async def _supervise_and_await_exit(scene: Scene) -> None:
    scene.notes["starts_before"] = sum(engine.num_starts for engine in scene.engines)
    for engine in scene.engines:
        scene.stack.fleet.keep(engine.name)
    await struck(scene.stack.folder, EngineFault.EXIT)
    await scene.load.finish()


async def _restart_engine(scene: Scene) -> None:
    engine = scene.engines[0]
    epoch = (await engine.status()).get("engine_epoch")
    scene.find_victims(engine)
    scene.note_instant("struck")
    await faults.kill(engine)
    await engine.start()
    await engine.ready()
    ready_at = time.monotonic()
    await scene.stack.fleet.until_routed()
    scene.notes["routed_s"] = time.monotonic() - ready_at
    if epoch is not None and (await engine.status()).get("engine_epoch") == epoch:
        raise FaultMissed("the engine that came back has the epoch of the one that went")


async def _start_duplicates(scene: Scene) -> None:
    engine, fleet = scene.engines[0], scene.stack.fleet
    same_port = fleet.twin(engine, "same-port", same_port=True)
    began_at = time.monotonic()
    try:
        await same_port.start()
    except StartFailed:
        scene.notes["same_port_exit_status"] = same_port.exit_status or 0
        scene.notes["same_port_s"] = time.monotonic() - began_at
    else:
        await same_port.stop()
        raise FaultMissed("two engines listen on one port") from None
    same_rank = fleet.twin(engine, "same-rank", same_port=False)
    await same_rank.start()
    try:
        await _until_refused(same_rank)
        known = [key for key in await scene.frontend.status() if same_rank.address in key]
        scene.notes["num_routed_duplicates"] = len(known)
    finally:
        await same_rank.stop()


async def _until_refused(duplicate) -> None:
    try:
        async with asyncio.timeout(_EXIT_LIMIT_S):
            while "held by a live engine" not in duplicate.log_file.read_text(errors="replace"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise FaultMissed("the coordinator did not refuse an engine of the same rank") from None


async def _duplicates_are_refused(scene: Scene) -> list[str]:
    problems = []
    if scene.notes["same_port_exit_status"] <= 0:
        problems.append(f"the engine on the same port ended with {scene.notes['same_port_exit_status']:g}")
    if "in use" not in (scene.stack.folder / "same-port.log").read_text(errors="replace"):
        problems.append("the engine on the same port does not say that it is in use")
    if scene.notes["num_routed_duplicates"]:
        problems.append("the frontend knows the engine of the same rank")
    return problems


async def _kill_rank(scene: Scene) -> None:
    scene.find_victims(scene.engines[0], at_least=4)
    scene.note_instant("struck")
    await kill_rank(scene.engines[0])
    scene.notes["exit_status_0"] = await scene.engines[0].ended(_EXIT_LIMIT_S)


async def _cut_connection(scene: Scene) -> None:
    scene.notes["prompt_tokens_before"] = await checks.prompt_tokens(scene.engines)
    scene.find_victims(scene.engines[0])
    scene.note_instant("struck")
    await cut(scene.stack.proxies["engine-0"])


async def _nothing_recomputed(scene: Scene) -> list[str]:
    grown = await checks.prompt_tokens(scene.engines) - scene.notes["prompt_tokens_before"]
    return [f"engines were given {grown:g} more prompt tokens"] if grown else []


def _drop(*directions: Direction):
    async def strike(scene: Scene) -> None:
        scene.find_victims(scene.engines[0])
        scene.note_instant("struck")
        await partition(scene.stack.proxies["engine-0"], asyncio.sleep(DROPPED_S), *directions)

    return strike


async def _kill_coordinator(scene: Scene) -> None:
    await faults.kill(scene.stack.fleet["coordinator-0"])


SCENARIOS = (
    Scenario(
        "E1 kill one of two engines",
        _kill_engine,
        (
            checks.is_clean,
            checks.requests_moved,
            # Before the first heartbeat is missed.
            checks.is_detected_within(1.0),
            checks.is_recovered_within(8.0),
        ),
        STANDARD,
    ),
    Scenario("E4 drain an engine", _terminate_engine, (checks.is_clean, checks.exits_with(0)), STANDARD),
    Scenario(
        "E5 stop an engine and let it go on",
        _stop_engine,
        (
            checks.is_clean,
            checks.requests_moved,
            checks.is_detected_within(2.8),
            checks.is_recovered_within(8.0),
            checks.has_stale_outputs,
            checks.all_engines_are_the_same,
        ),
        STANDARD,
    ),
    Scenario(
        "E15 restart an engine under its address",
        _restart_engine,
        (checks.is_clean, checks.noted("routed_s", at_most=1.0, is_time=True)),
        STANDARD,
    ),
    Scenario(
        "E16 start an engine twice",
        _start_duplicates,
        (checks.is_clean, _duplicates_are_refused, checks.all_engines_are_the_same),
        STANDARD,
        num_streams=16,
        median_tokens=1,
    ),
    Scenario("C1 kill the coordinator", _kill_coordinator, (checks.is_clean,), STANDARD),
    Scenario(
        "N1 reset a connection",
        _cut_connection,
        (
            checks.is_clean,
            checks.no_request_moved,
            _nothing_recomputed,
            checks.is_recovered_within(1.0),
            checks.all_engines_are_the_same,
        ),
        PROXIED,
    ),
    Scenario(
        "N2 drop both ways",
        _drop(Direction.IN, Direction.OUT),
        (
            checks.is_clean,
            checks.requests_moved,
            checks.is_detected_within(2.8),
            checks.all_engines_are_the_same,
        ),
        PROXIED,
    ),
    Scenario(
        "N3 drop what the engine says",
        _drop(Direction.OUT),
        (
            checks.is_clean,
            checks.requests_moved,
            checks.is_detected_within(2.8),
            checks.all_engines_are_the_same,
        ),
        PROXIED,
    ),
    Scenario(
        "E4 drain an engine with a short deadline",
        _terminate_engine,
        (
            checks.is_clean,
            checks.requests_moved,
            checks.exits_with(0),
            checks.noted("ended_s", at_most=3.0, is_time=True),
        ),
        FAULTY,
        median_tokens=20,
    ),
    Scenario(
        "E10 a request that makes the step raise",
        _await_raise,
        (checks.is_clean, checks.poison_request_ends_with_error, checks.all_engines_are_the_same),
        FAULTY,
        median_tokens=20,
        marked=EngineFault.RAISE,
    ),
    Scenario(
        "E12 a request whose logits are NaN",
        _await_nan,
        (checks.is_clean, checks.poison_request_ends_with_error, checks.all_engines_are_the_same),
        FAULTY,
        median_tokens=20,
        marked=EngineFault.NAN,
    ),
    Scenario(
        "E7 a step that hangs",
        _await_hang,
        (
            checks.is_clean,
            checks.requests_moved,
            checks.marked_request_is_clean,
            _ended_by_its_watchdog,
            checks.noted("ended_s", at_most=10.0, is_time=True),
        ),
        FAULTY,
        median_tokens=20,
        marked=EngineFault.HANG,
    ),
    Scenario(
        "poison that ends the process",
        _supervise_and_await_exit,
        (
            checks.is_clean,
            checks.requests_moved,
            checks.poison_request_is_quarantined,
            checks.restarts_at_most(2, on_slow_machine=MAX_MOVES),
        ),
        FAULTY,
        median_tokens=20,
        marked=EngineFault.EXIT,
    ),
    Scenario(
        "W1 kill a rank of one of two engines",
        _kill_rank,
        (checks.is_clean, checks.requests_moved),
        DIVIDED,
        num_streams=16,
        median_tokens=20,
    ),
)


def ids_of(scenario: Scenario) -> str:
    return scenario.name.replace(" ", "-")
