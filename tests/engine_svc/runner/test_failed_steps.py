"""A step that fails half-way leaves nothing behind that a later one could see."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.errors import DeviceFull, DeviceLost
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Inbox, StatsSnapshot
from engine_svc.loop.protocols import NoLockstep
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.ranks.state_digest import sampler_digest
from engine_svc.runner.executor import InlineExecutor, ThreadExecutor
from engine_svc.runner.failures import translated
from engine_svc.runner.model_runner import ModelRunner
from engine_svc.runner.running_step import RunningStep
from engine_svc.scheduler.config import SchedulerConfig
from tests.connections import without_collections
from tests.engine_svc.loop.frontend import Frontend
from tests.engine_svc.model.checkpoints import MAX_POSITION
from tests.engine_svc.request_options import split_options
from tests.engine_svc.runner.conftest import BLOCK_SIZE, NUM_BLOCKS, TinyModel
from tests.engine_svc.runner.fakes import apply
from tests.engine_svc.runner.test_input_batch import admitted, plan, small_batch
from triptych_kit.clock import FakeClock

NUM_REQUESTS = 7
MAX_TOKENS = 24
SAMPLING_OPTIONS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "top_k": 30},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.7, "presence_penalty": 0.5, "logprobs": 2},
    {"bad_words": ((5,), (9, 8)), "logit_bias": ((7, 3.0),)},
    {"min_tokens": 6, "stop_token_ids": frozenset({11})},
    {"allowed_token_ids": frozenset(range(40, 90)), "temperature": 1.0},
]


class FailingModel:
    """Raises in the middle of chosen steps, before their forward or after it."""

    def __init__(self, model: Model, why: Callable[[StepPlan], Exception | None], moment: str) -> None:
        self._model = model
        self._why = why
        self._moment = moment
        self.plan = StepPlan(0)  # which is running
        self.of_failed_steps: list[weakref.ref[Tensor]] = []  # what they computed

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        if self._moment == "before":
            self._fail(token_ids)
        logits = self._model.forward(token_ids, positions, logit_rows, context)
        if self._moment == "after":
            self._fail(logits)
        return logits

    def _fail(self, computed: Tensor) -> None:
        if self._why(self.plan) is not None:
            self.of_failed_steps.append(weakref.ref(computed))
            # No local may hold it: this frame is in its traceback.
            raise self._why(self.plan) or AssertionError


def failing_runner(
    model: TinyModel, why: Callable[[StepPlan], Exception | None], moment: str
) -> tuple[ModelRunner, FailingModel]:
    """A runner whose model knows the plan of each step, and may raise."""
    failing = FailingModel(model.ours.model, why, moment)
    runner = model.runner(model=failing)
    execute = runner.execute

    def execute_noted(plan: StepPlan) -> RunningStep:
        failing.plan = plan
        return execute(plan)

    runner.execute = execute_noted  # type: ignore[method-assign]
    return runner, failing


def serve(runner: ModelRunner, *, is_beside: bool, steps_in_flight: int) -> Frontend:
    """Run all requests to their ends on the real runner."""
    core = build_core(
        SchedulerConfig(
            max_model_len=MAX_POSITION,
            max_num_seqs=8,
            max_num_batched_tokens=40,
            async_scheduling=steps_in_flight > 1,
            max_steps_in_flight=steps_in_flight,
        ),
        CacheConfig(NUM_BLOCKS, (FullAttention(BLOCK_SIZE),)),
    )
    inbox, reader, rng = Inbox(100), Frontend(), random.Random(4)
    for handle in range(NUM_REQUESTS):
        prompt = [rng.randrange(3, 160) for _ in range(3 + 6 * handle)]
        options = {"temperature": 1.0, **SAMPLING_OPTIONS[handle]}
        sampling, extras = split_options(max_tokens=MAX_TOKENS, seed=handle, **options)
        request = Request(f"r{handle}", prompt, len(prompt), sampling, extras=extras)
        inbox.put(Add(request, reader.outbox, handle))
    engine = Engine(
        scheduler=core.scheduler,
        executor=ThreadExecutor(runner) if is_beside else InlineExecutor(runner),
        inbox=inbox,
        stats_snapshot=StatsSnapshot(),
        clock=FakeClock(),
        lockstep=NoLockstep(),
        max_in_flight=steps_in_flight,
    )
    for _ in range(1000):
        engine.turn()
        reader.read()
        if len(reader.ends) == NUM_REQUESTS:
            break
    engine.settle()
    engine.close()
    assert len(reader.ends) == NUM_REQUESTS
    assert core.kv_cache.num_used_blocks == 0
    # The rows of the last step are still there.
    runner.execute(StepPlan(0, released=[f"r{handle}" for handle in range(NUM_REQUESTS)]))
    return reader


def in_steps(*numbers: int) -> Callable[[StepPlan], Exception | None]:
    return lambda plan: ValueError("bad luck") if plan.step_number in numbers else None


@pytest.mark.parametrize(("is_beside", "steps_in_flight"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("numbers", [(1,), (2, 3), (5,), (9, 30)], ids=str)
def test_streams_of_steps_that_fail_are_those_of_an_undisturbed_run(
    tiny_model, is_beside, steps_in_flight, moment, numbers
):
    model = tiny_model("llama", "native")
    expected = serve(model.runner(), is_beside=is_beside, steps_in_flight=steps_in_flight)
    runner, failing = failing_runner(model, in_steps(*numbers), moment)
    seen = serve(runner, is_beside=is_beside, steps_in_flight=steps_in_flight)
    # A step behind one that failed is not run.
    assert 1 <= len(failing.of_failed_steps) <= len(numbers)
    assert seen.tokens == expected.tokens
    assert seen.logprobs.keys() == expected.logprobs.keys()
    for handle, logprobs in expected.logprobs.items():
        assert seen.logprobs[handle] == pytest.approx(logprobs, abs=1e-5)
    assert runner.batch.row_of == {}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_poisonous_row_leaves_the_others_tokens_alone(tiny_model, moment):
    model = tiny_model("llama", "native")
    expected = serve(model.runner(), is_beside=True, steps_in_flight=2)

    def why(plan: StepPlan) -> Exception | None:
        rows = dict(zip(plan.request_ids, plan.num_computed_tokens, strict=True))
        return ValueError("bad row") if rows.get("r3", 0) >= 20 else None

    seen = serve(failing_runner(model, why, moment)[0], is_beside=True, steps_in_flight=2)
    ended = seen.tokens.pop(3)
    assert ended == expected.tokens.pop(3)[: len(ended)]
    assert seen.tokens == expected.tokens


@pytest.mark.parametrize("is_beside", [False, True], ids=["inline", "thread"])
@pytest.mark.parametrize(
    "make_error",
    [
        lambda: RuntimeError("shapes do not match"),
        lambda: torch.OutOfMemoryError("CUDA out of memory"),
        lambda: MemoryError(),
        lambda: ValueError("bad luck"),
    ],
    ids=["runtime", "full", "memory", "value"],
)
def test_what_a_failed_step_computed_is_freed_without_a_collection(
    tiny_model, monkeypatch, is_beside, make_error
):
    # pytest keeps what is logged, and with it the traceback.
    monkeypatch.setattr(logging.getLogger("engine_svc.loop.recovery"), "disabled", True)

    def why(plan: StepPlan) -> Exception | None:
        return make_error() if plan.step_number in (2, 3) else None

    runner, failing = failing_runner(tiny_model("llama", "native"), why, "after")
    with without_collections():
        serve(runner, is_beside=is_beside, steps_in_flight=1)
        assert len(failing.of_failed_steps) == 2
        assert [logits() for logits in failing.of_failed_steps] == [None, None]


def test_a_runner_after_a_failed_step_is_in_the_state_of_a_new_one(tiny_model):
    model = tiny_model("llama", "native")
    (failing, _), fresh = failing_runner(model, in_steps(1), "after"), model.runner()
    sampling, extras = split_options(temperature=0.5, seed=3, repetition_penalty=1.2, min_tokens=2)
    first = plan([("a", 4, 0, [0]), ("b", 3, 0, [1])], admitted=[admitted("a", 4), admitted("b", 3)])
    for entry in first.admitted:
        entry.sampling, entry.extras = sampling, extras
    first.step_number = 1
    with pytest.raises(ValueError, match="bad luck"):
        failing.execute(first)
    # "c" never reached it.
    failing.execute(StepPlan(2, released=["b", "a", "c"]))
    assert failing.batch.row_of == fresh.batch.row_of == {}
    first.step_number = 3
    tokens = [runner.execute(first).result().sampled for runner in (failing, fresh)]
    assert tokens[0] == tokens[1]
    for runner in (failing, fresh):
        runner.execute(StepPlan(4, released=["a", "b"]))
    assert sampler_digest(failing.sampler) == sampler_digest(fresh.sampler)


def test_a_request_whose_entry_failed_can_be_released():
    batch = small_batch()
    with pytest.raises(RuntimeError):
        # Longer than a row.
        batch.enter(admitted("a", 100))
    assert batch.release(["a", "b"]) == [0]
    assert apply(batch, plan([("c", 2, 0, [3])], admitted=[admitted("c", 2)])) == [3]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceFull),
        (MemoryError(), DeviceFull),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), DeviceFull),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceLost),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), DeviceLost),
        (RuntimeError("shapes do not match"), RuntimeError),
    ],
)
def test_device_errors_are_distinguished_from_row_errors(error, kind):
    assert type(translated(error)) is kind
