"""The verb `top`: what a picture shows, and errors of the address."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.processes import START_LIMIT_S, running_async
from triptych_cli.verbs.top import frame, run_top
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import Page


def state(**engine: Any) -> dict[str, Any]:
    request = {
        "id": "r0", "status": "WAITING", "num_prompt_tokens": 7, "num_output_tokens": 0,
        "num_computed_tokens": 0, "num_preemptions": 0, "priority": 0, "age_ms": 1500,
        "blockers": ["free_blocks"], "blocks": [],
    }  # fmt: skip
    shown = {
        "name": "engine-0", "address": "127.0.0.1:5", "engine_id": "e", "model": "tiny", "state": "ready",
        "rank": 1, "wave": 3,
        "age_ms": 20, "running": 1, "waiting": 2, "free_blocks": 30, "total_blocks": 40,
        "pinned_blocks": 6, "pins": 5, "prefix_hit_rate": 0.25, "preemptions": 4,
        "prompt_tokens": 100, "generated_tokens": 50,
        "steps": [{"step": 1, "num_tokens": 8, "num_requests": 1, "duration_ms": 2.5}],
        "requests": [request, request | {"id": "r1"}], "cached_blocks": [],
    }  # fmt: skip
    return {
        "at_ms": 1000,
        "version": "1.2",
        "frontend": {"open": 5, "queued": 6, "held": 7},
        "coordinator": {"connected": False},
        "engines": [shown | engine],
    }


def row(lines: list[str], first: str) -> list[str]:
    """The cells of the line that begins with `first`."""
    [line] = [line for line in lines if line.startswith(first)]
    return line.split()


def test_a_picture_has_engines_rates_and_what_requests_wait_for() -> None:
    now = state(prompt_tokens=300, generated_tokens=60) | {"at_ms": 1500}
    lines = frame(now, state())
    assert "5 open, 6 queued, 7 held" in lines[0] and "not connected" in lines[0]
    assert row(lines, "engine-0") == [
        "engine-0", "ready", "1", "2", "10/40", "6", "5", "400", "20", "2.5", "25%", "4", "1", "3", "20",
        "tiny",
    ]  # fmt: skip
    assert row(lines, "r0") == ["r0", "WAITING", "free_blocks", "7", "0", "0", "0", "1.5", "0"]


def test_no_text_of_the_frontend_controls_the_terminal() -> None:
    hostile = "x\x1b[2J\r\n\u202e\ud800"
    [request, _] = state()["engines"][0]["requests"]
    now = state(
        name=hostile,
        address=hostile,
        model=hostile,
        requests=[request | {"id": hostile, "blockers": [hostile]}],
    )
    for line in frame(now | {"version": hostile}, None):
        assert line.isprintable()


def test_rates_are_unknown_without_a_picture_before_or_from_an_engine_that_started_anew() -> None:
    for before in (None, state(generated_tokens=51) | {"at_ms": 500}):
        assert row(frame(state(), before), "engine-0")[7:9] == ["-", "-"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://x", "is not an address"),
        ("127.0.0.1:1", "does not serve /ui/state"),
    ],
)
def test_a_wrong_address_is_one_line(url: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_top(url, 1.0, once=True, as_json=False) == 1
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


@asynccontextmanager
async def serving(path: str, page: Page) -> AsyncIterator[str]:
    """The address of a listener with one page."""

    async def make(target: str) -> Page:
        return page

    listener = AdminHTTP("127.0.0.1:0", {path: make})
    try:
        yield await listener.start()
    finally:
        await listener.stop(0)


async def test_a_listener_without_the_page_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving("/metrics", Page(b"")) as address:
        assert await asyncio.to_thread(run_top, address, 1.0, once=True, as_json=False) == 1
    error = capsys.readouterr().err
    assert "404" in error and "admin HTTP listener of a frontend" in error


@pytest.mark.parametrize("body", [b"{}", b"[]", b"5", b'{"engines": []}', b"no JSON"])
async def test_another_answer_than_a_state_is_one_line(
    body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving("/ui/state", Page(body, "application/json")) as address:
        assert await asyncio.to_thread(run_top, address, 1.0, once=True, as_json=False) == 1
    error = capsys.readouterr().err
    assert "does not serve /ui/state" in error and error.count("\n") == 1


@pytest.mark.parametrize("end", ["key", "signal"])
async def test_on_a_terminal_it_draws_until_it_is_ended_and_restores_the_screen(end: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 60, 0, 0))
    before = termios.tcgetattr(theirs)
    async with serving("/ui/state", Page(json.dumps(state()).encode(), "application/json")) as address:
        command = (sys.executable, "-m", "triptych_cli.cli", "top", "--url", address, "--interval-s=0.1")
        async with (
            asyncio.timeout(START_LIMIT_S),
            running_async(*command, stdin=theirs, stdout=theirs) as process,
        ):
            shown = b""
            # Two pictures of six lines.
            while shown.count(b"3 more lines; q ends") < 2:
                shown += await asyncio.to_thread(os.read, ours, 4096)
            if end == "key":
                os.write(ours, b"q")
            else:
                process.send_signal(signal.SIGINT)
            while not shown.endswith(b"\x1b[?25h\x1b[?1049l"):
                shown += await asyncio.to_thread(os.read, ours, 4096)
            assert await process.wait() == 0
    assert termios.tcgetattr(theirs) == before
    assert shown.startswith(b"\x1b[?1049h")
    lines = shown.split(b"\x1b[H")[1].split(b"\x1b[K\r\n")
    assert len(lines) == 6 and max(map(len, lines[:5])) == 60
    os.close(ours)
    os.close(theirs)


async def test_it_ends_at_once_though_the_frontend_does_not_answer() -> None:
    asked, was_asked_again, may_answer = 0, asyncio.Event(), asyncio.Event()

    async def make(target: str) -> Page:
        nonlocal asked
        asked += 1
        if asked > 1:
            was_asked_again.set()
            await may_answer.wait()
        return Page(json.dumps(state()).encode(), "application/json")

    ours, theirs = pty.openpty()
    listener = AdminHTTP("127.0.0.1:0", {"/ui/state": make})
    # A terminal of no known size has a usual one.
    command = ("-m", "triptych_cli.cli", "top", "--url", await listener.start(), "--interval-s=0.1")
    async with (
        asyncio.timeout(START_LIMIT_S),
        running_async(sys.executable, *command, stdin=theirs, stdout=theirs) as process,
    ):
        shown = b""
        while b"q ends" not in shown:
            shown += await asyncio.to_thread(os.read, ours, 4096)
        await was_asked_again.wait()
        began_at = time.monotonic()
        os.write(ours, b"q")
        assert await process.wait() == 0
        assert time.monotonic() - began_at < 4
    assert b"engine-0" in shown
    await listener.stop(0)
    os.close(ours)
    os.close(theirs)


async def test_a_terminal_that_cannot_be_drawn_on_gets_one_picture() -> None:
    ours, theirs = pty.openpty()
    async with serving("/ui/state", Page(json.dumps(state()).encode(), "application/json")) as address:
        command = (sys.executable, "-m", "triptych_cli.cli", "top", "--url", address)
        environment = {**os.environ, "TERM": "dumb"}
        async with (
            asyncio.timeout(START_LIMIT_S),
            running_async(*command, stdin=theirs, stdout=theirs, env=environment) as process,
        ):
            assert await process.wait() == 0
    shown = os.read(ours, 65536)
    assert b"engine-0" in shown and b"\x1b" not in shown
    os.close(ours)
    os.close(theirs)
