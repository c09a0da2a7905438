"""Where a request spent its time and how it ended: in every answer, and in one log line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from time import perf_counter

import grpc
import pytest

from tests.frontend_svc.fakes import (
    AT_EOS,
    AT_LENGTH,
    EOS_ID,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    answer,
    make_request,
    read_all,
    serving,
)
from triptych.api.v1 import chat_message_pb2, request_pb2
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2

ENTERED = [step_pb2.STEP_EVENT_KIND_QUEUED, step_pb2.STEP_EVENT_KIND_SCHEDULED]
RETURNED = [step_pb2.STEP_EVENT_KIND_PREEMPTED, step_pb2.STEP_EVENT_KIND_RESUMED]
CHAT = chat_message_pb2.ChatRequest(
    messages=[
        chat_message_pb2.ChatMessage(
            role=chat_message_pb2.CHAT_ROLE_USER, parts=[chat_message_pb2.ChatPart(text="the cat")]
        )
    ]
)


def eventful(engine: FakeEngine, request: FakeRequest) -> None:
    """An engine that preempts each request once."""
    engine.step({request: []}, events={request: ENTERED})
    engine.step({request: [5]}, cached={request: 2})
    engine.step({request: [6]}, events={request: RETURNED})
    engine.step({request: [EOS_ID]}, finished={request: AT_EOS})


class Lines(logging.Handler):
    """The fields of each line `request ended`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, object]] = []
        self._news = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "request ended":
            self.found.append(vars(record))
            self._news.set()

    async def next(self) -> dict[str, object]:
        """Wait for a line, and return the newest."""
        await asyncio.wait_for(self._news.wait(), WAIT_S)
        self._news.clear()
        return self.found[-1]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    logger, handler = logging.getLogger("frontend_svc.generation.tracing"), Lines()
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO, logger.name):
        yield handler
    logger.removeHandler(handler)


def shown(line: dict[str, object], *names: str) -> tuple[object, ...]:
    return tuple(line.get(name) for name in names)


async def test_every_kind_of_answer_says_where_it_spent_its_time(lines):
    async with serving(FakeEngine(eventful, chat_template="{{ messages[0].content }}")) as (client, _):
        began_at = perf_counter()
        finished = (await read_all(client.generate()))[3]
        once = await client.inference.GenerateOnce(make_request(), timeout=WAIT_S)
        chat = [one.finished async for one in client.chat.Chat(CHAT, timeout=WAIT_S)][-1]
        chat_once = await client.chat.ChatOnce(CHAT, timeout=WAIT_S)
        took_ms = (perf_counter() - began_at) * 1000
    for stats in (finished.stats, once.outputs[0].stats, chat.stats, chat_once.outputs[0].stats):
        assert (stats.num_preemptions, stats.num_migrations) == (1, 0)
        assert min(stats.queue_ms, stats.prefill_ms, stats.decode_ms) >= 0
        assert 0 < stats.queue_ms + stats.prefill_ms + stats.decode_ms < took_ms
    assert len(lines.found) == 4
    for line in lines.found:
        assert shown(line, "reason", "cause", "model", "num_cached_tokens", "num_output_tokens") == (
            "stop", None, "tiny", 2, 3,
        )  # fmt: skip
        assert shown(line, "num_preemptions", "num_migrations", "engine") == (1, 0, "engine-0")
        times = [line[name] for name in ("queue_ms", "prefill_ms", "decode_ms")]
        assert sum(times) <= line["duration_ms"] + 0.3


async def test_outputs_of_one_prompt_have_times_of_their_own_and_one_line(lines):
    def one_each(engine: FakeEngine, request: FakeRequest) -> None:
        if request.entry.group_index == 0:
            eventful(engine, request)
        else:
            engine.step({request: [7]}, cached={request: 0}, finished={request: AT_LENGTH})

    async with serving(FakeEngine(one_each)) as (client, _):
        whole = await client.inference.GenerateOnce(make_request(n=2), timeout=WAIT_S)
    assert [output.stats.num_preemptions for output in whole.outputs] == [1, 0]
    (line,) = lines.found
    assert shown(line, "num_output_tokens", "num_preemptions") == (4, 1)


