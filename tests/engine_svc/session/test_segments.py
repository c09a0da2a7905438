"""Input segments over a stream: turns, their ends, repeated and wrong ADDs, and what is left afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from engine_svc.admin.lifecycle import EngineState
from engine_svc.core.request import FinishReason
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.fakes import LIMIT_S, expected_tokens
from tests.engine_svc.session.service_rig import (
    ServiceRig,
    StreamClient,
    added,
    connected,
    make_entry,
    prompt_of,
    served,
)
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, step_pb2

ABORT, ERROR, LENGTH = (
    output_pb2.FINISH_REASON_ABORT,
    output_pb2.FINISH_REASON_ERROR,
    output_pb2.FINISH_REASON_LENGTH,
)
FEATURES = {"features": ["input_segments", "resume"]}
INVALID_ARGUMENT, FAILED_PRECONDITION = 3, 9


def opening(handle: int, **fields: object) -> add_pb2.AddEntry:
    entry = make_entry(handle, max_tokens=2)
    entry.MergeFrom(add_pb2.AddEntry(resumable=True, **fields))
    return entry


def segment(handle: int, number: int, *, max_tokens: int = 3, **fields: object) -> add_pb2.AddEntry:
    entry = make_entry(handle, prompt=[8, 9], max_tokens=max_tokens)
    entry.MergeFrom(add_pb2.AddEntry(**{"resumable": True, "segment": number, **fields}))
    return entry


@contextlib.asynccontextmanager
async def after_first_turn() -> AsyncIterator[tuple[ServiceRig, StreamClient]]:
    """A client whose request 1 waits for input."""
    async with served() as (rig, stub):
        client = StreamClient(stub, "f")
        await client.open(**FEATURES)
        await client.add(opening(1))
        await client.until_ended(1)
        yield rig, client


def ends_of(client: StreamClient) -> list[step_pb2.StepFinished]:
    """Of request 1."""
    return [end for message in client.received for end in message.step.finished]


async def until_ends(client: StreamClient, number: int) -> list[step_pb2.StepFinished]:
    await client.until(lambda: len(ends_of(client)) >= number)
    return ends_of(client)


async def test_a_request_goes_on_with_each_segment_and_ends_once():
    async with after_first_turn() as (rig, client):
        first = client.tokens.pop(1)
        await client.add(segment(1, 1))
        await until_ends(client, 2)
        tokens = expected_tokens([*prompt_of(1), first[0], 8, 9], 1, 3)
        assert client.tokens[1] == tokens
        await client.add(make_entry(1), add_pb2.AddEntry())  # In use, and invalid: nothing of request 1.
        await client.add(segment(1, 2, resumable=False))
        ends = await until_ends(client, 3)
        assert [(end.reason, end.turn_ended) for end in ends] == [
            (LENGTH, True),
            (LENGTH, True),
            (ABORT, False),
        ]
        assert num_unfinished(rig.scheduler) == 0
        firsts = [first for message in client.received for first in message.step.first]
        assert [first.prefill_stats.num_prompt_tokens for first in firsts] == [
            len(prompt_of(1)),
            len(prompt_of(1)) + 3,
        ]
        assert firsts[1].num_cached_tokens == len(prompt_of(1)) + 1


async def test_a_frontend_without_the_feature_cannot_have_a_resumable_request():
    async with connected() as (_, _, client):
        await client.add(opening(1))
        await client.until(lambda: 1 in client.rejected)
        assert "resumable" in client.rejected[1].status.message


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (add_pb2.AddEntry(output_token_ids=b"\x05\0\0\0"), ""),
        (add_pb2.AddEntry(pooling={}), "pooling"),
        (add_pb2.AddEntry(prompt_embeds={}), "prompt_embeds"),
    ],
)
async def test_what_a_resumable_request_cannot_have(entry: add_pb2.AddEntry, field: str):
    async with served() as (_, stub):
        client = StreamClient(stub, "f")
        await client.open(**FEATURES)
        resumable = opening(1)
        resumable.MergeFrom(entry)
        await client.add(resumable)
        await client.flush()
        assert (field in client.rejected[1].status.message) if field else not client.rejected


async def test_a_repeated_add_of_a_segment_is_ignored():
    async with after_first_turn() as (_, client):
        for entry in (opening(1), segment(1, 1), segment(1, 1), opening(1)):
            await client.add(entry)
        await until_ends(client, 2)
        await client.add(segment(1, 2), segment(1, 1))
        await client.flush()
        ends = await until_ends(client, 3)
        await client.add(segment(1, 3, resumable=False), segment(1, 3, resumable=False), segment(1, 3))
        await until_ends(client, 4)
        await client.add(segment(1, 4), segment(1, 3, resumable=False))
        await client.flush()
        assert [end.turn_ended for end in ends_of(client)] == [True, True, True, False]
        assert len(ends) == 3 and not client.rejected


async def test_a_segment_of_a_request_that_was_never_there_is_rejected():
    async with after_first_turn() as (_, client):
        await client.add(segment(2, 1), segment(1, 1, attempt=1), segment(1, 1))
        await until_ends(client, 2)
        assert "NO_SUCH_REQUEST" in str(client.rejected[2].status.details)
        assert client.rejected[1].attempt == 1


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"number": 2}, INVALID_ARGUMENT, "segment is 2"),
        ({"prompt_token_ids": b"\xff\xff\xff\x7f"}, INVALID_ARGUMENT, "prompt_token_ids"),
        ({"cache_salt": "other"}, INVALID_ARGUMENT, "cache_salt"),
        ({"skip_reading_prefix_cache": True}, INVALID_ARGUMENT, "computed again"),
        ({"output_token_ids": b"\x05\0\0\0"}, INVALID_ARGUMENT, "output_token_ids"),
        ({"prompt_token_ids": b"\x05\0\0\0" * 126}, INVALID_ARGUMENT, "begin with"),
    ],
)
async def test_a_wrong_segment_ends_its_request_with_the_cause(
    fields: dict[str, object], code: int, text: str
):
    async with after_first_turn() as (rig, client):
        await client.add(opening(2))
        await until_ends(client, 2)
        await client.add(segment(1, **{"number": 1, "max_tokens": 1, **fields}), segment(2, 1))
        ends = await until_ends(client, 4)
        (end,) = [end for end in ends if end.reason == ERROR]
        assert (end.turn_ended, end.code) == (False, code)
        assert text in end.message
        assert sum(end.turn_ended for end in ends) == 3
        assert num_unfinished(rig.scheduler) == 1


async def test_a_segment_without_tokens_ends_its_request():
    async with after_first_turn() as (_, client):
        entry = segment(1, 1)
        entry.ClearField("prompt_token_ids")
        await client.add(entry)
        assert (await until_ends(client, 2))[1].code == INVALID_ARGUMENT


async def test_a_segment_that_comes_before_the_end_of_the_turn_ends_its_request():
    async with served() as (rig, stub):
        client = StreamClient(stub, "f")
        await client.open(**FEATURES)
        entry = opening(1)
        entry.sampling.max_tokens = 30
        await added(rig, client, entry, hold_at=2)
        await client.add(segment(1, 1))
        await client.flush()
        rig.executor.gate.set()
        (end,) = await until_ends(client, 1)
        assert (end.reason, end.code, end.turn_ended) == (ERROR, FAILED_PRECONDITION, False)


async def test_a_cancelled_turn_ends_and_a_cancel_of_another_turn_is_ignored():
    async with after_first_turn() as (rig, client):
        for number in (0, 2):
            await client.send(cancel_turn(1, number))
        await added(rig, client, segment(1, 1, max_tokens=30), hold_at=4)
        for number in (0, 2):
            await client.send(cancel_turn(1, number))
        await client.send(cancel_turn(9, 1))
        await client.flush()
        rig.executor.hold_at = 6
        rig.executor.gate.set()
        await asyncio.to_thread(rig.executor.wait_for_launches, 6)
        assert len(ends_of(client)) == 1
        await client.send(cancel_turn(1, 1))
        await client.flush()
        rig.executor.gate.set()
        ends = await until_ends(client, 2)
        assert (ends[1].reason, ends[1].turn_ended) == (ABORT, True)
        await client.add(segment(1, 2))
        assert (await until_ends(client, 3))[2].reason == LENGTH


@pytest.mark.parametrize("ends_with", ["its client", "its engine"])
async def test_the_last_turn_of_a_request_can_be_cancelled_and_is_what_its_add_says(ends_with: str):
    async with served() as (rig, stub):
        client = StreamClient(stub, "f")
        await client.open(**FEATURES)
        entries = [opening(1), opening(2)]
        for entry in entries:
            entry.sampling.max_tokens = 30
        entries[1].sampling.stop_token_ids.append(expected_tokens(prompt_of(2), 2, 30)[-1])
        await added(rig, client, *entries, hold_at=2)
        if ends_with == "its client":
            await client.add(segment(1, 1, resumable=False), segment(2, 1, resumable=False))
        else:
            rig.engine.lifecycle.move_to(EngineState.DRAINING)
        await client.send(cancel_turn(1, 0))
        await client.flush()
        rig.executor.gate.set()
        ends = {end.reason: end for end in await until_ends(client, 2)}
        assert not any(end.turn_ended for end in ends.values())
        assert len(client.tokens[1]) < 30 and ABORT in ends
        assert ends[output_pb2.FINISH_REASON_STOP].stop_token_id == client.tokens[2][-1]


async def test_a_request_without_turns_cannot_be_cancelled_by_turn():
    async with connected() as (rig, _, client):
        await added(rig, client, make_entry(1, max_tokens=30), hold_at=2)
        await client.send(cancel_turn(1, 0))
        await client.flush()
        rig.executor.gate.set()
        (end,) = await until_ends(client, 1)
        assert end.reason == LENGTH


def cancel_turn(handle: int, number: int) -> engine_pb2.ConnectRequest:
    return engine_pb2.ConnectRequest(cancel_turn=engine_pb2.CancelTurn(handle=handle, segment=number))


async def test_an_idle_request_can_be_aborted():
    async with after_first_turn() as (rig, client):
        await client.abort(1)
        assert [end.turn_ended for end in await until_ends(client, 2)] == [True, False]
        assert num_unfinished(rig.scheduler) == 0


async def test_a_session_leaves_none_of_its_requests_for_adoption():
    async with served() as (rig, stub):
        client = StreamClient(stub, "f")
        await client.open(features=["adopt", "input_segments"])
        await client.add(opening(1, resume_state=b"state", orphan_grace_ms=60_000))
        await client.until_ended(1)
        await client.close()
        other = StreamClient(stub, "g")
        await other.open(features=["adopt"])
        await other.adopt((5, f"{1:032x}"))
        await other.until(lambda: 5 in other.rejected)
        aborted = rig.engine.stats_snapshot.counts.finished.values
        async with asyncio.timeout(LIMIT_S):
            # The engine notices the end of the other stream on its own.
            while not aborted[(FinishReason.ABORT.value,)]:
                await other.flush()
        assert aborted[(FinishReason.ABORT.value,)] == 1


async def test_a_drain_ends_idle_requests_at_once_and_others_with_their_turns():
    async with after_first_turn() as (rig, client):
        await added(rig, client, opening(2), hold_at=4)
        rig.engine.lifecycle.move_to(EngineState.DRAINING)
        await client.add(segment(1, 1))
        rig.executor.gate.set()
        ends = await until_ends(client, 3)
        assert [(end.reason, end.turn_ended) for end in ends[1:]] in (
            [(ABORT, False), (LENGTH, False)],
            [(LENGTH, False), (ABORT, False)],
        )
        await rig.servicer.until_dry()
