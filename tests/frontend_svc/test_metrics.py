"""What a frontend's metrics show of real calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
import pytest

from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    WAIT_S,
    Client,
    FakeEngine,
    answer,
    make_request,
    read_all,
    serving,
    serving_one,
)
from triptych.api.v1 import inference_pb2, request_pb2
from triptych_kit.telemetry.metrics import LabelValues


def readings(frontend: Frontend) -> dict[str, dict[LabelValues, float]]:
    """The values of all metrics, without the labels' names and the model's, by the samples' names."""
    found: dict[str, dict[LabelValues, float]] = {}
    for metric in frontend.metrics.collect():
        for sample in metric.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "model_name")
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def counted(frontend: Frontend, name: str) -> dict[str, float]:
    """The values of a metric with one label besides the model that are not 0."""
    return {label: value for (label,), value in readings(frontend)[name].items() if value}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  There is no event for it.
            await asyncio.sleep(0.005)


async def generated(engine: FakeEngine, client: Client, *steps: list[int], n: int = 1, **options):
    """A call whose outputs all get the tokens of `steps`, and then end."""
    first = len(engine.requests)
    call = client.generate(n=n, **options)
    requests = (await engine.wait_for_requests(first + n))[first:]
    for step in steps[:-1]:
        engine.step(dict.fromkeys(requests, step))
    engine.step(dict.fromkeys(requests, steps[-1]), finished=dict.fromkeys(requests, AT_LENGTH))
    return call


async def test_an_item_of_a_batch_that_waits_for_the_queue_is_one_request_without_an_error(caplog):
    caplog.set_level(logging.INFO, "frontend_svc.generation.tracing")
    asked = inference_pb2.GenerateBatchRequest(requests=[make_request() for _ in range(5)])
    async with serving(FakeEngine(answer("the cat")), max_queued_requests=1) as (client, frontend):
        async for message in client.inference.GenerateBatch(asked, timeout=WAIT_S):
            assert not message.HasField("error")
        assert readings(frontend)["triptych_frontend_requests_total"] == {(): 5}
        assert counted(frontend, "triptych_frontend_request_errors_total") == {}
        await until(lambda: len(caplog.records) >= 5)
    assert [record.reason for record in caplog.records] == ["stop"] * 5


async def test_counters_equal_what_clients_were_sent():
    async with serving_one() as (engine, client, frontend):
        prompt = generated_tokens = 0
        for steps in ([[5, 6], [7]], [[5]]):
            _, _, ids, finished = await read_all(await generated(engine, client, *steps))
            assert finished.usage.num_completion_tokens == len(ids)
            prompt += finished.usage.num_prompt_tokens
            generated_tokens += len(ids)
        found = readings(frontend)
        assert found["triptych_frontend_requests_total"] == {(): 2}
        assert counted(frontend, "triptych_frontend_outputs_finished_total") == {"length": 2}
        assert counted(frontend, "vllm:request_success_total") == {"length": 2}
        assert found["triptych_frontend_prompt_tokens_total"] == {(): prompt}
        assert found["vllm:generation_tokens_total"] == {(): generated_tokens} == {(): 4}
        for name, count in (
            ("time_to_first_token_seconds", 2),
            ("inter_token_latency_seconds", 1),
            ("time_per_output_token_seconds", 1),
            ("request_duration_seconds", 2),
            ("tokenize_seconds", 2),
            ("detokenize_seconds", 2),
        ):
            assert found[f"triptych_frontend_{name}_count"] == {(): count}, name
            assert 0 < found[f"triptych_frontend_{name}_sum"][()] < 60, name
        assert found["triptych_frontend_output_tokens_sum"] == {(): 4}
        spent_s = 0.0
        for name in ("queue", "prefill", "decode"):
            assert found[f"triptych_frontend_request_{name}_seconds_count"] == {(): 2}
            spent_s += found[f"triptych_frontend_request_{name}_seconds_sum"][()]
        assert 0 < spent_s <= found["triptych_frontend_request_duration_seconds_sum"][()] + 0.1


def by_label(frontend: Frontend, name: str, label: str) -> dict[str, float]:
    """The values of a metric that are not 0, by one of its labels."""
    samples = [sample for metric in frontend.metrics.collect() for sample in metric.samples]
    return {sample.labels[label]: sample.value for sample in samples if sample.name == name and sample.value}


async def test_metrics_of_the_gen_ai_conventions_are_of_the_same_requests():
    async with serving_one() as (engine, client, frontend):
        _, _, _, finished = await read_all(await generated(engine, client, [5, 6], [7]))
        aborted = client.generate()
        (_, request) = await engine.wait_for_requests(2)
        engine.step({request: [5]})
        await anext(aiter(aborted))
        aborted.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate(model="unknown"))
        await until(lambda: frontend.requests.draining.num_open == 0)
        num_prompt_tokens = finished.usage.num_prompt_tokens
        duration, usage = "gen_ai_server_request_duration_seconds", "gen_ai_client_token_usage"
        ended = by_label(frontend, f"{duration}_count", "error_type")
        assert ended == {"": 1, "CANCELLED": 1, "NOT_FOUND": 1}
        assert by_label(frontend, f"{duration}_count", "gen_ai_request_model") == {engine.model: 1, "": 1}
        assert by_label(frontend, f"{duration}_count", "gen_ai_operation_name") == {"text_completion": 1}
        tokens = by_label(frontend, f"{usage}_sum", "gen_ai_token_type")
        assert tokens == {"input": 2 * num_prompt_tokens, "output": 4}
        for name in ("time_to_first_token", "time_per_output_token"):
            found = readings(frontend)[f"gen_ai_server_{name}_seconds_count"]
            assert found == {("text_completion", "triptych", engine.model, engine.model): 1}


