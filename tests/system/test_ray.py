"""Engines placed on a Ray cluster: they serve, are drained one by one, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import tempfile
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from benchmarks.rig.processes import free_port, is_engine_key
from benchmarks.rig.streams import Load, make_cases
from benchmarks.rig.watch import placed
from tests.architecture.sources import ROOT
from tests.environments import environment_with
from tests.processes import running_async, signal_child
from tests.system.stack import START_LIMIT_S, WAIT_LIMIT_S, Stack, address_of, listeners_of
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel
from triptych_kit.process.child import Child

pytestmark = pytest.mark.network

NUM_STREAMS = 16
NUM_TOKENS = 64
# So many that an engine is drained meanwhile.
MANY_TOKENS = 256
_STATUS_LIMIT_S = 10.0


async def test_engines_on_a_ray_cluster_serve_and_are_drained_one_by_one(tmp_path: Path) -> None:
    python = await asyncio.to_thread(python_with_ray, tmp_path)
    with short_folder() as ray_folder:
        async with Stack() as stack, ray_cluster(python, ray_folder, tmp_path) as cluster:
            coordinator = await stack.start("coordinator", "--port=0")
            frontend = await stack.start("frontend", "--port=0", f"--coordinator={address_of(coordinator)}")
            channel = stack.channel(frontend)
            async with placement(cluster, address_of(coordinator), num_engines=2) as placed_engines:
                first, second = placed_engines.engines
                await until_routed(frontend, 2)
                with_both = await served_by(channel, Load(label="both"), NUM_TOKENS)

                load = Load(label="drained")
                load.send(channel, make_cases(NUM_STREAMS, num_tokens=MANY_TOKENS))
                while_drained = Counter((await placed(channel, load)).values())
                output = await cluster.run("ray", "drain", first["name"], f"--ray-address={cluster.address}")
                records = await load.finish()
                await until_routed(frontend, 1)
                with_one = await served_by(channel, Load(label="one"), NUM_TOKENS)
            placing_log = placed_engines.log_file.read_text()
        left = await processes_left(cluster.token)
    print(f"\nrequests by engine: {with_both}, {while_drained}, {with_one}; {output!r}")
    assert len(with_both) == len(while_drained) == 2
    assert {record.code for record in records} == {grpc.StatusCode.OK}
    assert output.splitlines() == [f"{first['name']} ended with 0"]
    assert list(with_one) == [second["engine_id"]]
    assert f"{second['name']} exited with code 0" in placing_log
    # No GPU was asked for, so none is seen.
    assert [first["devices"], second["devices"]] == ["", ""]
    assert left == []


def python_with_ray(folder: Path) -> Path:
    """The Python of a new venv with what the extra `ray` brings; all else it has from where we have it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    python = environment_with("-c", str(ROOT / "constraints.txt"), *extras["ray"], folder=folder / "venv")
    packages = next(folder.glob("venv/lib/python*/site-packages"))
    sources = [str(ROOT / source) for source in (".", "protos", "kernels")]
    (packages / "project.pth").write_text("\n".join([*sources, str(Path(grpc.__file__).parents[1])]) + "\n")
    return python


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder near the root: Ray keeps sockets in it, and the path of a socket has to be short."""
    path = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster of this machine, and how to run the `triptych` command beside it."""

    address: str
    python: Path
    environment: dict[str, str]
    folder: Path

    @property
    def token(self) -> str:
        """What every process of the cluster has in its environment, and no other."""
        return self.environment["RAY_AUTH_TOKEN"]

    @asynccontextmanager
    async def running(self, *arguments: str, log_file: Path) -> AsyncIterator[asyncio.subprocess.Process]:
        """`triptych ARGUMENTS`; what it reports goes to `log_file`."""
        with log_file.open("ab") as log:
            async with running_async(
                *(str(self.python), "-m", "triptych_cli.cli", *arguments),
                cwd=self.folder, env=self.environment, stdout=asyncio.subprocess.PIPE, stderr=log,
            ) as process:  # fmt: skip
                yield process

    async def run(self, *arguments: str) -> str:
        """Run `triptych ARGUMENTS` to its end, which has to be a success; what it printed."""
        log_file = self.folder / "command.log"
        async with self.running(*arguments, log_file=log_file) as process:
            output, _ = await asyncio.wait_for(process.communicate(), START_LIMIT_S)
            assert process.returncode == 0, log_file.read_text()[-2000:]
            return output.decode()


