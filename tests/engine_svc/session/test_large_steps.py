"""Steps too large for one message, over a real stream: every token comes, in messages a frontend takes."""

from __future__ import annotations

from array import array

from engine_svc.core.step import TokenLogprobs
from engine_svc.loop.step_output import MAX_PIECE_BYTES
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.loop.logprob_executor import telling
from tests.engine_svc.session.service_rig import (
    LENGTH,
    ServiceRig,
    StreamClient,
    added,
    make_entry,
    parked,
    prompt_of,
    serving,
    until_finished,
)
from triptych.engine.v1 import engine_pb2, session_pb2

RESUME = {"features": ["resume"]}
HANDLES = range(1, 11)


def make_rig(num_others: int, *, max_replay_bytes: int = 64 * MAX_PIECE_BYTES) -> ServiceRig:
    """An engine that tells the first request of so many others at each of its tokens."""
    rig = ServiceRig(max_outbox_bytes=10 * MAX_PIECE_BYTES, max_replay_bytes=max_replay_bytes)
    told = TokenLogprobs([-1.0], [1], num_others, [7] * num_others, [-0.5] * num_others)
    chosen = make_entry(HANDLES[0]).request_id
    telling(rig.executor, lambda request_id: told if request_id.startswith(chosen) else None)
    return rig


def sizes(client: StreamClient) -> list[int]:
    return [message.ByteSize() for message in client.heard if message.WhichOneof("message") == "step"]


def num_others_told(client: StreamClient, handle: int) -> int:
    """Entries beside its tokens, of all messages."""
    steps = [message.step for message in client.heard if message.WhichOneof("message") == "step"]
    return sum(len(step.top_logprobs.token_ids) // 4 for step in steps if handle in array("I", step.handles))


async def test_a_step_that_one_request_makes_too_large_comes_in_several_messages():
    rig = make_rig(num_others=100_000)
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open(**RESUME)
        await client.add(*(make_entry(handle, max_tokens=3) for handle in HANDLES))
        await client.until_ended(*HANDLES)
        assert max(sizes(client)) <= MAX_PIECE_BYTES
        assert client.finished == {handle: [LENGTH] for handle in HANDLES}
        assert client.tokens == {handle: expected_tokens(prompt_of(handle), handle, 3) for handle in HANDLES}
        assert num_others_told(client, HANDLES[0]) >= 3 * 100_000


async def test_what_waited_for_a_stream_comes_in_several_messages_each_when_those_before_are_acknowledged():
    rig = make_rig(num_others=20_000, max_replay_bytes=1000)
    async with serving(rig) as stub:
        first = StreamClient(stub, "f")
        await first.open(**RESUME)
        await added(rig, first, *(make_entry(handle, max_tokens=60) for handle in HANDLES), hold_at=5)
        await first.close()
        await parked(rig, stub)
        rig.executor.gate.set()
        await until_finished(stub, len(HANDLES))
        second = StreamClient(stub, "f")
        last_read = session_pb2.ResumePoint(engine_epoch=7, last_seq=0)
        await second.open(**RESUME, resume=last_read)
        while len(second.finished) < len(HANDLES):
            # What is answered here comes behind all that may be sent.
            await second.flush()
            num_steps = len(sizes(second))
            await second.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=second.heard[-1].seq)))
            await second.until(lambda before=num_steps: len(sizes(second)) > before)
        assert max(sizes(second)) <= MAX_PIECE_BYTES
        assert len(sizes(second)) >= 4
        assert second.finished == {handle: [LENGTH] for handle in HANDLES}
        assert second.tokens == {handle: expected_tokens(prompt_of(handle), handle, 60) for handle in HANDLES}
        assert num_others_told(second, HANDLES[0]) >= 60 * 20_000
