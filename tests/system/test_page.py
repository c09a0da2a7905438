"""The page /ui in a browser, over real processes: two engines, load, a death, a phone, the keyboard alone.

It needs Debian's `chromium` (`apt-get install chromium`), and is skipped without. The screenshots are kept in
build/screenshots.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.architecture.sources import ROOT
from tests.processes import START_LIMIT_S, running, source_environment
from triptych_client.client import Client
from triptych_client.errors import TriptychError

CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; apt-get install chromium"),
]

SCREENSHOTS = ROOT / "build" / "screenshots"
WAIT_MS = 30_000
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
NUM_STREAMS = 12
MAX_RUNNING = 4  # of each engine
PREFIX = "Once upon a time there was a clever child called Omar who lived in a tower by the sea. " * 3
# How many blocks the page has drawn, by the colours of its squares.
DRAWN = """canvas => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] === 255) colours.add(data.slice(i, i + 3).join());
    }
    return colours.size;
}"""
FOCUSED = """() => {
    const element = document.activeElement;
    return element.id || element.name || element.className || element.getAttribute("href") || element.tagName;
}"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `triptych serve` with two engines writes when all is ready."""
    ready_file = tmp_path_factory.mktemp("page") / "ready.json"
    flags = ("--port=0", f"--ready-file={ready_file}", "--data-parallel-size=2")
    # Under load some requests wait.
    engine_flags = (f"--max-num-seqs={MAX_RUNNING}", "--num-kv-blocks=640")
    command = (sys.executable, "-m", "triptych_cli.cli", "serve", *flags, *engine_flags)
    environment = {**source_environment(), "OMP_NUM_THREADS": "1"}
    with running(*command, env=environment, stderr=subprocess.DEVNULL) as process:
        limit = time.monotonic() + START_LIMIT_S
        while not ready_file.exists():
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.1)
        yield json.loads(ready_file.read_text())
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Debian's Chromium, driven by a Playwright that is installed for this module alone."""
    packages = tmp_path_factory.mktemp("playwright")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(packages), "playwright>=1.50,<2"], check=True)
    sys.path.append(str(packages))
    try:
        with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
            started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            yield started
            started.close()
    finally:
        sys.path.remove(str(packages))


@contextlib.contextmanager
def opened(browser: Any, stack: dict[str, Any], **options: Any) -> Iterator[Any]:
    """The page, followed until the end: no error, and no request to another host."""
    admin_http = process_of(stack, "frontend")["admin_http"]
    context = browser.new_context(**{"viewport": DESKTOP, "color_scheme": "light", **options})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    problems: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: problems.extend([message.text] if message.type == "error" else []))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.goto(f"http://{admin_http}/ui")
    page.locator(".engine[data-state=ready]").nth(1).wait_for()
    yield page
    assert problems == []
    assert hosts == {admin_http}
    context.close()


def process_of(stack: dict[str, Any], service: str) -> dict[str, Any]:
    return next(one for one in stack["processes"] if one["service"] == service)


@contextlib.contextmanager
def loaded(stack: dict[str, Any]) -> Iterator[None]:
    """Streams with a common prefix, each begun anew when it ends."""
    ended = threading.Event()

    def send(client: Client, index: int) -> None:
        while not ended.is_set():
            options: dict[str, Any] = {"max_tokens": 1800, "ignore_eos": True, "seed": index}
            with (
                contextlib.suppress(TriptychError),
                client.generate(PREFIX + str(index), **options) as stream,
            ):
                for _ in stream:
                    if ended.is_set():
                        break

    with Client(stack["grpc"]) as client:
        threads = [threading.Thread(target=send, args=(client, index)) for index in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def shoot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=True)