@asynccontextmanager
async def ray_cluster(python: Path, ray_folder: Path, folder: Path) -> AsyncIterator[Cluster]:
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    port = free_port()
    log_file = folder / "ray.log"
    command = (
        str(python), "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        "--node-ip-address=127.0.0.1", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false",
        f"--temp-dir={ray_folder}",
        # From the kernel: otherwise all from 10002 to 19999 are the workers', and `port` may be among them.
        "--min-worker-port=0", "--max-worker-port=0",
    )  # fmt: skip
    with log_file.open("wb") as log:
        async with running_async(*command, cwd=folder, env=environment, stdout=log, stderr=log) as head:
            try:
                async with asyncio.timeout(START_LIMIT_S):
                    while b"Ray runtime started" not in log_file.read_bytes():
                        assert head.returncode is None, log_file.read_text()[-2000:]
                        await asyncio.sleep(0.1)
                yield Cluster(f"127.0.0.1:{port}", python, environment, folder)
            finally:
                # It ends the node's other processes.
                signal_child(head, signal.SIGTERM)
                await asyncio.wait_for(head.wait(), START_LIMIT_S)


@dataclass(frozen=True, slots=True)
class PlacedEngines:
    """What `triptych ray place` has printed."""

    engines: list[dict[str, str]]  # as in the ready file, and `engine_id`
    log_file: Path


@asynccontextmanager
async def placement(cluster: Cluster, coordinator: str, *, num_engines: int) -> AsyncIterator[PlacedEngines]:
    """`triptych ray place` of the embedded model until the block ends, which it has to do well."""
    ready_file, log_file = cluster.folder / "ready.json", cluster.folder / "place.log"
    arguments = (
        "ray", "place", str(embedded_model()), "--insecure", f"--ray-address={cluster.address}",
        f"--num-engines={num_engines}", f"--coordinator={coordinator}", f"--ready-file={ready_file}",
    )  # fmt: skip
    async with cluster.running(*arguments, log_file=log_file) as process:
        async with asyncio.timeout(START_LIMIT_S):
            while not ready_file.exists():
                assert process.returncode is None, log_file.read_text()[-2000:]
                await asyncio.sleep(0.1)
        engines = json.loads(ready_file.read_text())["engines"]
        for engine in engines:
            engine["engine_id"] = str((await status_of(engine["admin_address"]))["engine_id"])
        yield PlacedEngines(engines, log_file)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START_LIMIT_S) == 0, log_file.read_text()[-2000:]
        assert not ready_file.exists()


async def served_by(channel: grpc.aio.Channel, load: Load, num_tokens: int) -> Counter[str]:
    """Send requests, all of which have to be answered; how many each engine had, by its id."""
    load.send(channel, make_cases(NUM_STREAMS, num_tokens=num_tokens))
    where = Counter((await placed(channel, load)).values())
    assert {record.code for record in await load.finish()} == {grpc.StatusCode.OK}
    return where


async def until_routed(frontend: Child, num_engines: int) -> None:
    """Wait until a frontend has so many engines READY and no other."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            status = await status_of(listeners_of(frontend)[1])
            states = [value for key, value in status.items() if is_engine_key(key, "state")]
            if states == ["ready"] * num_engines:
                return
            await asyncio.sleep(0.05)


async def status_of(admin_address: str) -> dict[str, float | str]:
    async with open_channel(admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_STATUS_LIMIT_S)
    return {value.key: value.number if value.HasField("number") else value.text for value in answer.values}


async def processes_left(token: str) -> list[str]:
    """Command lines of processes with `token` in their environment, once there are none or time is up."""
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while _processes_with(token):  # noqa: ASYNC110  Processes of others have no event.
                await asyncio.sleep(0.1)
    except TimeoutError:
        return _processes_with(token)
    return []


def _processes_with(token: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if token.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text(errors="replace").replace("\0", " "))
        except OSError:
            # It has ended, or is not ours.
            continue
    return found
