"""Of models that engines bring, the files and tokenizers of the last few are kept."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from frontend_svc.engines.artifacts import MAX_FILES, ArtifactStore
from frontend_svc.text.model import ServedModel
from frontend_svc.text.workers.workers import TextWorkers
from tests.frontend_svc.tokenizers import word_piece_tokenizer
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2


class FakeStub:
    """Offers one tokenizer with one of many chat templates."""

    def __init__(self) -> None:
        self._contents = {session_pb2.ARTIFACT_KIND_TOKENIZER: word_piece_tokenizer().to_str().encode()}

    def ready(self, template: str) -> session_pb2.Ready:
        self._contents[session_pb2.ARTIFACT_KIND_CHAT_TEMPLATE] = template.encode()
        return session_pb2.Ready(model_name="m", artifacts=[self._artifact(kind) for kind in self._contents])

    async def GetArtifacts(
        self, request: engine_pb2.GetArtifactsRequest, timeout: float
    ) -> AsyncIterator[engine_pb2.GetArtifactsResponse]:
        for kind in request.kinds:
            yield engine_pb2.GetArtifactsResponse(artifact=self._artifact(kind), chunk=self._contents[kind])

    def _artifact(self, kind: session_pb2.ArtifactKind) -> session_pb2.Artifact:
        content = self._contents[kind]
        return session_pb2.Artifact(
            kind=kind, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)
        )


class Rig:
    def __init__(self, workers: TextWorkers) -> None:
        self._stub = FakeStub()
        self._store = ArtifactStore(workers)

    async def model_of(self, number: int) -> ServedModel:
        """The model whose chat template is that of `number`."""
        ready = self._stub.ready(f"template {number}")
        return await self._store.model_of(ready, cast(engine_pb2_grpc.EngineCoreServiceStub, self._stub))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    workers = TextWorkers(1, time_limit_s=60.0)
    yield Rig(workers)
    await workers.close()


async def test_engines_of_the_same_files_share_one_tokenizer(rig: Rig) -> None:
    first, second = await rig.model_of(0), await rig.model_of(0)
    assert first.tokenizer is second.tokenizer
    third, fourth = await asyncio.gather(rig.model_of(2), rig.model_of(2))
    assert third.tokenizer is fourth.tokenizer
    assert (await rig.model_of(1)).tokenizer is not first.tokenizer


async def test_the_tokenizer_used_longest_ago_is_forgotten_first(rig: Rig) -> None:
    first = await rig.model_of(0)
    second = await rig.model_of(1)
    for number in range(2, MAX_FILES):
        await rig.model_of(number)
    assert (await rig.model_of(0)).tokenizer is first.tokenizer
    await rig.model_of(MAX_FILES)
    assert (await rig.model_of(0)).tokenizer is first.tokenizer
    assert (await rig.model_of(1)).tokenizer is not second.tokenizer
