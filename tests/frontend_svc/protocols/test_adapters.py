"""Adapters that are loaded and unloaded by HTTP: on all engines or none, and again on one that returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend_svc.fakes import WAIT_S, FakeEngine, answer, serving
from tests.frontend_svc.protocols.test_openai import HTTPClient, Reply
from triptych_kit.errors import DeadlineExceeded, Internal, InvalidArgument, PermissionDenied

COOK = {"lora_name": "cook", "lora_path": "/adapters/cook"}


class Admin(HTTPClient):
    async def load(self, **fields: object) -> Reply:
        return await self.post("/v1/load_lora_adapter", COOK | fields)

    async def unload(self, name: str = "cook") -> Reply:
        return await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def code_of(self, model: str = "cook") -> int:
        return (await self.post("/v1/completions", {"model": model, "prompt": "the cat"})).status


@contextlib.asynccontextmanager
async def administered(*engines: FakeEngine, **options: Any) -> AsyncIterator[Admin]:
    async with (
        serving(*engines, http_port=0, **{"allow_runtime_lora": True, **options}) as (client, frontend),
        asyncio.timeout(WAIT_S),
    ):
        if len(engines) > 1:
            await client.until_engines_are_ready(len(engines))
        assert frontend.servers.http is not None
        yield Admin(await frontend.servers.http.start())
        await frontend.servers.http.stop(0)


def two() -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine(answer("soup")), FakeEngine(answer("soup"), dp_rank=1)


def kinds(engine: FakeEngine) -> list[str | None]:
    return [call.WhichOneof("call") for call in engine.calls]


async def test_an_adapter_serves_the_request_after_its_load_and_not_after_its_unload():
    engines = two()
    async with administered(*engines) as admin:
        loaded = await admin.load()
        assert (loaded.status, loaded.content) == (200, b"Success: LoRA adapter 'cook' added successfully.")
        assert {await admin.code_of() for _ in range(4)} == {200}
        unloaded = await admin.unload()
        assert (unloaded.status, await admin.code_of()) == (200, 404)
        again = await admin.unload()
    assert (again.status, again.body["error"]["code"]) == (404, "not_found")
    assert [kinds(engine) for engine in engines] == [["add_adapter", "remove_adapter"]] * 2


async def test_a_name_that_is_taken_is_a_conflict_and_is_replaced_on_request():
    engines = two()
    async with administered(*engines) as admin:
        assert (await admin.load()).status == 200
        taken = await admin.load(lora_path="/adapters/other")
        of_model = await admin.load(lora_name="tiny")
        first = dict(engines[0].adapters)
        replaced = await admin.load(lora_path="/adapters/other", load_inplace=True)
    assert (taken.status, taken.body["error"]["type"]) == (409, "conflict_error")
    assert (of_model.status, replaced.status) == (409, 200)
    assert engines[0].adapters == engines[1].adapters != first


async def test_a_name_that_requests_have_for_another_model_is_a_conflict():
    engines = FakeEngine(), FakeEngine(model="other", dp_rank=1, adapters={"cook": "aa" * 32})
    async with administered(*engines, model_alias=("chef=other",)) as admin:
        replies = [await admin.load(lora_name=name, base_model_name="tiny") for name in ("cook", "chef")]
    assert [(reply.status, engines[0].calls) for reply in replies] == [(409, [])] * 2


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (InvalidArgument("rank is 512, the limit is 64", field="rank"), 400),
        (PermissionDenied("outside of the folder"), 403),
        (Internal("broken"), 500),
    ],
)
async def test_what_one_engine_refuses_none_has(refusal, status):
    engines = two()
    engines[1].refusal = refusal
    async with administered(*engines) as admin:
        reply = await admin.load()
        assert (reply.status, await admin.code_of()) == (status, 404)
    assert str(refusal) in reply.body["error"]["message"]
    assert [engine.adapters for engine in engines] == [{}, {}]


async def test_an_unload_that_one_engine_refuses_leaves_it_on_all():
    engines = two()
    async with administered(*engines) as admin:
        assert (await admin.load()).status == 200
        engines[1].refusal = Internal("broken")
        assert (await admin.unload()).status == 500
        assert await admin.code_of() == 200
    assert engines[0].adapters == engines[1].adapters != {}


async def test_an_engine_that_returns_gets_what_was_loaded_and_unloaded():
    engines = two()
    engines[0].adapters, engines[1].adapters = {"old": "aa" * 32}, {"old": "aa" * 32}
    async with administered(*engines) as admin:
        assert [(await admin.load()).status, (await admin.unload("old")).status] == [200, 200]
        await engines[1].kill()
        engines[1].adapters, engines[1].epoch = {"old": "aa" * 32}, engines[1].epoch + 1
        await engines[1].start(engines[1].address)
        await engines[1].wait(lambda: set(engines[1].adapters) == {"cook"})
    assert engines[0].adapters == engines[1].adapters


async def test_an_engine_that_was_out_of_reach_gets_what_was_changed_meanwhile():
    engines = two()
    async with administered(*engines) as admin:
        await engines[1].kill()
        await engines[0].wait(lambda: not engines[1].sessions)
        assert (await admin.load()).status == 200
        assert engines[1].adapters == {}
        await engines[1].start(engines[1].address)
        await engines[1].wait(lambda: set(engines[1].adapters) == {"cook"})


async def test_an_engine_that_answers_too_late_keeps_nothing_of_what_fails():
    engines = two()
    late = engines[1]

    def do_without_answer() -> None:
        late.on_call, late.refusal = do_in_time, DeadlineExceeded("no answer")
        late.adapters["cook"] = "aa" * 32

    def do_in_time() -> None:
        late.refusal = None

    late.on_call = do_without_answer
    async with administered(*engines) as admin:
        assert (await admin.load()).status == 504
        assert await admin.code_of() == 404
    assert [engine.adapters for engine in engines] == [{}, {}]


async def test_an_engine_that_is_lost_does_not_fail_what_the_others_do():
    engines = two()
    engines[1].on_call = engines[1].die
    async with administered(*engines) as admin:
        assert (await admin.load()).status == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "a b"}, "lora_name"),
        ({"lora_name": "a" * 65}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_path": ""}, "lora_path"),
        ({"lora_path": "x" * 4097}, "lora_path"),
        ({"lora_path": "a\0b"}, "lora_path"),
    ],
)
async def test_bad_names_and_paths_are_refused_before_any_engine(body, field):
    engine = FakeEngine()
    async with administered(engine) as admin:
        reply = await admin.load(**body)
    assert (reply.status, reply.body["error"]["param"], engine.calls) == (400, field, [])


async def test_only_admins_may_change_adapters_where_callers_have_roles(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        "- {name: ann, key: key-of-ann-0123456789, role: client}\n"
        "- {name: eve, key: key-of-eve-0123456789, role: admin}\n"
    )
    engine = FakeEngine()
    async with administered(engine, api_keys=str(file)) as admin:
        replies = [
            await admin.post(
                "/v1/load_lora_adapter", COOK, **{"authorization": f"Bearer key-of-{name}-0123456789"}
            )
            for name in ("ann", "eve")
        ]
    assert [reply.status for reply in replies] == [403, 200]
    assert replies[0].body["error"]["code"] == "role_not_allowed"


async def test_without_the_option_the_routes_are_not_served():
    engine = FakeEngine()
    async with administered(engine, allow_runtime_lora=False) as admin:
        reply = await admin.load()
    assert (reply.status, reply.body["error"]["code"], engine.calls) == (404, "unknown_url", [])
    assert "--allow-runtime-lora" in reply.body["error"]["message"]
