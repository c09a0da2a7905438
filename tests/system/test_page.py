"""The page /ui in a browser, over real processes: two engines, load, a death, a phone, the keyboard alone.

The browser is Debian's `chromium`, which is installed if it is missing. The screenshots are kept in
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
from tests.debian import missing_packages
from tests.environments import install
from tests.processes import START_LIMIT_S, running, source_environment
from triptych_client.client import Client
from triptych_client.errors import TriptychError

pytestmark = pytest.mark.network

SCREENSHOTS = ROOT / "build" / "screenshots"
WAIT_MS = 30_000
DESKTOP: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "has_touch": True,
    "color_scheme": "dark",
}
NUM_STREAMS = 12
MAX_RUNNING = 4  # of each engine
NUM_FOLDED = 8  # requests of a list until it is unfolded
SPAN_MS = 300_000  # of the plots
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
# Elements whose texts do not fit into them.
CUT = """selector => [...document.querySelectorAll(selector)].filter((each) => {
    return each.scrollWidth > each.clientWidth + 1 || each.scrollHeight > each.clientHeight + 1;
}).map((each) => each.outerHTML)"""
# Elements that the window does not hold in its width.
WIDE = """() => [...document.querySelectorAll("body *")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.right > innerWidth + 1 && !each.closest("pre") && box.left < innerWidth;
}).map((each) => each.className || each.tagName)"""
# First and last column of pixels of a plot in which a line is, as shares of its width beside the axis.
LINE = """canvas => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const axis = 48 * devicePixelRatio;
    const columns = [];
    for (let x = 0; x < width; x += 1) {
        for (let y = 0; y < height - 18 * devicePixelRatio; y += 1) {
            const [red, green, blue, alpha] = data.slice(4 * (y * width + x), 4 * (y * width + x) + 4);
            const isColoured = Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
            if (alpha > 200 && isColoured && x >= axis - 1) { columns.push(x); break; }
        }
    }
    return [columns[0], columns.at(-1)].map((x) => (x - axis) / (width - axis));
}"""
FOCUSED = """() => {
    const element = document.activeElement;
    return element.id || element.name || element.className || element.getAttribute("href") || element.tagName;
}"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `triptych serve` with two engines writes when all is ready."""
    ready_file = tmp_path_factory.mktemp("page") / "ready.json"
    flags = ("--port=0", "--http-port=0", f"--ready-file={ready_file}", "--data-parallel-size=2")
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
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages for this module alone."""
    folder = tmp_path_factory.mktemp("packages")
    install("--python", sys.executable, "--target", str(folder), "playwright>=1.50,<2", "openai")
    return folder


@pytest.fixture(scope="module")
def browser(packages: Path) -> Iterator[Any]:
    if shutil.which("chromium") is None:
        assert missing_packages(("chromium",)) == [], "as root: apt-get install chromium"
    sys.path.append(str(packages))
    try:
        with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
            chromium = shutil.which("chromium")
            started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            yield started
            started.close()
    finally:
        sys.path.remove(str(packages))


@contextlib.contextmanager
def opened(browser: Any, stack: dict[str, Any], **options: Any) -> Iterator[Any]:
    """The page, followed until the end: no error, no request to another host, nothing beside the window."""
    admin_http = process_of(stack, "frontend")["admin_http"]
    context = browser.new_context(**{**DESKTOP, **options})
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
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]
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


def shoot_in_both_schemes(page: Any, name: str) -> None:
    shoot(page, f"{name}-light")
    page.emulate_media(color_scheme="dark")
    shoot(page, f"{name}-dark")


def until_drawn(page: Any, card: Any) -> None:
    """Wait until an engine's blocks have two colours of requests, beside those of free and of cached ones."""
    canvas = card.locator(".map canvas").element_handle()
    page.wait_for_function(f"canvas => ({DRAWN})(canvas) >= 4", arg=canvas)


