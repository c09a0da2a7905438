"""Random sessions on engines that are killed: turns have the ids of requests for all tokens before them.

    python -m tests.acceptance sessions --json benchmarks/results/sessions.json

A coordinator, two engines with the embedded model, whose caches are smaller than what sessions keep, and a
frontend. Each session is drawn from its number: inputs of texts and ids, sent ahead or after a pause, turns
that are cancelled, and an end: of the input, by the client's leaving, by Abort or by a deadline. While some
of them run, an engine is killed, and it is started again. Promised: each session gets to its end, and each
turn has the ids of a request for the same tokens, one cut short their beginning; afterwards no engine has a
request or a block in use, and the frontend takes as many sessions as at its start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import grpc.aio

from benchmarks.report import Report, Row
from benchmarks.rig import faults
from benchmarks.rig.processes import Fleet, ServicePlan
from benchmarks.rig.streams import FIRST_MARKER_ID, FIRST_PLAIN_ID
from tests.system.generation import read_to_end
from tests.system.sessions import Session, Turn, differences
from triptych.api.v1 import inference_pb2_grpc, request_pb2, request_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel

_NUM_AT_ONCE, _MAX_SESSIONS, _NUM_ENGINES = 24, 48, 2
_LIMIT_S, _POLL_S = 60.0, 0.05
_ENGINE_FLAGS = (
    "--num-threads=1",
    "--block-size=16",
    # For the longest session, or for about half of those that are open.
    "--num-kv-blocks=24",
    "--max-num-batched-tokens=64",
    "--max-idle-sessions=4",
)
_NUM_TURNS, _NUM_ADDED, _NUM_TOKENS, _MANY_TOKENS = (1, 5), (1, 16), (1, 16), 40
_WORDS = ("the quick brown fox", " river bank", " jumps over the lazy dog", " and")
_MAX_PAUSE_S, _DEADLINE_S = 0.1, (0.02, 1.0)
_CANCEL_SHARE, _PAUSE_SHARE, _AHEAD_SHARE = 0.25, 0.3, 0.4
# Of a process's status.
_OF_REQUESTS = ("running", "waiting", "used_blocks", "num_open_requests", "num_queued_requests")


class Ending(Enum):
    """What ends a session."""

    INPUT = "end of the input"
    LEAVING = "client leaves"
    ABORT = "Abort"
    DEADLINE = "deadline"


_ENDINGS = (Ending.INPUT, Ending.INPUT, Ending.INPUT, Ending.LEAVING, Ending.ABORT, Ending.DEADLINE)


@dataclass(slots=True)
class Played:
    """A session that is over. error: what it did not end by."""

    number: int
    ending: Ending
    session: Session
    error: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scripts", type=int, default=1000, help="sessions")
    parser.add_argument("--kills", type=int, default=25, help="of engines")
    parser.add_argument("--seed", type=int, default=0, help="of the first session; the others follow")


def run(options: argparse.Namespace) -> Report:
    rows, shortfalls = asyncio.run(_run(options.scripts, options.kills, options.seed))
    settings = {"scripts": options.scripts, "kills": options.kills, "seed": options.seed}
    return Report("sessions", settings, rows, shortfalls)


async def _run(num_scripts: int, num_kills: int, first: int) -> tuple[list[Row], list[str]]:
    numbers = range(first, first + num_scripts)
    size = -(-num_scripts // max(1, num_kills))
    played: list[Played] = []
    shortfalls: list[str] = []
    async with _serving() as stack:
        for batch in (numbers[start : start + size] for start in range(0, num_scripts, size)):
            played += await stack.play(batch, has_kill=num_kills > 0)
            found = await stack.shortfalls(played[-len(batch) :])
            print(*found, f"{len(played)} sessions", sep="\n", file=sys.stderr, flush=True)
            shortfalls += found
        kept, shown = await stack.left(), await stack.status()
    shortfalls += [f"kept after the end: {text}" for text in kept]
    rows = [_row(ending, [one for one in played if one.ending is ending]) for ending in Ending]
    return [row for row in rows if row["sessions"]] + [shown], shortfalls


def _row(ending: Ending, played: Sequence[Played]) -> Row:
    turns = [turn for one in played for turn in one.session.turns if turn.prompt]
    followed = [pair for one in played for pair in itertools.pairwise(one.session.turns) if pair[1].prompt]
    return {
        "ending": ending.value,
        "sessions": len(played),
        "turns": len(turns),
        "tokens": sum(len(turn.token_ids) for turn in turns),
        "cancelled": sum(turn.reason == output_pb2.FINISH_REASON_ABORT and turn.has_next for turn in turns),
        "kept": sum(map(_is_kept, *zip(*followed, strict=True))) if followed else 0,
        "moved": sum(turn.finished.stats.num_migrations > 0 for turn in turns),
        "preempted": sum(turn.finished.stats.num_preemptions > 0 for turn in turns),
    }


def _is_kept(before: Turn, turn: Turn) -> bool:
    """Whether an engine had kept all that it had computed."""
    return turn.num_cached_tokens == len(before.prompt) + len(before.token_ids) - 1


class _Stack:
    """The processes, and the clients of the frontend."""

    def __init__(self, fleet: Fleet, channel: grpc.aio.Channel) -> None:
        self._fleet = fleet
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._requests = request_pb2_grpc.RequestServiceStub(channel)
        self._counts: Counter[str] = Counter()

    async def play(self, numbers: Sequence[int], *, has_kill: bool) -> list[Played]:
        """Sessions, as many at once as the frontend takes; an engine is killed when some are over."""
        waiting = iter(numbers)
        played: list[Played] = []
        rng = random.Random(f"kill {numbers[0]}")
        kill_at, killing = rng.randrange(max(1, len(numbers) - _NUM_AT_ONCE)), None

        async def play_some() -> None:
            nonlocal killing
            for number in waiting:
                if has_kill and killing is None and len(played) >= kill_at:
                    killing = asyncio.create_task(self._kill(rng))
                played.append(await self._play(number))

        await asyncio.gather(*(play_some() for _ in range(_NUM_AT_ONCE)))
        if killing is not None:
            await killing
        return played

    async def shortfalls(self, played: Sequence[Played]) -> list[str]:
        found = [f"session {one.number}: {one.error}" for one in played if one.error]
        for start in range(0, len(played), _NUM_AT_ONCE):
            some = played[start : start + _NUM_AT_ONCE]
            compared = await asyncio.gather(*(differences(self._stub, [one.session]) for one in some))
            found += [
                f"session {one.number}: {text}"
                for one, texts in zip(some, compared, strict=True)
                for text in texts
            ]
        return found

    async def left(self) -> list[str]:
        """What is there of sessions that are over."""
        found = await self._held()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT_S):
                while found:
                    await asyncio.sleep(_POLL_S)
                    found = await self._held()
        sessions = [Session(self._stub, sampling_pb2.SamplingParams()) for _ in range(_MAX_SESSIONS)]
        try:
            for session in sessions:
                await session.read(await session.add([FIRST_PLAIN_ID], 1))
        except grpc.aio.AioRpcError as error:
            return [*found, f"a place of a session: {error.details()}"]
        await asyncio.gather(*(session.end() for session in sessions))
        return found

    async def status(self) -> Row:
        """What the engines have counted, those of a killed process to its end."""
        for engine in self._fleet.of("engine"):
            self._count(await engine.status())
        return {**self._counts}

    async def _kill(self, rng: random.Random) -> None:
        engine = rng.choice(self._fleet.of("engine"))
        self._count(await engine.status())
        await faults.kill(engine)
        self._counts["kills"] += 1
        await self._fleet.start()
        await self._fleet.until_routed()

    def _count(self, status: dict[str, float | str]) -> None:
        for name in ("num_finished", "generated_tokens", "num_preemptions"):
            self._counts[name] += int(status.get(name, 0))

    async def _held(self) -> list[str]:
        held = []
        for process in self._fleet.processes.values():
            for name, value in (await process.status()).items():
                is_of_requests = name in _OF_REQUESTS or name.endswith(".num_in_flight")
                if is_of_requests and value:
                    held.append(f"{name} of {process.name} is {value}")
        return held

    async def _play(self, number: int) -> Played:
        rng = random.Random(number)
        ending, request_id = rng.choice(_ENDINGS), f"session-{number}"
        timeout = rng.uniform(*_DEADLINE_S) if ending is Ending.DEADLINE else _LIMIT_S
        session = Session(self._stub, _sampling(rng, number), timeout=timeout, request_id=request_id)
        played = Played(number, ending, session)
        try:
            await self._converse(session, rng, ending, request_id)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The deadline may pass anywhere.
            session.call.cancel()
            code = await session.call.code()
            if ending is not Ending.DEADLINE or code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                played.error = f"{code.name}: {error}"
        if session.is_over and ending in (Ending.INPUT, Ending.LEAVING):
            played.error = f"a turn ends it by reason {session.turns[-1].reason}"
        return played

    async def _converse(self, session: Session, rng: random.Random, ending: Ending, request_id: str) -> None:
        await _take_turns(session, rng)
        if session.is_over:
            await read_to_end(session.call)
            return
        match ending:
            case Ending.INPUT | Ending.DEADLINE:
                await session.end()
            case Ending.LEAVING:
                await _begin_last(session, rng)
                session.call.cancel()
            case Ending.ABORT:
                await self._abort(session, await _begin_last(session, rng), request_id)

    async def _abort(self, session: Session, turn: Turn, request_id: str) -> None:
        """Abort what runs of a session, which ends with it."""
        try:
            await self._requests.Abort(request_pb2.AbortRequest(request_id=request_id), timeout=_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            # Between two turns there is no request.
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        await session.read(turn)
        if turn.has_next:
            await session.end()
        else:
            await read_to_end(session.call)


async def _take_turns(session: Session, rng: random.Random) -> None:
    """Turns of a session up to its last one, with all that they have answered."""
    num_turns = rng.randint(*_NUM_TURNS)
    if rng.random() < _AHEAD_SHARE:
        for turn in [await _add(session, rng) for _ in range(num_turns)]:
            if not session.is_over:
                await session.read(turn)
        return
    for _ in range(num_turns):
        if session.is_over:
            return
        if rng.random() < _PAUSE_SHARE:
            await asyncio.sleep(rng.uniform(0, _MAX_PAUSE_S))
        if rng.random() < _CANCEL_SHARE:
            turn = await _begin(session, rng)
            await session.cancel_turn()
        else:
            turn = await _add(session, rng)
        await session.read(turn)


async def _begin_last(session: Session, rng: random.Random) -> Turn:
    """A turn that runs, or has ended."""
    return await _begin(session, rng) if rng.random() < 0.7 else await _ended(session, rng)


async def _begin(session: Session, rng: random.Random) -> Turn:
    """A turn that lasts for long, read up to its first tokens."""
    turn = await _add(session, rng, _MANY_TOKENS)
    await session.read(turn, num_tokens=rng.randrange(4))
    return turn


async def _ended(session: Session, rng: random.Random) -> Turn:
    turn = await _add(session, rng)
    await session.read(turn)
    return turn


async def _add(session: Session, rng: random.Random, max_tokens: int | None = None) -> Turn:
    token_ids = [rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(rng.randint(*_NUM_ADDED))]
    prompt = rng.choice(_WORDS) if rng.random() < 0.4 else token_ids
    return await session.add(prompt, max_tokens or rng.randint(*_NUM_TOKENS))


def _sampling(rng: random.Random, number: int) -> sampling_pb2.SamplingParams:
    """Greedy, or sampled with the seed that all turns have; ends by tokens or by strings in some."""
    sampling = sampling_pb2.SamplingParams(temperature=0.0, ignore_eos=rng.random() < 0.5)
    if rng.random() < 0.5:
        sampling.temperature, sampling.seed = 1.0, number
    if rng.random() < 0.3:
        sampling.stop_token_ids.extend(rng.sample(range(FIRST_PLAIN_ID, FIRST_MARKER_ID), 200))
    if rng.random() < 0.2:
        sampling.stop.extend((" the", "an"))
    return sampling


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[_Stack]:
    with tempfile.TemporaryDirectory(prefix="triptych-") as name:
        async with Fleet(Path(name)) as fleet:
            coordinator = fleet.add(ServicePlan("coordinator", 0))
            await fleet.start()
            known = f"--coordinator={coordinator.address}"
            for index in range(_NUM_ENGINES):
                ranks = f"--data-parallel-rank={index}", f"--data-parallel-size={_NUM_ENGINES}"
                flags = (str(embedded_model()), known, *ranks, *_ENGINE_FLAGS)
                fleet.add(ServicePlan("engine", index, flags))
            limits = (known, "--text-workers=1", f"--max-sessions={_MAX_SESSIONS}")
            frontend = fleet.add(ServicePlan("frontend", 0, limits))
            await fleet.start()
            await fleet.until_routed()
            async with open_channel(frontend.address, profile="public") as channel:
                yield _Stack(fleet, channel)
