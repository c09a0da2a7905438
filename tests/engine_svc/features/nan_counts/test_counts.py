"""The number of a row's logits that are not finite reaches the client, with the error that they cause."""

from __future__ import annotations

from math import inf, nan

from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.convert import messages
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.request import FinishReason
from engine_svc.core.step import StepResult
from engine_svc.features.nan_counts import runner, wire
from engine_svc.features.nan_counts.extras import NanCount
from engine_svc.loop.step_output import FinishedRow, StepOutput, split
from engine_svc.runner.sampling.transfer import Ints
from tests.engine_svc.runner.fakes import LogitsOfAllRows
from tests.engine_svc.scheduler.fakes import Stage, request


def test_without_the_option_nothing_is_counted():
    assert runner.make(EngineConfig(model="m"), None) is None
    assert runner.make(EngineConfig(model="m", count_nan_logits=True), None) is not None


def test_rows_with_logits_that_are_not_finite_are_counted_and_others_sample(tiny_model):
    def spoil(logits: Tensor, rows: Ints) -> None:
        logits[1, 5:8] = nan
        logits[1, 9] = inf
        logits[2, 4] = -inf
        logits[3, 0] = inf

    driver = tiny_model("llama", "native").driver(features=(LogitsOfAllRows(spoil), runner.NanCounts()))
    for row in range(4):
        driver.add(f"r{row}", [3 + row, 4, 5], temperature=0.5 * (row % 2))
    result = driver.step(dict.fromkeys(driver.requests, 3))
    assert result.non_finite == [1, 3]
    assert [len(tokens) for tokens in result.sampled] == [1, 0, 1, 0]
    assert result.extras == {NanCount: {1: NanCount(4), 3: NanCount(1)}}


def test_the_count_goes_out_with_the_end_of_the_request():
    stage = Stage()
    stage.add(request("a", 8), request("b", 8))
    plan = stage.schedule()
    result = StepResult(plan.step_number, [[7], []], non_finite=[1], extras={NanCount: {1: NanCount(3)}})
    result.clear_faulty()
    broken, sound = stage.scheduler.update(plan, result, 1.0)
    assert (broken.request_id, broken.finish_reason, broken.extras) == (
        "b",
        FinishReason.ERROR,
        {NanCount: NanCount(3)},
    )
    assert (sound.request_id, sound.extras) == ("a", None)


def test_the_wire_has_it_under_its_row():
    output = StepOutput(1, [5, 6], [1, 0], [9], [FinishedRow(1, FinishReason.ERROR)])
    output.extras[6] = {NanCount: NanCount(3).merged(NanCount(2))}
    features = WireFeatures([wire.make(EngineConfig(model="m"))])
    for piece in split(output, 1_000):
        step = messages.to_step(piece, {6: frozenset()}, features, 0.0)
        assert [(extra.row, extra.nan_count) for extra in step.extras] == [(1, 5)]
