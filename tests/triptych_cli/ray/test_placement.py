"""Engines on hosts of a cluster: which are started again, where, how often, and what a stop does."""

from __future__ import annotations

import asyncio

import pytest

from triptych_cli.ray.config import parse_place
from triptych_cli.ray.placement import EngineDied, EnginePlacement, HostLost, Placement
from triptych_cli.serve.supervisor import StartTimeout
from triptych_cli.services import embedded_model
from triptych_kit.config import ConfigError
from triptych_kit.process.supervision import SupervisorLimits

LIMITS = SupervisorLimits(startup_s=5.0, stop_s=5.0, max_restarts=2, restart_delay_s=0.0)
LIMIT_S = 10.0


class FakeHost:
    """A host whose engine ends when the test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.flags: list[list[str]] = []
        self.refusal = ""
        self.is_dismissed = False
        self.started = asyncio.Event()
        self._end: asyncio.Future[int] | None = None

    async def start(self, flags: list[str], environment: dict[str, str]) -> EnginePlacement:
        if self.refusal:
            raise EngineDied(self.refusal)
        self.flags.append(flags)
        self._end = asyncio.get_running_loop().create_future()
        self.started.set()
        return EnginePlacement(
            f"10.0.0.9:{4000 + len(self.flags)}", "127.0.0.1:1", "127.0.0.1:2", "node", 1, ""
        )

    async def ended(self) -> int:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def drain(self, limit_s: float) -> int:
        self.end(0)
        return 0

    async def dismiss(self) -> None:
        self.is_dismissed = True

    def end(self, status: int) -> None:
        assert self._end is not None
        self.started.clear()
        if not self._end.done():
            self._end.set_result(status)

    def lose(self) -> None:
        assert self._end is not None
        self._end.set_exception(HostLost("the node died"))


class FakeCluster:
    """As many hosts as are asked for; `refusal` is what their engines end with."""

    def __init__(self) -> None:
        self.hosts: list[FakeHost] = []
        self.refusal = ""
        self.provided = asyncio.Event()

    async def provide(self, name: str, index: int) -> FakeHost:
        host = FakeHost(name)
        host.refusal = self.refusal
        self.hosts.append(host)
        self.provided.set()
        return host


class Rig:
    """A placement over a fake cluster; every engine is ready at once, or never."""

    def __init__(self, num_engines: int = 1, *, is_ready: bool = True, limits=LIMITS) -> None:
        self.cluster = FakeCluster()
        self.lines: list[str] = []
        self.changed = asyncio.Event()
        self._is_ready = is_ready
        self.placement = Placement(
            parse_place(["--coordinator=10.0.0.1:50071", f"--num-engines={num_engines}"]),
            self.cluster,
            await_ready=self._await_ready,
            report=self.lines.append,
            on_change=self.changed.set,
            limits=limits,
        )

    async def _await_ready(self, service: str, address: str) -> None:
        assert service == "engine"
        if not self._is_ready:
            await asyncio.Event().wait()

    async def running(self) -> asyncio.Task[None]:
        await self.placement.start()
        return asyncio.ensure_future(self.placement.keep_running())

    async def changes(self) -> None:
        self.changed.clear()
        await asyncio.wait_for(self.changed.wait(), LIMIT_S)


async def test_an_engine_that_died_starts_again_on_its_host_and_port() -> None:
    rig = Rig()
    running = await rig.running()
    (host,) = rig.cluster.hosts
    host.end(-9)
    await rig.changes()
    assert len(rig.cluster.hosts) == 1
    assert ["--port=4001" in flags for flags in host.flags] == [False, True]
    assert any("was killed by SIGKILL; starts again" in line for line in rig.lines)
    running.cancel()


async def test_an_engine_whose_host_is_lost_starts_again_on_another_with_a_new_port() -> None:
    rig = Rig()
    running = await rig.running()
    rig.cluster.hosts[0].lose()
    await rig.changes()
    assert len(rig.cluster.hosts) == 2
    assert "--port=0" in rig.cluster.hosts[1].flags[0]
    running.cancel()


async def test_an_engine_that_was_drained_is_not_started_again_and_releases_its_resources() -> None:
    rig = Rig(num_engines=2)
    running = await rig.running()
    first, second = rig.cluster.hosts
    first.end(0)
    second.end(0)
    await asyncio.wait_for(running, LIMIT_S)
    assert [host.is_dismissed for host in rig.cluster.hosts] == [True, True]
    assert [len(host.flags) for host in rig.cluster.hosts] == [1, 1]


async def test_an_engine_that_keeps_dying_stays_down_and_the_others_run_on() -> None:
    rig = Rig(num_engines=2)
    running = await rig.running()
    dying, other = rig.cluster.hosts
    for _ in range(LIMITS.max_restarts + 1):
        dying.end(1)
        await rig.changes()
    assert rig.lines[-1] == (
        "ERROR engine-0 stays down after 2 restarts within 60 s: 3 deaths, the last: exited with code 1"
    )
    assert list(rig.placement.placements) == ["engine-1"]
    assert (dying.is_dismissed, other.is_dismissed, running.done()) == (True, False, False)
    other.end(0)
    await asyncio.wait_for(running, LIMIT_S)


async def test_the_last_engine_that_keeps_dying_ends_the_placement() -> None:
    rig = Rig()
    running = await rig.running()
    for _ in range(LIMITS.max_restarts):
        rig.cluster.hosts[0].end(1)
        await rig.changes()
    rig.cluster.hosts[0].end(1)
    with pytest.raises(EngineDied, match="engine-0 exited with code 1 after 2 restarts"):
        await asyncio.wait_for(running, LIMIT_S)


async def test_restarts_that_fail_count_as_well() -> None:
    rig = Rig()
    running = await rig.running()
    rig.cluster.refusal = "engine-0 exited with code 2"
    rig.cluster.hosts[0].lose()
    with pytest.raises(EngineDied, match="after 2 restarts"):
        await asyncio.wait_for(running, LIMIT_S)
    assert sum("did not start" in line for line in rig.lines) == LIMITS.max_restarts


async def test_an_engine_that_dies_while_it_loads_ends_the_start() -> None:
    rig = Rig(is_ready=False)
    starting = asyncio.ensure_future(rig.placement.start())
    await rig.cluster.provided.wait()
    await rig.cluster.hosts[0].started.wait()
    rig.cluster.hosts[0].end(2)
    with pytest.raises(EngineDied, match="exited with code 2 while it was starting"):
        await asyncio.wait_for(starting, LIMIT_S)


async def test_a_start_that_takes_too_long_says_which_engine_is_late() -> None:
    rig = Rig(is_ready=False, limits=SupervisorLimits(startup_s=0.01))
    with pytest.raises(StartTimeout, match=r"engine-0 \(loading\)"):
        await rig.placement.start()


async def test_a_stop_drains_every_engine_and_says_how_each_ended() -> None:
    rig = Rig(num_engines=2)
    running = await rig.running()
    await rig.placement.stop()
    await asyncio.wait_for(running, LIMIT_S)
    assert rig.lines[-2:] == ["engine-0 exited with code 0", "engine-1 exited with code 0"]
    assert all(host.is_dismissed for host in rig.cluster.hosts)


# The arguments of `triptych ray place`: whose is which, and what is refused before anything is placed.

COORDINATOR = "--coordinator=10.0.0.1:50071"


def test_flags_that_are_not_the_placements_own_are_every_engines(tmp_path) -> None:
    placing = parse_place([str(tmp_path), COORDINATOR, "--num-engines=2", "--max-num-seqs", "4"])
    assert placing.engine_flags == (str(tmp_path), "--max-num-seqs", "4", "--num-threads=1")


def test_each_engine_gets_its_rank_its_port_and_the_coordinator() -> None:
    placing = parse_place([COORDINATOR, "--num-engines=2", "--first-rank=2", "--base-port=4000"])
    flags = placing.flags_of(1)
    assert placing.name_of(1) == "engine-3"
    assert flags[-5:] == [
        "--port=4001",
        COORDINATOR,
        "--data-parallel-rank=3",
        "--data-parallel-size=4",
        "--drain-deadline-s=20.0",
    ]


def test_an_engine_that_starts_again_keeps_its_port() -> None:
    placing = parse_place([COORDINATOR])
    assert "--port=0" in placing.flags_of(0)
    assert "--port=4711" in placing.flags_of(0, 4711)


def test_without_a_model_the_embedded_one_is_placed() -> None:
    assert parse_place([COORDINATOR]).engine_flags[0] == str(embedded_model())


def test_engines_have_as_many_threads_as_cpus_are_set_aside_unless_the_user_says_how_many(tmp_path) -> None:
    assert "--num-threads=6" in parse_place([str(tmp_path), COORDINATOR, "--num-cpus=6"]).engine_flags
    chosen = parse_place([str(tmp_path), COORDINATOR, "--num-cpus=6", "--num-threads=2"]).engine_flags
    assert [flag for flag in chosen if "threads" in flag] == ["--num-threads=2"]


def test_engines_that_divide_the_experts_of_a_model_can_be_placed(tmp_path) -> None:
    placing = parse_place([str(tmp_path), COORDINATOR, "--num-engines=2", "--expert-parallel"])
    assert "--expert-parallel" in placing.flags_of(1)
    assert "--data-parallel-size=2" in placing.flags_of(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--coordinator is required"),
        ([COORDINATOR, "--num-engines=0"], "--num-engines is 0"),
        ([COORDINATOR, "--num-gpus=-1"], "--num-gpus is -1"),
        ([COORDINATOR, "--num-gpus=1.5"], "--num-gpus is 1.5"),
        ([COORDINATOR, "--num-gpus=inf"], "--num-gpus is inf"),
        ([COORDINATOR, "--first-rank=1024"], "--data-parallel-size is 1025"),
        ([COORDINATOR, "--expert-parallel"], "--expert-parallel is True"),
        ([COORDINATOR, "--num-engines=3", "--base-port=65534"], "ports up to 65536"),
        ([COORDINATOR, "--first-rank=1", "--data-parallel-size=1"], "--data-parallel-size is 1"),
        ([COORDINATOR, "--env=NAME"], "has to be NAME=VALUE"),
        ([COORDINATOR, "--env=CUDA_VISIBLE_DEVICES=0"], "Ray decides"),
        ([COORDINATOR, "--port=5"], "--port is set by the placement"),
        ([COORDINATOR, "--data-parallel-rank=1"], "--data-parallel-rank is set by the placement"),
        ([COORDINATOR, "--max-num-seqs=0"], "--max-num-seqs is 0"),
        ([COORDINATOR, "--max-num-sqs=1"], "did you mean --max-num-seqs"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_anything_is_placed(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_place(arguments)


def test_the_environment_is_handed_on() -> None:
    placing = parse_place([COORDINATOR, "--env=HF_HOME=/models", "--env=NAME=a=b"])
    assert placing.config.environment() == {"HF_HOME": "/models", "NAME": "a=b"}
