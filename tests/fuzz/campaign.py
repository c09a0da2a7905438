"""Sends drawn messages to a frontend, and checks every answer and the streams beside them."""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    MAX_MODEL_LEN,
    TOKENIZER,
    Client,
    FakeEngine,
    FakeRequest,
    read_all,
    serving,
)
from tests.fuzz.grammar import Drawn, Mood, draw
from triptych.api.v1 import (
    chat_pb2,
    embedding_pb2,
    inference_pb2,
    model_pb2,
    request_pb2,
    tokenizer_pb2,
)
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2
from triptych_kit.telemetry.logs import setup_logs

METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for module in (inference_pb2, chat_pb2, embedding_pb2, tokenizer_pb2, model_pb2, request_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
# Those that take prompts are drawn more often.
_OFTEN = ("Generate", "GenerateUnary", "GenerateBatch", "Chat", "ChatUnary")
_WEIGHTS = [5 if method.name in _OFTEN else 1 for method in METHODS]
_MOODS = {Mood.VALID: 3, Mood.EDGE: 3, Mood.HOSTILE: 4}
# INTERNAL, UNKNOWN, CANCELLED, DATA_LOSS and DEADLINE_EXCEEDED would be faults of the frontend.
_FINE = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED",
    "UNAVAILABLE", "OUT_OF_RANGE", "FAILED_PRECONDITION", "ABORTED",
}  # fmt: skip
_ANSWER_LIMIT_S = 60.0
_NUM_STREAMS = 8
_AT_ONCE = 8
_STREAM_PROMPT = [7, 9, 11]
_ANSWER = TOKENIZER.encode("the cat ran").ids
# A token to each stream beside after so many messages.
_STEP_EVERY = 25
_MAX_FAULTS = 20
_MAX_STREAM_TOKENS = MAX_MODEL_LEN - 100
_ENDED = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ERROR, message="no logprobs here")


@dataclass(slots=True)
class Report:
    """What was sent, how it was answered, and what was wrong with that."""

    seed: int
    num_messages: int = 0
    num_hidden: int = 0
    elapsed_s: float = 0.0
    statuses: dict[str, Counter[str]] = field(default_factory=dict)  # by method
    moods: dict[str, Counter[str]] = field(default_factory=dict)
    num_stream_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def note(self, method: MethodDescriptor, mood: Mood, code: str) -> None:
        self.num_messages += 1
        self.statuses.setdefault(method.name, Counter())[code] += 1
        self.moods.setdefault(mood.value, Counter())[code] += 1

    def as_json(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "num_messages": self.num_messages,
            "num_with_hidden_values": self.num_hidden,
            "elapsed_s": round(self.elapsed_s, 1),
            "num_streams_beside": _NUM_STREAMS,
            "num_tokens_of_streams": self.num_stream_tokens,
            "statuses_by_mood": {name: dict(sorted(codes.items())) for name, codes in self.moods.items()},
            "statuses_by_method": {
                name: dict(sorted(codes.items())) for name, codes in sorted(self.statuses.items())
            },
            "faults": self.faults,
        }


async def run_campaign(seed: int, num_messages: int) -> Report:
    """Send so many messages, a few at a time. Faults name the number of the message, drawn from the seed."""
    report, log = Report(seed), io.StringIO()
    setup_logs("frontend", instance="0", log_format="text", log_level="info", stream=log)
    engine = FakeEngine(_answer)
    began_at = time.monotonic()
    async with serving(engine) as (client, frontend):
        streams = _Streams(engine, client)
        await streams.begin()
        for first in range(0, num_messages, _STEP_EVERY):
            numbers = iter(range(first, min(first + _STEP_EVERY, num_messages)))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_AT_ONCE):
                    tasks.create_task(_send_all(client, report, numbers))
            streams.step()
            _check_log(log, report)
            if len(report.faults) >= _MAX_FAULTS:
                break
        report.num_stream_tokens = await streams.end(report)
        _check_rest(frontend, report)
    report.elapsed_s = time.monotonic() - began_at
    return report


