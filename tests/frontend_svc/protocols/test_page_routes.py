"""The pages of the admin HTTP listener at the HTTP port: on loopback alone, by the rules of that listener."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frontend_svc.fakes import FakeEngine, answer
from tests.frontend_svc.protocols.test_openai import CHAT, TEMPLATE, TEXT, served
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import metrics_page
from triptych_kit.telemetry.metrics import Metrics

HTML = {"accept": "text/html,*/*"}


async def test_metrics_and_the_page_are_served_on_loopback():
    async with served() as client:
        await client.post("/v1/chat/completions", CHAT)
        metrics = await client.call("GET", "/metrics")
        page = await client.call("GET", "/ui")
        script = await client.call("GET", "/ui/app.js")
        state = await client.call("GET", "/ui/state")
        traces = await client.call("GET", "/traces/last?n=1")
        wrong = await client.call("GET", "/traces/last?n=0")
    assert (metrics.status, page.status, script.status, state.status, traces.status) == (200,) * 5
    assert b"vllm:request_success_total{" in metrics.content
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert [engine["state"] for engine in state.body["engines"]] == ["ready"]
    assert [trace["name"] for trace in traces.body["traces"]] == ["chat tiny"]
    assert wrong.status == 400


async def test_metrics_of_the_other_processes_are_found_and_served(tmp_path: Path):
    metrics = Metrics("engine")
    other = AdminHTTP(f"unix:{tmp_path}/engine-0.http.sock", {"/metrics": metrics_page(metrics.collect)})
    await other.start()
    async with served(metrics_sockets=str(tmp_path)) as client:
        targets = await client.call("GET", "/metrics/targets")
        by_name = {}
        for group in targets.body:
            assert group["targets"] == [client.address]
            labels = group["labels"]
            assert labels["__scheme__"] == "http"
            query = f"process={labels['__param_process']}"
            by_name[labels["instance"]] = (await client.call("GET", f"/metrics?{query}")).content
        unknown = await client.call("GET", "/metrics?process=../engine-0")
        await other.stop(0)
        (tmp_path / "engine-0.http.sock").touch()
        gone = await client.call("GET", "/metrics?process=engine-0")
        own = await client.call("GET", "/metrics")
    assert targets.headers["content-type"] == "application/json"
    assert {name: b'service="engine"' in text for name, text in by_name.items()} == {
        "engine-0": True,
        "frontend-0": False,
    }
    assert b"triptych_frontend_requests_total" in by_name["frontend-0"]
    assert b"triptych_frontend_requests_total" in own.content
    assert (unknown.status, gone.status) == (404, 503)


async def test_the_playground_answers_in_lines():
    async with served(FakeEngine(answer(TEXT), chat_template=TEMPLATE)) as client:
        body = {"messages": [{"role": "CHAT_ROLE_USER", "parts": [{"text": "hi"}]}]}
        reply = await client.post("/ui/chat", body, **{"content-type": "application/json"})
        large = await client.post("/ui/chat", b" " * 300_000, **{"content-type": "application/json"})
        untyped = await client.post("/ui/chat", body)
        read = await client.call("GET", "/ui/chat")
    lines = [json.loads(line) for line in reply.content.splitlines()]
    assert "".join(line["response"].get("delta", {}).get("content", "") for line in lines) == TEXT
    assert (large.status, untyped.status, read.status) == (413, 415, 405)


async def test_the_root_leads_browsers_to_the_page_and_names_the_routes_to_others():
    async with served() as client:
        browser = await client.call("GET", "/", **HTML)
        program = await client.call("GET", "/")
    assert (browser.status, browser.headers["location"]) == (307, "/ui")
    assert {program.body[name] for name in ("openai", "ui", "metrics")} == {
        "/v1/chat/completions",
        "/ui",
        "/metrics",
    }


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip", "via"])
async def test_a_proxy_on_this_host_is_not_served(header):
    async with served() as client:
        replies = [await client.call("GET", path, **{header: "1.2.3.4"}) for path in ("/metrics", "/ui")]
    assert [reply.status for reply in replies] == [403, 403]


async def test_a_site_that_points_its_name_here_is_not_served():
    async with served() as client:
        reply = await client.call("GET", "/ui/state", host="evil.example:8000")
    assert reply.status == 421


@pytest.mark.parametrize("options", [{"host": "0.0.0.0", "insecure": True}])
async def test_elsewhere_they_are_not_served(options):
    async with served(**options) as client:
        client.address = client.address.replace("0.0.0.0", "127.0.0.1")
        replies = [await client.call("GET", path) for path in ("/metrics", "/ui", "/ui/state")]
        root = await client.call("GET", "/", **HTML)
    assert [reply.status for reply in replies] == [404] * 3
    assert "--admin-http-port" in replies[0].body["error"]["message"]
    assert "ui" not in root.body


async def test_with_keys_the_page_is_for_admins_and_metrics_are_for_every_role(tmp_path: Path):
    roles = ("client", "engine", "admin")
    file = tmp_path / "keys.yaml"
    file.write_text(
        "".join(f"- {{name: {role}, key: key-of-{role}-0123456789, role: {role}}}\n" for role in roles)
    )
    async with served(api_keys=str(file)) as client:

        async def statuses(path: str) -> list[int]:
            keys = [{"authorization": f"Bearer key-of-{role}-0123456789"} for role in roles]
            return [(await client.call("GET", path, **key)).status for key in ({}, *keys)]

        found = {path: await statuses(path) for path in ("/metrics", "/ui", "/ui/state", "/")}
        asked = await client.call("GET", "/ui")
    assert found == {
        "/metrics": [401, 200, 200, 200],
        "/ui": [401, 403, 403, 200],
        "/ui/state": [401, 403, 403, 200],
        "/": [401, 200, 403, 200],
    }
    # A browser asks for the key.
    assert asked.headers["www-authenticate"].startswith("Basic")
