"""The verb `serve` with the real services and the embedded model."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import save_file

from tests.certificates import CertificateAuthority
from tests.connections import until_connections, without_collections
from tests.processes import START_LIMIT_S, running_async
from tests.system.generation import request_of
from tests.triptych_cli.conftest import RunHere
from tests.triptych_cli.fakes import children_of, triptych
from triptych.api.v1 import generate_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from triptych_cli.arguments import parse_serve
from triptych_cli.serve.port_owner import find_port_owner
from triptych_cli.serve.readiness import await_ready
from triptych_cli.serve.serve import plan_stack
from triptych_cli.services import READINESS, embedded_model
from triptych_kit.channel import open_channel
from triptych_kit.config import ConfigError
from triptych_kit.http.admin_http import read_page
from triptych_kit.limits import INTERNAL


@dataclass(slots=True)
class Stack:
    """A running `triptych serve`: its process, what it wrote when ready, what it printed so far."""

    process: asyncio.subprocess.Process
    ready: dict[str, Any]
    banner: str

    @property
    def url(self) -> str:
        return f"grpc://{self.ready['grpc']}"

    def pid_of(self, service: str) -> int:
        return next(int(one["pid"]) for one in self.ready["processes"] if one["service"] == service)


@asynccontextmanager
async def serving(
    ready_file: Path, *flags: str, stderr: int | None = None, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Stack]:
    """`triptych serve` with the embedded model, ready."""
    async with running_async(
        *(
            sys.executable,
            "-m",
            "triptych_cli.cli",
            "serve",
            "--port=0",
            f"--ready-file={ready_file}",
            *flags,
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
    ) as process:
        assert process.stdout is not None
        # The banner comes after the ready file, when everything is ready.
        banner = await asyncio.wait_for(process.stdout.readuntil(b"triptych complete"), START_LIMIT_S)
        yield Stack(process, json.loads(ready_file.read_text()), banner.decode())


def is_running(pid: int) -> bool:
    """Whether a process of that id is there and not a corpse."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def workers_of(parent: int) -> list[int]:
    """The frontends that share the port of a frontend that only looks after them."""
    return children_of(parent, "frontend")


@pytest.mark.parametrize(
    ("flags", "added"),
    [((), ["--num-kv-blocks=640"]), (("--num-kv-blocks=9",), []), (("--kv-cache-memory=1GiB",), [])],
)
def test_an_engine_that_joins_others_has_their_memory_unless_its_flags_say_another(flags, added):
    stack = plan_stack(parse_serve(list(flags)), Path("/run/x"))
    assert stack.engine is not None
    engine, alone = stack.engine(2), stack.flags(stack.engine(2), 3, 0)
    assert [flag for flag in stack.flags(engine, 3, 640) if flag not in alone] == added
    assert stack.flags(stack.coordinator, 3, 640) == stack.flags(stack.coordinator, 3, 0)


@pytest.mark.parametrize(
    ("flags", "frontends"),
    [
        ((), [(7000, None)]),
        (("--data-parallel-size=3",), [(7000, None)]),
        (("--data-parallel-external-lb",), [(7000, None)]),
        (
            ("--data-parallel-size=2", "--data-parallel-external-lb"),
            [(7000, "--engine-label=dp_rank=0"), (7001, "--engine-label=dp_rank=1")],
        ),
    ],
)
def test_a_frontend_balances_all_ranks_or_there_is_one_for_each(flags, frontends) -> None:
    stack = plan_stack(parse_serve(["--grpc-port=7000", *flags]), Path("/run/x"))
    planned = []
    for plan in stack.others:
        if plan.service == "frontend":
            labels = [flag for flag in stack.flags(plan, 1, 0) if flag.startswith("--engine-label")]
            planned.append((stack.ports[plan.name], labels[0] if labels else None))
    assert planned == frontends


