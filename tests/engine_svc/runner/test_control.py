"""Requests to all ranks reach each of them in order, and what none could do changes nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine_svc.core.control import RanksDisagree, Refused, WakeTag, WeightsLost
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.model.errors import CheckpointError
from engine_svc.model.facts import KVShape, ModelFacts
from engine_svc.runner import control as control_module
from engine_svc.runner.control import RunnerControl, runner_calls
from engine_svc.runner.executor import Call, InlineExecutor, ThreadExecutor
from engine_svc.runner.memory.parked_memory import NoRoom
from tests.engine_svc.runner.conftest import TinyModel
from tests.engine_svc.runner.fakes import PlanDriver

FACTS = ModelFacts(
    architecture="Llama",
    kv_shapes=(KVShape(1, 1, 1),),
    vocab_size=3,
    max_position=4,
    eos_token_ids=(),
    dtype="float32",
    num_parameters=1,
    weights_digest="first",
)


@dataclass
class FakeRunner:
    """Notes what it is asked for; what is in `refuses` cannot be had."""

    asked: list[object] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    refuses: Exception | None = None
    digest: str = "second"  # of the weights that it reads
    collectives: Mapping[str, Callable[..., object]] = field(default_factory=dict)

    def _note(self, *asked: object) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.threads.add(threading.current_thread().name)
        self.asked.append(asked)

    def execute(self, plan: StepPlan) -> FakeRunner:
        self._note("step", plan.step_number)
        return self

    def result(self) -> StepResult:
        return StepResult(0, sampled=[])

    def sleep(self, level: int) -> None:
        self._note("sleep", level)

    def wake(self, tags: Collection[WakeTag]) -> None:
        self._note("wake", *tags)

    def reload_weights(self, folder: Path | None, names: list[str]) -> ModelFacts:
        self._note("reload", folder, *names)
        return replace(FACTS, weights_digest=self.digest)

    def save_weights(self, folder: Path) -> Path:
        self._note("save", folder)
        return folder / "file"

    def start_profile(self, folder: Path, prefix: str) -> Path:
        self._note("start", folder, prefix)
        return folder / prefix

    def stop_profile(self) -> Path:
        self._note("stop")
        return Path("trace")


@dataclass
class ManyRanks:
    """Ranks in other processes: what goes to them and comes back is JSON."""

    calls: Sequence[Mapping[str, Call]]
    called: list[str] = field(default_factory=list)

    def call(self, name: str, arguments: Mapping[str, object]) -> list[Mapping[str, object]]:
        self.called.append(name)
        sent = json.dumps(arguments)
        return [json.loads(json.dumps(calls[name](json.loads(sent)))) for calls in self.calls]


def test_everything_reaches_every_rank_with_its_arguments():
    runners = [FakeRunner(), FakeRunner()]
    control = RunnerControl(ManyRanks([runner_calls(runner) for runner in runners]))
    control.call_all("sleep", {"level": 2})
    control.call_each("wake", {"tags": ["weights", "kv_cache"]})
    assert control.call_all("reload_weights", {"folder": None, "names": []}) == [{"digest": "second"}] * 2
    assert (
        control.call_all("reload_weights", {"folder": "/new", "names": ["a"]}) == [{"digest": "second"}] * 2
    )
    assert control.call_each("save_weights", {"folder": "/kept"}) == [{"file": "/kept/file"}] * 2
    started = control.call_each("start_profile", {"folder": "/traces", "prefix": "p"}, undo="stop_profile")
    assert started == [{"file": "/traces/p"}] * 2
    assert control.call_each("stop_profile") == [{"file": "trace"}] * 2
    for runner in runners:
        assert runner.asked == [
            ("sleep", 2),
            ("wake", WakeTag.WEIGHTS, WakeTag.KV_CACHE),
            ("reload", None),
            ("reload", Path("/new"), "a"),
            ("save", Path("/kept")),
            ("start", Path("/traces"), "p"),
            ("stop",),
        ]


TRACES = {"folder": "/traces", "prefix": "p"}
_NO_FOLDER, _NO_WEIGHTS = CheckpointError("no such folder"), WeightsLost("no weights")


@pytest.mark.parametrize(
    ("ranks", "call", "error", "words"),
    [
        # What no rank could do is refused in its words.
        ([{"refuses": _NO_FOLDER}] * 2, "reload_weights", Refused, "no such folder"),
        ([{"refuses": PermissionError("no such folder")}] * 2, "reload_weights", Refused, "no such folder"),
        # Where one rank has no weights any more and none has others, the engine has none.
        ([{"refuses": _NO_WEIGHTS}] * 2, "reload_weights", WeightsLost, "no weights"),
        ([{"refuses": _NO_FOLDER}, {"refuses": _NO_WEIGHTS}], "reload_weights", WeightsLost, "no weights"),
        # Ranks that did not all do it are no engine any more.
        ([{}, {"refuses": _NO_FOLDER}], "reload_weights", RanksDisagree, "failed on others: no such folder"),
        ([{}, {"refuses": _NO_WEIGHTS}], "reload_weights", RanksDisagree, "failed on others: no weights"),
        # A trace that some cannot write ends no engine.
        ([{}, {"refuses": OSError("no space left")}], "stop_profile", Refused, "no space left"),
    ],
)
def test_what_ranks_answer_decides_what_becomes_of_the_engine(ranks, call, error, words):
    control = RunnerControl(ManyRanks([runner_calls(FakeRunner(**rank)) for rank in ranks]))
    make_call = control.call_all if call == "reload_weights" else control.call_each
    with pytest.raises(error, match=words):
        make_call(call, {"folder": None, "names": []})


def test_a_wake_for_which_one_rank_has_no_room_is_refused_and_wakes_the_rest_the_next_time():
    runners = [FakeRunner(), FakeRunner(refuses=NoRoom("8 MiB cannot be allocated"))]
    control = RunnerControl(ManyRanks([runner_calls(runner) for runner in runners]))
    with pytest.raises(Refused, match="8 MiB cannot be allocated"):
        control.call_each("wake", {"tags": ["weights"]})
    runners[1].refuses = None
    control.call_each("wake", {"tags": ["weights"]})
    assert [runner.asked for runner in runners] == [
        [("wake", WakeTag.WEIGHTS)] * 2,
        [("wake", WakeTag.WEIGHTS)],
    ]


def test_a_profile_that_some_ranks_cannot_begin_is_stopped_in_the_others_and_refused():
    runners = [FakeRunner(), FakeRunner(refuses=PermissionError("/traces cannot be written to"))]
    control = RunnerControl(ManyRanks([runner_calls(runner) for runner in runners]))
    with pytest.raises(Refused, match="/traces cannot be written to"):
        control.call_each("start_profile", TRACES, undo="stop_profile")
    assert runners[0].asked == [("start", Path("/traces"), "p"), ("stop",)]


def test_a_profile_that_no_rank_can_begin_leaves_the_one_that_runs():
    runners = [FakeRunner(refuses=ValueError("is recording already")) for _ in range(2)]
    ranks = ManyRanks([runner_calls(runner) for runner in runners])
    with pytest.raises(Refused, match="is recording already"):
        RunnerControl(ranks).call_each("start_profile", TRACES, undo="stop_profile")
    assert ranks.called == ["start_profile"]


def test_a_collective_runs_with_its_arguments_in_every_rank_and_a_refusal_ends_no_engine():
    def power(base: int, exponent: int) -> int:
        if base == exponent:
            raise ValueError("base and exponent are equal")
        return base**exponent

    ranks = ManyRanks([runner_calls(FakeRunner(collectives={"power": power})) for _ in range(2)])
    call = {"name": "power", "arguments": {"base": 2, "exponent": 5}}
    assert RunnerControl(ranks).call_each("collective", call) == [{"result": "32"}] * 2
    call = {"name": "power", "arguments": {"base": 2, "exponent": 2}}
    with pytest.raises(Refused, match="are equal"):
        RunnerControl(ranks).call_each("collective", call)


def test_the_log_level_of_every_rank_can_be_changed(monkeypatch):
    levels: list[str] = []
    monkeypatch.setattr(control_module, "set_log_level", levels.append)
    ranks = ManyRanks([runner_calls(FakeRunner()) for _ in range(2)])
    call = {"name": "log_level", "arguments": {"level": "error"}}
    assert RunnerControl(ranks).call_each("collective", call) == [{"result": "error"}] * 2
    with pytest.raises(Refused, match="log level 'loud' is not one of"):
        RunnerControl(ranks).call_each("collective", call | {"arguments": {"level": "loud"}})
    assert levels == ["error"] * 2


def test_a_bug_in_a_rank_is_no_refusal():
    control = RunnerControl(
        InlineExecutor(FakeRunner(), runner_calls(FakeRunner(refuses=RuntimeError("bug"))))
    )
    with pytest.raises(RuntimeError, match="bug"):
        control.call_all("sleep", {"level": 1})


def test_inline_it_happens_in_the_callers_thread():
    runner = FakeRunner()
    RunnerControl(InlineExecutor(runner, runner_calls(runner))).call_all("sleep", {"level": 1})
    assert runner.threads == {threading.current_thread().name}


def test_beside_it_happens_in_the_models_thread_behind_the_steps_launched_before():
    runner = FakeRunner()
    executor = ThreadExecutor(runner, runner_calls(runner))
    steps = [executor.launch(StepPlan(number)) for number in (1, 2)]
    RunnerControl(executor).call_all("sleep", {"level": 1})
    steps.append(executor.launch(StepPlan(3)))
    for step in steps:
        step.result()
    executor.shutdown()
    assert runner.asked == [("step", 1), ("step", 2), ("sleep", 1), ("step", 3)]
    assert runner.threads == {"model"}


def test_an_error_beside_reaches_the_caller_and_the_thread_goes_on():
    runner = FakeRunner()
    executor = ThreadExecutor(runner, runner_calls(FakeRunner(refuses=RuntimeError("bug"))))
    with pytest.raises(RuntimeError, match="bug"):
        RunnerControl(executor).call_all("sleep", {"level": 1})
    executor.launch(StepPlan(1)).result()
    executor.shutdown()
    assert runner.asked == [("step", 1)]


def test_a_real_runner_sleeps_wakes_and_is_profiled_in_the_models_thread(tiny_model, tmp_path):
    model: TinyModel = tiny_model("llama", "native")
    runner = model.runner()
    executor = ThreadExecutor(runner, runner_calls(runner))
    control = RunnerControl(executor)
    control.call_all("sleep", {"level": 1})
    with pytest.raises(Refused, match="nothing to load them from"):
        control.call_all("sleep", {"level": 2})
    control.call_each("wake", {"tags": [tag.value for tag in WakeTag]})
    (started,) = control.call_each("start_profile", {"folder": str(tmp_path), "prefix": "engine"})
    trace = Path(started["file"])
    plans: list[StepPlan] = []
    driver = PlanDriver(_Collecting(plans), num_blocks=8, block_size=4)
    driver.add("r", [1, 2, 3])
    driver.step({"r": 3})
    assert executor.launch(plans[0]).result().sampled[0]
    assert control.call_each("stop_profile") == [started]
    assert trace.stat().st_size > 0
    executor.shutdown()


class _Collecting:
    """A runner that keeps plans for another."""

    def __init__(self, plans: list[StepPlan]) -> None:
        self.plans = plans

    def execute(self, plan: StepPlan) -> _Collecting:
        self.plans.append(plan)
        return self

    def result(self) -> StepResult:
        return StepResult(0, sampled=[[5]])
