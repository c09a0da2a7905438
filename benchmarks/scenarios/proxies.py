"""Streams through nginx and HAProxy that are reloaded, over frontends that age connections: what is lost.

    python -m benchmarks proxies --seconds 600 --tokens 800 --json benchmarks/results/proxies.json
    python -m benchmarks proxies --idle 30s      # limits of silence far below the files'

nginx and HAProxy run with the files of deploy/, side by side in front of the same frontends, and are reloaded
every few seconds. Through each there are always so many streams of gRPC (`triptych_client`, which resumes)
and of HTTP (server-sent events, never sent again once an answer has begun). Steps take a tenth of a second,
so that streams last for minutes. Now and then the engine is paused for longer than 30 s: all streams are
silent, and those that begin meanwhile before their first token. The frontends end connections by
`--max-connection-age-s`.

Promised with the files as they are: no stream fails, and the ids of each are those of a direct call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import h11

from benchmarks.report import Report, Row
from benchmarks.rig.pace import write_entry_point
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from benchmarks.rig.proxies import KINDS, Backend, Proxy, is_installed
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import utility_pb2
from triptych_cli.services import embedded_model
from triptych_client.aio import Client
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Finished
from triptych_client.retry import RetryPolicy
from triptych_kit.channel import open_channel

PROTOCOLS = ("grpc", "http")
_NUM_QUESTIONS = 16
_FIRST_PLAIN_ID, _LAST_PLAIN_ID = 300, 2040
_MAX_ATTEMPTS = 3
_ORPHAN_GRACE_MS = 5000
_READ_LIMIT_S = 300.0
_CALL_LIMIT_S = 60.0
_RETRY_S = 0.1
# Of each proxy and protocol, in each pause.
_NUM_WAITING = 2
_NUM_WAITING_TOKENS = 50
_RESUME = "/triptych.api.v1.InferenceService/Resume"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--proxy", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--frontends", type=int, nargs="+", default=[2, 1], choices=(1, 2), help="in turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="time in which streams begin")
    parser.add_argument(
        "--streams", type=int, default=16, help="at once, of each protocol through each proxy"
    )
    parser.add_argument(
        "--tokens", type=int, default=400, help="of the longest streams; the shortest have a quarter"
    )
    parser.add_argument("--step-ms", type=int, default=100, help="what is added to each step")
    parser.add_argument("--reload-s", type=float, default=5.0, help="time between two reloads")
    parser.add_argument("--age-s", type=float, default=20.0, help="age of a connection to a frontend")
    parser.add_argument("--silence-s", type=float, default=35.0, help="of a pause of the engine; 0: none")
    parser.add_argument("--silence-every-s", type=float, default=180.0, help="between two pauses")
    parser.add_argument("--heartbeat-s", type=float, default=15.0, help="of silent HTTP streams")
    parser.add_argument("--idle", help="limits of silence in place of the files' hour, e.g. 30s")


def run(options: argparse.Namespace) -> Report:
    options.proxy = options.proxy or list(KINDS)
    if missing := [name for name in options.proxy if not is_installed(name)]:
        raise SystemExit(f"not installed: {', '.join(missing)}")
    rows: list[Row] = []
    broken: list[str] = []
    for num_frontends in options.frontends:
        found, shortfalls = asyncio.run(measure(options, num_frontends))
        rows += found
        broken += shortfalls
    names = (
        "seconds", "streams", "tokens", "step_ms", "reload_s", "age_s", "silence_s", "silence_every_s",
        "heartbeat_s", "idle",
    )  # fmt: skip
    return Report("proxies", {name: getattr(options, name) for name in names}, rows, broken)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and a seed, None for greedy, and what a direct call was answered."""

    token_ids: tuple[int, ...]
    seed: int | None
    num_tokens: int
    answer: tuple[int, ...] = ()

    @property
    def sampling(self) -> dict[str, float]:
        return {"temperature": 0.0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}

    def cut(self, num_tokens: int) -> Question:
        return replace(self, num_tokens=min(num_tokens, self.num_tokens), answer=self.answer[:num_tokens])


@dataclass(slots=True)
class Tally:
    """The ends of the streams of one protocol through one proxy."""

    num_streams: int = 0
    num_differing: int = 0
    num_retried: int = 0  # that were sent again, before any answer
    num_heartbeats: int = 0
    longest_s: float = 0.0
    longest_gap_s: float = 0.0
    lost: list[str] = field(default_factory=list)

    def note_retry(self) -> None:
        self.num_retried += 1


@dataclass(slots=True)
class Received:
    """The ids of one stream so far, and when the newest part came."""

    began_at: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    longest_gap_s: float = 0.0
    _part_at: float = field(default_factory=time.monotonic)

    def add(self, token_ids: Sequence[int]) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self._part_at)
        self._part_at = now
        self.token_ids += token_ids


