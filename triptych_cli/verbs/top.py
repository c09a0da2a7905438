"""The verb `top`: engines and their requests on a full screen, as the frontend's page /ui/state has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from triptych_cli.client_channel import client_credentials
from triptych_cli.verbs.probe import untrusted
from triptych_cli.verbs.terminal import printable
from triptych_kit.channel import TLS_SCHEMES, parse_target
from triptych_kit.errors import InvalidArgument
from triptych_kit.http.admin_http import read_page

_LIMIT_S = 5.0
_ID_CHARACTERS = 16
_AVERAGED_STEPS = 20
_MAX_BETWEEN_S = 1.0
_USUAL_SIZE = 80, 24  # of a terminal that does not know its own
_ENGINE_COLUMNS = (
    "<engine", "<state", "running", "waiting", "blocks", "pinned", "pins", "in/s", "out/s", "step ms", "hits",
    "preempted", "rank", "wave", "age ms", "<model",
)  # fmt: skip
_REQUEST_COLUMNS = (
    "<request", "<status", "<waits for", "prompt", "computed", "output", "blocks", "age s", "preempted",
)  # fmt: skip
_QUIT = frozenset(b"qQ\x03")

State = Mapping[str, Any]  # the JSON of /ui/state


class NoState(Exception):
    """The page could not be read."""


def run_top(url: str, interval_s: float, *, once: bool, as_json: bool) -> int:
    """Show the state until q or Ctrl-C, or print it once. Returns 1 if the first one cannot be read."""
    is_once = once or not sys.stdout.isatty()
    try:
        before, state = None, asyncio.run(_read(url))
        if is_once and not as_json:
            # Rates need a second picture.
            time.sleep(min(interval_s, _MAX_BETWEEN_S))
            before, state = state, asyncio.run(_read(url))
    except (InvalidArgument, NoState) as error:
        print(f"triptych top: {printable(str(error))}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(state))
    elif is_once:
        print("\n".join(frame(state, before)))
    else:
        asyncio.run(_show(url, state, interval_s))
    return 0


async def _read(url: str) -> State:
    address = parse_target(url)
    try:
        page = await read_page(
            address,
            "/ui/state",
            limit_s=_LIMIT_S,
            credentials=client_credentials(),
            has_tls=url.startswith(TLS_SCHEMES),
        )
        state: State = json.loads(page)
        frame(state, None)
    except ssl.SSLCertVerificationError as error:
        raise NoState(untrusted(address, error)) from error
    except TimeoutError as error:
        raise NoState(f"no answer from {address} within {_LIMIT_S:g} s") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Of another service's JSON, a part is missing or of another type.
        raise NoState(
            f"{address} does not serve /ui/state ({error}): --url takes the admin HTTP listener of a frontend"
        ) from error
    return state


async def _show(url: str, state: State, interval_s: float) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with _screen(), _keys(ended.set):
        before, problem = None, "q ends"
        while not ended.is_set():
            _draw(frame(state, before), problem)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), interval_s)
            reading, ending = asyncio.ensure_future(_read(url)), asyncio.ensure_future(ended.wait())
            await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
            if ended.is_set():
                reading.cancel()
                break
            ending.cancel()
            try:
                newest = reading.result()
            except NoState as error:
                problem = str(error)
            else:
                before, state, problem = state, newest, "q ends"


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Another screen of the terminal, without a cursor, until the end."""
    _write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        _write("\x1b[?25h\x1b[?1049l")


def _draw(lines: Sequence[str], last: str) -> None:
    """Fill the screen; what does not fit is cut, and said in the last line."""
    # Not COLUMNS and LINES, which do not follow the terminal.
    size = os.get_terminal_size(sys.stdout.fileno())
    width, height = (own or usual for own, usual in zip(size, _USUAL_SIZE, strict=True))
    num_cut = len(lines) - (height - 1)
    if num_cut > 0:
        last = f"{num_cut} more lines; {last}"
    shown = [line[:width] for line in lines[: height - 1]]
    shown += [""] * (height - 1 - len(shown))
    # Each line clears what is left of the one before it; the screen is not cleared, which would flicker.
    _write("\x1b[H" + "\x1b[K\n".join([*shown, printable(last)[:width]]) + "\x1b[K")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _keys(on_quit: Callable[[], None]) -> Iterator[None]:
    """Call `on_quit` at a key that ends the view, which needs no Enter. Restores the terminal."""
    if not sys.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read_key() -> None:
        if _QUIT.intersection(os.read(descriptor, 64)):
            on_quit()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read_key)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def frame(state: State, before: State | None) -> list[str]:
    """One picture as lines. Rates are those since `before`; None: they are not known."""
    frontend, engines = state["frontend"], state["engines"]
    coordinator = "connected" if state["coordinator"]["connected"] else "not connected"
    head = (
        f"triptych {state['version']}  requests: {frontend['open']} open, {frontend['queued']} queued, "
        f"{frontend['held']} held  coordinator {coordinator}"
    )
    return [
        printable(head),
        "",
        *_aligned(_ENGINE_COLUMNS, [_engine_row(one, state, before) for one in engines]),
        "",
        *_aligned(
            _REQUEST_COLUMNS, [_request_row(request) for one in engines for request in one["requests"]]
        ),
    ]


def _engine_row(engine: State, state: State, before: State | None) -> list[str]:
    hits, steps = engine["prefix_hit_rate"], engine["steps"][-_AVERAGED_STEPS:]
    return [
        engine["name"],
        engine["state"],
        str(engine["running"]),
        str(engine["waiting"]),
        f"{engine['total_blocks'] - engine['free_blocks']}/{engine['total_blocks']}",
        str(engine["pinned_blocks"]),
        str(engine["pins"]),
        *_rates(engine, state, before),
        f"{sum(step['duration_ms'] for step in steps) / len(steps):.1f}" if steps else "-",
        "-" if hits is None else f"{hits:.0%}",
        str(engine["preemptions"]),
        _shown(engine["rank"]),
        _shown(engine["wave"]),
        _shown(engine["age_ms"]),
        engine["model"],
    ]


def _rates(engine: State, state: State, before: State | None) -> list[str]:
    """Tokens in and out per second."""
    names = ("prompt_tokens", "generated_tokens")
    if before is not None and state["at_ms"] > before["at_ms"]:
        passed_s = (state["at_ms"] - before["at_ms"]) / 1000
        for earlier in before["engines"]:
            counts = [engine[name] - earlier[name] for name in names]
            # An engine that has started anew counts from 0.
            if earlier["address"] == engine["address"] and min(counts) >= 0:
                return [f"{count / passed_s:.0f}" for count in counts]
    return ["-", "-"]


def _request_row(request: State) -> list[str]:
    return [
        request["id"][:_ID_CHARACTERS],
        request["status"],
        ", ".join(request["blockers"]),
        str(request["num_prompt_tokens"]),
        str(request["num_computed_tokens"]),
        str(request["num_output_tokens"]),
        str(len(request["blocks"])),
        f"{request['age_ms'] / 1000:.1f}",
        str(request["num_preemptions"]),
    ]


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A heading and a line a row. Columns whose name begins with < have text, the others numbers."""
    names = [column.removeprefix("<") for column in columns]
    rows = [[printable(cell) for cell in cells] for cells in rows]
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column.startswith("<") else cell.rjust(width)
            for column, cell, width in zip(columns, cells, widths, strict=True)
        ).rstrip()
        for cells in (names, *rows)
    ]


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)
