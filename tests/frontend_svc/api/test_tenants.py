"""Two tenants of one frontend never meet: not in ids, not in resumed streams, not in cached prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.fakes import WAIT_S, Client, FakeEngine, answer, make_request, serving
from tests.frontend_svc.protocols.test_openai import HTTPClient
from triptych.api.v1 import inference_pb2, request_pb2
from triptych_kit.channel import ChannelCredentials, open_channel
from triptych_kit.errors import from_rpc_error

KEYS = {name: f"triptych-key-of-{name}" for name in ("ann", "amy", "bob", "none")}
ENTRIES = f"""
- {{name: ann, key: {KEYS["ann"]}, role: client, tenant: a}}
- {{name: amy, key: {KEYS["amy"]}, role: client, tenant: a}}
- {{name: bob, key: {KEYS["bob"]}, role: client, tenant: b, max_requests: 1}}
- {{name: none, key: {KEYS["none"]}, role: client}}
"""


@contextlib.asynccontextmanager
async def tenants(engine: FakeEngine, folder: Path) -> AsyncIterator[tuple[dict[str, Client], Frontend]]:
    """A client of each key."""
    (folder / "keys").write_text(ENTRIES)
    async with contextlib.AsyncExitStack() as stack:
        options = {"api_keys": str(folder / "keys"), "http_port": 0}
        _, frontend = await stack.enter_async_context(serving(engine, **options))
        clients = {}
        for name, key in KEYS.items():
            channel = open_channel(
                frontend.address, profile="public", credentials=ChannelCredentials(api_key=key)
            )
            clients[name] = Client(await stack.enter_async_context(channel))
        yield clients, frontend


async def test_an_id_belongs_to_its_tenant(tmp_path: Path):
    engine = FakeEngine()
    async with tenants(engine, tmp_path) as (clients, _):
        asked_by = [clients[name].inference for name in ("ann", "bob")]
        calls = [inference.Generate(make_request(request_id="x")) for inference in asked_by]
        await engine.wait_for_requests(2)
        asked = request_pb2.AbortRequest(request_id="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await clients["none"].request.Abort(asked, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        # Of the same tenant, with another key.
        await clients["amy"].request.Abort(asked, timeout=WAIT_S)
        await engine.wait(lambda: sum(one.num_aborts for one in engine.requests) == 1)
        still = await clients["bob"].request.GetRequest(
            request_pb2.GetRequestRequest(request_id="x"), timeout=WAIT_S
        )
        assert still.request_id == "x"
        for call in calls:
            call.cancel()
        await engine.wait(lambda: sum(one.num_aborts for one in engine.requests) == 2)


async def test_tenants_share_no_cached_prompt(tmp_path: Path):
    engine = FakeEngine(answer("the dog"))
    salts = {}
    async with tenants(engine, tmp_path) as (clients, _):
        for name, client in clients.items():
            for salt in ("", "s"):
                await client.inference.GenerateOnce(make_request(cache_salt=salt), timeout=WAIT_S)
                salts[name, salt] = engine.requests[-1].entry.cache_salt
        # A salt that is made as this frontend does it meets none of them.
        for salt in (salts["ann", ""], salts["ann", "s"]):
            await clients["none"].inference.GenerateOnce(make_request(cache_salt=salt), timeout=WAIT_S)
            assert engine.requests[-1].entry.cache_salt not in salts.values()
    assert (salts["none", ""], salts["none", "s"]) == ("", "s")
    assert salts["ann", ""] == salts["amy", ""]
    assert salts["ann", "s"] == salts["amy", "s"]
    assert len({salts[name, salt] for name in ("ann", "bob", "none") for salt in ("", "s")}) == 6


async def test_a_stream_is_resumed_by_its_tenant_alone(tmp_path: Path):
    engine = FakeEngine()
    async with tenants(engine, tmp_path) as (clients, _):
        call = clients["ann"].inference.Generate(make_request(orphan_grace_ms=5000, seed=1))
        await engine.wait_for_requests(1)
        engine.step({engine.requests[0]: [5]})
        token = (await asyncio.wait_for(call.read(), WAIT_S)).started.resume_token
        asked = inference_pb2.ResumeRequest(resume_token=token, last_position=1)
        for name in ("bob", "none"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await clients[name].inference.Resume(asked, timeout=WAIT_S).read()
            error = from_rpc_error(caught.value)
            assert error.code is grpc.StatusCode.NOT_FOUND
        resumed = clients["amy"].inference.Resume(asked, timeout=WAIT_S)
        assert (await resumed.read()).response.delta.token_ids == [5]
        resumed.cancel()
        call.cancel()


async def test_a_tenant_at_its_limit_is_refused_and_others_are_not(tmp_path: Path):
    engine = FakeEngine()
    async with tenants(engine, tmp_path) as (clients, frontend):
        call = clients["bob"].inference.Generate(make_request())
        await engine.wait_for_requests(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await clients["bob"].inference.Generate(make_request(), timeout=WAIT_S).read()
        error = from_rpc_error(caught.value)
        assert (error.reason, error.retry_after_ms) == ("TENANT_LIMIT", 1000)
        assert frontend.servers.http is not None
        http_client = HTTPClient(await frontend.servers.http.start())
        reply = await http_client.post(
            "/v1/completions", {"prompt": "x"}, authorization=f"Bearer {KEYS['bob']}"
        )
        await frontend.servers.http.stop(0)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert reply.body["error"]["code"] == "tenant_limit"
        other = clients["ann"].inference.Generate(make_request())
        await engine.wait_for_requests(2)
        call.cancel()
        other.cancel()
        await engine.wait(lambda: sum(one.num_aborts for one in engine.requests) == 2)
