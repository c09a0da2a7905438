"""Streams through nginx and HAProxy with the files of deploy/: none is lost, and heartbeats arrive at once.

`python -m benchmarks proxies` is the same for minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig.proxies import KINDS, Backend, Proxy
from benchmarks.scenarios.proxies import add_options, measure
from tests.debian import missing_packages
from tests.frontend_svc.fakes import serving
from tests.frontend_svc.protocols.raw_http import connected
from tests.frontend_svc.protocols.test_responses import engine_of
from tests.frontend_svc.protocols.websocket_client import PING, PONG, WebSocketClient, frame, upgrade

pytestmark = pytest.mark.network


@pytest.mark.parametrize("proxy", KINDS)
async def test_no_stream_is_lost_or_differs_while_a_proxy_is_reloaded(proxy):
    assert missing_packages((proxy,)) == [], f"as root: apt-get install {proxy}"
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(
        [
            "--seconds=5", "--streams=3", "--tokens=40", "--step-ms=50", "--reload-s=1", "--age-s=2",
            "--silence-s=1.5", "--heartbeat-s=0.4",
        ]
    )  # fmt: skip
    options.proxy = [proxy]
    rows, broken = await measure(options, num_frontends=2)
    assert broken == []
    assert {row["protocol"]: row["streams"] > 5 for row in rows} == {"grpc": True, "http": True}
    assert all(row["reloads"] >= 4 for row in rows)
    assert [row["heartbeats"] > 0 for row in rows] == [False, True]


async def until(client: WebSocketClient, kind: str) -> list[dict[str, Any]]:
    """The events up to the first of this type; pings are answered, as clients do."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != kind:
        opcode, content = await client.frame()
        if opcode == PING:
            await client.connection.send(frame(content, PONG))
        else:
            events.append(json.loads(content))
    return events


@pytest.mark.parametrize("proxy", KINDS)
async def test_a_session_of_the_realtime_api_outlives_silence_and_a_reload(proxy: str, tmp_path: Path):
    assert missing_packages((proxy,)) == [], f"as root: apt-get install {proxy}"
    async with serving(engine_of("the cat sat"), http_port=0, http_heartbeat_s=0.3) as (_, frontend):
        assert frontend.servers.http is not None
        address = await frontend.servers.http.start()
        server = Proxy(proxy, tmp_path / proxy, [Backend(frontend.address, address)], idle="1s")
        await server.start()
        try:
            async with connected(server.http) as connection:
                request = upgrade("/v1/realtime", f"origin: http://{server.http}")
                await connection.send(request.replace(b"host: 127.0.0.1", f"host: {server.http}".encode()))
                reply = await connection.reply()
                assert reply is not None
                assert reply.status == 101
                client = WebSocketClient(connection)
                await until(client, "session.created")
                await server.reload()
                for _ in range(5):
                    assert await client.frame() == (PING, b"")
                    await connection.send(frame(b"", PONG))
                item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the"}]}
                await client.send({"type": "conversation.item.create", "item": item})
                await client.send({"type": "response.create"})
                done = (await until(client, "response.done"))[-1]
                (output,) = done["response"]["output"]
                assert output["content"][0]["text"] == "the cat sat"
        finally:
            await server.stop()
            await frontend.servers.http.stop(1.0)
