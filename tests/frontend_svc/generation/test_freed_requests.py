"""What has ended leaves nothing that only a full collection would find."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import grpc
import pytest

from frontend_svc.generation.generation import OpenRequest
from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, make_request, read_all, serving
from triptych.api.v1 import inference_pb2

_LONG = 1_000_000  # characters of an id that is refused


async def test_a_request_that_has_ended_is_freed_without_a_collection() -> None:
    async with serving(FakeEngine(answer("sat"))) as (client, _):
        gc.collect()
        gc.disable()
        held = len(_open_requests())  # by a test before, for all that this one knows
        try:
            await read_all(client.generate())
            async with asyncio.timeout(WAIT_S):
                # What the call still does after its last message has no event.
                while len(_open_requests()) > held:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        finally:
            gc.enable()


async def test_of_a_request_that_was_refused_nothing_large_waits_for_a_collection() -> None:
    async with serving(FakeEngine()) as (client, _):
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(8):
                with pytest.raises(grpc.aio.AioRpcError):
                    await client.inference.GenerateUnary(_too_long(), timeout=WAIT_S)
                with pytest.raises(grpc.aio.AioRpcError):
                    await read_all(client.generate(request_id="i" * _LONG))
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    # The last one may still be on its way out.
    assert held < 4 * _LONG


def _too_long() -> inference_pb2.GenerateUnaryRequest:
    return inference_pb2.GenerateUnaryRequest(request=make_request(request_id="i" * _LONG))


def _open_requests() -> list[OpenRequest]:
    return [one for one in gc.get_objects() if type(one) is OpenRequest]
