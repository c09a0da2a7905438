"""GenerateSession: turns over one stream, and what ends them and it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from frontend_svc.api.calls import caller_of
from frontend_svc.generation.answers.session import SessionAnswers
from tests.frontend_svc.fakes import (
    AT_EOS,
    AT_LENGTH,
    EOS_ID,
    MAX_MODEL_LEN,
    TOKENIZER,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    Script,
    answer,
    details_of,
    make_request,
    read_all,
    serving,
    serving_one,
)
from tests.frontend_svc.protocols.raw_http import until
from triptych.api.v1 import generate_pb2, inference_pb2, request_pb2
from triptych.common.v1 import error_pb2, output_pb2, sampling_pb2
from triptych.engine.v1 import engine_pb2, step_pb2
from triptych_kit.errors import ResourceExhausted
from triptych_kit.telemetry.metrics import Counts

Message = inference_pb2.GenerateSessionRequest


def start(prompt: str | Sequence[int] = "the cat", **fields) -> Message:
    return Message(start=make_request(prompt, **fields))


def append(prompt: str | Sequence[int], **sampling) -> Message:
    message = inference_pb2.SessionAppend()
    if isinstance(prompt, str):
        message.prompt = prompt
    else:
        message.token_ids.ids.extend(prompt)
    if sampling:
        message.sampling.CopyFrom(sampling_pb2.SamplingParams(**sampling))
    return Message(append=message)


END = Message(end={})
CANCEL = Message(cancel_turn={})


@dataclass
class Turn:
    """What a stream has of one turn."""

    started: generate_pb2.Started
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finished: generate_pb2.Finished = field(default_factory=generate_pb2.Finished)


class Session:
    """A call of GenerateSession."""

    def __init__(self, client, *, timeout: float = WAIT_S) -> None:
        self.call = client.inference.GenerateSession(timeout=timeout)
        self.position = 0

    async def send(self, *messages: Message) -> None:
        for message in messages:
            await self.call.write(message)

    async def read(self) -> inference_pb2.GenerateSessionResponse:
        message = await self.call.read()
        if message is not EOF:
            self.position += 1
            assert message.response.position == self.position
        return message

    async def turn(self) -> tuple[Turn, bool]:
        """Everything of a turn, and whether others may follow."""
        message = await self.read()
        turn = Turn(message.response.started)
        while not message.response.HasField("finished"):
            turn.text += message.response.delta.text
            turn.ids += message.response.delta.token_ids
            message = await self.read()
        turn.finished = message.response.finished
        return turn, message.turn_ended

    async def is_at_end(self) -> bool:
        return await self.read() is EOF and await self.call.code() is grpc.StatusCode.OK

    async def error(self) -> grpc.aio.AioRpcError:
        """With which the stream ends."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self._read_to_end()
        return caught.value

    async def _read_to_end(self) -> None:
        while await self.read() is not EOF:
            pass


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


async def test_a_turn_continues_all_tokens_before_it_but_the_token_that_ended_the_one_before():
    engine = FakeEngine(answer(" sat"))
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start("the cat", return_prompt_token_ids=True))
        first, has_next = await session.turn()
        assert (first.text, first.ids, has_next) == (" sat", [*ids_of(" sat"), EOS_ID], True)
        await session.send(append(" down"))
        second, _ = await session.turn()
        context = [*engine.requests[0].prompt, *ids_of(" sat"), *ids_of(" down")]
        assert engine.requests[1].prompt == context == list(second.started.prompt_token_ids)
        await session.send(append([5, 6]))
        await session.turn()
        assert engine.requests[2].prompt == [*context, *ids_of(" sat"), 5, 6]
        await session.send(END)
        last = await session.read()
        assert (last.response.finished.reason, last.turn_ended) == (output_pb2.FINISH_REASON_STOP, False)
        assert last.response.finished.stop_match.eos == EOS_ID
        assert not last.response.finished.HasField("usage")
        assert await session.is_at_end()


async def test_a_token_that_ended_no_turn_is_part_of_the_next():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: [7, 8]}, finished={request: AT_LENGTH}, cached={request: 0})

    engine = FakeEngine(script)
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2], max_tokens=2), append([3]), END)
        assert (await session.turn())[1]
        assert not (await session.turn())[1]
        assert await session.is_at_end()
    assert [request.prompt for request in engine.requests] == [[1, 2], [1, 2, 7, 8, 3]]


