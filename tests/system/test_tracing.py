"""One tree of spans per request, from two processes, under the client's own trace."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from tests.system.generation import read_to_end, request_of
from tests.system.otlp import OtlpReceiver, ReceivedSpan
from tests.system.stack import Stack

CLIENT_SPAN_ID = "00f067aa0ba902b7"
EXPECTED = {"request", "tokenize", "detokenize", "engine.request", "queue", "prefill", "decode"}


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[OtlpReceiver, str]]:
    receiver = OtlpReceiver()
    endpoint = await receiver.start()
    yield receiver, endpoint
    await receiver.stop()


@pytest.mark.parametrize("is_aborted", [False, True], ids=["finished", "aborted"])
async def test_a_request_is_one_tree_under_the_clients_traceparent(is_aborted, slow_llama, receiver):
    received, endpoint = receiver
    rng = random.Random(11)
    trace_id = f"{rng.getrandbits(128):032x}"
    metadata = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN_ID}-01"),)
    async with Stack({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}) as stack:
        trio = await stack.start_all(slow_llama)
        # Many seconds of steps are left when an abort comes, however late its client gets to it.
        call = stack.inference(trio.frontend).Generate(
            request_of("the quick brown fox", 400 if is_aborted else 20), metadata=metadata
        )
        for _ in range(6):
            await call.read()
        if is_aborted:
            call.cancel()
        else:
            await read_to_end(call)
        spans = await received.trace(trace_id, lambda spans: {span.name for span in spans} >= EXPECTED)
    _check_tree(spans)
    engine_span = next(span for span in spans if span.name == "engine.request")
    assert {"scheduled", "first_token"} <= set(engine_span.events)
    assert ("aborted" in engine_span.events) == is_aborted


def _check_tree(spans: list[ReceivedSpan]) -> None:
    assert len(spans) == len(EXPECTED)
    by_name = {span.name: span for span in spans}
    parents = {
        "request": CLIENT_SPAN_ID,
        "tokenize": by_name["request"].span_id,
        "detokenize": by_name["request"].span_id,
        "engine.request": by_name["request"].span_id,
        "queue": by_name["engine.request"].span_id,
        "prefill": by_name["engine.request"].span_id,
        "decode": by_name["engine.request"].span_id,
    }
    assert {name: span.parent_span_id for name, span in by_name.items()} == parents
    assert len({span.pid for span in spans}) == 2
