"""Cases about requests that take further input after the end of a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2, engine_pb2
from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.engine_stream import EngineStream
from triptych_conformance.engine_under_test import EngineUnderTest, column
from triptych_kit.errors import NotFound, Unimplemented, to_number

CASES: Cases[EngineUnderTest] = Cases(Section.REQUESTS)

_ABORT, _ERROR = output_pb2.FINISH_REASON_ABORT, output_pb2.FINISH_REASON_ERROR
_FEATURE = "input_segments"
_NUM_TOKENS = 8
_SAMPLED = {"temperature": 1.0}


@CASES.must("Where a session lacks the feature input_segments, `resumable` is UNIMPLEMENTED.")
async def resumable_without_feature(engine: EngineUnderTest) -> None:
    stream = await engine.open(features=("resume",))
    await stream.add(engine.entry(1, resumable=True))
    error = await stream.rejection_of(1)
    expect(isinstance(error, Unimplemented), "UNIMPLEMENTED", repr(error))
    expect("resumable" in error.message, "a message that names resumable", error.message)


@CASES.must(
    "A turn ends with `turn_ended`; the next one has the tokens that an ADD of the whole context has."
)
async def turns(engine: EngineUnderTest) -> None:
    stream, opening = await _open(engine)
    await _until_turn_ended(stream, opening)
    first, reference = stream.record.tokens[1], await engine.reference()
    expect(first == reference[:_NUM_TOKENS], "the first tokens of the reference", first)
    context = [*engine.prompt, *first]
    for number, sampling in enumerate((_SAMPLED, {}), start=1):
        added = engine.prompt[:number]
        await _until_turn_ended(stream, _segment(engine, opening, number, [context[-1], *added], sampling))
        context += added
        await _must_be_whole(engine, stream, context, sampling)
        context += stream.record.tokens[1]


@CASES.must(
    "An ADD that is not `resumable` ends the request, once. Repeated ADDs, and those behind it, are ignored."
)
async def end_of_input(engine: EngineUnderTest) -> None:
    stream, opening = await _open(engine)
    await _until_turn_ended(stream, opening)
    segment = _segment(engine, opening, 1)
    await _until_turn_ended(stream, segment)
    end = _end(opening, 2)
    for entry in (opening, segment, end, end, _segment(engine, opening, 3), segment):
        await _send(stream, entry)
    record = stream.record
    await stream.until(lambda: not record.finished[1].turn_ended, "the end of the request")
    expect(record.finished[1].reason == _ABORT, "reason ABORT", record.finished[1])
    await stream.abort([1])
    await stream.until(lambda: 1 in record.already_finished, "already_finished with handle 1")
    expect(not record.rejected, "no rejection", record.rejected)


@CASES.must(
    "`cancel_turn` ends the turn of its segment with ABORT, and the next goes on; of others it is ignored."
)
async def cancelled_turn(engine: EngineUnderTest) -> None:
    stream, opening = await _open(engine, engine.long)
    await stream.add(opening)
    await stream.until_tokens(1)
    await _cancel(stream, 1)
    num_tokens = len(stream.record.tokens[1]) + _NUM_TOKENS
    await stream.until_tokens(1, num_tokens)
    expect(not stream.record.has_ended(1), "a turn that goes on", stream.record.finished)
    await _cancel(stream, 0)
    await stream.until_finished(1)
    end, tokens = stream.record.finished[1], stream.record.tokens[1]
    expect(end.turn_ended and end.reason == _ABORT, "reason ABORT and turn_ended", end)
    expect(len(tokens) < engine.long, "an end before max_tokens", "all tokens")
    await _cancel(stream, 0)
    await _until_turn_ended(stream, _segment(engine, opening, 1, [tokens[-1], *engine.prompt]))
    await _must_be_whole(engine, stream, [*engine.prompt, *tokens, *engine.prompt])


@CASES.must(
    "A refused segment ends its request: INVALID_ARGUMENT, FAILED_PRECONDITION too early. Of none: NOT_FOUND."
)
async def refused_segments(engine: EngineUnderTest) -> None:
    stream, opening = await _open(engine)
    record = stream.record
    wrong: list[tuple[int, list[int]]] = [(2, engine.prompt), (1, [])]
    for number, token_ids in wrong:
        opening.request_id += str(number)
        await _until_turn_ended(stream, opening)
        await _send(stream, _segment(engine, opening, number, token_ids))
        await stream.until(lambda: not record.finished[1].turn_ended, "the end of the request")
        end = record.finished[1]
        is_refused = end.reason == _ERROR and end.code == to_number("INVALID_ARGUMENT")
        expect(is_refused, "reason ERROR and the code INVALID_ARGUMENT", end)
    running = engine.entry(2, engine.long, resumable=True)
    await stream.add(running)
    await stream.until_tokens(2)
    await _send(stream, _segment(engine, running, 1))
    await stream.until_finished(2)
    end = record.finished[2]
    is_early = end.reason == _ERROR and end.code == to_number("FAILED_PRECONDITION")
    expect(is_early and not end.turn_ended, "reason ERROR and the code FAILED_PRECONDITION", end)
    await _send(stream, _segment(engine, engine.entry(3), 1))
    error = await stream.rejection_of(3)
    expect(isinstance(error, NotFound), "NOT_FOUND", repr(error))


async def _open(
    engine: EngineUnderTest, max_tokens: int = _NUM_TOKENS
) -> tuple[EngineStream, add_pb2.AddEntry]:
    """A stream of an engine with the feature, and the ADD that opens request 1."""
    engine.needs(_FEATURE)
    return await engine.open(), engine.entry(1, max_tokens, resumable=True)


def _segment(
    engine: EngineUnderTest,
    opening: add_pb2.AddEntry,
    number: int,
    token_ids: Sequence[int] | None = None,
    sampling: dict[str, Any] | None = None,
) -> add_pb2.AddEntry:
    return engine.entry(
        opening.handle,
        _NUM_TOKENS,
        sampling=sampling,
        request_id=opening.request_id,
        resumable=True,
        segment=number,
        prompt_token_ids=column(engine.prompt if token_ids is None else token_ids),
    )


def _end(opening: add_pb2.AddEntry, number: int) -> add_pb2.AddEntry:
    return add_pb2.AddEntry(handle=opening.handle, request_id=opening.request_id, segment=number)


async def _send(stream: EngineStream, entry: add_pb2.AddEntry) -> None:
    """Send what begins no turn."""
    stream.record.tokens.setdefault(entry.handle, [])
    await stream.send(add=add_pb2.Add(entries=[entry]))


async def _cancel(stream: EngineStream, number: int) -> None:
    await stream.send(cancel_turn=engine_pb2.CancelTurn(handle=1, segment=number))


async def _until_turn_ended(stream: EngineStream, entry: add_pb2.AddEntry) -> None:
    """Begin a turn of request 1, and wait for its end."""
    await stream.add(entry)
    await stream.until_finished(1)
    end = stream.record.finished[1]
    expect(end.turn_ended, "an end with turn_ended", end)


async def _must_be_whole(
    engine: EngineUnderTest,
    stream: EngineStream,
    context: Sequence[int],
    sampling: dict[str, Any] | None = None,
) -> None:
    """The tokens of request 1's turn must be those of another request for the context."""
    entry = engine.entry(9, _NUM_TOKENS, sampling=sampling, prompt_token_ids=column(context))
    await stream.add(entry)
    await stream.until_finished(9)
    seen, whole = stream.record.tokens[1], stream.record.tokens[9]
    expect(seen == whole, f"the tokens of an ADD of {len(context)} tokens, {whole}", seen)