class StreamLost(Exception):
    """A stream failed. The message has the reason."""


async def measure(options: argparse.Namespace, num_frontends: int) -> tuple[list[Row], list[str]]:
    """The row of each proxy and protocol, and what was not kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Fleet(folder) as fleet:
            await _start(fleet, folder, options, num_frontends)
            frontends = fleet.of("frontend")
            questions = await _answered(frontends[0].address, _make_questions(options.tokens))
            backends = [Backend(frontend.address, frontend.http) for frontend in frontends]
            proxies = [Proxy(each, folder / each, backends, idle=options.idle) for each in options.proxy]
            tallies: dict[tuple[str, str], Tally] = {}
            num_processes: Counter[str] = Counter()
            async with contextlib.AsyncExitStack() as resources:
                for proxy in proxies:
                    resources.push_async_callback(proxy.stop)
                    await proxy.start()
                # The ids are known, so that streams may be slow from now on.
                (folder / "slow").touch()
                await _disturbed(options, fleet, proxies, num_processes, questions, tallies)
            resumed = _num_resumed(frontends)
    rows: list[Row] = []
    broken: list[str] = []
    for proxy, protocol in itertools.product(proxies, PROTOCOLS):
        tally = tallies[proxy.name, protocol]
        rows.append(
            {
                "frontends": num_frontends,
                "proxy": proxy.name,
                "protocol": protocol,
                "streams": tally.num_streams,
                "lost": len(tally.lost),
                "differing": tally.num_differing,
                "resumed": resumed[proxy.name] if protocol == "grpc" else 0,
                "retried": tally.num_retried,
                "reloads": proxy.num_reloads,
                "most_processes": num_processes[proxy.name],
                "heartbeats": tally.num_heartbeats,
                "longest_s": tally.longest_s,
                "longest_gap_s": tally.longest_gap_s,
                "first_loss": tally.lost[0] if tally.lost else None,
            }
        )
        label = f"{num_frontends} behind {proxy.name}, {protocol}"
        if tally.lost:
            broken.append(f"{label}: {len(tally.lost)} streams lost: {tally.lost[0]}")
        if tally.num_differing:
            broken.append(f"{label}: {tally.num_differing} streams differ from the direct call")
    return rows, broken


async def _start(fleet: Fleet, folder: Path, options: argparse.Namespace, num_frontends: int) -> None:
    coordinator = fleet.add(ServicePlan("coordinator", 0))
    known = f"--coordinator={coordinator.address}"
    engine_flags = (
        str(embedded_model()), "--num-threads=1", known, "--max-num-seqs=128", "--kv-cache-memory=1GiB",
    )  # fmt: skip
    site = folder / "site"
    fleet.add(
        ServicePlan("engine", 0, engine_flags, write_entry_point(site, folder / "slow", options.step_ms))
    )
    for index in range(num_frontends):
        flags = (
            known, "--http-port=0", "--text-workers=1", f"--http-heartbeat-s={options.heartbeat_s:g}",
            f"--max-connection-age-s={options.age_s:g}", "--max-connection-age-grace-s=3600",
        )  # fmt: skip
        fleet.add(ServicePlan("frontend", index, flags))
    await fleet.start()
    await fleet.until_routed()


def _make_questions(num_tokens: int) -> list[Question]:
    rng = random.Random(1)
    return [
        Question(
            tuple(rng.randrange(_FIRST_PLAIN_ID, _LAST_PLAIN_ID) for _ in range(rng.randint(16, 64))),
            None if index % 2 else 1000 + index,
            # Of different lengths, so that some begin at any time.
            num_tokens * (1 + index // 2 % 4) // 4,
        )
        for index in range(_NUM_QUESTIONS)
    ]


async def _answered(address: str, questions: Sequence[Question]) -> list[Question]:
    """The questions with what direct calls are answered."""
    async with Client(address) as client:

        async def ask(question: Question) -> Question:
            answer = await client.generate_unary(
                question.token_ids, max_tokens=question.num_tokens, ignore_eos=True, **question.sampling
            )
            return replace(question, answer=answer.outputs[0].token_ids)

        return await asyncio.gather(*map(ask, questions))


async def _disturbed(
    options: argparse.Namespace,
    fleet: Fleet,
    proxies: Sequence[Proxy],
    num_processes: Counter[str],
    questions: Sequence[Question],
    tallies: dict[tuple[str, str], Tally],
) -> None:
    """Keep the streams coming for the time, reload and pause meanwhile, and wait for the last stream."""
    ends_at = time.monotonic() + options.seconds
    is_paused = asyncio.Event()
    async with contextlib.AsyncExitStack() as resources:
        slots: list[Coroutine[None, None, None]] = []
        for proxy, protocol in itertools.product(proxies, PROTOCOLS):
            tally = tallies[proxy.name, protocol] = Tally()
            for index in range(options.streams + _NUM_WAITING):
                streams: Streams
                name = f"{proxy.name}-{protocol}-{index}"
                if protocol == "grpc":
                    client = Client(proxy.grpc, retry=CountedRetries(on_retry=tally.note_retry))
                    streams = GRPCStreams(await resources.enter_async_context(client), name)
                else:
                    streams = await resources.enter_async_context(HTTPStreams(proxy.http, name))
                slot = Slot(streams, tally, [*questions[index:], *questions[:index]], ends_at)
                slots.append(slot.run() if index < options.streams else slot.run_in_pauses(is_paused))
        running = asyncio.ensure_future(_all_of(slots))
        others = [asyncio.ensure_future(_keep_reloading(proxy, options, num_processes)) for proxy in proxies]
        if options.silence_s:
            others.append(
                asyncio.ensure_future(_keep_pausing(fleet["engine-0"], options, ends_at, is_paused))
            )
        pending = {running, *others}
        try:
            while not running.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    # A proxy that fails ends the measurement.
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)


async def _all_of(slots: Sequence[Coroutine[None, None, None]]) -> None:
    await asyncio.gather(*slots)


class Slot:
    """One stream after the other, over one connection to one proxy."""

    def __init__(self, streams: Streams, tally: Tally, questions: Sequence[Question], ends_at: float) -> None:
        self._streams, self._tally, self._ends_at = streams, tally, ends_at
        self._questions = itertools.cycle(questions)

    async def run(self) -> None:
        while time.monotonic() < self._ends_at:
            await self._stream(next(self._questions))

    async def run_in_pauses(self, is_paused: asyncio.Event) -> None:
        """Streams that begin while the engine is paused."""
        while (left_s := self._ends_at - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_paused.wait(), left_s)
                await self._stream(next(self._questions).cut(_NUM_WAITING_TOKENS))

    async def _stream(self, question: Question) -> None:
        received, tally = Received(), self._tally
        tally.num_streams += 1
        try:
            await self._streams.stream(question, received, tally)
        except StreamLost as lost:
            tally.lost.append(f"{lost} after {len(received.token_ids)} tokens")
        else:
            tally.num_differing += tuple(received.token_ids) != question.answer
        tally.longest_s = max(tally.longest_s, time.monotonic() - received.began_at)
        tally.longest_gap_s = max(tally.longest_gap_s, received.longest_gap_s)


async def _keep_reloading(proxy: Proxy, options: argparse.Namespace, num_processes: Counter[str]) -> None:
    while True:
        await asyncio.sleep(options.reload_s)
        await proxy.reload()
        num_processes[proxy.name] = max(num_processes[proxy.name], proxy.num_processes)


async def _keep_pausing(
    engine: ServiceProcess, options: argparse.Namespace, ends_at: float, is_paused: asyncio.Event
) -> None:
    """Pause the engine, the first time early, for as long as there are new streams."""
    await asyncio.sleep(min(options.silence_every_s, options.seconds / 6))
    async with open_channel(engine.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)

        async def call(call: utility_pb2.UtilityCall) -> None:
            await stub.Utility(admin_pb2.UtilityRequest(call=call), timeout=_CALL_LIMIT_S)

        while time.monotonic() < ends_at:
            keep = utility_pb2.PauseCall(mode=utility_pb2.PAUSE_MODE_KEEP, clear_cache=False)
            await call(utility_pb2.UtilityCall(pause=keep))
            is_paused.set()
            try:
                await asyncio.sleep(options.silence_s)
            finally:
                is_paused.clear()
                await call(utility_pb2.UtilityCall(resume=utility_pb2.ResumeCall()))
            await asyncio.sleep(options.silence_every_s)


class Streams(Protocol):
    """Streams of one protocol through one proxy, one after the other."""

    async def stream(self, question: Question, received: Received, tally: Tally) -> None:
        """Read one stream; raises StreamLost."""
        ...


@dataclass(frozen=True, slots=True)
class CountedRetries(RetryPolicy):
    """The client's own policy, which counts what is sent again before any answer."""

    on_retry: Callable[[], None] = field(kw_only=True)

    def is_retried(self, error: TriptychError, num_attempts: int) -> bool:
        is_retried = RetryPolicy.is_retried(self, error, num_attempts)
        if is_retried:
            self.on_retry()
        return is_retried


