"""Streams of every kind, and all that their clients received, in order. Knows no fault."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import grpc.aio

from triptych.api.v1 import generate_pb2, inference_pb2_grpc, request_pb2, request_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import from_rpc_error

# Ids below are special in the embedded model; those from here on are for tests to mark requests with.
FIRST_PLAIN_ID = 16
FIRST_MARKER_ID = 2040
STREAM_LIMIT_S = 120.0
_LOOKUP_LIMIT_S = 60.0
_LOOK_S = 0.02
_BEGIN_LIMIT_S = 120.0
# Of the newest streams, which may be open.
_MAX_OPEN = 256
# Neither is ever generated whole, and both begin with what often is: text is held back at every such place.
_HELD_STOPS = ("the zq", ". Zq")
_MET_STOPS = (" ran", " said")


class Kind(Enum):
    """The kind of a stream's request; the load has each in its share of sixteen."""

    GREEDY = "greedy"
    SEEDED = "seeded"
    SEVERAL = "n = 4"
    STOP = "stop strings"
    PENALTIES = "penalties"
    LOGPROBS = "logprobs"


_SIXTEENTHS = {
    Kind.GREEDY: 5, Kind.SEEDED: 4, Kind.SEVERAL: 1, Kind.STOP: 2, Kind.PENALTIES: 2, Kind.LOGPROBS: 2
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with its parameters: what it is answered with depends on nothing else."""

    key: int
    kind: Kind
    token_ids: tuple[int, ...]
    sampling: sampling_pb2.SamplingParams

    @property
    def num_outputs(self) -> int:
        return max(1, self.sampling.n)


def make_cases(num_streams: int, *, num_tokens: int = 128, seed: int = 1) -> list[Case]:
    """The load: kinds in turn, prompts of 32 to 512 tokens, every sampled one with a seed of its own."""
    rng = random.Random(seed)
    kinds = [kind for kind, count in _SIXTEENTHS.items() for _ in range(count)]
    # Any two neighbours differ, so that engines which take turns get all kinds.
    kinds = [kinds[(index * 5) % len(kinds)] for index in range(len(kinds))]
    cases = []
    for key in range(num_streams):
        kind = kinds[key % len(kinds)]
        prompt = tuple(rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(rng.randint(32, 512)))
        cases.append(Case(key, kind, prompt, _sampling_of(kind, key, num_tokens)))
    return cases


def _sampling_of(kind: Kind, key: int, num_tokens: int) -> sampling_pb2.SamplingParams:
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    # Every other one of those that could be either is sampled.
    is_sampled = kind in (Kind.SEEDED, Kind.SEVERAL) or (kind is not Kind.GREEDY and key // 16 % 2 == 0)
    if is_sampled:
        sampling.temperature, sampling.seed = 0.9, 1000 + key
    if kind is Kind.SEVERAL:
        sampling.n = 4
    elif kind is Kind.STOP:
        sampling.stop.extend(_HELD_STOPS if key % 32 < 16 else (*_HELD_STOPS, *_MET_STOPS))
    elif kind is Kind.PENALTIES:
        sampling.presence_penalty, sampling.frequency_penalty = 0.6, 0.3
        sampling.repetition_penalty, sampling.min_tokens = 1.1, num_tokens // 2
    elif kind is Kind.LOGPROBS:
        sampling.logprobs = 3
    return sampling


@dataclass(slots=True)
class StreamRecord:
    """One stream as its client saw it: messages with their instants, then how the call ended."""

    case: Case
    request_id: str
    sent_at: float
    events: list[tuple[float, generate_pb2.GenerateResponse]] = field(default_factory=list)
    ended_at: float | None = None
    code: grpc.StatusCode | None = None
    reason: str = ""  # of the error, as machines read it
    details: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of its furthest output."""
        counts = [0] * self.case.num_outputs
        for _, event in self.events:
            if event.HasField("delta"):
                counts[event.delta.output_index] += len(event.delta.token_ids)
        return max(counts)

    @property
    def token_instants(self) -> list[float]:
        """When messages with tokens came, in s of the monotonic clock."""
        return [at for at, event in self.events if event.HasField("delta") and event.delta.token_ids]

    @property
    def gaps_s(self) -> list[float]:
        """Times between a message with tokens and the one before it, of any of its outputs."""
        at = self.token_instants
        return [later - earlier for earlier, later in itertools.pairwise(at)]


class Load:
    """Streams under way. `records` grows and is filled while they run."""

    def __init__(self, *, label: str, limit_s: float = STREAM_LIMIT_S) -> None:
        self.records: list[StreamRecord] = []
        self._label = label
        self._limit_s = limit_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, channel: grpc.aio.Channel, cases: Sequence[Case]) -> list[StreamRecord]:
        """Send these at once; the label keeps their blocks apart from those of other loads."""
        records = []
        for case in cases:
            record = StreamRecord(case, f"{self._label}-{len(self.records)}", time.monotonic())
            self.records.append(record)
            records.append(record)
            self._tasks[record.request_id] = asyncio.ensure_future(self._read(channel, record))
        return records

    async def ended(self, record: StreamRecord) -> None:
        await asyncio.gather(self._tasks[record.request_id], return_exceptions=True)

    def cancel(self, record: StreamRecord) -> None:
        """Cancel one stream, as a client that goes away does."""
        self._tasks[record.request_id].cancel()

    @property
    def num_open(self) -> int:
        return sum(record.ended_at is None for record in self.records)

    @property
    def num_begun(self) -> int:
        """The open streams with output."""
        return sum(record.ended_at is None and record.num_tokens > 0 for record in self.records)

    async def finish(self) -> list[StreamRecord]:
        """Wait for every stream; all records."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        return self.records

    async def _read(self, channel: grpc.aio.Channel, record: StreamRecord) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=record.case.token_ids),
            sampling=record.case.sampling,
            request_id=record.request_id,
            cache_salt=self._label,
        )
        try:
            async for event in stub.Generate(request, timeout=self._limit_s):
                record.events.append((time.monotonic(), event))
            record.code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            record.code, record.details = error.code(), error.details() or ""
            record.reason = from_rpc_error(error).reason
        finally:
            record.ended_at = time.monotonic()


class Flow:
    """So many streams at any time, each followed by the next; `engines` has the engine each began at."""

    def __init__(self, channel: grpc.aio.Channel, cases: Sequence[Case], label: str) -> None:
        self.load = Load(label=label)
        self.engines: dict[str, str] = {}
        self._channel = channel
        self._cases = itertools.cycle(cases)
        self._is_over = False

    @contextlib.asynccontextmanager
    async def running(
        self, num_streams: int, *, between_starts_s: float = 0.0, finds_engines: bool = True
    ) -> AsyncIterator[None]:
        """Keep the streams coming for as long as the block lasts, then wait for the last."""
        slots: list[asyncio.Task[None]] = []
        looking = asyncio.ensure_future(self._look() if finds_engines else asyncio.sleep(0))
        try:
            for _ in range(num_streams):
                slots.append(asyncio.ensure_future(self._run_slot()))
                # Streams that begin at once end at once, and their prompts would stop all others together.
                await asyncio.sleep(between_starts_s)
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*slots)
            looking.cancel()
            await asyncio.wait((looking,))

    async def begin_more(self, num_streams: int) -> None:
        """Wait until that number of further streams has begun, or raise TimeoutError."""
        until = len(self.load.records) + num_streams
        async with asyncio.timeout(_BEGIN_LIMIT_S):
            while len(self.load.records) < until:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)

    def open_at(self, engine_id: str) -> list[StreamRecord]:
        return [
            record
            for record in self.load.records
            if record.ended_at is None and self.engines.get(record.request_id) == engine_id
        ]

    async def _run_slot(self) -> None:
        while not self._is_over:
            (record,) = self.load.send(self._channel, [next(self._cases)])
            await self.load.ended(record)

    async def _look(self) -> None:
        """Look up where each stream is, soon after its beginning: later it may have moved."""
        while True:
            unknown = [one for one in self.load.records[-_MAX_OPEN:] if one.request_id not in self.engines]
            open_ones = [record for record in unknown if record.ended_at is None]
            if open_ones:
                where = await engine_ids(self._channel, open_ones)
                self.engines |= {request_id: engine for request_id, engine in where.items() if engine}
            await asyncio.sleep(_LOOK_S)


async def engine_ids(channel: grpc.aio.Channel, records: Sequence[StreamRecord]) -> dict[str, str]:
    """Where each stream that is open runs, by its id, as the frontend reports it; "" is nowhere yet."""
    stub = request_pb2_grpc.RequestServiceStub(channel)

    async def ask(record: StreamRecord) -> tuple[str, str] | None:
        request = request_pb2.GetRequestRequest(request_id=record.request_id)
        try:
            answer = await stub.GetRequest(request, timeout=_LOOKUP_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        return record.request_id, answer.engine_id

    answers = await asyncio.gather(*(ask(record) for record in records if record.ended_at is None))
    return dict(answer for answer in answers if answer is not None)
