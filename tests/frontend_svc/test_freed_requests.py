"""What has ended leaves nothing that only a full collection would find."""

from __future__ import annotations

import asyncio
import gc

from frontend_svc.generation import OpenRequest
from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, read_all, serving


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


def _open_requests() -> list[OpenRequest]:
    return [one for one in gc.get_objects() if type(one) is OpenRequest]