class GRPCStreams:
    """Streams over one channel, with the client's own retries and resumption.

    Each has an x-request-id of its own: by it a proxy finds the frontend that has the stream.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name
        self._numbers = itertools.count()

    async def stream(self, question: Question, received: Received, tally: Tally) -> None:
        is_finished = False
        call = self._client.generate(
            question.token_ids,
            max_tokens=question.num_tokens,
            ignore_eos=True,
            orphan_grace_ms=_ORPHAN_GRACE_MS,
            metadata={"x-request-id": f"{self._name}-{next(self._numbers)}"},
            **question.sampling,
        )
        try:
            async with asyncio.timeout(None) as limit, call:
                loop = asyncio.get_running_loop()
                limit.reschedule(loop.time() + _READ_LIMIT_S)
                async for event in call:
                    limit.reschedule(loop.time() + _READ_LIMIT_S)
                    if isinstance(event, Delta):
                        received.add(event.token_ids)
                    is_finished = is_finished or isinstance(event, Finished)
        except TriptychError as error:
            raise StreamLost(str(error)) from error
        except TimeoutError as error:
            raise StreamLost(f"silent for {_READ_LIMIT_S:.0f} s") from error
        if not is_finished:
            raise StreamLost("ended without its end")


class HTTPStreams:
    """Streams of server-sent events over one connection, and a new one where it has ended, as clients do.

    Like OpenAI's client it sends a request again that was not answered at all, twice at most.
    """

    def __init__(self, address: str, name: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._name = name
        self._numbers = itertools.count()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._protocol = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> HTTPStreams:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._disconnect()

    async def stream(self, question: Question, received: Received, tally: Tally) -> None:
        body = {
            "prompt": list(question.token_ids), "max_tokens": question.num_tokens, "ignore_eos": True,
            "stream": True, "return_token_ids": True, **question.sampling,
        }  # fmt: skip
        request_id = f"{self._name}-{next(self._numbers)}"
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                status = await self._send(json.dumps(body).encode(), f"{request_id}-{attempt}")
            except (OSError, EOFError, h11.RemoteProtocolError) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    break
                reason = f"status {status}"
                if status < 500:
                    raise StreamLost(reason)
            self._disconnect()
            if attempt == _MAX_ATTEMPTS:
                raise StreamLost(reason)
            tally.note_retry()
            await asyncio.sleep(_RETRY_S)
        is_done = False
        try:
            async for line in self._lines():
                if line.startswith(b":"):
                    tally.num_heartbeats += 1
                elif line.startswith(b"data: {"):
                    received.add(_ids_of(line))
                is_done = is_done or line == b"data: [DONE]"
        except (OSError, EOFError, h11.RemoteProtocolError) as error:
            self._disconnect()
            raise StreamLost(f"{type(error).__name__}: {error}") from error
        if not is_done:
            raise StreamLost("ended without its end")

    async def _send(self, body: bytes, request_id: str) -> int:
        """Send a request; the status of its answer."""
        if self._streams is not None and self._streams[0].at_eof():
            self._disconnect()
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
            self._protocol = h11.Connection(h11.CLIENT)
        else:
            self._protocol.start_next_cycle()
        headers = [
            ("host", "localhost"), ("content-type", "application/json"), ("content-length", str(len(body))),
            ("x-request-id", request_id),
        ]  # fmt: skip
        writer = self._streams[1]
        for event in (
            h11.Request(method="POST", target="/v1/completions", headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            writer.write(self._protocol.send(event) or b"")
        await writer.drain()
        answer = await self._next_event()
        if not isinstance(answer, h11.Response):
            raise EOFError("no answer")
        return answer.status_code

    async def _lines(self) -> AsyncIterator[bytes]:
        """The lines of the answer's body."""
        rest = b""
        while isinstance(event := await self._next_event(), h11.Data):
            *lines, rest = (rest + event.data).split(b"\n")
            for line in lines:
                yield line
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            self._disconnect()

    async def _next_event(self) -> object:
        assert self._streams is not None, "a request was sent"
        reader = self._streams[0]
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(_READ_LIMIT_S):
                data = await reader.read(65_536)
            self._protocol.receive_data(data)
        return event

    def _disconnect(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()


def _ids_of(line: bytes) -> list[int]:
    content = json.loads(line.removeprefix(b"data: "))
    if "error" in content:
        raise StreamLost(str(content["error"]))
    return [token for choice in content["choices"] for token in choice.get("token_ids", ())]


def _num_resumed(frontends: Sequence[ServiceProcess]) -> Counter[str]:
    """The Resume calls of each proxy's streams that frontends have served, by their logs."""
    return Counter(
        str(record["request_id"]).partition("-")[0]
        for frontend in frontends
        for record in frontend.log_records()
        if record.get("method") == _RESUME and record.get("code") == "OK"
    )
