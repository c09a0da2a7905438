"""A frontend reports how late its own event loop runs."""

from __future__ import annotations

import asyncio

from tests.frontend_svc.fakes import WAIT_S, serving_one

KEYS = ("event_loop_lag_p50_ms", "event_loop_lag_p99_ms", "event_loop_lag_max_ms")


async def test_the_lag_is_sampled_while_a_request_is_open_and_not_after_it():
    async with serving_one() as (engine, client, frontend):
        counts = frontend.requests.loop_lag.distribution.counts
        assert sum(counts) == 0
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        async with asyncio.timeout(WAIT_S):
            # The sampler has no event to wait for.
            while sum(counts) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        values = [float(frontend.status()[key]) for key in KEYS]
        assert 0 <= values[0] <= values[1] <= values[2]
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
        await frontend.drain()
        num_samples = sum(counts)
        await asyncio.sleep(0)
        assert sum(counts) == num_samples
