"""A feature's stages on the device: called for its rows alone, and where one raises, only these end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.convert import messages
from engine_svc.convert.feature import WireFeature, WireFeatures
from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost
from engine_svc.core.extras import Extra, OutputExtra
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.step import AdmittedRequest, StepResult
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Inbox, Outbox, StatsSnapshot
from engine_svc.loop.protocols import NoLockstep
from engine_svc.loop.step_output import StepOutput, UnreadSteps
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.runner.executor import InlineExecutor, ThreadExecutor
from engine_svc.runner.feature import LogitRows, PendingPart, RunnerFeature, RunnerFeatures
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import Ints
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.model.checkpoints import MAX_POSITION
from tests.engine_svc.request_options import split_options
from tests.engine_svc.runner.conftest import BLOCK_SIZE, NUM_BLOCKS, TinyModel
from tests.engine_svc.runner.fakes import LogitsOfAllRows, PlanDriver
from tests.engine_svc.runner.test_model_runner import prompt_of
from triptych.engine.v1 import step_pb2
from triptych_kit.clock import FakeClock

LAUNCH_STAGES = [
    "add_row",
    "before_forward",
    "extra_positions",
    "after_forward",
    "before_sampling",
    "apply",
    "after_sampling",
]
PARTS = ["part of before_sampling", "part of after_sampling"]


@dataclass(frozen=True)
class Mark(Extra):
    """Of requests that use the feature. stage: in which it raises."""

    stage: str = ""


@dataclass(frozen=True)
class Count(OutputExtra):
    """How many tokens steps sampled for a row; goes to the client."""

    num_tokens: int
    size_bytes: int = 8

    def merged(self, later: Count) -> Count:
        return Count(self.num_tokens + later.num_tokens)

    def split(self, max_bytes: int) -> list[Count]:
        return [self]


class Staged(RunnerFeature):
    """Has every stage, notes the rows of each call, and raises in the stages that its rows name."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error or ValueError("no luck")
        self._stage_of: dict[int, str] = {}
        self.calls: list[tuple[str, list[int]]] = []
        self.given: list[LogitRows] = []

    def uses(self, admitted: AdmittedRequest) -> bool:
        return Mark in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._stage_of[row] = admitted.extras[Mark].stage
        self._begin("add_row", [row])

    def remove_row(self, row: int) -> None:
        del self._stage_of[row]
        self.calls.append(("remove_row", [row]))

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        self._begin("before_forward", self._own(inputs.rows))

    def extra_positions(self, inputs: StepInputs) -> Ints | None:
        rows = self._own(inputs.rows)
        self._begin("extra_positions", rows)
        # The first token of each of its rows.
        firsts = inputs.counts.cumsum() - inputs.counts
        return firsts[[row in rows for row in inputs.rows.tolist()]] if rows else None

    def after_forward(self, inputs: StepInputs, hidden: Tensor, model: Model) -> None:
        self._begin("after_forward", self._own(inputs.rows))
        assert hidden.shape[0] == inputs.counts.sum()

    def before_sampling(self, inputs: StepInputs, logits: Tensor) -> PendingPart:
        rows = self._own(inputs.rows)
        self._begin("before_sampling", rows)
        assert logits.shape[0] == len(rows)
        return lambda: self._read("part of before_sampling", rows)

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        self._begin("apply", logit_rows.rows.tolist())
        assert len(positions) == len(logit_rows.rows)
        self.given.append(logit_rows)

    def after_sampling(self, logits: Tensor, token_ids: Tensor, logit_rows: LogitRows) -> PendingPart:
        rows = logit_rows.rows.tolist()
        self._begin("after_sampling", rows)
        return lambda: self._read("part of after_sampling", rows)

    def _own(self, rows: Ints) -> list[int]:
        return [row for row in rows.tolist() if row in self._stage_of]

    def _begin(self, stage: str, rows: list[int]) -> None:
        self.calls.append((stage, rows))
        self._raise_in(stage, rows)

    def _read(self, stage: str, rows: Sequence[int]) -> dict[int, Count]:
        self._raise_in(stage, rows)
        return {row: Count(1) for row in rows} if stage == "part of after_sampling" else {}

    def _raise_in(self, stage: str, rows: Sequence[int]) -> None:
        if any(self._stage_of.get(row) == stage for row in rows):
            raise self._error


