"""Adapters that are loaded, replaced and unloaded while two engines answer, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.engine_svc.features.adapters.folders import write_adapter
from tests.engine_svc.features.adapters.test_checkpoint import change_config, change_tensors
from tests.system.generation import Answer, collect, request_of
from tests.system.stack import Stack, address_of
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych_cli.services import embedded_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NUM_STREAMS = 16
NUM_TOKENS = 120
PROMPT = [40 + 7 * number for number in range(20)]


def request_for(adapter: str, num_tokens: int = NUM_TOKENS, seed: int = 0) -> generate_pb2.GenerateRequest:
    request = request_of(PROMPT, num_tokens, temperature=1.0, seed=seed)
    request.adapter = adapter
    return request


class Service:
    """The frontend of two engines."""

    def __init__(self, http: str, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self._http, self.stub = http, stub

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        return await asyncio.to_thread(self._send, path, body)

    async def load(self, name: str, path: Path, **more: Any) -> tuple[int, str]:
        return await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})

    async def unload(self, name: str) -> tuple[int, str]:
        return await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def answers(self, adapter: str, seeds: Sequence[int] = range(NUM_STREAMS)) -> list[list[int]]:
        found = await asyncio.gather(*(collect(self.stub, request_for(adapter, seed=seed)) for seed in seeds))
        return [answer.token_ids for answer in found]

    def _send(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://{self._http}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


async def begun(service: Service, adapter: str) -> list[asyncio.Task[Answer]]:
    """Streams of which each has begun: its first tokens have come."""
    tasks, first = [], []
    for seed in range(NUM_STREAMS):
        has_begun = asyncio.Event()
        first.append(has_begun)
        tasks.append(asyncio.create_task(_noted(service, request_for(adapter, seed=seed), has_begun)))
    await asyncio.gather(*(each.wait() for each in first))
    return tasks


async def _noted(service: Service, request: generate_pb2.GenerateRequest, has_begun: asyncio.Event) -> Answer:
    answer = Answer()
    async for response in service.stub.Generate(request, timeout=120):
        if response.WhichOneof("event") == "delta":
            answer.token_ids.extend(response.delta.token_ids)
            has_begun.set()
    return answer


def damaged(folder: Path, model: Path) -> dict[str, tuple[Path, str]]:
    """Adapters that cannot be served: each with what the refusal says."""
    weights = "adapter_model.safetensors"
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
    made = {
        name: write_adapter(folder / name, model, seed=9, modules=ATTENTION)
        for name in ("dora", "rank", "module", "shape", "pickle", "truncated", "nan")
    }
    change_config(made["dora"], use_dora=True)
    change_config(made["rank"], r=128)
    change_tensors(
        made["module"],
        lambda tensors: tensors.update(
            {
                name.replace("q_proj", "z_proj"): tensors[name].clone()
                for name in list(tensors)
                if q_proj in name
            }
        ),
    )
    change_tensors(
        made["shape"],
        lambda tensors: tensors.update({f"{q_proj}.lora_A.weight": tensors[f"{q_proj}.lora_A.weight"][:, 1:]
                                        .contiguous()}),
    )  # fmt: skip
    (made["pickle"] / weights).rename(made["pickle"] / "adapter_model.bin")
    content = (made["truncated"] / weights).read_bytes()
    (made["truncated"] / weights).write_bytes(content[:-1])
    change_tensors(
        made["nan"], lambda tensors: tensors[f"{q_proj}.lora_B.weight"].view(-1)[:1].fill_(float("nan"))
    )
    says = {
        "dora": "use_dora", "rank": "128, it takes 1 to 64", "module": "z_proj, the model has no such module",
        "shape": "its weight has", "pickle": "files that run code when read are refused",
        "truncated": "is truncated", "nan": "elements that are not finite",
    }  # fmt: skip
    return {name: (path, says[name]) for name, path in made.items()}


@pytest.fixture
def adapters(tmp_path) -> Path:
    folder, model = tmp_path / "adapters", embedded_model()
    for seed, name in enumerate(("old", "new")):
        write_adapter(folder / name, model, seed=seed, modules=ATTENTION)
    return folder


async def test_adapters_change_beside_streams_that_do_not(adapters, tmp_path):
    model = embedded_model()
    flags = ("--num-threads=1", "--enable-lora", f"--lora-dir={adapters}", "--allow-runtime-lora")
    async with Stack() as stack:
        coordinator = await stack.start("coordinator", "--port=0")
        known = f"--coordinator={address_of(coordinator)}"
        await stack.start_several("engine", str(model), "--port=0", known, *flags, count=2)
        await stack.engines_known(coordinator, 2)
        frontend = await stack.start(
            "frontend", "--port=0", "--http-port=0", known, "--allow-runtime-lora", "--text-workers=1"
        )
        await stack.ready("frontend", frontend)
        assert frontend.announcement is not None
        service = Service(frontend.announcement.http, stack.inference(frontend))
        plain, old, new = [await service.answers(name) for name in ("", "old", "new")]
        assert len({tuple(answer) for answer in (*plain, *old, *new)}) == 3 * NUM_STREAMS
        assert len({token for answers in (plain, old, new) for answer in answers for token in answer}) > 100
        await _is_replaced_and_unloaded(service, adapters, plain, old, new)
        await _refuses(service, adapters, tmp_path, plain)


async def _is_replaced_and_unloaded(
    service: Service, adapters: Path, plain: list[list[int]], old: list[list[int]], new: list[list[int]]
) -> None:
    shutil.copytree(adapters / "old", adapters / "mine")
    assert (await service.load("mine", adapters / "mine"))[0] == 200
    assert await service.answers("mine", range(2)) == old[:2]
    # A name with another content is not taken over but on demand.
    assert (await service.load("mine", adapters / "new"))[0] == 409
    running = await begun(service, "mine")
    beside = await begun(service, "")
    assert (await service.load("mine", adapters / "new", load_inplace=True))[0] == 200
    assert await service.answers("mine", range(4)) == new[:4]
    assert [task.result().token_ids for task in running if await task] == old
    assert [task.result().token_ids for task in beside if await task] == plain
    running = await begun(service, "mine")
    assert (await service.unload("mine"))[0] == 200
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(service.stub, request_for("mine"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    status, body = await service.post("/v1/completions", {"model": "mine", "prompt": "x", "max_tokens": 1})
    assert status == 404, body
    assert [task.result().token_ids for task in running if await task] == new
    assert (await service.unload("mine"))[0] == 404


async def _refuses(service: Service, adapters: Path, outside: Path, plain: list[list[int]]) -> None:
    beside = await begun(service, "")
    for name, (path, says) in damaged(adapters, embedded_model()).items():
        status, body = await service.load(name, path)
        assert status == 400 and says in json.loads(body)["error"]["message"], (name, status, body)
    assert (await service.load("nothing", adapters / "nothing"))[0] == 404
    for path in (outside, adapters / "..", Path("/etc")):
        status, body = await service.load("elsewhere", path)
        assert status == 403 and "--lora-dir" in body, body
    assert (await service.load("../x", adapters / "new"))[0] == 400
    assert [task.result().token_ids for task in beside if await task] == plain
    status, body = await service.post("/v1/completions", {"model": "old", "prompt": "x", "max_tokens": 1})
    assert status == 200, body