async def test_the_end_of_the_clients_messages_is_the_end_of_input():
    async with serving(FakeEngine(answer("x"))) as (client, _):
        session = Session(client)
        await session.send(start())
        await session.call.done_writing()
        turn, _ = await session.turn()
        assert turn.finished.reason == output_pb2.FINISH_REASON_STOP
        assert await session.is_at_end()


async def test_sampling_stays_until_an_append_has_another_and_the_seed_until_one_has_a_seed():
    engine = FakeEngine(answer("x"))
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(
            start(temperature=0.5),
            append("a"),
            append("b", temperature=0.25),
            append("c", seed=3),
            append("d"),
            END,
        )
        for _ in range(5):
            await session.turn()
    entries = [request.entry for request in engine.requests]
    assert [entry.sampling.temperature for entry in entries] == [0.5, 0.5, 0.25, 1.0, 1.0]
    seeds = [entry.request_seed for entry in entries]
    assert seeds == [seeds[0]] * 3 + [3] * 2


async def test_only_the_first_prompt_is_truncated():
    engine = FakeEngine(answer("x", token_ids=[9]))
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2, 3], truncate_prompt_tokens=2), append([4]), END)
        await session.turn()
        await session.turn()
    assert [request.prompt for request in engine.requests] == [[2, 3], [2, 3, 9, 4]]


async def test_a_cancelled_turn_leaves_what_it_has_sampled_and_the_next_follows():
    async with serving_one() as (engine, client, _):
        session = Session(client)
        await session.send(start([1, 2]))
        (first,) = await engine.wait_for_requests(1)
        engine.step({first: [7]}, cached={first: 0})
        await session.read()
        await session.read()
        await session.send(CANCEL)
        end = await session.read()
        assert (end.response.finished.reason, end.turn_ended) == (output_pb2.FINISH_REASON_ABORT, True)
        # Without a turn it is ignored.
        await session.send(CANCEL, append([3]))
        second = (await engine.wait_for_requests(2))[1]
        assert second.prompt == [1, 2, 7, 3]
        engine.step({second: [EOS_ID]}, finished={second: AT_EOS}, cached={second: 0})
        turn, _ = await session.turn()
        assert turn.finished.reason == output_pb2.FINISH_REASON_STOP
        await session.send(END)
        await session.read()
        assert await session.is_at_end()
        assert first.abort_reason == engine_pb2.ABORT_REASON_CLIENT


async def test_an_abort_of_the_request_ends_the_session():
    async with serving_one() as (engine, client, _):
        session = Session(client)
        await session.send(start(request_id="a"), append("b"))
        await engine.wait_for_requests(1)
        await client.request.Abort(request_pb2.AbortRequest(request_id="a"))
        turn, has_next = await session.turn()
        assert (turn.finished.reason, has_next) == (output_pb2.FINISH_REASON_ABORT, False)
        assert await session.is_at_end()


async def test_a_client_that_leaves_has_its_turn_aborted():
    async with serving_one() as (engine, client, _):
        session = Session(client)
        await session.send(start())
        (request,) = await engine.wait_for_requests(1)
        session.call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
    assert request.abort_reason == engine_pb2.ABORT_REASON_CLIENT


# Row 120.
async def test_who_closes_the_answers_ends_the_reading_of_the_input():
    ended = asyncio.Event()

    async def sent() -> AsyncIterator[Message]:
        try:
            yield start()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(FakeEngine(answer("x"))) as (_, frontend):
        answers = SessionAnswers(frontend.requests.generation, Counts(), max_sessions=1)
        stream = answers.stream(sent(), caller_of(None))
        assert (await anext(stream)).response.HasField("started")
        assert not ended.is_set()
        await stream.aclose()
        assert ended.is_set()


async def test_the_deadline_of_the_call_is_that_of_its_turns():
    async with serving_one() as (engine, client, _):
        session = Session(client, timeout=0.5)
        await session.send(start())
        (request,) = await engine.wait_for_requests(1)
        assert request.entry.remaining_ms <= 500
        error = await session.error()
        await engine.wait(lambda: request.abort_reason is not None)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