def add_marked(driver: PlanDriver, name: str, seed: int, stage: str = "", **options: object) -> None:
    driver.add(name, prompt_of(9, seed=seed), **options).extras[Mark] = Mark(stage)


def step_all(driver: PlanDriver) -> StepResult:
    return driver.step({name: request.num_pending_tokens for name, request in driver.requests.items()})


# One process: what a stage raises ends its rows alone.


def test_stages_are_called_in_order_and_for_their_rows_alone(tiny_model):
    feature = Staged()
    driver = tiny_model("llama", "native").driver(features=(feature,))
    driver.add("plain", prompt_of(5, seed=1))
    add_marked(driver, "first", 2)
    driver.add("drawn", prompt_of(7, seed=3), temperature=1.0)
    add_marked(driver, "second", 4, temperature=1.0)
    result = step_all(driver)
    assert feature.calls == [("add_row", [1]), ("add_row", [3])] + [
        (stage, [1, 3]) for stage in LAUNCH_STAGES[1:]
    ]
    assert result.extras == {Count: {1: Count(1), 3: Count(1)}}
    assert result.failed == {}
    driver.finish("first")
    feature.calls.clear()
    # Rows of the batch and of the plan are in another order than they entered.
    result = driver.step({"second": 1, "drawn": 1, "plain": 1})
    assert ("remove_row", [1]) in feature.calls
    assert ("apply", [3]) in feature.calls
    assert result.extras == {Count: {0: Count(1)}}


