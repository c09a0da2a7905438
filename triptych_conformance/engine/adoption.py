"""Cases about requests that another session takes over."""

from __future__ import annotations

import asyncio
import secrets

from triptych.engine.v1 import add_pb2
from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.engine_stream import EngineStream
from triptych_conformance.engine_under_test import NUM_REFERENCE_TOKENS, EngineUnderTest, column
from triptych_kit.errors import FailedPrecondition, NotFound, ServiceError

CASES: Cases[EngineUnderTest] = Cases(Section.ADOPTION)

_STATE = b"conformance"
_GRACE_MS = 5000
_RETRY_S = 0.05


@CASES.must("A request of a lost session is adopted with its prompt, its state, and all output tokens.")
async def adopt_after_loss(engine: EngineUnderTest) -> None:
    engine.needs("adopt")
    owner, entry = await _orphan(engine)
    await owner.cut()
    await _must_adopt(engine, entry)


@CASES.must("Orphans are kept where goodbye says so in field 2, and dropped where it does not.")
async def adopt_after_goodbye(engine: EngineUnderTest) -> None:
    engine.needs("adopt")
    owner, entry = await _orphan(engine)
    await owner.goodbye(leaves_adoptable=True)
    await _must_adopt(engine, entry)
    owner, entry = await _orphan(engine)
    await owner.goodbye()
    await owner.until(lambda: owner.is_over, "the end of the stream")
    error = await _rejection(await engine.open(), entry.request_id)
    expect(isinstance(error, NotFound), "NOT_FOUND", repr(error))


@CASES.must("A request whose session has a stream is not adopted: FAILED_PRECONDITION, SESSION_LIVES.")
async def adopt_of_living_session(engine: EngineUnderTest) -> None:
    engine.needs("adopt")
    owner, entry = await _orphan(engine)
    error = await _rejection(await engine.open(), entry.request_id)
    if owner.record.has_ended(1):
        return
    expect(isinstance(error, FailedPrecondition), "FAILED_PRECONDITION", repr(error))
    expect(error.reason == "SESSION_LIVES", "reason SESSION_LIVES", error.reason)


@CASES.must("What an engine does not keep is not adopted: NOT_FOUND.")
async def adopt_of_unknown_request(engine: EngineUnderTest) -> None:
    engine.needs("adopt")
    error = await _rejection(await engine.open(), secrets.token_hex(16))
    expect(isinstance(error, NotFound), "NOT_FOUND", repr(error))


@CASES.must("A request without resume_state is not kept for others.")
async def adopt_without_state(engine: EngineUnderTest) -> None:
    engine.needs("adopt")
    owner = await engine.open()
    entry = engine.entry(1, engine.long)
    await owner.add(entry)
    await owner.until_tokens(1)
    await owner.cut()
    error = await _rejection(await engine.open(), entry.request_id)
    expect(isinstance(error, NotFound), "NOT_FOUND", repr(error))


async def _orphan(engine: EngineUnderTest) -> tuple[EngineStream, add_pb2.AddEntry]:
    """A stream with a request in flight that others may adopt."""
    owner = await engine.open()
    entry = engine.entry(1, engine.long, resume_state=_STATE, orphan_grace_ms=_GRACE_MS)
    await owner.add(entry)
    await owner.until_tokens(1)
    return owner, entry


async def _must_adopt(engine: EngineUnderTest, entry: add_pb2.AddEntry) -> None:
    stream = await engine.open()
    record, handle = stream.record, 9
    async with asyncio.timeout(stream.patience_s):
        while handle not in record.adopted:
            # Until the engine has seen that the stream of the owner is lost.
            record.rejected.clear()
            await stream.adopt(handle, entry.request_id)
            await stream.until(lambda: handle in record.adopted or handle in record.rejected, "an answer")
            error = record.rejected.get(handle)
            is_early = isinstance(error, FailedPrecondition) and error.reason == "SESSION_LIVES"
            expect(error is None or is_early, "adopted", repr(error))
            await asyncio.sleep(_RETRY_S if is_early else 0)
    adopted = record.adopted[handle]
    expect(adopted.resume_state == _STATE, "the resume_state of the ADD", adopted.resume_state)
    expect(
        adopted.prompt_token_ids == column(engine.prompt), "the prompt of the ADD", adopted.prompt_token_ids
    )
    await stream.until_tokens(handle, NUM_REFERENCE_TOKENS)
    tokens = record.tokens[handle][:NUM_REFERENCE_TOKENS]
    expect(tokens == await engine.reference(), "all tokens since the ADD", tokens)
    await stream.abort([handle])
    await stream.until_finished(handle)


async def _rejection(stream: EngineStream, request_id: str) -> ServiceError:
    await stream.adopt(9, request_id)
    return await stream.rejection_of(9)