def tab_to(page: Any, name: str, *, most: int = 60) -> None:
    """Press Tab until the focus is on the element of that id, name or class."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == name:
            return
    raise AssertionError(f"{name} is not reached within {most} tabs")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_rest_the_engines_and_all_their_blocks_are_shown(browser, stack, scheme: str) -> None:
    with opened(browser, stack, color_scheme=scheme) as page:
        addresses = {one["address"] for one in stack["processes"] if one["service"] == "engine"}
        assert set(page.locator(".engine .address").all_inner_texts()) == addresses
        assert page.locator("#connection").inner_text() == "live"
        assert page.locator("#coordinator").inner_text() == "connected"
        for card in page.locator(".engine").all():
            blocks = card.locator(".map")
            assert int(blocks.get_attribute("data-total")) > 100
            assert blocks.get_attribute("data-used") == "0"
            assert card.locator(".map canvas").evaluate(DRAWN) >= 1
        shoot(page, f"rest-{scheme}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_under_load_requests_their_blocks_and_steps_are_shown(browser, stack, scheme: str) -> None:
    with loaded(stack), opened(browser, stack, color_scheme=scheme) as page:
        page.locator(".map:not([data-used='0']):not([data-shared='0'])").first.wait_for()
        page.locator(".running .request").nth(2 * MAX_RUNNING - 1).wait_for()
        page.locator(".waiting .request", has_text="waits for max_num_seqs").first.wait_for()
        card = page.locator(".engine", has=page.locator(".running .request")).first
        # Colours of requests, beside those of free and of cached blocks.
        assert card.locator(".map canvas").evaluate(DRAWN) >= 4
        card.locator(".steps[data-num-steps='120']").wait_for()
        card.locator(".output-rate", has_text=re.compile(r"^[1-9]")).wait_for()
        card.locator(".running .request").first.hover()
        card.locator(".readout", has_text="blocks (").wait_for()
        page.mouse.move(0, 0)
        card.locator(".running .request[tabindex='0']").focus()
        page.keyboard.press("ArrowDown")
        assert page.evaluate(FOCUSED) == "request shown"
        card.locator(".readout", has_text="blocks (").wait_for()
        shoot(page, f"load-{scheme}")


def test_a_phone_shows_all_in_its_width(browser, stack) -> None:
    options = {"viewport": PHONE, "device_scale_factor": 2, "has_touch": True, "color_scheme": "dark"}
    with loaded(stack), opened(browser, stack, **options) as page:
        page.locator(".running .request").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        wide = """() => [...document.querySelectorAll("body *")].filter((each) => {
            const box = each.getBoundingClientRect();
            return box.right > innerWidth + 1 && !each.closest("pre") && box.left < innerWidth;
        }).map((each) => each.className || each.tagName)"""
        assert page.evaluate(wide) == []
        shoot(page, "phone")


def test_the_playground_streams_an_answer_with_times_and_alternatives(browser, stack) -> None:
    with opened(browser, stack) as page:
        page.fill("#max_tokens", "48")
        page.fill("#temperature", "0")
        page.click("#send")
        page.locator("#progress", has_text=re.compile("^(length|stop): ")).wait_for()
        tokens = page.locator("#answer span")
        assert tokens.count() >= 20
        times = [float(each.get_attribute("data-gap-ms")) for each in tokens.all()]
        assert (
            sum(1 for each in times if each > 0) >= 5
        )  # messages; on a busy machine each has several tokens
        with Client(stack["grpc"]) as client:
            same = client.generate_unary("Once upon a time", temperature=0, max_tokens=48)
        assert "".join(tokens.all_text_contents()) == same.text
        tokens.nth(3).hover()
        page.locator("#token tr").nth(4).wait_for()
        assert "log probability" in page.locator("#token").inner_text()
        rows = page.locator("#waterfall .row")
        rows.nth(5).wait_for()
        names = [text.split()[0] for text in rows.all_inner_texts()]
        assert names[:4] == ["request", "tokenize", "queue", "prefill"]
        assert set(names[4:]) == {"decode", "detokenize"}
        shoot(page, "playground")


def test_a_conversation_goes_on(browser, stack) -> None:
    with opened(browser, stack) as page:
        page.locator("label", has_text="Chat").click()
        page.fill("#max_tokens", "16")
        for number, text in enumerate(("Tell me about a crab.", "And then?"), start=1):
            page.fill("#prompt", text)
            page.click("#send")
            page.locator("#turns p").nth(2 * number - 1).wait_for()
        assert page.locator("#turns p").nth(2).inner_text() == "you And then?"
        assert page.locator("#prompt").input_value() == ""
        page.locator("#copy summary").click()
        shoot(page, "conversation")


def test_an_error_names_its_field(browser, stack) -> None:
    with opened(browser, stack) as page:
        page.fill("#temperature", "9")
        page.click("#send")
        error = page.locator("#error")
        error.wait_for()
        assert (
            error.inner_text() == "INVALID_ARGUMENT: sampling.temperature is 9.0, must be finite and in 0..2"
        )
        assert page.locator("[aria-invalid=true]").get_attribute("id") == "temperature"
        shoot(page, "error")


def test_the_commands_run(browser, stack, tmp_path: Path) -> None:
    with opened(browser, stack) as page:
        page.fill("#prompt", 'It\'s "here": é\\n $HOME')
        page.fill("#max_tokens", "4")
        page.fill("#temperature", "0")
        page.locator("#copy summary").click()
        commands = {}
        for kind in ("buf", "python", "curl"):
            page.select_option("#copy-kind", kind)
            commands[kind] = page.locator("#command").inner_text()
    with Client(stack["grpc"]) as client:
        expected = client.generate_unary('It\'s "here": é\\n $HOME', temperature=0, max_tokens=4).text
    script = tmp_path / "command.py"
    script.write_text(commands["python"], encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, str(script)], env=source_environment(), capture_output=True, check=True, text=True
    )
    assert ran.stdout == expected
    lines = subprocess.run(["sh", "-c", commands["curl"]], capture_output=True, check=True, text=True).stdout
    deltas = [json.loads(line)["response"].get("delta", {}) for line in lines.splitlines()]
    assert "".join(delta.get("text", "") for delta in deltas) == expected
    assert commands["buf"].startswith("buf curl ")
    # Set by `make test-network`.
    if "BUF" in os.environ:
        buf = commands["buf"].replace("buf", os.environ["BUF"], 1)
        printed = subprocess.run(["sh", "-c", buf], capture_output=True, check=True, text=True).stdout
        assert "".join(json.loads(f'"{text}"') for text in re.findall(r'"text": "(.*)"', printed)) == expected


def test_every_control_is_reached_and_operated_by_the_keyboard(browser, stack) -> None:
    with opened(browser, stack) as page:
        press, focused = page.keyboard.press, lambda: page.evaluate(FOCUSED)
        reached: list[str] = []
        press("Tab")
        while focused() != "BODY" and len(reached) < 60:
            reached.append(focused())
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            parent = page.evaluate(
                "getComputedStyle(document.activeElement.parentElement.parentElement).outlineStyle"
            )
            assert outline != "none" or parent != "none", reached[-1]
            press("Tab")
        names = ["#engines", "#playground", "pause", "theme", *2 * ["map", "steps"], "kind", "prompt"]
        names += ["temperature", "max_tokens", "seed", "logprobs", "send", "SUMMARY"]
        assert reached == names

        tab_to(page, "pause")
        press("Enter")
        assert page.locator("#connection").inner_text() == "paused"
        press("Enter")
        page.locator("#connection", has_text="live").wait_for()
        tab_to(page, "theme")
        press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        tab_to(page, "map")
        press("ArrowRight")
        press("End")
        readout = page.locator(".readout").first
        last = page.locator(".map").first.get_attribute("data-shown")
        assert re.match(rf"block {last}: (free|cached)", readout.inner_text())
        press("Escape")
        assert readout.inner_text() == ""

        tab_to(page, "kind")
        press("ArrowRight")
        assert page.locator("#system").is_visible()
        press("ArrowLeft")
        tab_to(page, "prompt")
        press("Control+a")
        page.keyboard.type("The king")
        tab_to(page, "max_tokens")
        page.keyboard.type("24")
        tab_to(page, "prompt")
        press("Control+Enter")
        page.locator("#progress", has_text=re.compile("^(length|stop): ")).wait_for()
        for _ in range(8):
            press("Tab")
            if page.evaluate("document.activeElement.parentElement.id") == "answer":
                break
        press("ArrowRight")
        page.locator("#token", has_text="Token 2").wait_for()
        press("Home")
        page.locator("#token", has_text="Token 1:").wait_for()

        tab_to(page, "SUMMARY")
        press("Enter")
        tab_to(page, "copy-kind")
        press("ArrowDown")
        assert "grpc.insecure_channel" in page.locator("#command").inner_text()
        tab_to(page, "copy-button")
        press("Enter")
        page.locator("#copied", has_text=re.compile("copied|selected")).wait_for()


def test_stop_aborts_the_request(browser, stack) -> None:
    with opened(browser, stack) as page:
        endless = json.dumps({"prompt": "The king", "sampling": {"max_tokens": 1900, "ignore_eos": True}})
        page.route("**/ui/generate", lambda route: route.continue_(post_data=endless))
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        page.locator("#answer span").nth(3).wait_for()
        request = page.locator(".running .request")
        request.wait_for()
        tab_to(page, "stop")
        page.keyboard.press("Enter")
        page.locator("#progress", has_text="stopped: ").wait_for()
        assert page.evaluate(FOCUSED) == "send"
        request.wait_for(state="detached")


def test_the_state_is_read_ten_times_a_second_at_most_and_not_in_a_hidden_tab(browser, stack) -> None:
    with opened(browser, stack) as page:
        reads: list[float] = []
        page.on(
            "request", lambda request: reads.extend([time.monotonic()] * request.url.endswith("/ui/state"))
        )
        page.wait_for_timeout(2000)
        assert 5 <= len(reads) <= 21
        page.evaluate("""() => {
            Object.defineProperty(document, "hidden", { value: true, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""")
        page.wait_for_timeout(300)
        reads.clear()
        page.wait_for_timeout(700)
        assert reads == []
        page.evaluate("""() => {
            delete document.hidden;
            document.dispatchEvent(new Event("visibilitychange"));
        }""")
        page.wait_for_timeout(700)
        assert reads


def test_a_frontend_that_does_not_answer_is_said_to(browser, stack) -> None:
    pid = process_of(stack, "frontend")["pid"]
    with opened(browser, stack) as page:
        os.kill(pid, signal.SIGSTOP)
        try:
            page.locator(
                "#connection[data-state=unreachable]", has_text="the frontend does not answer"
            ).wait_for()
            shoot(page, "frontend-frozen")
        finally:
            os.kill(pid, signal.SIGCONT)
        page.locator("#connection[data-state=live]").wait_for()


def test_a_killed_engine_is_marked_and_its_requests_move(browser, stack) -> None:
    engine = process_of(stack, "engine")
    with loaded(stack), opened(browser, stack) as page:
        page.locator(".running .request").nth(2 * MAX_RUNNING - 1).wait_for()
        os.kill(engine["pid"], signal.SIGKILL)
        card = page.locator(f".engine[data-address='{engine['address']}']")
        page.locator(f".engine.dead[data-address='{engine['address']}']").wait_for()
        assert card.locator(".notice").is_visible()
        assert card.locator(".state").inner_text() == "dead"
        assert card.locator(".map canvas").evaluate(DRAWN) >= 4
        shoot(page, "killed")
        other = page.locator(".engine[data-state=ready]")
        other.locator(".waiting .request").nth(MAX_RUNNING).wait_for()
        # `serve` starts it again.
        page.locator(f".engine[data-state=ready][data-address='{engine['address']}']").wait_for()