class ReadsPlans(Staged):
    """Notes its part of each plan."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Mark | None] = []

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        self.parts.append(inputs.extras.get(Mark))


def test_a_feature_reads_its_part_of_each_plan(tiny_model):
    feature = ReadsPlans()
    driver = tiny_model("llama", "native").driver(features=(feature,))
    add_marked(driver, "a", 1)
    pending = driver.requests["a"].num_pending_tokens
    driver.step({"a": pending - 2}, parts={Mark: Mark("first")})
    driver.step({"a": 2})
    driver.step({"a": 1}, parts={Mark: Mark("third")})
    assert feature.parts == [Mark("first"), None, Mark("third")]


def test_a_feature_without_rows_is_not_called(tiny_model):
    feature = Staged()
    driver = tiny_model("llama", "native").driver(features=(feature,))
    driver.add("greedy", prompt_of(5, seed=1))
    driver.add("drawn", prompt_of(6, seed=2), temperature=1.0)
    for _ in range(3):
        step_all(driver)
    driver.finish("drawn")
    assert step_all(driver).extras == {}
    assert feature.calls == []


def test_steps_of_the_same_rows_are_given_the_same_object(tiny_model):
    feature = Staged()
    driver = tiny_model("llama", "native").driver(features=(feature,))
    add_marked(driver, "a", 1)
    driver.add("b", prompt_of(5, seed=2), temperature=1.0)
    for _ in range(4):
        step_all(driver)
    driver.finish("b")
    step_all(driver)
    _, second, third, fourth, last = feature.given
    assert second is third is fourth
    assert last is not fourth


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("stage", LAUNCH_STAGES + PARTS)
def test_a_stage_that_raises_ends_its_rows_and_no_others(tiny_model, stage, model_impl, caplog):
    model = tiny_model("llama", model_impl)
    undisturbed, disturbed = model.driver(), model.driver(features=(Staged(),))
    others = {"greedy": {}, "drawn": {"temperature": 1.0, "seed": 5}, "asking": {"prompt_logprobs": 1}}
    for driver in (undisturbed, disturbed):
        for index, (name, options) in enumerate(others.items()):
            driver.add(name, prompt_of(6 + index, seed=index), **options)
            if driver is disturbed and index == 0:
                add_marked(disturbed, "marked", 9, stage)
    step_all(undisturbed)
    result = step_all(disturbed)
    assert result.failed == {1: "Staged failed: ValueError: no luck"}
    assert result.faults() == [(1, "Staged failed: ValueError: no luck")]
    assert [len(tokens) for tokens in result.sampled] == [1, 0, 1, 1]
    # Nothing of a row that failed is left, be it of the other stages.
    assert not result.extras.get(Count)
    (record,) = [record for record in caplog.records if record.name == "engine_svc.core.errors"]
    assert (record.levelno, record.feature) == (logging.ERROR, "Staged")
    assert record.exc_info is not None
    disturbed.finish("marked")
    # The row is used again, by a request for which no stage raises.
    add_marked(disturbed, "later", 11)
    result = step_all(disturbed)
    assert (result.failed, result.extras[Count]) == ({}, {3: Count(1)})
    step_all(undisturbed)
    for _ in range(6):
        step_all(undisturbed)
        assert step_all(disturbed).failed == {}
    for name in others:
        assert disturbed.requests[name].token_ids == undisturbed.requests[name].token_ids
    assert len(disturbed.requests["later"].output_token_ids) == 7


@pytest.mark.parametrize("stage", LAUNCH_STAGES)
def test_a_step_launched_before_the_failure_was_read_reports_it_again(tiny_model, stage):
    feature = Staged()
    driver = tiny_model("llama", "native").driver(features=(feature,))
    driver.add("plain", prompt_of(5, seed=1))
    add_marked(driver, "marked", 2, stage)
    assert step_all(driver).failed == {1: "Staged failed: ValueError: no luck"}
    feature.calls.clear()
    result = driver.step({"marked": 1, "plain": 1})
    assert result.failed == {0: "Staged failed: ValueError: no luck"}
    assert [len(tokens) for tokens in result.sampled] == [0, 1]
    assert feature.calls == []


@pytest.mark.parametrize("stage", LAUNCH_STAGES)
def test_a_rank_that_reports_no_results_reports_failed_rows_before_a_forward(tiny_model, stage):
    events: list[object] = []
    seen = LogitsOfAllRows(lambda logits, rows: events.append("forward"))
    driver = tiny_model("llama", "native").driver(
        features=(seen, Staged()), on_failed=lambda number, failed: events.append((number, failed))
    )
    driver.add("plain", prompt_of(5, seed=1))
    add_marked(driver, "marked", 2, stage)
    step_all(driver)
    driver.step({"marked": 1, "plain": 1})
    first, second = [(number, {1 - number: "Staged failed: ValueError: no luck"}) for number in range(2)]
    # In the same step if the forward could have used what is missing, else before the next one.
    is_early = stage in LAUNCH_STAGES[:3]
    assert events == [*([first] if is_early else []), "forward", second, "forward"]


def test_a_failure_in_a_prompts_chunk_ends_the_row_before_it_samples(tiny_model):
    driver = tiny_model("llama", "native").driver(features=(Staged(),))
    driver.add("plain", prompt_of(5, seed=1))
    add_marked(driver, "marked", 2, "before_forward")
    result = driver.step({"marked": 4, "plain": 5})
    assert result.failed == {0: "Staged failed: ValueError: no luck"}
    assert [len(tokens) for tokens in result.sampled] == [0, 1]


@pytest.mark.parametrize("logit", [math.nan, -math.inf])
def test_nothing_comes_of_a_row_that_ends_without_a_token(tiny_model, logit):
    def spoil(logits: Tensor, rows: Ints) -> None:
        logits[1] = logit

    driver = tiny_model("llama", "native").driver(features=(LogitsOfAllRows(spoil), Staged()))
    add_marked(driver, "sound", 1, logprobs=1)
    add_marked(driver, "spoiled", 2, logprobs=1)
    result = step_all(driver)
    assert [row for row, _ in result.faults()] == [1]
    assert [len(tokens) for tokens in result.sampled] == [1, 0]
    assert result.extras == {Count: {0: Count(1)}}
    assert list(result.logprobs) == [0]


def test_two_features_fail_apart(tiny_model):
    class Other(Staged):
        def uses(self, admitted: AdmittedRequest) -> bool:
            return bool(admitted.sampling.seed)

        def add_row(self, row: int, admitted: AdmittedRequest) -> None:
            self._stage_of[row] = "apply"

    driver = tiny_model("llama", "native").driver(features=(Staged(), Other(OSError("gone"))))
    add_marked(driver, "a", 1)
    driver.add("b", prompt_of(5, seed=2), seed=3)
    driver.add("c", prompt_of(5, seed=3))
    add_marked(driver, "d", 4, "after_sampling", temperature=1.0)
    result = step_all(driver)
    no_luck = "Staged failed: ValueError: no luck"
    assert result.failed == {0: no_luck, 1: "Other failed: OSError: gone", 3: no_luck}
    assert [len(tokens) for tokens in result.sampled] == [0, 0, 1, 0]


def test_a_row_whose_removal_raises_is_free_all_the_same(tiny_model):
    class Clinging(Staged):
        def remove_row(self, row: int) -> None:
            raise KeyError(row)

    driver = tiny_model("llama", "native").driver(features=(Clinging(),))
    add_marked(driver, "first", 1)
    step_all(driver)
    driver.finish("first")
    driver.add("second", prompt_of(5, seed=2))
    result = step_all(driver)
    assert (result.failed, len(result.sampled[0])) == ({}, 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceFull),
        (MemoryError(), DeviceFull),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceLost),
        (PeersLost("rank 1 is gone"), PeersLost),
    ],
)
@pytest.mark.parametrize("stage", LAUNCH_STAGES + PARTS)
def test_an_error_of_the_device_fails_the_step_and_ends_no_row(tiny_model, stage, error, kind):
    driver = tiny_model("llama", "native").driver(features=(Staged(error),))
    driver.add("plain", prompt_of(5, seed=1))
    add_marked(driver, "marked", 2, stage)
    with pytest.raises(kind):
        step_all(driver)


# Which rows have their logits read.


def test_only_features_that_read_logits_keep_a_greedy_row_from_the_fast_path():
    class Early(RunnerFeature):
        def uses(self, admitted: AdmittedRequest) -> bool:
            return True

        def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None: ...

    sampling, _ = split_options()
    for features, expected in (((Early(),), False), ((Early(), Staged()), True)):
        found = RunnerFeatures(features, max_num_seqs=4)
        for stage in ("", "add_row"):
            admitted = AdmittedRequest("a", [1], 1, sampling, [[]], {Mark: Mark(stage)})
            found.add_row(2, admitted)
            # Whether a stage raised makes no difference: ranks exchange as many logits as their neighbours.
            assert found.reads_logits(admitted) == expected
            found.remove_row(2)
        assert not found.reads_logits(AdmittedRequest("b", [1], 1, sampling, [[]]))


def test_logits_of_rows_are_given_by_their_entries():
    feature = Staged()
    features = RunnerFeatures([feature], max_num_seqs=6)
    sampling, _ = split_options()
    for row, extras in ((0, {}), (4, {Mark: Mark()}), (5, {Mark: Mark()})):
        features.add_row(row, AdmittedRequest(str(row), [1], 1, sampling, [[]], extras))
    rows, positions = np.array([5, 0, 4]), np.array([7, 8, 9])
    features.apply(torch.zeros(3, 4), rows, positions, torch.zeros(6, 10, dtype=torch.int32))
    (some,) = feature.given
    assert (some.entries.tolist(), some.rows.tolist()) == ([0, 2], [5, 4])


# Through the loop: what a feature adds reaches the client, and a request that ends by it says why.


class CountsOfStep(WireFeature):
    writes = Count

    def write(self, step: step_pb2.Step, row: int, extra: Count, now: float) -> None:
        step.extras.add(row=row, prompt_logprobs=step_pb2.PromptLogprobs(first_position=extra.num_tokens))


NUM_TOKENS = 12
FEATURES = WireFeatures([CountsOfStep()])


def serve(model: TinyModel, stage: str | None, *, is_beside: bool, depth: int) -> list[StepOutput]:
    """Five requests to their ends, of which the fourth uses the feature unless `stage` is None."""
    core = build_core(
        SchedulerConfig(
            max_model_len=MAX_POSITION,
            max_num_seqs=8,
            max_num_batched_tokens=24,
            async_scheduling=depth > 1,
            max_steps_in_flight=depth,
        ),
        CacheConfig(NUM_BLOCKS, (FullAttention(BLOCK_SIZE),)),
    )
    runner = model.runner(features=(Staged(),))
    inbox, outbox = Inbox(100), Outbox(max_bytes=1 << 24, wake=lambda: None)
    engine = Engine(
        scheduler=core.scheduler,
        executor=ThreadExecutor(runner) if is_beside else InlineExecutor(runner),
        inbox=inbox,
        stats_snapshot=StatsSnapshot(),
        clock=FakeClock(),
        lockstep=NoLockstep(),
        max_in_flight=depth,
    )
    for handle in range(5):
        sampling, extras = split_options(max_tokens=NUM_TOKENS, temperature=handle % 2, seed=handle)
        if handle == 3 and stage is not None:
            extras[Mark] = Mark(stage)
        prompt = prompt_of(5 + 9 * handle, seed=handle)
        request = Request(f"r{handle}", prompt, len(prompt), sampling, extras=extras)
        inbox.put(Add(request, outbox, handle))
    outputs: list[StepOutput] = []
    for _ in range(500):
        engine.turn()
        output = outbox.take()
        if output is not None:
            outputs.append(output)
        if sum(len(output.finished) for output in outputs) == 5:
            break
    engine.settle()
    engine.close()
    assert core.kv_cache.num_used_blocks == 0
    return outputs


def tokens_of(outputs: list[StepOutput]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {handle: [] for handle in range(5)}
    for output in outputs:
        start = 0
        for handle, num_tokens in zip(output.handles, output.num_tokens, strict=True):
            tokens[handle] += output.token_ids[start : start + num_tokens]
            start += num_tokens
    return tokens


@pytest.mark.parametrize("stage", ["add_row", "apply", "part of after_sampling"])
@pytest.mark.parametrize(("is_beside", "depth"), [(False, 1), (True, 2)])
def test_a_request_ends_with_the_error_of_its_feature_and_others_as_ever(tiny_model, is_beside, depth, stage):
    model = tiny_model("llama", "native")
    expected = tokens_of(serve(model, None, is_beside=is_beside, depth=depth))
    outputs = serve(model, stage, is_beside=is_beside, depth=depth)
    ends = {output.handles[end.row]: end for output in outputs for end in output.finished}
    failed = ends.pop(3)
    assert (failed.reason, failed.message) == (FinishReason.ERROR, "Staged failed: ValueError: no luck")
    assert [end.reason for end in ends.values()] == [FinishReason.LENGTH] * 4
    assert tokens_of(outputs) == {**expected, 3: []}
    assert all(not output.extras for output in outputs)


@pytest.mark.parametrize(("is_beside", "depth"), [(False, 1), (True, 2)])
def test_what_a_feature_adds_reaches_the_step_of_the_client(tiny_model, is_beside, depth):
    model = tiny_model("llama", "native")
    outputs = serve(model, "", is_beside=is_beside, depth=depth)
    assert tokens_of(outputs) == tokens_of(serve(model, None, is_beside=is_beside, depth=depth))
    counts: list[int] = []
    for output in outputs:
        for extra in messages.to_step(
            output, dict.fromkeys(output.handles, frozenset()), FEATURES, 0.0
        ).extras:
            assert output.handles[extra.row] == 3
            counts.append(extra.prompt_logprobs.first_position)
    assert counts == [1] * NUM_TOKENS


def test_what_a_feature_adds_to_unread_steps_reaches_the_client_as_one():
    unread = UnreadSteps()
    for number in range(40):
        unread.add(StepOutput(number, [2, 3], [1, 1], [8, 9], extras={3: {Count: Count(number)}}))
    step = messages.to_step(unread.merged(), {}, FEATURES, 0.0)
    assert [(extra.row, extra.prompt_logprobs.first_position) for extra in step.extras] == [(1, 780)]