async def _send_all(client: Client, report: Report, numbers) -> None:
    for number in numbers:
        # Each message has a seed of its own, so that one can be repeated alone.
        rng = random.Random(f"{report.seed}/{number}")
        method = rng.choices(METHODS, _WEIGHTS)[0]
        mood = rng.choices(list(_MOODS), list(_MOODS.values()))[0]
        drawn = draw(rng, method.input_type, mood)
        path = f"/{method.containing_service.full_name}/{method.name}"
        code, details = await _send(client.channel, path, drawn.content)
        report.note(method, mood, code)
        report.num_hidden += bool(drawn.hidden)
        if fault := _fault(drawn, code, details, is_served=not method.client_streaming):
            report.faults.append(f"message {number}, {method.name}, {drawn.content.hex()[:2000]}: {fault}")


async def _send(channel: grpc.aio.Channel, path: str, content: bytes) -> tuple[str, str]:
    # Also for methods with one answer: on the wire it is a stream of one.
    method = channel.unary_stream(path, request_serializer=None, response_deserializer=None)
    call = method(content, timeout=_ANSWER_LIMIT_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def _fault(drawn: Drawn, code: str, details: str, *, is_served: bool) -> str:
    if code not in _FINE:
        return f"{code}: {details}"
    if drawn.hidden and drawn.is_parsed and is_served and code != "INVALID_ARGUMENT":
        return f"{code} although {', '.join(sorted(drawn.hidden))}"
    if not details.isprintable():
        return f"the message of {code} cannot be printed: {details!r}"
    return ""


def _answer(engine: FakeEngine, request: FakeRequest) -> None:
    """Streams beside are answered by hand; others at once, and forgotten."""
    if request.prompt[: len(_STREAM_PROMPT)] == _STREAM_PROMPT:
        return
    engine.requests.remove(request)
    sampling = request.entry.sampling
    has_logprobs = any(sampling.HasField(name) for name in ("logprobs", "prompt_logprobs"))
    if has_logprobs or sampling.logprob_token_ids:
        engine.step({request: []}, finished={request: _ENDED})
        return
    ids = _ANSWER[: max(1, min(len(_ANSWER), sampling.max_tokens))]
    engine.step({request: ids}, finished={request: AT_LENGTH})


class _Streams:
    """Streams beside the messages: a token each now and then, by hand."""

    def __init__(self, engine: FakeEngine, client: Client) -> None:
        self._engine = engine
        self._client = client
        self._expected: list[list[int]] = [[] for _ in range(_NUM_STREAMS)]
        self._requests: Sequence[FakeRequest] = ()
        self._reads: list[asyncio.Task] = []

    async def begin(self) -> None:
        for index in range(_NUM_STREAMS):
            call = self._client.generate([*_STREAM_PROMPT, 20 + index], timeout=7200, ignore_eos=True)
            self._reads.append(asyncio.ensure_future(read_all(call)))
            requests = await self._engine.wait_for_requests(index + 1)
        self._requests = list(requests)

    def step(self) -> None:
        if len(self._expected[0]) >= _MAX_STREAM_TOKENS:
            return
        for index, expected in enumerate(self._expected):
            expected.append(_ANSWER[(len(expected) + index) % len(_ANSWER)])
            self._engine.step({self._requests[index]: expected[-1:]})

    async def end(self, report: Report) -> int:
        """End all, and note those that are not as they would have been alone. Returns the tokens of all."""
        for index, request in enumerate(self._requests):
            self._engine.step({request: [_ANSWER[index % len(_ANSWER)]]}, finished={request: AT_LENGTH})
            self._expected[index].append(_ANSWER[index % len(_ANSWER)])
        for index, read in enumerate(self._reads):
            _, text, ids, _ = await read
            if ids != self._expected[index] or text != TOKENIZER.decode(self._expected[index]):
                report.faults.append(f"stream {index} differs: {ids}")
        return sum(map(len, self._expected))


def _check_log(log: io.StringIO, report: Report) -> None:
    for line in log.getvalue().split("\n"):
        if not line.isprintable():
            report.faults.append(f"a line of the log cannot be printed: {line!r}")
        if "incident" in line:
            report.faults.append(f"an incident: {line}")
    log.seek(0)
    log.truncate()


def _check_rest(frontend: Frontend, report: Report) -> None:
    for name in ("num_open_requests", "num_queued_requests", "num_queued_texts", "num_held_requests"):
        if left := frontend.status()[name]:
            report.faults.append(f"{name} is {left} when all calls have ended")
