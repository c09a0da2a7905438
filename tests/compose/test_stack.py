"""The images in real containers, as the compose file for any machine puts them together."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.compose.engine import ContainerEngine
from tests.compose.files import CPU_FILE, ROOT, read
from triptych_client.client import Client
from triptych_client.errors import TriptychError
from triptych_client.retry import RetryPolicy

pytestmark = pytest.mark.compose

PROJECT = "triptych-test"
NUM_STREAMS = 16
MIB = 10**6
MAX_SIZES = {"frontend": 150 * MIB, "coordinator": 110 * MIB}
BASE = "docker.io/library/python:3.11-slim-bookworm"
CHOSEN_KEY = "a-key-that-the-operator-has-chosen"
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

    def key(self, member: str) -> str:
        """A key of the volume, which is there soon after the start."""
        return self._until_done(self.container("frontend"), "cat", f"/keys/{member}.key").strip()

    def published(self, port: int) -> str:
        """Where the host listens for a port of the frontend."""
        ports = self.project["services"]["frontend"]["ports"]
        (found,) = (one.rsplit(":", 1)[0] for one in ports if one.endswith(f":{port}"))
        return str(found)

    def await_ready(self, service: str) -> None:
        """Wait until a service's own health check says so."""
        kind = service.partition("-")[0]
        self._until_done(self.container(service), "triptych", "health", "--service", kind)

    def _until_done(self, *command: str) -> str:
        """The output of a command in a container, as soon as it succeeds there."""
        until = time.monotonic() + _READY_LIMIT_S
        while True:
            try:
                return self.engine.run("exec", *command)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The three images, built, and the project on a network of its own."""
    engine = ContainerEngine(os.environ.get("CONTAINERS", "docker"))
    project = read(CPU_FILE)
    for service in (name for name, one in project["services"].items() if "build" in one):
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
    with stack.engine.running(
        "run", "--rm", "-i", "--network=host", f"--volume={_STREAMS}:/streams.py:ro",
        f"--env=TRIPTYCH_API_KEY={stack.key('client')}", "--entrypoint=python", stack.image("frontend"),
        "/streams.py", stack.published(50051), str(NUM_STREAMS),
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


def grpc_answer(stack: Stack, key: str | None) -> str:
    """The text that a prompt is answered with over gRPC, or the code and reason of the refusal."""
    with Client(stack.published(50051), retry=RetryPolicy(max_attempts=1), api_key=key) as client:
        try:
            completion = client.generate_unary("Once upon a time", max_tokens=4, temperature=0, timeout_s=30)
        except TriptychError as error:
            return f"{error.status.name} {error.reason}"
    return completion.text


def http_answer(stack: Stack, key: str | None) -> str:
    """The same over HTTP, where a refusal is its status."""
    body = {"model": _model(stack, key), "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://{stack.published(8000)}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **_bearer(key)},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: str = json.load(response)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return str(error.code)
    return answer


def _model(stack: Stack, key: str | None) -> str:
    request = urllib.request.Request(f"http://{stack.published(8000)}/v1/models", headers=_bearer(key))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            name: str = json.load(response)["data"][0]["id"]
    except urllib.error.HTTPError:
        return "not shown"
    return name


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def test_light_images_are_light(stack: Stack) -> None:
    sizes = {kind: stack.engine.size_above(stack.image(kind), BASE) for kind in MAX_SIZES}
    sizes["engine"] = stack.engine.size_above(stack.image("engine-0"), BASE)
    print("above the base:", {kind: f"{size / MIB:.0f} MB" for kind, size in sizes.items()})
    assert {kind: size for kind, size in sizes.items() if size > MAX_SIZES.get(kind, size)} == {}


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


@pytest.mark.parametrize("service", ["frontend", "engine-0", "engine-1", "coordinator"])
def test_services_run_as_an_unprivileged_user_on_a_read_only_root(stack: Stack, service: str) -> None:
    stack.await_ready(service)
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
    assert report.startswith(f"Usage: triptych {kind}")


def test_clients_are_served_with_their_key_alone(stack: Stack) -> None:
    stack.await_ready("frontend")
    key = stack.key("client")
    text = grpc_answer(stack, key)
    assert text == http_answer(stack, key)
    assert text.isprintable()
    assert grpc_answer(stack, None) == "UNAUTHENTICATED NO_CREDENTIALS"
    assert grpc_answer(stack, key + "x") == "UNAUTHENTICATED UNKNOWN_KEY"
    # The keys of services are not for clients' calls.
    assert grpc_answer(stack, stack.key("engine")) == "PERMISSION_DENIED ROLE_NOT_ALLOWED"
    assert (http_answer(stack, None), http_answer(stack, key + "x")) == ("401", "401")


def test_only_the_container_that_makes_the_keys_can_write_them(stack: Stack) -> None:
    facts = stack.engine.inspect(stack.container("keys"))
    assert (facts["State"]["Status"], facts["State"]["ExitCode"]) == ("exited", 0)
    shown = ("stat", "-c", "%a %u:%g", "/keys/keys.yaml")
    assert stack.engine.run("exec", stack.container("frontend"), *shown).split() == ["600", "65532:65532"]
    for service in ("frontend", "engine-0", "coordinator"):
        with pytest.raises(RuntimeError, match="Read-only file system"):
            stack.engine.run("exec", stack.container(service), "touch", "/keys/probe")


@pytest.mark.parametrize("service", ["frontend", "engine-0", "coordinator"])
def test_metrics_are_read_with_the_key_of_metrics_from_another_container(stack: Stack, service: str) -> None:
    # As Prometheus does: another user, who shares the group that may read the key.
    scrape = (
        "import sys, urllib.error, urllib.request as u\n"
        f"url, key = 'http://{service}:9400/metrics', open('/keys/metrics.key').read().strip()\n"
        "def status(headers):\n"
        "    try: return u.urlopen(u.Request(url, headers=headers), timeout=10).status\n"
        "    except urllib.error.HTTPError as error: return error.code\n"
        "print(status({'authorization': 'Bearer ' + key}), status({}))\n"
        "try: open('/keys/admin.key')\n"
        "except PermissionError: print('no other key')\n"
    )
    networks = stack.engine.inspect(stack.container("frontend"))["NetworkSettings"]["Networks"]
    (volume,) = (
        mount["Name"]
        for mount in stack.engine.inspect(stack.container("frontend"))["Mounts"]
        if mount["Destination"] == "/keys"
    )
    printed = stack.engine.run(
        "run", "--rm", f"--network={next(iter(networks))}", f"--volume={volume}:/keys:ro",
        "--user=65534:65532", "--entrypoint=python", stack.image("coordinator"), "-c", scrape,
    )  # fmt: skip
    assert printed.split("\n")[:2] == ["200 401", "no other key"]


def test_keys_outlive_the_containers_and_the_one_of_clients_is_replaced_on_request(stack: Stack) -> None:
    before = {member: stack.key(member) for member in ("client", "frontend", "engine", "metrics")}

    def start_again(**variables: str) -> None:
        stack.engine.compose(CPU_FILE, PROJECT, "down")
        stack.engine.compose(CPU_FILE, PROJECT, "up", "-d", variables=variables)
        stack.await_ready("frontend")

    start_again()
    assert {member: stack.key(member) for member in before} == before
    text = grpc_answer(stack, before["client"])
    assert text.isprintable()
    assert "UNAUTHENTICATED" not in text
    start_again(TRIPTYCH_API_KEY=CHOSEN_KEY)
    assert {member: stack.key(member) for member in before} == {**before, "client": CHOSEN_KEY}
    assert grpc_answer(stack, CHOSEN_KEY) == http_answer(stack, CHOSEN_KEY) == text
    assert grpc_answer(stack, before["client"]) == "UNAUTHENTICATED UNKNOWN_KEY"
