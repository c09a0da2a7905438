"""OpenAI's HTTP API beside vLLM's: equal streams of the embedded model, the servers in turns.

    python -m benchmarks http_peers --vllm PYTHON --json benchmarks/results/http_peers.json

Each server is started as a user does, `triptych serve` and `vllm serve`, with one compute thread; its engine
has one core, all of its other processes share another with the clients, and their CPU is what is counted. A
`--variant NAME=VARIABLES FLAGS` is vLLM once more, with these. The processes of vLLM, which wait without
sleep for a while, are stopped in the turns of others. Every stream's text is compared with its ids.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report import Report, Row
from benchmarks.rig.frontend import with_descendants
from benchmarks.scenarios.http import Mode, in_turns, rows_of
from triptych_cli.services import embedded_model

_ENGINE_CORE, _OTHERS_CORE = 1, 0
_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 20.0
_POLL_S = 0.5
_MAX_NUM_SEQS = 256
# Titles of the processes of engines: ours, vLLM's and those of its ranks.
_ENGINES = ("triptych-engine", "vllm::engine", "vllm::worker")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", type=Path, required=True, help="Python of its CPU build, or what runs it")
    parser.add_argument("--variant", action="append", default=[], help="NAME=VARIABLES FLAGS")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=100, help="of a stream")


def run(options: argparse.Namespace) -> Report:
    os.sched_setaffinity(0, {_OTHERS_CORE})
    rows = asyncio.run(_measure(options))
    return Report("http_peers", {"rounds": options.rounds, "tokens": options.tokens}, rows)


async def _measure(options: argparse.Namespace) -> list[Row]:
    ours = (
        sys.executable, "-m", "triptych_cli.cli", "serve", "--grpc-port=0",
        "--num-threads=1", f"--max-num-seqs={_MAX_NUM_SEQS}", "--kv-cache-memory=1GiB", "--log-level=error",
    )  # fmt: skip
    theirs = (
        str(options.vllm), "-m", "benchmarks.contestants.vllm_serve", "serve", str(embedded_model()),
        "--max-model-len=2048", f"--max-num-seqs={_MAX_NUM_SEQS}", "--dtype=float32",
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        modes = [
            await stack.enter_async_context(_server("triptych", ours, {})),
            await stack.enter_async_context(_server("vLLM", theirs, {})),
        ]
        for variant in options.variant:
            name, _, words = variant.partition("=")
            variables = [word for word in shlex.split(words) if not word.startswith("-")]
            flags = [word for word in shlex.split(words) if word.startswith("-")]
            environment = dict(pair.split("=", 1) for pair in variables)
            modes.append(await stack.enter_async_context(_server(name, (*theirs, *flags), environment)))
        stopped = {mode.name: with_descendants(mode.pids[0]) for mode in modes[1:]}
        rows: list[Row] = []
        for num_streams in options.streams:
            turns = await in_turns(
                modes, num_streams, options.rounds, options.tokens, lambda mode: _alone(mode, stopped)
            )
            rows += rows_of("peers", num_streams, turns)
    return rows


@contextlib.contextmanager
def _alone(mode: Mode, stopped: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Stop the processes of the other servers for the block."""
    others = [pid for name, pids in stopped.items() if name != mode.name for pid in pids]
    try:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def _server(name: str, command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[Mode]:
    """A server once it answers, its engine on the core of engines."""
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: ASYNC220  Its output is a file.
            [*command, f"--port={port}"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            await _until_served(name, process, port)
            yield Mode(name, "http", f"127.0.0.1:{port}", _pin(process.pid), {})
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4_000:])
            raise
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, _STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


async def _until_served(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not await asyncio.to_thread(_is_served, port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{name} is not served: {process.returncode}")
        await asyncio.sleep(_POLL_S)


def _is_served(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            return bool(json.load(answer)["data"])
    except OSError:
        return False


def _pin(pid: int) -> list[int]:
    """Give the threads of its engines their core; the processes that are no engines."""
    others = []
    for each in with_descendants(pid):
        # All have names of their own.
        title = Path(f"/proc/{each}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[0]
        if not title.lower().startswith(_ENGINES):
            others.append(each)
            continue
        for thread in Path(f"/proc/{each}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {_ENGINE_CORE})
    if len(others) == len(with_descendants(pid)):
        raise RuntimeError(f"no process of {pid} is an engine")
    return others


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
