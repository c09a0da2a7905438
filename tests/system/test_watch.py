"""Live engines as operators see them: /ui/state of a frontend while requests stream, and `triptych top`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import collect, random_prompt, request_of
from tests.system.stack import WAIT_LIMIT_S, Stack, listeners_of
from tests.triptych_cli.fakes import triptych
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych_kit.channel import open_channel
from triptych_kit.http.admin_http import read_page
from triptych_kit.process.child import Child

BLOCK_SIZE = 16
ENGINE_FLAGS = ("--max-num-seqs=2", f"--block-size={BLOCK_SIZE}", "--num-kv-blocks=200")
State = dict[str, Any]


async def state_when(frontend: Child, holds: Callable[[State], bool]) -> State:
    """The state of the frontend's only engine, once it `holds`."""
    assert frontend.announcement is not None
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            page = json.loads(await read_page(frontend.announcement.admin_http, "/ui/state", limit_s=10))
            [engine] = page["engines"]
            if holds(engine):
                return page


async def test_requests_are_seen_while_they_stream_with_what_they_share_and_wait_for(llama: str) -> None:
    rng = random.Random(5)
    head = random_prompt(rng, 4 * BLOCK_SIZE, VOCAB_SIZE)
    prompts = [head + random_prompt(rng, 5, VOCAB_SIZE) for _ in range(3)]
    async with Stack() as stack:
        trio = await stack.start_all(llama, *ENGINE_FLAGS)
        stub = stack.inference(trio.frontend)
        # Watched from the start, so that the plan that leaves the third request waiting is seen.
        await state_when(trio.frontend, lambda engine: engine["age_ms"] is not None)
        answers = [asyncio.create_task(collect(stub, request_of(prompt, 300))) for prompt in prompts]
        page = await state_when(
            trio.frontend,
            lambda engine: any(request["blockers"] for request in engine["requests"]) and engine["steps"],
        )
        [engine] = page["engines"]
        first, second, third = engine["requests"]
        assert [one["status"] for one in engine["requests"]] == ["RUNNING", "RUNNING", "WAITING"]
        assert first["blocks"][:4] == second["blocks"][:4]
        assert not set(first["blocks"][4:]) & set(second["blocks"][4:])
        assert (third["blockers"], third["blocks"]) == (["max_num_seqs"], [])
        assert (engine["state"], engine["running"], engine["waiting"]) == ("ready", 2, 1)
        assert engine["total_blocks"] == 200
        assert page["frontend"]["open"] == 3 and page["coordinator"] == {"connected": True}
        assert engine["steps"][-1]["duration_ms"] > 0
        assert (engine["rank"], engine["wave"]) == (None, None)

        assert trio.frontend.announcement is not None
        url = f"http://{trio.frontend.announcement.admin_http}"
        shown, printed = await asyncio.gather(
            triptych("top", "--url", url, "--once"),
            triptych("top", "--url", url, "--json"),
        )
        assert (shown.exit_code, printed.exit_code) == (0, 0), shown.err + printed.err
        assert "waits for" in shown.out and engine["address"] in shown.out
        assert json.loads(printed.out)["engines"][0]["address"] == engine["address"]

        assert [len(answer.token_ids) for answer in await asyncio.gather(*answers)] == [300] * 3
        page = await state_when(trio.frontend, lambda engine: not engine["requests"])
        assert set(first["blocks"][:4]) <= set(page["engines"][0]["cached_blocks"])

        # The admin listener has the same call.
        async with open_channel(listeners_of(trio.engine)[1]) as channel:
            call = admin_pb2_grpc.AdminServiceStub(channel).WatchScheduler(
                admin_pb2.WatchSchedulerRequest(max_blocks=1000)
            )
            message = await asyncio.wait_for(call.read(), WAIT_LIMIT_S)
            assert message.stats.num_finished == 3 and len(message.cached_block_ids) > 4
            call.cancel()

        # An engine that is gone is not watched any more.
        trio.engine.kill()
        # While the connection is tried again, what it did last is kept.
        page = await state_when(
            trio.frontend, lambda engine: engine["state"] not in ("ready", "reconnecting")
        )
        assert page["engines"][0]["age_ms"] is None
