"""Requests whose frontend is gone, and the one that takes them over: every token once, and an end to all."""

from __future__ import annotations

import asyncio
import math
from array import array

import grpc

from engine_svc.core.step import TokenLogprobs
from tests.engine_svc.fakes import LIMIT_S, expected_tokens
from tests.engine_svc.loop.logprob_executor import emit_logprobs
from tests.engine_svc.session.service_rig import (
    ABORT,
    LENGTH,
    ServiceRig,
    StreamClient,
    added,
    column,
    lost,
    make_entry,
    parked,
    prompt_of,
    served,
    serving,
    until_finished,
)
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2, step_pb2
from triptych_kit.rules import rules_of

FEATURES = {"features": ["adopt", "resume"]}
NUM_TOKENS = 20
LONG_MS = 60_000


def resumable_entry(handle: int, *, grace_ms: int = LONG_MS, **fields: object) -> add_pb2.AddEntry:
    entry = make_entry(handle, **{"max_tokens": NUM_TOKENS, **fields})
    entry.orphan_grace_ms, entry.resume_state = grace_ms, b"state of %d" % handle
    return entry


def wire_id(handle: int) -> str:
    return make_entry(handle).request_id


def whole(handle: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    return expected_tokens(prompt_of(handle), handle, num_tokens)


async def begun(stub, rig: ServiceRig, *entries: add_pb2.AddEntry) -> StreamClient:
    """A first frontend, whose requests have begun and now wait for the executor."""
    client = await another(stub, "a")
    await added(rig, client, *entries, hold_at=5)
    await client.until(lambda: all(client.tokens.get(entry.handle) for entry in entries))
    return client


async def orphaned(stub, rig: ServiceRig, *entries: add_pb2.AddEntry) -> StreamClient:
    """The same, with its stream broken, which the engine has noticed."""
    client = await begun(stub, rig, *entries)
    await client.close()
    await parked(rig, stub)
    return client


async def adopting(stub, *entries: tuple[int, str]) -> StreamClient:
    """Another frontend, which has adopted these."""
    client = await another(stub)
    await client.adopt(*entries)
    await client.until(lambda: client.kinds().count("adopted") == len(entries))
    return client


async def again(stub, first: StreamClient) -> StreamClient:
    """The first frontend over another stream, behind all that it has read."""
    last_read = session_pb2.ResumePoint(engine_epoch=7, last_seq=first.received[-1].seq)
    return await another(stub, "a", resume=last_read)


async def another(stub, name: str = "b", **hello: object) -> StreamClient:
    client = StreamClient(stub, name)
    await client.open(**FEATURES, **hello)
    return client


def reason_of(rejected: engine_pb2.AddRejected) -> bytes:
    return rejected.status.details


async def test_a_request_whose_frontend_is_gone_goes_on_at_another_from_its_first_token():
    async with served() as (rig, stub):
        await orphaned(stub, rig, resumable_entry(1), resumable_entry(2))
        second = await adopting(stub, (11, wire_id(1)), (12, wire_id(2)))
        rig.executor.gate.set()
        await second.until_ended(11, 12)
        assert second.tokens == {11: whole(1), 12: whole(2)}
        assert second.finished == {11: [LENGTH], 12: [LENGTH]}
        kinds = second.kinds()
        assert kinds.index("step") > kinds.index("adopted")
        adopted = second.last("adopted").adopted
        assert (adopted.handle, adopted.attempt, adopted.resume_state) == (12, 0, b"state of 2")
        assert adopted.prompt_token_ids == column(prompt_of(2))
        stats = (await stub.GetLoad(engine_pb2.GetLoadRequest())).stats
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (10, 2 * NUM_TOKENS)
        assert stats.num_used_blocks == 0


async def test_the_first_step_says_how_its_tokens_came_and_what_the_cache_had():
    async with served() as (rig, stub):
        first = await begun(stub, rig, resumable_entry(1))
        await first.until(lambda: len(first.tokens[1]) >= 3)
        await first.close()
        await parked(rig, stub)
        second = await adopting(stub, (7, wire_id(1)))
        rig.executor.gate.set()
        await second.until_ended(7)
        step = next(message.step for message in second.received if message.WhichOneof("message") == "step")
        (num_tokens,) = step.num_tokens
        assert num_tokens >= 3
        assert [(part.row, list(part.num_tokens)) for part in step.parts] == [(0, [1] * num_tokens)]
        assert [(row.row, row.num_cached_tokens) for row in step.first] == [(0, 0)]


async def test_a_request_that_has_ended_meanwhile_is_handed_over_with_its_end():
    async with served() as (rig, stub):
        await orphaned(stub, rig, resumable_entry(1))
        rig.executor.gate.set()
        await until_finished(stub, 1)
        second = await another(stub)
        await second.adopt((7, wire_id(1)))
        await second.until_ended(7)
        assert (second.tokens, second.finished) == ({7: whole(1)}, {7: [LENGTH]})


async def test_a_finish_sent_to_a_frontend_that_died_is_sent_again():
    async with served() as (rig, stub):
        first = await begun(stub, rig, resumable_entry(1))
        rig.executor.gate.set()
        await first.until_ended(1)
        await first.close()
        await parked(rig, stub)
        second = await another(stub)
        await second.adopt((7, wire_id(1)))
        await second.until_ended(7)
        assert (second.tokens, second.finished) == ({7: whole(1)}, {7: [LENGTH]})


async def test_what_lives_is_unknown_or_is_taken_already_is_refused_by_its_own_status():
    async with served() as (rig, stub):
        first = await begun(stub, rig, resumable_entry(1), make_entry(2, max_tokens=NUM_TOKENS))
        second = await another(stub)
        await second.adopt((1, wire_id(1)), (2, wire_id(2)), (3, "f" * 32))
        await second.until(lambda: len(second.rejected) == 3)
        codes = {handle: rejected.status.code for handle, rejected in second.rejected.items()}
        lives, unknown = (
            grpc.StatusCode.FAILED_PRECONDITION.value[0],
            grpc.StatusCode.NOT_FOUND.value[0],
        )
        assert codes == {1: lives, 2: unknown, 3: unknown}
        assert b"SESSION_LIVES" in reason_of(second.rejected[1])
        await first.close()
        await parked(rig, stub)
        await second.adopt((9, wire_id(1)))
        await second.until(lambda: "adopted" in second.kinds())
        await second.adopt((4, wire_id(1)))
        await second.until(lambda: 4 in second.rejected)
        assert b"SESSION_LIVES" in reason_of(second.rejected[4])
        third = await another(stub, "c")
        await third.adopt((1, wire_id(1)))
        await third.until(lambda: 1 in third.rejected)
        assert b"SESSION_LIVES" in reason_of(third.rejected[1])
        await second.adopt((9, "f" * 32))
        await second.until(lambda: 9 in second.rejected)
        assert b"HANDLE_IN_USE" in reason_of(second.rejected[9])
        rig.executor.gate.set()
        await second.until_ended(9)
        assert (second.tokens, second.finished) == ({9: whole(1)}, {9: [LENGTH]})


async def test_a_request_can_be_adopted_again_and_again():
    async with served() as (rig, stub):
        client = await begun(stub, rig, resumable_entry(1))
        for index, name in enumerate("bcd"):
            await client.close()
            await parked(rig, stub, index + 1)
            client = await another(stub, name)
            await client.adopt((1, wire_id(1)))
            await client.until(lambda client=client: "adopted" in client.kinds())
        rig.executor.gate.set()
        await client.until_ended(1)
        assert client.tokens == {1: whole(1)}


async def test_a_frontend_that_comes_back_hears_that_its_request_ended_there_and_can_harm_it_no_more():
    async with served() as (rig, stub):
        first = await orphaned(stub, rig, resumable_entry(1))
        second = await adopting(stub, (7, wire_id(1)))
        back = await again(stub, first)
        await back.abort(1)
        await back.flush()
        rig.executor.gate.set()
        await back.until_ended(1)
        await second.until_ended(7)
        assert back.finished == {1: [ABORT]}
        assert (second.tokens, second.finished) == ({7: whole(1)}, {7: [LENGTH]})


async def test_the_end_of_the_session_that_was_lost_leaves_alone_what_was_adopted_and_what_may_be():
    rig = ServiceRig()
    rig.engine.replay_window_s = 0.02
    async with serving(rig) as stub:
        first = await begun(stub, rig, resumable_entry(1), resumable_entry(2), make_entry(3, max_tokens=100))
        await first.close()
        await lost(rig, stub)
        second = await adopting(stub, (7, wire_id(1)))
        await parked(rig, stub, 0)
        await second.adopt((8, wire_id(2)))
        rig.executor.gate.set()
        await second.until_ended(7, 8)
        assert second.tokens == {7: whole(1), 8: whole(2)}
        assert (await until_finished(stub, 3)).num_generated_tokens < 2 * NUM_TOKENS + 100


async def test_a_request_not_adopted_within_its_grace_ends_and_frees_its_blocks():
    rig = ServiceRig()
    rig.engine.replay_window_s = 0.02
    async with serving(rig) as stub:
        first = await begun(stub, rig, resumable_entry(1, grace_ms=30, max_tokens=100))
        await first.close()
        async with asyncio.timeout(LIMIT_S):
            while rig.servicer.num_orphaned_requests:
                await stub.GetLoad(engine_pb2.GetLoadRequest())
        rig.executor.gate.set()
        stats = await until_finished(stub, 1)
        assert stats.num_used_blocks == 0
        assert stats.num_generated_tokens < 100
        second = await another(stub)
        await second.adopt((7, wire_id(1)))
        await second.until(lambda: 7 in second.rejected)
        assert second.rejected[7].status.code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_frontend_that_says_goodbye_leaves_nothing_to_adopt():
    async with served() as (rig, stub):
        first = await begun(stub, rig, resumable_entry(1, max_tokens=100))
        await first.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
        await first.until(lambda: first.is_over)
        rig.executor.gate.set()
        assert (await until_finished(stub, 1)).num_used_blocks == 0
        assert rig.servicer.num_orphaned_requests == 0


async def test_a_frontend_may_leave_to_others_what_can_be_adopted_and_nothing_else():
    async with served() as (rig, stub):
        first = await begun(stub, rig, resumable_entry(1), make_entry(2, max_tokens=100))
        goodbye = engine_pb2.Goodbye(leaves_adoptable=True)
        await first.send(engine_pb2.ConnectRequest(goodbye=goodbye))
        await first.until(lambda: first.is_over)
        second = await another(stub)
        await second.adopt((7, wire_id(1)), (8, wire_id(2)))
        await second.until(lambda: "adopted" in second.kinds() and 8 in second.rejected)
        rig.executor.gate.set()
        await second.until_ended(7)
        assert (second.tokens, second.finished) == ({7: whole(1)}, {7: [LENGTH]})
        stats = await until_finished(stub, 2)
        assert (stats.num_generated_tokens < NUM_TOKENS + 100, stats.num_used_blocks) == (True, 0)


async def test_what_a_frontend_left_behind_ends_unless_adopted_within_its_grace():
    async with served() as (rig, stub):
        first = await begun(stub, rig, resumable_entry(1, grace_ms=30, max_tokens=100))
        goodbye = engine_pb2.Goodbye(leaves_adoptable=True)
        await first.send(engine_pb2.ConnectRequest(goodbye=goodbye))
        async with asyncio.timeout(LIMIT_S):
            while rig.servicer.num_orphaned_requests:
                await stub.GetLoad(engine_pb2.GetLoadRequest())
        rig.executor.gate.set()
        stats = await until_finished(stub, 1)
        assert (stats.num_generated_tokens < 100, stats.num_used_blocks) == (True, 0)


async def test_a_session_that_goes_on_over_another_stream_keeps_its_requests():
    async with served() as (rig, stub):
        first = await orphaned(stub, rig, resumable_entry(1))
        back = await again(stub, first)
        await back.flush()
        second = await another(stub)
        await second.adopt((7, wire_id(1)))
        await second.until(lambda: 7 in second.rejected)
        assert b"SESSION_LIVES" in reason_of(second.rejected[7])
        rig.executor.gate.set()
        await back.until_ended(1)
        assert first.tokens[1] + back.tokens[1] == whole(1)


async def test_a_short_grace_ends_no_request_whose_session_may_still_be_resumed():
    async with served() as (rig, stub):
        first = await orphaned(stub, rig, resumable_entry(1, grace_ms=0))
        back = await again(stub, first)
        rig.executor.gate.set()
        await back.until_ended(1)
        assert (first.tokens[1] + back.tokens[1], back.finished) == (whole(1), {1: [LENGTH]})


async def test_an_adoption_that_is_asked_again_after_a_break_is_done_once():
    async with served() as (rig, stub):
        await orphaned(stub, rig, resumable_entry(1))
        second = await another(stub)
        await second.adopt((7, wire_id(1)), (8, "f" * 32))
        await second.adopt((7, wire_id(1)), (8, "f" * 32))
        await second.flush()
        assert second.kinds().count("adopted") == 1
        assert second.kinds().count("add_rejected") == 1
        rig.executor.gate.set()
        await second.until_ended(7)
        assert second.tokens == {7: whole(1)}


async def test_an_adopted_request_is_aborted_by_its_new_handle():
    async with served() as (rig, stub):
        await orphaned(stub, rig, resumable_entry(1, max_tokens=100))
        second = await adopting(stub, (7, wire_id(1)))
        await second.abort(7)
        await second.flush()
        rig.executor.gate.set()
        await second.until_ended(7)
        assert second.finished == {7: [ABORT]}
        assert (await until_finished(stub, 1)).num_used_blocks == 0


async def test_what_moved_away_and_came_back_is_kept_and_not_what_ended_by_the_move():
    async with served() as (rig, stub):
        first = await begun(stub, rig, resumable_entry(1))
        await first.abort(1, reason=engine_pb2.ABORT_REASON_MIGRATED)
        later = resumable_entry(1, attempt=1)
        later.handle = 2
        await first.add(later)
        await first.flush()
        await first.close()
        await parked(rig, stub)
        second = await another(stub)
        await second.adopt((7, wire_id(1)))
        await second.until(lambda: "adopted" in second.kinds() or 7 in second.rejected)
        rig.executor.gate.set()
        await second.until_ended(7)
        assert second.last("adopted").adopted.attempt == 1
        assert (second.tokens, second.finished) == ({7: whole(1)}, {7: [LENGTH]})


async def test_a_row_of_many_steps_that_is_merged_with_later_ones_still_says_how_its_tokens_came():
    async with served(max_outbox_bytes=10_000_000) as (rig, stub):
        await orphaned(stub, rig, resumable_entry(1, max_tokens=100))
        unread = StreamClient(stub, "b")
        await unread.send_hello(**FEATURES)
        await unread.adopt((7, wire_id(1)))
        rig.executor.gate.set()
        await until_finished(stub, 1)
        unread.start_reading()
        await unread.until_ended(7)
        assert unread.tokens == {7: whole(1, 100)}
        steps = [message.step for message in unread.received if message.WhichOneof("message") == "step"]
        assert [set(part.num_tokens) for step in steps for part in step.parts] == [
            {1} for step in steps if step.num_tokens[0] > 1
        ]


async def test_what_an_adopter_gets_of_a_request_is_limited_and_refused_by_name():
    async with served() as (_, stub):
        client = await another(stub)
        entry = resumable_entry(1)
        entry.resume_state = b"x" * (rules_of(add_pb2.AddEntry, "resume_state").max_bytes + 1)
        await client.add(entry)
        await client.until(lambda: 1 in client.rejected)
        status = client.rejected[1].status
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert status.message == "resume_state has 65537 bytes, must have at most 65536"


# A request that is adopted with logprobs of its tokens: each of them has its position, known or not.


def moved_entry(handle: int, num_before: int) -> object:
    """An ADD of a request that has produced tokens at another engine, and wants logprobs of all."""
    entry = resumable_entry(handle, attempt=1, logprobs=1)
    entry.output_token_ids = column(whole(handle)[:num_before])
    return entry


def places_of(step: step_pb2.Step, handle: int) -> list[tuple[float, int]]:
    """Of each token that a step brings to `handle`: its log probability, and how many others are reported."""
    start = 0
    logprobs, others = array("f", step.sampled_logprobs), array("f", step.top_logprobs.logprobs)
    k = step.top_logprobs.k
    for row, num_tokens in zip(array("I", step.handles), step.num_tokens, strict=True):
        if row == handle:
            return [
                (logprobs[place], sum(not math.isnan(value) for value in others[place * k : (place + 1) * k]))
                for place in range(start, start + num_tokens)
            ]
        start += num_tokens
    return []


async def test_one_adopted_while_its_first_step_runs_keeps_its_places_and_its_neighbours_their_tokens():
    rig = ServiceRig()
    token_logprobs = TokenLogprobs([-1.0], [1], 1, [5], [-1.0])
    emit_logprobs(
        rig.executor, lambda request_id: token_logprobs if request_id.startswith(wire_id(1)) else None
    )
    held, loop = asyncio.Event(), asyncio.get_running_loop()

    def hold(plan) -> None:
        if not held.is_set() and any(each.startswith(wire_id(1)) for each in plan.request_ids):
            rig.executor.gate.clear()
            loop.call_soon_threadsafe(held.set)

    async with serving(rig) as stub:
        second = await another(stub)
        await added(rig, second, make_entry(2, max_tokens=60), hold_at=4)
        rig.executor.on_launch = hold
        first = await another(stub, "a")
        await first.add(moved_entry(1, num_before=3))
        await first.flush()
        rig.executor.gate.set()
        await held.wait()
        await first.close()
        await parked(rig, stub)
        await second.adopt((11, wire_id(1)))
        await second.until(lambda: "adopted" in second.kinds())
        rig.executor.gate.set()
        await second.until_ended(2, 11)
        assert second.tokens == {2: whole(2, 60), 11: whole(1)}
        assert second.finished == {2: [LENGTH], 11: [LENGTH]}
        steps = [message.step for message in second.received if message.WhichOneof("message") == "step"]
        places = [place for step in steps for place in places_of(step, 11)]
        assert [place for place in places if not math.isnan(place[0])] == [(-1.0, 1)] * (len(places) - 3)
        assert len(places) == len(whole(1))
