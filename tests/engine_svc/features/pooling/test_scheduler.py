"""Tokens of pooled prompts are counted by task."""

from __future__ import annotations

from engine_svc.core.request import Request
from engine_svc.features.pooling.extras import PoolingRequest
from engine_svc.features.pooling.scheduler import PooledTokens
from tests.engine_svc.scheduler.fakes import Stage, request
from triptych_kit.telemetry.metrics import Metrics


def pooled(request_id: str, num_tokens: int, task: str) -> Request:
    made = request(request_id, num_tokens)
    made.samples = False
    made.extras[PoolingRequest] = PoolingRequest(task)
    return made


def test_tokens_count_by_task_once_their_prompt_has_its_result():
    metrics = Metrics("engine")
    stage = Stage(features=[PooledTokens(metrics)], max_num_batched_tokens=16)
    stage.add(pooled("a", 40, "embed"), pooled("b", 3, "embed"), pooled("c", 5, "score"))
    stage.add(pooled("aborted", 7, "embed"), request("sampled", 9, max_tokens=1))
    counted = metrics.families["triptych_engine_pooled_tokens_total"].read
    stage.update(stage.schedule())
    assert counted() == {}
    stage.scheduler.abort(["aborted"], now=1.0)
    while stage.scheduler.has_work:
        stage.update(stage.schedule())
    assert counted() == {("embed",): 43, ("score",): 5}