WRONG: list[tuple[list[Message], str]] = [
    ([append("a")], "append: must not come before start"),
    ([CANCEL], "cancel_turn: must not come before start"),
    ([], "start is missing"),
    ([Message()], "message is not set"),
    ([start(), start()], "start: must be sent once"),
    ([start(), END, append("a")], "append: must not follow end"),
    ([start(n=2, temperature=1.0)], "sampling.n is 2, must be 1"),
    ([start(orphan_grace_ms=5)], "orphan_grace_ms is 5, must be 0"),
    ([Message(start={"embeds": {}})], "embeds: "),
    ([start(temperature=-1.0)], "sampling.temperature is -1"),
    ([start(), Message(append={})], "append.input is not set"),
    ([start(), append([])], "append.token_ids is [], must not be empty"),
    ([start(), append([1 << 20])], "append.token_ids[0] is 1048576"),
    ([start(), append("a", temperature=-1.0)], "append.sampling.temperature is -1"),
    ([start(), append("a", n=2, temperature=1.0)], "append.sampling.n is 2"),
    ([start([5]), append([5] * (MAX_MODEL_LEN - 2))], "append.token_ids has 510 tokens, with those before"),
]


async def test_wrong_input_ends_the_session_with_its_field():
    async with serving(FakeEngine(answer("x"))) as (client, _):
        for messages, named in WRONG:
            session = Session(client)
            await session.send(*messages)
            await session.call.done_writing()
            error = await session.error()
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert named in error.details()
            assert "BadRequest" in details_of(error)


async def test_wrong_input_ends_the_turn_that_runs():
    async with serving_one() as (engine, client, _):
        session = Session(client)
        await session.send(start())
        (request,) = await engine.wait_for_requests(1)
        await session.send(start())
        error = await session.error()
        await engine.wait(lambda: request.abort_reason is not None)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_limited_number_of_appends_waits():
    async with serving_one() as (engine, client, _):
        session = Session(client)
        await session.send(start())
        await engine.wait_for_requests(1)
        for _ in range(65):
            await session.send(append("a"))
        error = await session.error()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the limits are 64 and 16777216" in error.details()
    assert "RetryInfo" in details_of(error)


async def test_the_input_that_waits_in_all_sessions_is_limited_and_one_that_ends_makes_room():
    async def sent(*messages: Message) -> AsyncIterator[Message]:
        for message in messages:
            yield message
        await asyncio.Event().wait()

    async with serving_one() as (engine, _, frontend):
        answers = SessionAnswers(
            frontend.requests.generation, Counts(), max_sessions=8, max_waiting_bytes=1000
        )
        first = answers.stream(sent(start(), append("a" * 400), append("a" * 400)), caller_of(None))
        beginning = asyncio.ensure_future(anext(first))
        await engine.wait_for_requests(1)
        with pytest.raises(ResourceExhausted, match="turns in all sessions, the limit is 1000"):
            await anext(answers.stream(sent(start(), append("a" * 400)), caller_of(None)))
        beginning.cancel()
        await asyncio.wait((beginning,))
        third = answers.stream(sent(start(), append("a" * 400)), caller_of(None))
        beginning = asyncio.ensure_future(anext(third))
        request = (await engine.wait_for_requests(2))[-1]
        engine.step({request: [7]}, cached={request: 0})
        assert (await beginning).response.HasField("started")
        await third.aclose()


async def test_a_limited_number_of_sessions_is_open_and_one_that_ends_makes_room():
    async with serving(FakeEngine(answer("x")), max_sessions=1) as (client, frontend):
        first = Session(client)
        await first.send(start())
        await first.turn()
        assert frontend.requests.sessions.values["generate",] == 1
        error = await Session(client).error()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 sessions are open, the limit is 1" in error.details()
        assert "TOO_MANY_SESSIONS" in details_of(error) and "RetryInfo" in details_of(error)
        await first.send(END)
        await first.read()
        assert await first.is_at_end()
        third = Session(client)
        await third.send(start(), END)
        assert (await third.turn())[0].text == "x"
        assert await third.is_at_end()
        await until(lambda: not frontend.requests.sessions.values["generate",])


async def test_a_drain_ends_an_idle_session_and_waits_for_a_turn():
    async with serving_one() as (engine, client, frontend):
        session = Session(client)
        await session.send(start())
        (request,) = await engine.wait_for_requests(1)
        drained = asyncio.ensure_future(frontend.drain())
        await asyncio.sleep(0)
        engine.step({request: [EOS_ID]}, finished={request: AT_EOS}, cached={request: 0})
        assert (await session.turn())[1]
        await drained
        await frontend.end_calls()
        error = await session.error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "DRAINING" in details_of(error)


