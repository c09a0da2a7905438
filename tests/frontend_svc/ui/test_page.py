"""The files of the page /ui, and its playground. A browser runs them in `tests/system/test_page.py`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from frontend_svc.ui.page import About, ui_pages
from tests.architecture.sources import ROOT
from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, read_all, serving

STATIC = ROOT / "frontend_svc" / "ui" / "static"
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in STATIC.iterdir()}
SCRIPTS = sorted(name for name in TEXTS if name.endswith(".js"))
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


@asynccontextmanager
async def playground(engine: FakeEngine, **options) -> AsyncIterator[str]:
    """The address of the admin HTTP listener of a frontend with one engine."""
    async with serving(engine, **options) as (_, frontend):
        address = await frontend.servers.admin_http.start()
        try:
            yield address
        finally:
            await frontend.servers.admin_http.stop(0)


async def ask(address: str, head: str, body: bytes = b"") -> tuple[str, bytes]:
    """The head of an answer, and its body without the sizes of chunks."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    length = f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n" if body else ""
    writer.write(f"{head} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{length}\r\n".encode() + body)
    whole = await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    answered, _, content = whole.partition(b"\r\n\r\n")
    return answered.decode(), content


async def lines(address: str, path: str, body: bytes) -> list[dict]:
    head, content = await ask(address, f"POST {path}", body)
    assert "application/x-ndjson" in head
    return [json.loads(line) for line in content.splitlines() if line.startswith(b"{")]