def test_the_admin_http_ports_follow_the_first_one() -> None:
    flags = ["--admin-http-port=9400", "--data-parallel-size=2", "--data-parallel-external-lb"]
    stack = plan_stack(parse_serve(flags), Path("/run/x"))
    assert stack.engine is not None
    planned = {
        plan.name: [flag for flag in stack.flags(plan, 2, 0) if flag.startswith("--admin-http-port")]
        for plan in (stack.coordinator, *stack.others, stack.engine(2))
    }
    assert planned == {
        name: [f"--admin-http-port={port}"]
        for name, port in (
            ("coordinator-0", 9400), ("frontend-0", 9401), ("frontend-1", 9402),
            ("engine-0", 9403), ("engine-1", 9404), ("engine-2", 9405),
        )
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"--admin-http-port is 65532, the range is 0\.\.65531"):
        parse_serve(["--admin-http-port=65532", *flags[1:]])


def test_every_frontend_needs_a_port() -> None:
    flags = ["--port=65535", "--data-parallel-size=2", "--data-parallel-external-lb"]
    with pytest.raises(ConfigError, match=r"--port is 65535, the range is 0\.\.65534"):
        parse_serve(flags)


async def test_a_stack_says_where_it_is_answers_and_stops_whole(tmp_path: Path) -> None:
    async with serving(tmp_path / "ready.json") as stack:
        processes = stack.ready["processes"]
        assert [(one["service"], one["index"]) for one in processes] == [
            ("coordinator", 0),
            ("engine", 0),
            ("frontend", 0),
        ]
        assert stack.ready["http"].startswith("127.0.0.1:")
        assert stack.ready["grpc"] == processes[2]["address"]
        sockets = [one[kind] for one in processes[:2] for kind in ("address", "admin_address", "admin_http")]
        for path in [*sockets, processes[2]["admin_address"]]:
            assert stat.S_IMODE(os.stat(path.removeprefix("unix:")).st_mode) == 0o600
        kinds = ("address", "admin_address", "admin_http")
        assert len({one[kind] for one in processes for kind in kinds}) == 9
        for one in processes:
            page = await read_page(one["admin_http"], "/metrics", limit_s=10)
            assert f'triptych_build_info{{service="{one["service"]}"'.encode() in page.replace(
                b'engine="0",model_name="triptych-tiny",', b""
            )
        http = stack.ready["http"]
        targets = json.loads(await read_page(http, "/metrics/targets", limit_s=10))
        names = ["coordinator-0", "engine-0", "frontend-0"]
        assert [group["labels"]["instance"] for group in targets] == names
        scraped = [await read_page(http, f"/metrics?process={name}", limit_s=10) for name in names]
        services = [f'triptych_build_info{{service="{name.partition("-")[0]}"'.encode() for name in names]
        assert all(service in page for service, page in zip(services[::2], scraped[::2], strict=True))
        assert b"triptych_engine_generated_tokens_total" in scraped[1]
        assert f"grpc://{stack.ready['grpc']}" in stack.banner
        assert f"http://{http}/ui" in stack.banner
        assert f"triptych chat --url {stack.url}" in stack.banner

        assert (await triptych("health", "--url", stack.url)).exit_code == 0
        question = ["--prompt", "Once upon a time", "--max-tokens", "5", "--temperature", "0", "--json"]
        answered = await triptych("complete", "--url", stack.url, *question)
        answer = json.loads(answered.out)
        assert len(answer["token_ids"]) == answer["usage"]["num_completion_tokens"] == 5
        engine, frontend = [
            (await read_page(one["admin_http"], "/metrics", limit_s=10)).decode().splitlines()
            for one in processes[1:]
        ]
        labels = 'engine="0",model_name="triptych-tiny"'
        assert f"triptych_engine_generated_tokens_total{{{labels}}} 5.0" in engine
        assert 'triptych_frontend_generated_tokens_total{model_name="triptych-tiny"} 5.0' in frontend
        ended = 'vllm:request_success_total{finished_reason="length",model_name="triptych-tiny"} 1.0'
        assert ended in frontend

        second = await triptych("serve", "--grpc-port", stack.ready["grpc"].rpartition(":")[2])
        assert second.exit_code == 2
        assert f"is in use by pid {stack.pid_of('frontend')} (" in second.err

        stack.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(stack.process.wait(), 60) == 0
        assert not [one["service"] for one in processes if is_running(one["pid"])]
        assert not (tmp_path / "ready.json").exists()