# An engine that keeps requests between turns.

KEEPS = ("adopt", "input_segments")
TURN_ENDED = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_LENGTH, turn_ended=True)


def ends_turn(*token_ids: int, end: step_pb2.StepFinished = TURN_ENDED) -> Script:
    """A script that answers each turn with these tokens."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        if request.entry.resumable:
            engine.step({request: token_ids}, finished={request: end}, cached={request: 0})
        else:
            engine.step({request: []}, finished={request: AT_LENGTH})

    return script


def names(request: FakeRequest) -> tuple[int, str, int]:
    entry = request.entry
    return entry.handle, entry.request_id, entry.attempt


async def test_an_engine_that_keeps_a_turn_gets_only_what_is_new_and_the_end():
    engine = FakeEngine(ends_turn(7, 8), features=KEEPS)
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2], temperature=0.5), append([3]), append([4], temperature=0.25), END)
        for _ in range(3):
            assert (await session.turn())[0].ids == [7, 8]
        assert await session.is_at_end()
        first, second, third, end = await engine.wait_for_requests(4)
        assert [request.prompt for request in engine.requests] == [[1, 2], [8, 3], [8, 4], []]
        assert names(first) == names(second) == names(third) == names(end)
        assert [request.entry.segment for request in engine.requests] == [0, 1, 2, 3]
        assert [request.entry.resumable for request in engine.requests] == [True, True, True, False]
        assert [request.entry.sampling.temperature for request in engine.requests[:3]] == [0.5, 0.5, 0.25]
        assert engine.received.count("abort") == 0


async def test_a_token_that_ended_a_turn_is_not_sent_again():
    end = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_STOP, eos_token_id=EOS_ID, turn_ended=True)
    engine = FakeEngine(ends_turn(7, EOS_ID, end=end), features=KEEPS)
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2]), append([3]), END)
        await session.turn()
        await session.turn()
    assert [request.prompt for request in engine.requests[:2]] == [[1, 2], [3]]


@pytest.mark.parametrize(
    "second",
    [
        append([3], stop=["cat"]),
        append([3], seed=5),
        append([3], bad_words=["cat"]),
        append([3], prompt_logprobs=0),
        append([3], skip_reading_prefix_cache=True),
    ],
)
async def test_a_turn_that_does_not_continue_what_is_kept_is_a_request_of_its_own(second):
    """After a stop string the engine may have more tokens than the client."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        ids = TOKENIZER.encode("the cat sat").ids if request.entry.segment else [7]
        if request.entry.resumable:
            engine.step({request: ids}, finished={request: TURN_ENDED}, cached={request: 0})

    engine = FakeEngine(script, features=KEEPS)
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2], seed=4), second, append([4]), END)
        for _ in range(2):
            await session.turn()
        await engine.wait(lambda: sum(request.entry.segment == 0 for request in engine.requests) >= 2)
        opened = [request for request in engine.requests if request.entry.segment == 0]
        ended = [request.entry for request in engine.requests if not request.entry.resumable]
        assert opened[1].prompt[:4] == [1, 2, 7, 3]
        assert ended[0].handle == opened[0].handle
        session.call.cancel()


async def test_a_turn_that_is_cancelled_ends_with_its_next_token():
    engine = FakeEngine(features=KEEPS)
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2]))
        (first,) = await engine.wait_for_requests(1)
        engine.step({first: [7]}, cached={first: 0})
        await session.read()
        # The engine has it once, however often it is sent.
        await session.send(CANCEL, CANCEL, CANCEL)
        await engine.wait(lambda: bool(engine.cancels))
        assert (engine.cancels[0].handle, engine.cancels[0].segment) == (first.handle, 0)
        aborted = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ABORT, turn_ended=True)
        engine.step({first: [8]}, finished={first: aborted})
        await session.send(append([3]))
        second = (await engine.wait_for_requests(2))[1]
        assert (second.prompt, second.entry.segment) == ([8, 3], 1)
        # The engine is lost before the turn has ended: it ends here.
        await session.send(CANCEL)
        await engine.wait(lambda: len(engine.cancels) == 2)
        assert engine.cancels[1].segment == 1
        engine.die()
        ends = []
        while len(ends) < 2:
            message = await session.read()
            if message.response.HasField("finished"):
                ends.append((message.response.finished.reason, message.turn_ended))
        assert ends == [(output_pb2.FINISH_REASON_ABORT, True)] * 2
        session.call.cancel()


