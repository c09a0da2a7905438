"""The images in real containers, as the compose file for any machine puts them together."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.compose.engine import ContainerEngine
from tests.compose.files import CPU_FILE, ROOT, read

pytestmark = pytest.mark.compose

PROJECT = "triptych-test"
NUM_STREAMS = 16
MIB = 10**6
MAX_SIZES = {"frontend": 150 * MIB, "coordinator": 110 * MIB}
BASE = "docker.io/library/python:3.11-slim-bookworm"
_READY_LIMIT_S = 120.0
_STREAMS = Path(__file__).with_name("streams.py")


@dataclass
class Stack:
    """The running project."""

    engine: ContainerEngine
    project: dict[str, Any]
    up_at: float

    def container(self, service: str) -> str:
        name = {"docker": f"{PROJECT}-{service}-1"}.get(Path(self.engine.program).name)
        return name or f"{PROJECT}_{service}_1"

    def image(self, service: str) -> str:
        image: str = self.project["services"][service]["image"]
        return image

    def await_ready(self, service: str) -> None:
        """Wait until a service's own health check says so."""
        kind = service.partition("-")[0]
        until = time.monotonic() + _READY_LIMIT_S
        while True:
            try:
                self.engine.run("exec", self.container(service), "triptych", "health", "--service", kind)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            else:
                return


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The three images, built, and the project on a network of its own."""
    engine = ContainerEngine(os.environ.get("CONTAINERS", "docker"))
    project = read(CPU_FILE)
    for service in ("coordinator", "frontend", "engine-0"):
        build = project["services"][service]["build"]
        arguments = {name: str(value) for name, value in build.get("args", {}).items()}
        if "EXTRA_INDEX_URL" in os.environ:
            arguments["EXTRA_INDEX_URL"] = os.environ["EXTRA_INDEX_URL"]
        engine.build(build["target"], project["services"][service]["image"], ROOT, arguments)
    up_at = time.time()
    try:
        engine.compose(CPU_FILE, PROJECT, "up", "-d")
        yield Stack(engine, project, up_at)
    finally:
        engine.compose(CPU_FILE, PROJECT, "down", "-v")


@pytest.fixture(scope="module")
def streams(stack: Stack) -> Iterator[subprocess.Popen[str]]:
    """A client in a container of its own that goes through the published port."""
    port = stack.project["services"]["frontend"]["ports"][0].rsplit(":", 1)[0]
    with stack.engine.running(
        "run", "--rm", "-i", "--network=host", f"--volume={_STREAMS}:/streams.py:ro",
        "--entrypoint=python", stack.image("frontend"), "/streams.py", port, str(NUM_STREAMS),
    ) as process:  # fmt: skip
        yield process


def progress_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of the client's; raises EOFError where it has ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise EOFError(f"the client ended with {process.wait()}")
    facts: dict[str, Any] = json.loads(line)
    return facts


def test_light_images_are_light(stack: Stack) -> None:
    sizes = {kind: stack.engine.size_above(stack.image(kind), BASE) for kind in MAX_SIZES}
    sizes["engine"] = stack.engine.size_above(stack.image("engine-0"), BASE)
    print("above the base:", {kind: f"{size / MIB:.0f} MB" for kind, size in sizes.items()})
    assert {kind: size for kind, size in sizes.items() if size > MAX_SIZES.get(kind, size)} == {}


@pytest.mark.parametrize("service", ["frontend", "engine-0", "engine-1", "coordinator"])
def test_services_run_as_an_unprivileged_user_on_a_read_only_root(stack: Stack, service: str) -> None:
    facts = stack.engine.inspect(stack.container(service))
    assert facts["HostConfig"]["ReadonlyRootfs"] is True
    assert stack.engine.run("exec", stack.container(service), "id", "-u").strip() == "65532"
    probe = (
        "for file in /probe /opt/triptych/probe; do touch $file 2>/dev/null && exit 1; done; touch /tmp/probe"
    )
    stack.engine.run("exec", stack.container(service), "sh", "-c", probe)


@pytest.mark.parametrize("service", ["frontend", "engine-0", "coordinator"])
def test_an_image_runs_for_any_user(stack: Stack, service: str) -> None:
    # As a cluster does it: an unknown user, of group 0, on a root that cannot be written.
    kind = service.partition("-")[0]
    volume = "touch /models/probe && " if kind == "engine" else ""
    report = stack.engine.run(
        "run", "--rm", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--user=123456:0", "--entrypoint=sh",
        stack.image(service), "-c", f"{volume}triptych {kind} --help",
    )  # fmt: skip
    assert report.startswith(f"usage: triptych {kind}")


def test_no_stream_is_lost_while_services_stop_die_and_restart(stack, streams):
    first_token_s = progress_of(streams)["first_token_at"] - stack.up_at
    assert progress_of(streams)["num_ids"] >= 20
    for engine in ("engine-0", "engine-1"):
        stack.await_ready(engine)
    run = stack.engine.run
    run("stop", stack.container("engine-0"))
    assert stack.engine.inspect(stack.container("engine-0"))["State"]["ExitCode"] == 0
    run("start", stack.container("engine-0"))
    stack.await_ready("engine-0")
    run("kill", "--signal=KILL", stack.container("engine-1"))
    run("start", stack.container("engine-1"))
    stack.await_ready("engine-1")
    run("restart", stack.container("coordinator"))
    stack.await_ready("coordinator")
    run("restart", stack.container("frontend"))
    stack.await_ready("frontend")
    outcome, _ = streams.communicate("", timeout=_READY_LIMIT_S)
    report = json.loads(outcome)
    print(f"up to the first token: {first_token_s:.1f} s; streams: {report['num_streams']}")
    assert (report["errors"], report["num_different"]) == ([], 0)
    assert report["num_streams"] > 4 * NUM_STREAMS
