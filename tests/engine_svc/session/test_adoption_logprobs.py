"""A request that is adopted and told of its tokens: each of them has its place, known or not."""

from __future__ import annotations

import asyncio
import math
from array import array

from engine_svc.core.step import TokenLogprobs
from tests.engine_svc.loop.logprob_executor import telling
from tests.engine_svc.session.service_rig import (
    LENGTH,
    ServiceRig,
    added,
    column,
    make_entry,
    parked,
    serving,
)
from tests.engine_svc.session.test_adoption import another, kept_entry, whole, wire_id
from triptych.engine.v1 import step_pb2


def moved_entry(handle: int, num_before: int) -> object:
    """An ADD of a request that has yielded tokens at another engine, and wants to be told of all."""
    entry = kept_entry(handle, attempt=1, logprobs=1)
    entry.output_token_ids = column(whole(handle)[:num_before])
    return entry


def places_of(step: step_pb2.Step, handle: int) -> list[tuple[float, int]]:
    """Of each token that a step brings to `handle`: its log probability, and how many others are told of."""
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
    told = TokenLogprobs([-1.0], [1], 1, [5], [-1.0])
    telling(rig.executor, lambda request_id: told if request_id.startswith(wire_id(1)) else None)
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
        steps = [message.step for message in second.heard if message.WhichOneof("message") == "step"]
        places = [place for step in steps for place in places_of(step, 11)]
        assert [place for place in places if not math.isnan(place[0])] == [(-1.0, 1)] * (len(places) - 3)
        assert len(places) == len(whole(1))