async def test_the_page_and_all_it_names_are_served():
    async with playground(FakeEngine()) as address:
        for path in ("/ui", "/ui/"):
            head, page = await ask(address, f"GET {path}")
            assert head.startswith("HTTP/1.1 200")
            assert "content-type: text/html; charset=utf-8" in head
            assert "content-security-policy: default-src 'self';" in head
        assert page.decode() == TEXTS["index.html"]
        named = set(re.findall(r'(?:src|href)="(/[^"]+)"', TEXTS["index.html"]))
        named |= {f"/ui/{name}" for text in TEXTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
        assert named == {f"/ui/{name}" for name in TEXTS if name != "index.html"}
        for path in named:
            assert (await ask(address, f"GET {path}"))[0].startswith("HTTP/1.1 200")


async def test_commands_of_the_page_are_given_where_this_frontend_is_reached():
    async with serving(FakeEngine(), http_port=0) as (_, frontend):
        http_address = await frontend.servers.http.start()
        address = await frontend.servers.admin_http.start()
        about = json.loads((await ask(address, "GET /ui/about"))[1])
        await frontend.servers.admin_http.stop(0)
        await frontend.servers.http.stop(0)
    expected = {
        "address": frontend.address,
        "http_address": http_address,
        "has_tls": False,
        "needs_key": False,
    }
    assert about == expected


async def test_the_history_is_kept_from_the_start_of_the_frontend_whether_it_is_read_or_not():
    async with serving(FakeEngine(answer("the cat"))) as (client, frontend):
        await read_all(client.generate("the dog"))
        address = await frontend.servers.admin_http.start()
        async with asyncio.timeout(WAIT_S):
            while not any(json.loads((await ask(address, "GET /ui/history"))[1])["tokens_per_s"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert json.loads((await ask(address, "GET /ui/about"))[1])["http_address"] == ""
        await frontend.servers.admin_http.stop(0)


def test_no_file_names_another_host():
    allowed = {"http://www.w3.org/2000/svg"}
    found = {
        url for text in TEXTS.values() for url in re.findall(r"(?:https?:)?//[\w.-]+\.[^\s\"'`)]+", text)
    }
    assert {url for url in found if "$" not in url} - allowed == set()


def test_nothing_is_written_into_the_page_that_its_policy_forbids():
    for name, text in TEXTS.items():
        assert not re.search(r"\bstyle=|\bon\w+=\"|<script>|<style|\beval\(|new Function", text), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_id_that_a_script_uses_is_in_the_page(script: str):
    ids = set(re.findall(r'\bid="([^"]+)"', TEXTS["index.html"]))
    used = set(re.findall(r'(?:byId|getElementById)\("([^"]+)"\)', TEXTS[script]))
    assert used - ids == set()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_class_that_a_script_looks_for_is_in_the_page(script: str):
    page = " ".join(re.findall(r'class="([^"]+)"', TEXTS["index.html"])).split()
    looked_for = re.findall(r'(?:find|querySelector|set)\("\.([\w-]+)"', TEXTS[script])
    assert set(looked_for) - set(page) == set()


def test_every_label_is_of_a_field():
    ids = re.findall(r'\bid="([^"]+)"', TEXTS["index.html"])
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:for|aria-labelledby|href)="#?([\w-]+)"', TEXTS["index.html"])
    assert {name for name in references if name not in ids} == set()


async def test_a_prompt_is_answered_with_a_line_for_each_response():
    async with playground(FakeEngine(answer("the cat"))) as address:
        got = await lines(address, "/ui/generate", b'{"prompt": "the dog", "sampling": {"seed": 7}}')
    assert got[0]["response"]["started"]["request_id"].startswith("ui-")
    text = "".join(line["response"].get("delta", {}).get("text", "") for line in got)
    assert text == "the cat"
    assert got[-1]["response"]["finished"]["reason"] == "FINISH_REASON_STOP"
    times = [line["at_ms"] for line in got]
    assert times == sorted(times)


async def test_a_conversation_is_answered_by_the_chat_service():
    engine = FakeEngine(answer("a mat"), chat_template=TEMPLATE)
    body = b'{"messages": [{"role": "CHAT_ROLE_USER", "parts": [{"text": "the cat"}]}]}'
    async with playground(engine) as address:
        got = await lines(address, "/ui/chat", body)
    assert "".join(line["response"].get("delta", {}).get("content", "") for line in got) == "a mat"


async def test_an_error_is_shown_as_it_is():
    expected = [
        (b'{"prompt": "a", "sampling": {"temperature": 9}}', "is 9.0, must be", ["sampling.temperature"]),
        (b'{"prompt": "a", "sampling": {"max_tokens": "many"}}', "max_tokens field", []),
        (b'{"prompt": "a", "no_field": 1}', 'no field named "no_field"', []),
        (b"{", "Failed to load JSON", []),
        (b"\xff", "decode", []),
        (b"[" * 50_000, "recursion", []),
        (b'{"prompt": ""}', "prompt", ["prompt"]),
    ]
    async with playground(FakeEngine()) as address:
        for body, message, fields in expected:
            (line,) = await lines(address, "/ui/generate", body)
            assert line["error"]["code"] == "INVALID_ARGUMENT"
            assert message in line["error"]["message"]
            assert line["error"]["fields"] == fields


async def test_a_client_that_goes_away_aborts_its_request():
    engine = FakeEngine()
    async with serving(engine) as (_, frontend):
        address = await frontend.servers.admin_http.start()
        _, writer = await asyncio.open_connection(*address.split(":"))
        body = b'{"prompt": "the dog"}'
        head = f"POST /ui/generate HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await engine.wait_for_requests(1)
        writer.close()
        await engine.wait(lambda: engine.requests[0].num_aborts == 1)
        await frontend.servers.admin_http.stop(0)


@pytest.mark.parametrize(
    ("options", "has_page"),
    [
        ({"admin_http_host": "0.0.0.0", "insecure": True}, False),
        ({"admin_http_host": "0.0.0.0", "insecure": True, "ui": True}, True),
    ],
)
async def test_the_page_is_on_loopback_alone_unless_it_is_asked_for(options: dict, has_page: bool):
    async with playground(FakeEngine(), **options) as address:
        address = f"127.0.0.1:{address.rpartition(':')[2]}"
        for path in ("GET /ui", "POST /ui/generate"):
            head, _ = await ask(address, path, b"{}" if path.startswith("POST") else b"")
            assert head.startswith("HTTP/1.1 200" if has_page else "HTTP/1.1 404")


def test_every_static_file_has_a_content_type():
    about = About("127.0.0.1:1", "", has_tls=False, needs_key=False)
    assert len(ui_pages(lambda: about)) == len(TEXTS) + 2