async def test_a_call_that_is_cancelled_late_or_refused_is_logged_with_its_cause(lines):
    engine = FakeEngine(lambda engine, request: None)
    async with serving(engine) as (client, _):
        call = client.generate(request_id="gone")
        await engine.wait_for_requests(1)
        call.cancel()
        gone = await lines.next()
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate(request_id="late", timeout=0.2))
        late = await lines.next()
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate(request_id="wrong", temperature=-1.0))
        wrong = await lines.next()
    assert [shown(line, "request_id", "reason", "cause") for line in (gone, late, wrong)] == [
        ("gone", "abort", "client"),
        ("late", "abort", "deadline"),
        ("wrong", "error", "INVALID_REQUEST"),
    ]
    # All of its time in the engine was before its first step.
    assert gone["queue_ms"] > 0
    assert shown(gone, "prefill_ms", "decode_ms", "num_output_tokens") == (0, 0, 0)
    assert shown(wrong, "engine", "queue_ms") == (None, None)


async def test_a_request_that_an_abort_call_ends_is_logged_as_that(lines):
    engine = FakeEngine(lambda engine, request: None)
    async with serving(engine) as (client, _):
        reading = asyncio.ensure_future(read_all(client.generate(request_id="mine")))
        await engine.wait_for_requests(1)
        await client.request.Abort(request_pb2.AbortRequest(request_id="mine"), timeout=WAIT_S)
        assert (await reading)[3].reason == output_pb2.FINISH_REASON_ABORT
    assert [shown(line, "reason", "cause") for line in lines.found] == [("abort", "request")]


async def test_logits_that_are_no_numbers_are_in_the_line_of_their_request(lines):
    def broken(engine: FakeEngine, request: FakeRequest) -> None:
        step = step_pb2.Step(step_number=1, handles=request.handle.to_bytes(4, "little"))
        step.extras.add(row=0, nan_count=3)
        step.finished.add(row=0, reason=output_pb2.FINISH_REASON_ERROR, message="not finite")
        request.session.send(step=step)

    async with serving(FakeEngine(broken)) as (client, _):
        finished = (await read_all(client.generate()))[3]
    assert finished.error_message == "not finite"
    assert shown(lines.found[0], "reason", "cause", "num_nan_logits") == ("error", "ENGINE_ERROR", 3)


async def test_a_request_that_moves_is_one_line_with_the_last_engine(lines):
    first = FakeEngine(lambda engine, request: None)
    second = FakeEngine(answer("x"), dp_rank=1, is_ready=False)
    async with serving(first, second, reconnect_window_s=WAIT_S) as (client, _):
        reading = asyncio.ensure_future(read_all(client.generate()))
        await first.wait_for_requests(1)
        second.become_ready()
        await client.until_engines_are_ready(2)
        first.die()
        finished = (await reading)[3]
    assert finished.stats.num_migrations == 1
    assert [shown(line, "num_migrations", "engine") for line in lines.found] == [(1, "engine-1")]


async def test_a_request_of_which_one_output_failed_is_logged_as_failed(lines):
    failed = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ERROR, message="not finite")
    engine = FakeEngine(lambda engine, request: None)
    async with serving(engine) as (client, _):
        reading = asyncio.ensure_future(
            client.inference.GenerateOnce(make_request(n=2, temperature=1.0), timeout=WAIT_S)
        )
        first, second = await engine.wait_for_requests(2)
        engine.step({first: []}, finished={first: failed})
        engine.step({second: [5]}, finished={second: AT_LENGTH})
        await reading
        line = await lines.next()
    assert shown(line, "reason", "cause") == ("error", "ENGINE_ERROR")
