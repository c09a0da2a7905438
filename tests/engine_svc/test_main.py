"""The engine as a process: what it announces, how it answers, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import triptych_cli.tiny_model
from engine_svc import main
from engine_svc.session.servicer import FULL_NAME
from tests.engine_svc.model.loading.fake_hub import FakeHub, folder_files, serve
from tests.engine_svc.session.service_rig import LENGTH, StreamClient, make_entry
from tests.processes import running, source_environment
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import engine_pb2_grpc
from triptych_kit.channel import open_channel

_MODEL = Path(triptych_cli.tiny_model.__file__).parent / "weights"
_PATIENCE_S = 120.0
# Enough that they are not all there before a process that was asked to drain has been asked for more.
_NUM_TOKENS = 1000


class EngineProcess:
    """`engine_svc.main`; its announcement is read when it comes."""

    def __init__(self, process: subprocess.Popen[str], pipe: TextIO) -> None:
        self.process = process
        self._pipe = pipe

    def announcement(self) -> dict[str, str | int]:
        return json.loads(self._pipe.readline())

    def exit(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=_PATIENCE_S)
        return self.process.returncode, errors


@contextlib.contextmanager
def engine_process(*arguments: str) -> Iterator[EngineProcess]:
    reading, writing = os.pipe()
    command = (sys.executable, "-m", "engine_svc.main", *arguments, "--announce-fd", str(writing))
    options = {"env": source_environment(), "stderr": subprocess.PIPE, "text": True}
    with open(reading, encoding="utf-8") as pipe, running(*command, pass_fds=[writing], **options) as process:
        os.close(writing)
        yield EngineProcess(process, pipe)


async def test_a_process_loads_serves_drains_on_sigterm_and_exits_with_zero():
    flags = ("--port=0", "--num-threads=1", "--kv-cache-memory=64M", "--drain-deadline-s=600")
    with engine_process(str(_MODEL), *flags) as engine:
        record = engine.announcement()
        assert (record["service"], record["index"], record["pid"]) == ("engine", 0, engine.process.pid)
        async with open_channel(str(record["address"])) as channel:
            client = StreamClient(engine_pb2_grpc.EngineCoreServiceStub(channel), "f")
            await client.open()
            await client.until(lambda: "ready" in client.kinds(), patience_s=_PATIENCE_S)
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=FULL_NAME)
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            phases = await _span_names(str(record["admin_address"]))
            assert phases == [
                "start engine", "configure", "build", "find model", "listen", "import", "weights", "memory",
                "warm-up", "assemble",
            ]  # fmt: skip
            await client.add(make_entry(1, max_tokens=_NUM_TOKENS, ignore_eos=True))
            await client.until(lambda: 1 in client.tokens)
            engine.process.send_signal(signal.SIGTERM)
            await client.until(lambda: "draining" in client.kinds())
            await client.add(make_entry(2))
            await client.until(lambda: client.is_over)
            assert client.finished == {1: [LENGTH]}
            assert len(client.tokens[1]) == _NUM_TOKENS
            assert client.rejected[2].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        code, errors = engine.exit()
        assert code == 0
        assert "READY" in errors
        assert "Traceback" not in errors


async def _span_names(admin_address: str) -> list[str]:
    async with open_channel(admin_address) as channel:
        trace = await admin_pb2_grpc.AdminServiceStub(channel).GetTrace(admin_pb2.GetTraceRequest())
    return [span.name for span in trace.spans]


async def test_a_process_that_is_stopped_while_loading_exits_at_once():
    with engine_process(str(_MODEL), "--port", "0") as engine:
        record = engine.announcement()
        async with open_channel(str(record["admin_address"])) as channel:
            status = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
            values = {value.key: value.text or value.number for value in status.values}
            assert values["engine_state"] == "loading"
        engine.process.send_signal(signal.SIGTERM)
        code, errors = engine.exit()
        assert code == 0
        assert "READY" not in errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no/such/folder"], "no/such/folder is not a folder"),
        ([str(_MODEL), "--coordinator", "nowhere"], "--coordinator: 'nowhere'"),
        (["--max-num-sequences", "3"], "--max-num-sequences"),
        ([], "MODEL is required"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(monkeypatch, capfd, arguments, reason):
    # This process is not the engine's.
    for name in ("prepare_service", "set_title"):
        monkeypatch.setattr(main, name, lambda *_: None)
    assert main.main(arguments) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("triptych engine: ")
    assert reason in line


def test_a_port_in_use_is_named_and_exits_as_wrong_usage():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with engine_process(str(_MODEL), "--port", port) as engine:
            code, errors = engine.exit()
    assert code == 2
    assert port in errors


# An engine whose model is of a hub: it fetches it, serves it under that name, or says why it cannot.


def engine_of(*arguments: str, hub: FakeHub, home: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    kept = {
        name: value for name, value in source_environment().items() if not name.startswith(("HF_", "HUGGING"))
    }
    environment = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    command = (sys.executable, "-m", "engine_svc.main", *arguments, "--port=0", "--kv-cache-memory=64M")
    return running(*command, env=environment, stderr=subprocess.PIPE, text=True)


def until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "READY" in line:
            return lines
    raise AssertionError("".join(lines))


def test_a_model_of_the_hub_is_fetched_and_served_under_its_name(tmp_path):
    with (
        serve(FakeHub(folder_files(_MODEL))) as hub,
        engine_of("org/tiny", "--num-threads=1", hub=hub, home=tmp_path) as process,
    ):
        lines = until_ready(process)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, rest
    assert "org/tiny" in lines[-1]
    assert any("downloading" in line for line in lines)
    assert "model.safetensors" in hub.downloaded


def test_a_model_that_cannot_be_had_is_one_line_and_exit_code_2(tmp_path):
    with (
        serve(FakeHub({"model.safetensors": b""}, gated=True)) as hub,
        engine_of("org/tiny", hub=hub, home=tmp_path) as process,
    ):
        _, errors = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("triptych engine: org/tiny is gated: accept its licence at")