def tab_to(page: Any, name: str, *, most: int = 60) -> None:
    """Press Tab until the focus is on the element of that id, name or class."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == name:
            return
    raise AssertionError(f"{name} is not reached within {most} tabs")


def test_at_rest_the_engines_and_all_their_blocks_are_shown(browser, stack) -> None:
    with opened(browser, stack) as page:
        assert page.locator(".engine .name").all_inner_texts() == ["engine-0", "engine-1"]
        assert page.locator("#connection").inner_text() == "live"
        assert page.locator("#coordinator").inner_text() == "connected"
        for card in page.locator(".engine").all():
            blocks = card.locator(".map")
            assert int(blocks.get_attribute("data-total")) > 100
            assert blocks.get_attribute("data-used") == "0"
            assert card.locator(".map canvas").evaluate(DRAWN) >= 1
        shoot_in_both_schemes(page, "rest")


def test_under_load_requests_their_blocks_and_steps_are_shown(browser, stack) -> None:
    with loaded(stack), opened(browser, stack, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.locator(".map:not([data-used='0']):not([data-shared='0'])").first.wait_for()
        page.locator(".running .request").nth(2 * MAX_RUNNING - 1).wait_for()
        page.locator(".waiting .request", has_text="waits for a slot in the batch").first.wait_for()
        card = page.locator(".engine", has=page.locator(".running .request")).first
        assert page.locator(".waiting .swatch:not(.none)").count() == 0
        for figure in page.locator(".plots figure").all():
            figure.locator("b", has_text=re.compile("[1-9]")).first.wait_for()
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            until_drawn(page, card)
        card.locator(".steps[data-num-steps='120']").wait_for()
        card.locator(".output-rate", has_text=re.compile(r"^[1-9]")).wait_for()
        card.locator(".running .request").first.hover()
        card.locator(".readout", has_text="blocks (").wait_for()
        page.mouse.move(0, 0)
        card.locator(".running .request[tabindex='0']").focus()
        page.keyboard.press("ArrowDown")
        assert page.evaluate(FOCUSED) == "request shown"
        card.locator(".readout", has_text="blocks (").wait_for()
        shoot_in_both_schemes(page, "load")
        # An id is short, and is copied whole by a click.
        name = page.locator(".running .request .id").first
        assert re.fullmatch("[0-9a-f]{8}", name.inner_text())
        shown = name.inner_text()
        name.click()
        page.locator(".running .id", has_text="copied").wait_for()
        whole = page.evaluate("navigator.clipboard.readText()")
        assert re.match("[0-9a-f]{32}", whole) and whole.startswith(shown)


@pytest.mark.parametrize("options", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_long_list_says_how_many_more_there_are_and_shows_them(browser, stack, options) -> None:
    with opened(browser, stack, **options) as page:
        page.route("**/ui/state", lambda route: route.fulfill(json=crowded(route.fetch().json())))
        card = page.locator(".engine").first
        running, waiting = card.locator(".running"), card.locator(".waiting")
        running.locator(".request").nth(NUM_FOLDED - 1).wait_for()
        for lane, num_listed in ((running, 20), (waiting, 23)):
            assert lane.locator(".request").count() == NUM_FOLDED
            assert lane.locator(".more").inner_text() == f"Show {num_listed - NUM_FOLDED} more"
        assert running.locator(".count").inner_text() == "20"
        assert waiting.locator(".rest").inner_text() == "577 more are open, and not listed here"
        assert card.locator(".pins").inner_text() == "1,200 blocks by 1 pin"
        colours = running.locator(".swatch").evaluate_all("all => all.map((each) => each.style.background)")
        assert len(set(colours)) == NUM_FOLDED
        shoot(page, f"folded-{page.viewport_size['width']}")
        for lane, num_listed in ((running, 20), (waiting, 23)):
            lane.locator(".more").click()
            lane.locator(".request").nth(num_listed - 1).wait_for()
            lane.locator(".request").last.scroll_into_view_if_needed()
            assert lane.locator(".more").inner_text() == f"Show only {NUM_FOLDED}"
        assert page.evaluate(CUT, ".request, .request .id, .request .numbers-of") == []
        if options == PHONE:
            assert all(link.bounding_box()["height"] >= 44 for link in page.locator("nav a").all())
            assert page.evaluate(WIDE) == []
        else:
            # None has a second line.
            heights = [each.bounding_box()["height"] for each in card.locator(".request").all()]
            assert max(heights) < 1.5 * min(heights)
        shoot(page, f"unfolded-{page.viewport_size['width']}")
        page.unroute_all(behavior="ignoreErrors")


def crowded(state: dict[str, Any]) -> dict[str, Any]:
    """The state with an engine that has 20 running and 600 waiting requests, of which 23 are listed."""
    request = {"num_prompt_tokens": 1476, "num_output_tokens": 119, "num_computed_tokens": 1595, "blocks": []}
    request |= {"num_preemptions": 12, "priority": 0, "age_ms": 9000, "blockers": []}
    running = [
        request | {"id": f"{index:08x}" * 4, "status": "RUNNING", "blocks": [index + 1]}
        for index in range(20)
    ]
    waiting = [
        request | {"id": f"{index:08x}" * 4, "status": "WAITING", "blockers": ["free_blocks"]}
        for index in range(20, 43)
    ]
    counts = {"running": 20, "waiting": 600, "pins": 1, "pinned_blocks": 1200}
    full = state["engines"][0] | counts | {"requests": running + waiting}
    return state | {"engines": [full, *state["engines"][1:]]}


def test_the_plots_show_five_minutes(browser, stack) -> None:
    ages = list(range(SPAN_MS, -1, -1000))
    wave = [50 + (age // 1000) % 60 for age in ages]
    content = {
        "span_ms": SPAN_MS, "age_ms": ages, "tokens_per_s": [10 * each for each in wave],
        "running": wave, "waiting": [each // 4 for each in wave], "first_token_p50_ms": wave,
        "first_token_p95_ms": [9 * each for each in wave], "kv_use": [each / 120 for each in wave],
    }  # fmt: skip
    with opened(browser, stack) as page:
        # Those of the frontend's life, before the page was opened.
        throughput = page.locator("figure[data-plot=throughput] .plot")
        assert throughput.get_attribute("data-span-ms") == str(SPAN_MS)
        assert int(throughput.get_attribute("data-num-samples")) >= 3
        page.route("**/ui/history", lambda route: route.fulfill(json=content))
        page.locator(".plot[data-num-samples='301']").nth(3).wait_for()
        for plot in page.locator(".plot").all():
            first, last = plot.locator("canvas").evaluate(LINE)
            assert first < 0.01 and last > 0.99
        throughput.hover(position={"x": 50, "y": 40})
        readout = page.locator("figure[data-plot=throughput] output")
        assert readout.inner_text().startswith(("5 min 0 s ago", "4 min 59 s ago", "4 min 58 s ago"))
        shoot_in_both_schemes(page, "history")
        page.unroute_all(behavior="ignoreErrors")


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
        assert names[:5] == ["request", "tokenize", "engine", "queue", "prefill"]
        assert set(names[5:]) == {"decode", "detokenize"}
        shoot(page, "playground")


def test_a_request_has_the_model_stop_strings_a_schema_and_tools(browser, stack) -> None:
    with opened(browser, stack) as page:
        page.locator("label", has_text="Chat").click()
        page.locator("#model option").first.wait_for(state="attached")
        page.locator("#more summary").click()
        page.fill("#prompt", "The weather?")
        page.fill("#top_p", "0.5")
        page.fill("#max_tokens", "4")
        page.fill("#stop", "end\n\\n\\n")
        for button in page.locator(".example").all():
            button.click()
        page.select_option("#tool_choice", "none")
        with page.expect_request("**/ui/chat") as sent:
            page.click("#send")
        request = sent.value.post_data_json
        assert request["model"] == page.locator("#model").input_value() != ""
        assert request["sampling"]["top_p"] == 0.5
        assert request["sampling"]["stop"] == ["end", "\n\n"]
        schema = json.loads(request["sampling"]["structured_output"]["json_schema"])
        assert schema["required"] == ["name", "age"]
        assert [tool["name"] for tool in request["tools"]] == ["get_weather"]
        assert json.loads(request["tools"][0]["parameters_json_schema"])["required"] == ["city"]
        assert request["tool_choice"] == {"mode": "TOOL_CHOICE_MODE_NONE"}
        page.locator("#progress", has_text=": ").wait_for()


@pytest.mark.parametrize(
    ("kind", "field", "text", "message"),
    [
        ("Chat", "prompt", "  ", "Write a message first."),
        ("Prompt", "prompt", "", "Write a prompt first."),
        ("Prompt", "schema", "{", "The schema is not JSON: "),
        ("Chat", "tools", '"get_weather"', "The list of tools must be a JSON list of objects."),
    ],
)
def test_a_field_that_cannot_be_sent_is_marked_and_nothing_is_sent(
    browser, stack, kind: str, field: str, text: str, message: str
) -> None:
    with opened(browser, stack) as page:
        sent: list[str] = []
        page.on("request", lambda request: sent.extend([request.url] * (request.method == "POST")))
        page.locator("fieldset label", has_text=kind).click()
        page.fill("#prompt", "The king")
        page.locator("#more summary").click()
        page.fill(f"#{field}", text)
        page.click("#send")
        assert page.locator("#error").inner_text().startswith(message)
        assert page.locator("[aria-invalid=true]").get_attribute("id") == field
        assert page.evaluate(FOCUSED) == field
        assert sent == []


def test_a_conversation_goes_on_and_shows_each_answer_once(browser, stack) -> None:
    with opened(browser, stack) as page:
        page.locator("label", has_text="Chat").click()
        page.fill("#max_tokens", "16")
        for number, text in enumerate(("Tell me about a crab.", "And then?"), start=1):
            page.fill("#prompt", text)
            page.click("#send")
            page.locator("#progress", has_text=": ").wait_for()
            page.locator("#turns p").nth(2 * number - 2).wait_for()
        assert page.locator("#turns p").count() == 3
        assert page.locator("#turns p").nth(2).inner_text() == "you\nAnd then?"
        assert page.locator("#prompt").input_value() == ""
        answer = "".join(page.locator("#answer span").all_text_contents()).removesuffix("·")
        assert page.locator("#playground").inner_text().count(answer) == 1
        page.locator("#copy summary").click()
        # Between two messages the command is that of the last one.
        assert '"content": "And then?"' in page.locator("#command").inner_text()
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


def test_the_commands_run(browser, stack, packages: Path, tmp_path: Path) -> None:
    prompt = 'It\'s "here": é\\n $HOME'
    with opened(browser, stack) as page:
        page.fill("#prompt", prompt)
        page.fill("#max_tokens", "4")
        page.fill("#temperature", "0")
        page.locator("#copy summary").click()
        assert page.locator("#copy-kind").input_value() == "openai-curl"
        commands = {}
        for kind in ("openai-curl", "openai-python", "grpc-buf", "grpc-python", "page-curl"):
            page.select_option("#copy-kind", kind)
            commands[kind] = page.locator("#command").inner_text()
    with Client(stack["grpc"]) as client:
        expected = client.generate_unary(prompt, temperature=0, max_tokens=4).text
    assert run_python(tmp_path, commands["openai-python"], packages) == expected
    assert run_python(tmp_path, commands["grpc-python"]) == expected
    events = run_shell(commands["openai-curl"]).split("\n\n")
    bodies = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(body["choices"][0]["text"] for body in bodies) == expected
    lines = run_shell(commands["page-curl"]).splitlines()
    deltas = [json.loads(line)["response"].get("delta", {}) for line in lines]
    assert "".join(delta.get("text", "") for delta in deltas) == expected
    assert commands["grpc-buf"].startswith("buf curl ")
    # Set by `make test-network`.
    if "BUF" in os.environ:
        printed = run_shell(commands["grpc-buf"].replace("buf", os.environ["BUF"], 1))
        assert "".join(json.loads(f'"{text}"') for text in re.findall(r'"text": "(.*)"', printed)) == expected


def test_the_commands_of_a_chat_with_tools_and_a_schema_run(browser, stack, packages, tmp_path) -> None:
    with opened(browser, stack) as page:
        page.locator("label", has_text="Chat").click()
        page.fill("#prompt", "The weather?")
        page.fill("#max_tokens", "4")
        page.locator("#more summary").click()
        page.locator(".example").first.click()
        page.fill("#stop", "never")
        page.locator("#copy summary").click()
        curl = page.locator("#command").inner_text()
        page.select_option("#copy-kind", "openai-python")
        python = page.locator("#command").inner_text()
    assert '"logprobs": true' in curl and "logprobs=True" in python
    assert "data: [DONE]" in run_shell(curl) and "error" not in run_shell(curl)
    assert run_python(tmp_path, python, packages) != ""


def run_python(folder: Path, script: str, packages: Path | None = None) -> str:
    file = folder / "command.py"
    file.write_text(script, encoding="utf-8")
    environment = source_environment()
    if packages is not None:
        environment["PYTHONPATH"] += f"{os.pathsep}{packages}"
    command = [sys.executable, str(file)]
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout


def run_shell(command: str) -> str:
    return subprocess.run(["sh", "-c", command], capture_output=True, check=True, text=True).stdout


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
        names = ["#engines", "#playground", "pause", "theme", *4 * ["plot"], *2 * ["map", "steps"]]
        names += ["kind", "model", "prompt", "temperature", "top_p", "max_tokens", "seed", "logprobs"]
        names += ["SUMMARY", "send", "SUMMARY"]
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
        assert "from openai import OpenAI" in page.locator("#command").inner_text()
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
        tab_to(page, "stop-button")
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
    with opened(browser, stack) as page:
        with loaded(stack):
            page.locator(".running .request").nth(2 * MAX_RUNNING - 1).wait_for()
            card = page.locator(f".engine[data-address='{engine['address']}']")
            until_drawn(page, card)
            os.kill(engine["pid"], signal.SIGKILL)
            page.locator(f".engine.dead[data-address='{engine['address']}']").wait_for()
            assert card.locator(".notice").is_visible()
            assert card.locator(".state").inner_text() == "dead"
            assert card.locator(".map canvas").evaluate(DRAWN) >= 4
            shoot(page, "killed")
            other = page.locator(".engine[data-state=ready]")
            other.locator(".waiting .request").nth(MAX_RUNNING).wait_for()
        # `serve` starts it again.
        again = page.locator(f".engine[data-state=ready][data-address='{engine['address']}']")
        again.wait_for(timeout=START_LIMIT_S * 1000)
