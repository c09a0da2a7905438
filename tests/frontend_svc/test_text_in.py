"""Text workers as a frontend's clients see them: what a text costs, and which of them."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from tests.frontend_svc.fakes import EOS_ID, WAIT_S, FakeEngine, answer, details_of, read_all, serving
from tests.frontend_svc.text.workers.test_workers import SLOW_TEXT, slow_tokenizer
from triptych.api.v1 import model_pb2
from triptych.engine.v1 import session_pb2

LIMIT_S = 1.0


def engine_with(tokenizer, **options) -> FakeEngine:
    engine = FakeEngine(answer("", token_ids=[1, 1, 1]), max_model_len=100_000, **options)
    engine.files[session_pb2.ARTIFACT_KIND_TOKENIZER] = tokenizer.to_str().encode()
    return engine


async def until_there_are(frontend, num_workers: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while frontend.status()["num_text_workers"] != num_workers:  # noqa: ASYNC110  There is no event for it.
            await asyncio.sleep(0)


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_there_are_as_many_text_workers_as_asked_for(num_workers):
    async with serving(engine_with(slow_tokenizer()), text_workers=num_workers) as (_, frontend):
        await until_there_are(frontend, num_workers)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_prompt_that_takes_too_long_is_refused_and_the_others_are_answered(num_workers):
    engine = engine_with(slow_tokenizer())
    async with serving(engine, text_workers=num_workers, text_time_limit_s=LIMIT_S) as (client, _):
        hanging = client.generate(SLOW_TEXT)
        others = [read_all(client.generate("ok")) for _ in range(8)]
        answers = await asyncio.gather(*others)
        assert [ids for _, _, ids, _ in answers] == [[1, 1, 1, EOS_ID]] * 8
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(hanging)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(caught.value)
        for word in ("prompt", "limit of 1 s", "TEXT_TIME_LIMIT"):
            assert word in details


async def test_a_tokenizer_model_that_cannot_be_converted_is_logged_for_the_operator(tmp_path, caplog):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0bbroken")
    engine = engine_with(slow_tokenizer())
    async with serving(engine, tokenizer=str(tmp_path), waits_ready=False) as (client, _):
        # A process that imports a library of models comes before the answer.
        async with asyncio.timeout(WAIT_S):
            while "slow-tokenizers" not in log_text(caplog) and "be converted" not in log_text(caplog):
                await client.model.GetServerInfo(model_pb2.GetServerInfoRequest())
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate("ok"))


def log_text(caplog) -> str:
    return json.dumps([{**vars(record), "args": ""} for record in caplog.records], default=str)