async def test_what_runs_is_what_its_file_and_its_flags_say(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    names = "served-model-name: [triptych-tiny, gpt-4o]\n"
    file.write_text(f"port: 1\nmax-model-len: 1024\nmax_num_seqs: 2\n{names}")
    flags = (f"--config={file}", "-tp", "2", "--dtype", "half", "--kv-cache-memory=64MiB")
    async with serving(tmp_path / "ready.json", *flags, stderr=asyncio.subprocess.STDOUT) as stack:
        # The flag `--port=0` before the file's.
        assert int(stack.url.rpartition(":")[2]) > 1
        assert [one["service"] for one in stack.ready["processes"]].count("engine") == 1
        assert len(children_of(stack.pid_of("engine"), "engine")) == 2
        assert "triptych-tiny, dtype float16, up to 1,024 tokens a request" in stack.banner
        assert re.search(r"KV +2,048 tokens.* blocks; --kv-cache-memory is 64\.0 MiB", stack.banner)
        warnings = [line for line in stack.banner.splitlines() if '"warning"' in line]
        assert len([line for line in warnings if "kv_cache_memory is cut" in line]) == 1
        words = ("--model", "gpt-4o", "Once upon a time", "--max-tokens", "5")
        answered = await triptych("complete", "--url", stack.url, *words)
        assert answered.exit_code == 0
        models = await asyncio.to_thread(asked_over_http, stack, "/v1/models")
        assert [model["id"] for model in models["data"]] == ["gpt-4o", "triptych-tiny"]
        # A closed schema of one value each: a drawn call cannot be cut by length.
        sizes = {"a": {"enum": [2, 3]}}
        schema = {"type": "object", "properties": sizes, "required": ["a"], "additionalProperties": False}
        function = {"name": "add", "parameters": schema}
        body = {
            "model": "gpt-4o",
            "messages": [{"role": "user", "content": "Add 2 and 3."}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        answer = await asyncio.to_thread(asked_over_http, stack, "/v1/chat/completions", body)
        assert answer["model"] == "triptych-tiny"
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) in ({"a": 2}, {"a": 3})


def asked_over_http(stack: Stack, path: str, body: object = None) -> Any:
    """What the HTTP API of a stack answers, as an object."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{stack.ready['http']}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=START_LIMIT_S) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)], ids=lambda one: one.name
)
async def test_behind_an_external_balancer_frontends_have_their_engines_and_stop_without_a_reader_of_the_log(
    tmp_path: Path, number
) -> None:
    ready_file, (read_fd, write_fd) = tmp_path / "ready.json", os.pipe()
    flags = ("--port=0", f"--ready-file={ready_file}", "-dp", "2", "--data-parallel-external-lb")
    async with running_async(
        *(sys.executable, "-m", "triptych_cli.cli", "serve", *flags), stdout=write_fd, stderr=write_fd
    ) as process:
        os.close(write_fd)
        with os.fdopen(read_fd) as log:
            lines = [await asyncio.to_thread(log.readline)]
            while "triptych complete" not in lines[-1]:
                lines.append(await asyncio.to_thread(log.readline))
        ready = json.loads(ready_file.read_text())
        addresses: dict[str, list[str]] = {"engine": [], "frontend": []}
        for one in sorted(ready["processes"], key=lambda one: one["index"]):
            addresses.get(one["service"], []).append(one["address"])
        assert ready["grpc"] == addresses["frontend"][0]
        for engine, frontend in zip(addresses["engine"], addresses["frontend"], strict=True):
            assert f"grpc://{frontend}" in "".join(lines)
            async with open_channel(frontend) as channel:
                models = model_pb2_grpc.ModelServiceStub(channel)
                info = await models.GetServerInfo(model_pb2.GetServerInfoRequest())
            assert [one.endpoint for one in info.engines] == [engine]
        async with open_channel(ready["grpc"]) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                request_of("Once upon a time", 900)
            )
            answer = await call.read()
            process.send_signal(number)
            while isinstance(event := await call.read(), generate_pb2.GenerateResponse):
                answer = event
        assert answer.finished.usage.num_completion_tokens == 900
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert not [one["service"] for one in ready["processes"] if is_running(one["pid"])]


@pytest.mark.parametrize("delay_s", [0.3, pytest.param(1.5, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("streams", ["", "<&- >&- 2>&-"], ids=["streams", "no streams"])
async def test_a_stack_that_is_stopped_while_it_starts_leaves_nothing(delay_s: float, streams: str) -> None:
    serve = (sys.executable, "-m", "triptych_cli.cli", "serve", "--port=0")
    async with running_async("sh", "-c", f'exec "$0" "$@" {streams}', *serve) as process:
        # Whatever it does by then: imports, or waits for its services.
        await asyncio.sleep(delay_s)
        process.send_signal(signal.SIGUSR1)  # Not a stop: it writes the stacks.
        children = children_of(process.pid, "")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
    assert not [pid for pid in children if is_running(pid)]


async def test_serve_with_a_key_and_a_certificate_serves_those_with_the_key(
    tmp_path: Path,
) -> None:
    ca = CertificateAuthority(tmp_path)
    files, key = ca.issue("server"), "triptych-0123456789abcdef"
    flags = (f"--ssl-certfile={files.certificate}", f"--ssl-keyfile={files.key}")
    environment = {"TRIPTYCH_API_KEY": key}
    async with serving(tmp_path / "ready.json", *flags, environment=environment) as stack:
        url = f"grpcs://{stack.ready['grpc']}"
        assert f"triptych chat --url {url}" in stack.banner
        assert f"https://{stack.ready['http']}/v1 (OpenAI)" in stack.banner
        [shown] = re.findall("try     (curl .*)", stack.banner)
        words = shlex.split(shown.replace("$TRIPTYCH_API_KEY", key).replace("CA.pem", ca.file))
        answered = await asyncio.to_thread(subprocess.run, [*words, "-sS"], capture_output=True, text=True)
        assert len(json.loads(answered.stdout)["choices"][0]["text"]) > 20, answered
        prompt = ("complete", "--url", url, "--prompt", "Once upon", "--max-tokens", "4")
        trusting = {"TRIPTYCH_CA_CERTS": ca.file}
        served = await triptych(*prompt, environment=environment | trusting)
        assert (served.exit_code, served.err) == (0, "")
        unknown = await triptych(*prompt, environment=trusting)
        assert unknown.err.startswith("UNAUTHENTICATED (NO_CREDENTIALS)")
        missing = await triptych(*prompt, environment={"TRIPTYCH_CA_CERTS": str(tmp_path / "none.pem")})
        assert missing.err == f"{tmp_path}/none.pem cannot be read: No such file or directory\n"

        def models() -> int:
            context = ssl.create_default_context(cafile=ca.file)
            connection = http.client.HTTPSConnection(stack.ready["http"], context=context, timeout=60)
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            status = connection.getresponse().status
            connection.close()
            return status

        assert await asyncio.to_thread(models) == 200
        asked = await triptych("health", "--url", url, environment=trusting)
        assert asked.exit_code == 0


@pytest.mark.chaos
async def test_a_killed_engine_and_a_killed_frontend_with_workers_come_back_on_their_ports(
    tmp_path: Path,
) -> None:
    ready_file = tmp_path / "ready.json"
    async with serving(ready_file, "--workers=2", "--host=::1") as stack:
        assert len(workers_of(stack.pid_of("frontend"))) == 2
        assert stack.ready["grpc"].startswith("[::1]:") and f"grpc://{stack.ready['grpc']}\n" in stack.banner
        assert asked_over_http(stack, "/v1/models")["data"]
        chat = await triptych("chat", "--url", stack.url, "--quick", "hi", "--max-tokens", "5")
        assert (chat.exit_code, chat.err) == (0, "")
        os.kill(stack.pid_of("engine"), signal.SIGKILL)
        with_engine = await until_restarted(ready_file, stack.ready)
        addresses = [[one["address"] for one in ready["processes"]] for ready in (stack.ready, with_engine)]
        assert addresses[0] == addresses[1]
        assert restarted(stack.ready, with_engine).keys() == {"engine"}
        # A worker may be about to dial the engine.
        assert await five_tokens(stack)

        frontend = stack.pid_of("frontend")
        workers = workers_of(frontend)
        os.kill(frontend, signal.SIGKILL)
        again = await until_restarted(ready_file, with_engine)
        assert again["grpc"] == stack.ready["grpc"]
        started = restarted(with_engine, again)
        assert started.keys() == {"frontend"}
        async with asyncio.timeout(START_LIMIT_S):
            while (health := await triptych("health", "--url", stack.url)).exit_code:
                assert health.out == "NOT_SERVING\n"
        assert not [pid for pid in workers if is_running(pid)]
        workers = workers_of(started["frontend"])
        assert len(workers) == 2

        stack.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(stack.process.wait(), 60) == 0
        assert not [pid for pid in workers if is_running(pid)]


async def until_restarted(ready_file: Path, before: dict[str, Any]) -> dict[str, Any]:
    """The content of a ready file once it is another one: something that died is ready again."""
    async with asyncio.timeout(START_LIMIT_S):
        # A file of another process has no event to wait for.
        while (after := json.loads(ready_file.read_text())) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return after


def restarted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """The services whose process is another one, with its id."""
    pairs = zip(before["processes"], after["processes"], strict=True)
    return {one["service"]: int(other["pid"]) for one, other in pairs if one["pid"] != other["pid"]}


async def five_tokens(stack: Stack) -> list[int]:
    """The tokens of an answer, as soon as a frontend has an engine."""
    question = ["--prompt", "Once upon a time", "--max-tokens", "5", "--temperature", "0", "--json"]
    async with asyncio.timeout(START_LIMIT_S):
        while (answered := await triptych("complete", "--url", stack.url, *question)).exit_code:
            assert "UNAVAILABLE" in answered.err
    token_ids: list[int] = json.loads(answered.out)["token_ids"]
    assert len(token_ids) == 5
    return token_ids


async def test_an_engine_that_cannot_load_its_model_ends_the_start_with_its_cause(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(embedded_model() / name, tmp_path)
    save_file({"model.norm.weight": torch.zeros(256)}, tmp_path / "model.safetensors")
    outcome = await triptych("serve", str(tmp_path), "--port=0")
    assert outcome.exit_code == 2
    *before, last = outcome.err.splitlines()
    cause = "the checkpoint lacks model.embed_tokens.weight"
    death = r"\[serve\] engine-0 \(pid \d+\) exited with code 2 while it was starting: "
    assert re.fullmatch(death + re.escape(cause), last)
    assert not [line for line in before if cause in line]
    assert not children_of(outcome.pid, "")


async def test_on_a_terminal_a_start_is_short_and_ctrl_c_ends_it_in_two_lines(tmp_path: Path) -> None:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(master, "rb", buffering=0)
    )
    async with running_async(
        *(sys.executable, "-m", "triptych_cli.cli", "serve", "--port=0"), stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        start = await asyncio.wait_for(reader.readuntil(b"triptych complete --url"), START_LIMIT_S)
        start += await reader.readline()
        process.send_signal(signal.SIGINT)
        end = bytearray()
        # A terminal whose last writer has gone is an error, not an end.
        with contextlib.suppress(OSError):
            while part := await asyncio.wait_for(reader.read(4096), 60):
                end += part
        assert await process.wait() == 0
    assert start.startswith(b"triptych serve: starting ...\r\x1b[2K")
    lines = as_seen(start.decode())
    assert len(lines) <= 13, lines
    assert [" READY at " in line for line in lines[:3]] == [True] * 3
    shown = "\n".join(lines)
    for word in (
        "model   triptych-tiny, dtype float32",
        "KV      ",
        "grpc://",
        "admin   triptych admin coordinator-0, triptych admin engine-0",
    ):
        assert word in shown
    assert "triptych chat --url grpc://127.0.0.1:" in shown
    assert " INFO " not in shown
    assert as_seen(end.decode()) == ["[serve] stopping", "[serve] stopped"]


def as_seen(text: str) -> list[str]:
    """The lines of a terminal's output that stay, without the bar that was drawn between them."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    # A line behind a carriage return takes the place of a bar.
    lines = [line.rstrip("\r").rpartition("\r")[2].strip() for line in plain.split("\n")]
    return [line for line in lines if line and " % " not in line]


async def test_an_engine_that_is_killed_while_it_loads_is_named(tmp_path: Path) -> None:
    async with running_async(
        *(
            sys.executable,
            "-m",
            "triptych_cli.cli",
            "serve",
            "--port=0",
            f"--ready-file={tmp_path / 'ready'}",
        ),
        stderr=asyncio.subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        # Its first line: it still has seconds of loading before it.
        await asyncio.wait_for(process.stderr.readuntil(b"[engine-0]"), START_LIMIT_S)
        [engine] = children_of(process.pid, "engine")
        os.kill(engine, signal.SIGKILL)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert f"[serve] engine-0 (pid {engine}) was killed by SIGKILL while it was starting: " in err.decode()
    assert not (tmp_path / "ready").exists()
    assert not children_of(process.pid, "")


def test_a_host_that_is_not_of_this_machine_is_refused(run_here: RunHere) -> None:
    for host in ("no-such-host.invalid", "192.0.2.1"):
        outcome = run_here("serve", "--host", host, "--insecure")
        assert outcome.exit_code == 2
        assert f"address {host}:50051 cannot be listened on: " in outcome.err


# Finding the process that holds a port.


def test_the_process_that_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        owner = find_port_owner("127.0.0.1", server.getsockname()[1])
    assert owner is not None
    assert owner.pid == os.getpid()
    assert "pytest" in str(owner)


def test_a_free_port_has_no_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert find_port_owner("127.0.0.1", port) is None


def test_a_port_that_the_kernel_chooses_is_free() -> None:
    assert find_port_owner("127.0.0.1", 0) is None


# Waiting for a service: until it serves, however late it can be asked, and nothing of the wait stays.

_Status = health_pb2.HealthCheckResponse


class LateHealth(health_pb2_grpc.HealthServicer):
    """Cannot be asked at first, stops while it is asked, and then serves on request."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_serve = asyncio.Event()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        self.num_asked += 1
        if self.num_asked == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        if self.num_asked == 2:
            # In gRPC's words, as of a server that stops with calls open.
            await context.abort(grpc.StatusCode.CANCELLED, "Cancelling all calls")
        assert request.service == READINESS["engine"]
        yield _Status(status=_Status.NOT_SERVING)
        await self.may_serve.wait()
        yield _Status(status=_Status.SERVING)
        await asyncio.Event().wait()


async def test_a_service_is_awaited_and_no_connection_stays():
    servicer, server = LateHealth(), grpc.aio.server(options=INTERNAL.options())
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with without_collections():
        waiting = asyncio.ensure_future(await_ready("engine", address))
        await until_connections(address, 1)
        assert not waiting.done()
        servicer.may_serve.set()
        await waiting
        await until_connections(address, 0)
    assert servicer.num_asked == 3
    await server.stop(None)
