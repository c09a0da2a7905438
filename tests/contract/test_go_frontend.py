"""A frontend in Go, written from the protos and engine-session.md alone, against real engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import triptych_cli.tiny_model
from tests.contract.our_engine import SCHEMA, check_language
from tests.processes import announced, running_async, source_environment
from tests.system.otlp import collecting
from triptych_kit.telemetry import conventions as names

pytestmark = pytest.mark.polyglot

SOURCE = Path(__file__).parent / "go_frontend"
MODEL = Path(triptych_cli.tiny_model.__file__).parent / "weights"
COMMANDS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
LIBRARIES = ("google.golang.org/grpc", "google.golang.org/protobuf", "github.com/golang/protobuf/proto")
REQUIRED = os.environ.get("REQUIRE", "go").split()
BUILD_LIMIT_S = 600
RUN_LIMIT_S = 300


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The built program."""
    missing = [command for command in COMMANDS if not shutil.which(command)]
    missing += [name for name in LIBRARIES if not Path("/usr/share/gocode/src", name).is_dir()]
    if missing:
        stop = pytest.fail if "go" in REQUIRED else pytest.skip
        stop(f"go: missing {' '.join(missing)}")
    folder = tmp_path_factory.mktemp("go_frontend")
    command = [str(SOURCE / "build.sh"), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return str(folder / "frontend")


@pytest.mark.parametrize(
    ("scenarios", "flags"),
    [
        ("generate,abort,resume,lapse", ()),
        ("drain", ()),
        # Shorter than the requests of the scenario take.
        ("deadline", ("--drain-deadline-s=2",)),
        ("death", ()),
    ],
)
async def test_a_frontend_of_another_language_passes(
    frontend: str, scenarios: str, flags: tuple[str, ...]
) -> None:
    async with _engine(*flags) as (first, pid), _engine() as (second, _):
        await _run(frontend, scenarios, f"-engines={first},{second}", f"-pids={pid}")


async def test_our_engines_spans_are_below_those_of_a_frontend_of_another_language(frontend: str) -> None:
    trace_id = "5b8aa5a2d2c872e8321cf37308d69df2"
    async with collecting() as (receiver, variables), _engine(**variables) as (address, _):
        await _run(frontend, "generate", f"-engines={address}", f"-trace={trace_id}")
        spans = await receiver.trace(trace_id, bool)
    assert {(span.service, span.name, span.kind) for span in spans} == {("engine", "llm_request", "server")}
    assert {span.parent_span_id == span.attributes[names.REQUEST_ID][:16] for span in spans} == {True}


async def test_a_frontend_of_another_language_has_every_keyword_of_a_schema(frontend: str) -> None:
    async with _engine() as (address, _):
        output = await _run(frontend, "language", f"-engines={address}", f"-schema={json.dumps(SCHEMA)}")
    check_language([[int(token_id) for token_id in ids.split()] for ids in re.findall(r"\[(.*?)\]", output)])


async def _run(frontend: str, scenarios: str, *flags: str) -> str:
    """The output of the scenarios, all of which pass."""
    options = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    async with running_async(frontend, f"-scenarios={scenarios}", *flags, **options) as process:
        written, _ = await asyncio.wait_for(process.communicate(), RUN_LIMIT_S)
    output = written.decode()
    verdicts = [line.split()[:2] for line in output.splitlines()]
    assert verdicts == [["PASS", name] for name in scenarios.split(",")], output
    assert process.returncode == 0
    return output


@contextlib.asynccontextmanager
async def _engine(*flags: str, **variables: str) -> AsyncIterator[tuple[str, int]]:
    """Address and process id of an engine, which may be loading still. variables: of its environment."""
    command = (sys.executable, "-m", "engine_svc.main", str(MODEL), "--port=0", "--num-threads=1", *flags)
    environment = {**source_environment(), **variables}
    async with announced(*command, stderr=asyncio.subprocess.DEVNULL, env=environment) as (process, record):
        yield str(record["address"]), process.pid
