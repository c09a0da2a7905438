"""What of InferenceService is not built."""

from __future__ import annotations

import grpc
import pytest

from tests.frontend_svc.fakes import FakeEngine, serving


async def test_what_is_not_built_is_unimplemented():
    async with serving(FakeEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.GenerateSession().read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