@pytest.mark.parametrize("comes", ["before", "after", "refused"])
async def test_a_request_that_the_engine_has_ended_between_two_turns_is_opened_again(comes):
    def end(engine: FakeEngine, request: FakeRequest) -> None:
        aborted = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ABORT)
        engine.step({request: []}, finished={request: aborted})

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        if request.entry.segment == 0:
            engine.step({request: [7]}, finished={request: TURN_ENDED}, cached={request: 0})
            if comes == "before":
                end(engine, request)
        elif comes == "after":
            end(engine, request)
        elif comes == "refused":
            status = error_pb2.ErrorStatus(code=grpc.StatusCode.NOT_FOUND.value[0], message="no request")
            request.session.send(add_rejected=engine_pb2.AddRejected(handle=request.handle, status=status))

    engine = FakeEngine(script, features=KEEPS)
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2]))
        await session.turn()
        # Another request's answer comes behind what the engine has sent.
        await read_all(client.generate([5]))
        await session.send(append([3]))
        assert (await session.turn())[0].ids == [7]
        session.call.cancel()
    opened = [request.prompt for request in engine.requests if request.entry.segment == 0]
    assert opened == [[1, 2], [5], [1, 2, 7, 3]]


async def test_a_turn_whose_engine_is_lost_goes_on_at_another_with_all_tokens():
    first, second = FakeEngine(features=KEEPS), FakeEngine(features=KEEPS, dp_rank=1)
    async with serving(first, second) as (client, _):
        await client.until_engines_are_ready(2)
        session = Session(client)
        await session.send(start([1, 2]))
        await asyncio.wait(
            [asyncio.ensure_future(one.wait_for_requests(1)) for one in (first, second)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        lost, other = (first, second) if first.requests else (second, first)
        (opened,) = lost.requests
        lost.step({opened: [7]}, finished={opened: TURN_ENDED}, cached={opened: 0})
        await session.turn()
        await session.send(append([3]))
        segment = (await lost.wait_for_requests(2))[1]
        lost.step({segment: [8]}, cached={segment: 2})
        await session.read()
        await session.read()
        lost.die()
        (moved,) = await other.wait_for_requests(1)
        assert (moved.prompt, moved.output, moved.entry.segment) == ([1, 2, 7, 3], [8], 0)
        other.step({moved: [9]}, finished={moved: TURN_ENDED}, cached={moved: 0})
        await session.turn()
        await session.send(append([4]))
        assert (await other.wait_for_requests(2))[1].prompt == [9, 4]
        # Between two turns: the next opens a request where there is an engine.
        follower = other.requests[1]
        other.step({follower: [5]}, finished={follower: TURN_ENDED}, cached={follower: 0})
        await session.turn()
        other.die()
        await session.send(append([6]))
        await lost.wait_for_requests(3)
        session.call.cancel()
    assert lost.requests[2].prompt == [1, 2, 7, 3, 8, 9, 4, 5, 6]


async def test_a_client_that_leaves_between_two_turns_has_its_request_ended():
    engine = FakeEngine(ends_turn(7), features=KEEPS)
    async with serving(engine) as (client, _):
        session = Session(client)
        await session.send(start([1, 2]))
        await session.turn()
        session.call.cancel()
        end = (await engine.wait_for_requests(2))[1]
    assert (end.entry.segment, end.entry.resumable) == (1, False)


async def test_requests_that_wait_for_input_give_way_where_an_engine_takes_no_more():
    engine = FakeEngine(ends_turn(7), features=KEEPS, max_inflight_adds=2)
    async with serving(engine) as (client, _):
        sessions = [Session(client) for _ in range(3)]
        for session in sessions:
            await session.send(start([1, 2]))
            await session.turn()
        opened, _, end, _ = await engine.wait_for_requests(4)
        assert (end.handle, end.entry.segment) == (opened.handle, 1)
        assert not end.entry.resumable
        for session in sessions:
            session.call.cancel()