async def test_parameters_and_sources_of_prompts_have_vllms_names():
    async with serving_one() as (engine, client, frontend):
        call = client.generate(n=2, max_tokens=30)
        first, second = await engine.wait_for_requests(2)
        engine.step({first: [5, 6], second: []}, cached={first: 1, second: 1})
        engine.step({first: [7], second: [7]}, finished={first: AT_LENGTH, second: AT_LENGTH})
        *_, finished = [message async for message in call]
        found = readings(frontend)
        num_prompt_tokens = finished.finished.usage.num_prompt_tokens
    assert found["vllm:request_params_n_sum"] == {(): 2}
    assert found["vllm:request_params_max_tokens_sum"] == {(): 30}
    assert found["vllm:request_max_num_generation_tokens_sum"] == {(): 3}
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == {(): num_prompt_tokens - 1}
    assert found["vllm:prompt_tokens_by_source_total"] == {
        ("local_compute",): num_prompt_tokens - 1,
        ("local_cache_hit",): 1,
    }


async def test_each_output_of_a_request_is_counted_and_the_request_once():
    async with serving_one() as (engine, client, frontend):
        async for _ in await generated(engine, client, [5], [6], n=3):
            pass
        found = readings(frontend)
    assert found["triptych_frontend_requests_total"] == {(): 1}
    assert found["triptych_frontend_outputs_finished_total"]["length",] == 3
    assert found["triptych_frontend_generated_tokens_total"] == {(): 6}
    assert found["triptych_frontend_time_to_first_token_seconds_count"] == {(): 1}
    assert found["triptych_frontend_inter_token_latency_seconds_count"] == {(): 3}


async def test_a_client_that_goes_is_an_abort_by_the_client():
    async with serving_one() as (engine, client, frontend):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5]})
        await anext(aiter(call))
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
        await until(lambda: frontend.requests.draining.num_open == 0)
        assert counted(frontend, "triptych_frontend_requests_aborted_total") == {"client": 1}
        assert counted(frontend, "triptych_frontend_outputs_finished_total") == {"abort": 1}
        assert counted(frontend, "triptych_frontend_request_errors_total") == {}
        assert readings(frontend)["triptych_frontend_request_duration_seconds_count"] == {(): 0}


async def test_an_abort_call_is_an_abort_by_request():
    async with serving_one() as (engine, client, frontend):
        call = client.generate(request_id="mine")
        await engine.wait_for_requests(1)
        await client.request.Abort(request_pb2.AbortRequest(request_id="mine"))
        async for _ in call:
            pass
        assert counted(frontend, "triptych_frontend_requests_aborted_total") == {"request": 1}
        assert counted(frontend, "triptych_frontend_outputs_finished_total") == {"abort": 1}


async def test_deadlines_and_refusals_are_counted_by_code():
    async with serving_one() as (_, client, frontend):
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate(model="unknown"))
        # Its time begins with an open connection.
        late = client.generate(timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(late)
        await until(lambda: frontend.requests.draining.num_open == 0)
        assert counted(frontend, "triptych_frontend_requests_aborted_total") == {"deadline": 1}
        assert counted(frontend, "triptych_frontend_request_errors_total")["NOT_FOUND"] == 1
        assert readings(frontend)["triptych_frontend_requests_total"] == {(): 2}


async def test_models_appear_at_zero_and_labels_of_clients_nowhere():
    async with serving_one() as (engine, client, frontend):
        for number in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await read_all(client.generate(model=f"unknown-{number}"))
        labels = {
            value
            for metric in frontend.metrics.collect()
            for sample in metric.samples
            for name, value in sample.labels.items()
            if name == "model_name"
        }
        assert labels == {engine.model}
        assert readings(frontend)["triptych_frontend_time_to_first_token_seconds_count"] == {(): 0}


async def test_what_is_known_of_an_engine_that_is_gone_ends():
    engines = FakeEngine(), FakeEngine()
    async with serving(*engines) as (_, frontend):
        addresses = {engine.address for engine in engines}
        found = readings(frontend)["triptych_frontend_engine_requests_in_flight"]
        assert found == {(address,): 0 for address in addresses}
        frontend.engines.directory.set_addresses("configuration", [engines[0].address])
        await engines[1].kill()
        await until(lambda: len(frontend.engines.directory.clients()) == 1)
        later = readings(frontend)
        assert later["triptych_frontend_engine_requests_in_flight"] == {(engines[0].address,): 0}
        states = later["triptych_frontend_engine_state"]
        assert {labels for labels, value in states.items() if value} == {(engines[0].address, "ready")}
        assert {address for address, _ in states} == {engines[0].address}
