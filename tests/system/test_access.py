"""Who may call what: every role at every RPC and route of real services; credentials that are not valid."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio

from tests.system.stack import Stack, Trio, address_of, listeners_of
from tests.system.test_every_rpc import METHODS
from tests.triptych_cli.fakes import triptych
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_cli.services import embedded_model
from triptych_client.client import Client
from triptych_client.errors import TriptychError
from triptych_kit.channel import ChannelCredentials, open_channel
from triptych_kit.errors import ServiceError, from_rpc_error

# They share the services.
pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLES = ("client", "frontend", "engine", "coordinator", "admin")
NOT_ALLOWED = "ROLE_NOT_ALLOWED"
LIMIT_S = 60.0
# Those that connect to others.
NAMES = ("engine", "frontend")
FIRST, SECOND = "session-1-0123456789", "session-2-0123456789"
# By package or method: who may call it. What is not here is refused to all.
ALLOWED = {
    "triptych.api.v1.": {"client", "admin"},
    "triptych.engine.v1.EngineCoreService.Connect": {"frontend"},
    "triptych.engine.v1.EngineCoreService.GetArtifacts": {"frontend"},
    "triptych.engine.v1.EngineCoreService.UploadBlob": {"frontend"},
    "triptych.engine.v1.EngineCoreService.": {"frontend", "admin"},
    "triptych.engine.v1.KvService.": {"engine"},
    "triptych.coordinator.v1.CoordinatorService.EngineSession": {"engine"},
    "triptych.coordinator.v1.CoordinatorService.FrontendSession": {"frontend"},
    "triptych.coordinator.v1.CoordinatorService.GetTopology": {"frontend", "admin"},
    "triptych.coordinator.v1.ScalingService.": {"admin"},
    "triptych.admin.v1.AdminService.WatchScheduler": {"frontend", "admin"},
    "triptych.admin.v1.AdminService.": {"admin"},
}
ROUTES = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/triptych-tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/score"),
    ("POST", "/rerank"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/docs"),
    ("GET", "/"),
    ("POST", "/invocations"),
    ("GET", "/v1/../v1/models"),
    ("GET", "/health/"),
    ("GET", "//health"),
)
# The pages of the admin HTTP listener at this port, by who may see them.
PAGES = {"/metrics": set(ROLES), "/traces/last": {"admin"}, "/ui": {"admin"}, "/ui/state": {"admin"}}
UPGRADE = MappingProxyType(
    {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
)
OPEN_ROUTES = (("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping"))


def key_of(name: str) -> str:
    return f"triptych-key-of-{name}-0123456789"


def entry(name: str, role: str, **more: str) -> str:
    rest = "".join(f", {field}: {value}" for field, value in more.items())
    return f"- {{name: {name}, key: {key_of(name)}, role: {role}{rest}}}\n"


class Guarded(NamedTuple):
    """Three services that need keys, and the file of these."""

    trio: Trio
    keys: Path

    def address(self, of: str) -> str:
        """Of a listener of the frontend or the engine."""
        child = self.trio.engine if of.startswith("engine") else self.trio.frontend
        assert child.announcement is not None
        return str(getattr(child.announcement, of.partition(".")[2]))


def entries(*without: str) -> str:
    """The file of credentials."""
    listed = {
        **{role: entry(role, role) for role in ROLES},
        "old": entry("old", "client", expires="2020-01-01"),
        "gone": entry("gone", "client"),
        "owner": entry("owner", "frontend"),
        "owner again": "- {name: owner, role: frontend, key: owner-renewed-0123456789}\n",
        "thief": entry("thief", "frontend"),
    }
    return "".join(text for name, text in listed.items() if name not in without)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.yaml"
    keys.write_text(entries())
    for name in NAMES:
        (folder / f"{name}.key").write_text(key_of(name))
    flags = (f"--api-keys={keys}", "--port=0")
    async with Stack() as stack:
        coordinator = await stack.start("coordinator", *flags)
        known = f"--coordinator={address_of(coordinator)}"
        engine_key, frontend_key = (f"--peer-api-key-file={folder / name}.key" for name in NAMES)
        model = (str(embedded_model()), "--num-threads=1")
        engine = await stack.start("engine", *model, *flags, known, engine_key)
        frontend = await stack.start("frontend", *flags, "--http-port=0", known, frontend_key)
        await stack.ready("frontend", frontend)
        yield Guarded(Trio(coordinator, engine, frontend), keys)


def may_call(role: str, method: str) -> bool:
    found = [roles for name, roles in sorted(ALLOWED.items(), reverse=True) if method.startswith(name)]
    # Of several the longest, which is the method itself.
    best = max((name for name in ALLOWED if method.startswith(name)), key=len, default="")
    return bool(found) and role in ALLOWED[best]


async def ask(channel: grpc.aio.Channel, method: Any) -> ServiceError | None:
    """The error of a call with one empty message, up to its first answer; None for none."""
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = kinds[method.client_streaming, method.server_streaming](path, None, None)
    answer = call(iter([b""]) if method.client_streaming else b"", timeout=LIMIT_S)
    try:
        if method.server_streaming:
            await answer.read()
            answer.cancel()
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def test_every_role_at_every_rpc_of_every_listener(guarded: Guarded) -> None:
    num_cells = 0
    # A drain ends a service, which may be tried by those alone who may not.
    drain = "triptych.admin.v1.AdminService.Drain"
    for child in (guarded.trio.frontend, guarded.trio.engine, guarded.trio.coordinator):
        for address in listeners_of(child):
            for role in ROLES:
                credentials = ChannelCredentials(api_key=key_of(role))
                async with open_channel(address, credentials=credentials) as channel:
                    for method in METHODS:
                        if (role, method.full_name) == ("admin", drain):
                            continue
                        error = await ask(channel, method)
                        is_refused = error is not None and error.reason == NOT_ALLOWED
                        what = f"{method.full_name} by {role} at {child.name} {address}: {error}"
                        assert is_refused != may_call(role, method.full_name), what
                        num_cells += 1
            for key in ("", "triptych-a-key-that-is-not-known"):
                async with open_channel(address, credentials=ChannelCredentials(api_key=key)) as channel:
                    # At once: the answer to a wrong key waits when there were many.
                    errors = await asyncio.gather(*(ask(channel, method) for method in METHODS))
                    for method, error in zip(METHODS, errors, strict=True):
                        assert error is not None
                        assert error.code is grpc.StatusCode.UNAUTHENTICATED, method.full_name
                        num_cells += 1
    assert num_cells > 2000


async def http_answer(
    address: str,
    method: str,
    path: str,
    key: str,
    body: bytes = b"{}",
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes]:
    """The status and the body of an answer. more: headers."""

    def answer() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        headers = {"content-type": "application/json", **authorization, **more}
        try:
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    return await asyncio.to_thread(answer)


def http_cells() -> Iterator[tuple[str, str, str, set[int]]]:
    """Method, path, key and the statuses that may come."""
    for method, path in ROUTES:
        for role in ROLES:
            served = {200, 400, 404, 405} if role in ("client", "admin") else {403}
            yield method, path, key_of(role), served
        for key in ("", "wrong-key-0123456789"):
            yield method, path, key, {401}
    for method, path in OPEN_ROUTES:
        for key in ("", "wrong-key-0123456789", *map(key_of, ROLES)):
            yield method, path, key, {200}


async def test_every_role_at_every_route(guarded: Guarded) -> None:
    for method, path, key, statuses in http_cells():
        status, body = await http_answer(guarded.address("frontend.http"), method, path, key)
        assert status in statuses, (method, path, key, body)
        if status in (401, 403):
            is_openai = not path.startswith("/v1/messages")
            of_openai = {"param", "code"} if is_openai else set()
            assert set(json.loads(body)["error"]) == {"message", "type", *of_openai}


async def test_every_role_at_a_websocket(guarded: Guarded) -> None:
    address = guarded.address("frontend.http")
    keys = {key_of(role): 101 if role in ("client", "admin") else 403 for role in ROLES}
    for key, status in {**keys, "wrong-key-0123456789": 401, "": 401}.items():
        seen, body = await http_answer(address, "GET", "/v1/realtime", key, b"", UPGRADE)
        assert seen == status, (key, body)


async def test_every_role_at_every_page(guarded: Guarded) -> None:
    address = guarded.address("frontend.http")
    for path, roles in PAGES.items():
        for role in ROLES:
            status, _ = await http_answer(address, "GET", path, key_of(role))
            assert status == (200 if role in roles else 403), (path, role)
        for key in ("", "wrong-key-0123456789"):
            assert (await http_answer(address, "GET", path, key))[0] == 401, path


async def test_credentials_that_expired_or_were_removed_are_refused(guarded: Guarded) -> None:
    address, http_address = guarded.address("frontend.address"), guarded.address("frontend.http")

    async def code_of(name: str) -> str:
        status, body = await http_answer(http_address, "GET", "/v1/models", key_of(name))
        return "" if status == 200 else str(json.loads(body)["error"]["code"])

    assert [await code_of(name) for name in ("old", "gone", "client")] == ["expired_credentials", "", ""]
    guarded.keys.write_text(entries("gone"))
    async with asyncio.timeout(LIMIT_S):
        # Another process has no event to wait for.
        while await code_of("gone") != "unknown_key":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await code_of("client") == ""
    method = next(one for one in METHODS if one.full_name.endswith("ModelService.ListModels"))
    for name, reason in (("gone", "UNKNOWN_KEY"), ("client", None)):
        credentials = ChannelCredentials(api_key=key_of(name))
        async with open_channel(address, credentials=credentials) as channel:
            error = await ask(channel, method)
            assert (error.reason if error else None) == reason


def hello(frontend_id: str, session_id: str, epoch: int) -> engine_pb2.ConnectRequest:
    return engine_pb2.ConnectRequest(
        hello=session_pb2.Hello(
            frontend_id=frontend_id,
            session_id=session_id,
            frontend_epoch=epoch,
            schema_revision=1_000_000,
            features=["resume"],
            role=session_pb2.PEER_ROLE_FRONTEND,
        )
    )


def replace_by_folder(keys: Path) -> None:
    keys.unlink()
    keys.mkdir()


def replace_by_loop(keys: Path) -> None:
    """No user can read it, root neither."""
    keys.unlink()
    keys.symlink_to(keys)


# What becomes of the file, with the status of its keys and that of /ready.
FILE_FAULTS: dict[str, tuple[Callable[[Path], object], int, int]] = {
    "emptied": (lambda keys: keys.write_text(""), 401, 200),
    "removed": (lambda keys: keys.unlink(), 401, 503),
    "unreadable": (replace_by_loop, 503, 503),
    "a folder": (replace_by_folder, 503, 503),
    "broken": (lambda keys: keys.write_text(entries()[:-9]), 503, 503),
}


@pytest.mark.chaos
async def test_no_key_is_served_two_seconds_after_its_file_was_lost_under_load(guarded: Guarded) -> None:
    address, keys = guarded.address("frontend.http"), guarded.keys
    answered: list[tuple[float, int]] = []  # when it was sent, and its status
    arrived = asyncio.Condition()
    is_over = False

    async def load(key: str) -> None:
        body = json.dumps({"prompt": "Once upon", "max_tokens": 8, "temperature": 0}).encode()
        while not is_over:
            sent_at = time.monotonic()
            status, _ = await http_answer(address, "POST", "/v1/completions", key, body)
            answered.append((sent_at, status))
            async with arrived:
                arrived.notify_all()

    async def first_after(began_at: float, status: int, limit_s: float) -> None:
        """Wait for an answer with this status to a request that was sent after `began_at`."""

        def has_come() -> bool:
            return any(sent_at >= began_at and each == status for sent_at, each in answered)

        async with asyncio.timeout(limit_s), arrived:
            await arrived.wait_for(has_come)

    running = [asyncio.ensure_future(load(key_of("client"))) for _ in range(8)]
    try:
        for name, (fault, status, ready_status) in FILE_FAULTS.items():
            await first_after(time.monotonic(), 200, LIMIT_S)
            fault_at = time.monotonic()
            fault(keys)
            await first_after(fault_at, status, 2.0)
            refused_at = time.monotonic()
            ready, body = await http_answer(address, "GET", "/ready", "")
            assert (name, ready) == (name, ready_status)
            assert (b"KEYS_UNREADABLE".lower() in body) is (ready_status == 503)
            metrics, shown = await http_answer(address, "GET", "/metrics", key_of("client"))
            assert metrics == status, shown
            async with open_channel(
                guarded.address("frontend.address"), credentials=ChannelCredentials(api_key=key_of("client"))
            ) as channel:
                error = await ask(channel, next(one for one in METHODS if one.name == "ListModels"))
            expected = grpc.StatusCode.UNAUTHENTICATED if status == 401 else grpc.StatusCode.UNAVAILABLE
            assert error is not None and error.code is expected
            # A few more of each sender.
            for _ in range(3):
                await first_after(time.monotonic(), status, LIMIT_S)
            assert {each for sent_at, each in answered if sent_at >= refused_at} == {status}, name
            restore(keys)
    finally:
        is_over = True
        await asyncio.gather(*running)
        restore(keys)
    assert {status for _, status in answered} == {200, 401, 503}


def restore(keys: Path) -> None:
    if keys.is_dir():
        keys.rmdir()
    whole = keys.with_suffix(".new")
    whole.write_text(entries())
    whole.replace(keys)


async def test_the_session_of_a_frontend_cannot_be_taken_over(guarded: Guarded) -> None:
    address = guarded.address("engine.address")
    async with contextlib.AsyncExitStack() as stack:

        async def connect(key: str, message: engine_pb2.ConnectRequest) -> Any:
            channel = open_channel(address, credentials=ChannelCredentials(api_key=key))
            await stack.enter_async_context(channel)
            call: Any = engine_pb2_grpc.EngineCoreServiceStub(channel).Connect()
            await call.write(message)
            return call

        owner = await connect(key_of("owner"), hello("f-1", FIRST, 1))
        assert (await owner.read()).HasField("hello_ack")
        for session_id, epoch in (
            (FIRST, 1),
            (SECOND, 1),
            (FIRST, 2),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (await connect(key_of("thief"), hello("f-1", session_id, epoch))).read()
            assert from_rpc_error(caught.value).reason == "NOT_THE_OWNER"
        # Its own heartbeats go on.
        assert (await asyncio.wait_for(owner.read(), LIMIT_S)).WhichOneof("message")
        # The same identity with a renewed key goes on where it was.
        again = await connect("owner-renewed-0123456789", hello("f-1", SECOND, 2))
        assert (await again.read()).HasField("hello_ack")
        other = await connect(key_of("thief"), hello("f-2", FIRST, 1))
        assert (await other.read()).HasField("hello_ack")


async def test_an_admin_call_is_audited_and_no_key_is_logged(guarded: Guarded) -> None:
    address = guarded.address("engine.admin_address")
    method = next(one for one in METHODS if one.full_name.endswith("AdminService.GetStatus"))
    for role in ("admin", "client"):
        credentials = ChannelCredentials(api_key=key_of(role))
        async with open_channel(address, credentials=credentials) as channel:
            await ask(channel, method)
    lines = list(guarded.trio.engine.last_lines)
    records = [json.loads(line) for line in lines if line.startswith("{")]
    audited = [one for one in records if one["logger"] == "triptych.audit"]
    shown = [(one.get("identity"), one["method"], one["code"]) for one in audited]
    path = "/triptych.admin.v1.AdminService/GetStatus"
    assert shown[-2:] == [("admin", path, "OK"), ("client", path, "PERMISSION_DENIED")]
    assert [line for line in lines if "key-of" in line] == []


async def test_tools_and_clients_send_their_key(guarded: Guarded) -> None:
    url = f"grpc://{guarded.address('frontend.address')}"
    prompt = ("complete", "--url", url, "--prompt", "Once upon", "--max-tokens", "4", "--temperature", "0")
    refused = await triptych(*prompt, environment={"TRIPTYCH_API_KEY": ""})
    assert (refused.exit_code, refused.err.split(":")[0]) == (1, "UNAUTHENTICATED (NO_CREDENTIALS)")
    served = await triptych(*prompt, environment={"TRIPTYCH_API_KEY": key_of("client")})
    assert (served.exit_code, served.err) == (0, "")
    admin = guarded.address("engine.admin_address")
    for role, exit_code in (("client", 1), ("admin", 0)):
        asked = await triptych("admin", admin, "status", environment={"TRIPTYCH_API_KEY": key_of(role)})
        assert asked.exit_code == exit_code, asked.err

    def answer(key: str | None) -> str:
        with Client(url, api_key=key) as client:
            return client.generate_unary("Once upon", max_tokens=4, temperature=0).outputs[0].text

    assert (await asyncio.to_thread(answer, key_of("client"))) in served.out
    with pytest.raises(TriptychError) as caught:
        await asyncio.to_thread(answer, None)
    assert caught.value.reason == "NO_CREDENTIALS"
