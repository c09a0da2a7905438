"""Calls to all ranks of an engine besides steps: sleep, wake, reload of weights, profiles, collectives.

`RunnerControl` is the engine's side, `runner_calls` a rank's side; only plain values pass between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from engine_svc.core.control import Collective, RanksDisagree, Refused, WakeTag, WeightsLost
from engine_svc.runner.executor import Call
from engine_svc.runner.memory.free_memory import num_bytes_in_use
from engine_svc.runner.model_runner import ModelRunner
from triptych_kit.telemetry.logs import LOG_LEVELS, set_log_level

_REFUSAL = "refusal"
_LOSS = "loss"


def _set_log_level(level: str) -> str:
    if level not in LOG_LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LOG_LEVELS)}")
    set_log_level(level)
    return level


# memory: bytes that the rank uses, of its GPU, or on a CPU of its process.
COLLECTIVES = (Collective("memory"), Collective("log_level", {"level": str}))
_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "memory": num_bytes_in_use,
    "log_level": _set_log_level,
}


class ControlledExecutor(Protocol):
    """Reaches all ranks of the engine."""

    def call(self, name: str, arguments: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        """Have each rank run the call after the steps launched before; returns their answers, in order."""
        ...


def runner_calls(runner: ModelRunner) -> dict[str, Call]:
    """The calls of a rank, by name."""
    functions = {**_FUNCTIONS, **runner.collectives}

    def sleep(arguments: Mapping[str, Any]) -> Mapping[str, object]:
        runner.sleep(arguments["level"])
        return {}

    def wake(arguments: Mapping[str, Any]) -> Mapping[str, object]:
        runner.wake([WakeTag(tag) for tag in arguments["tags"]])
        return {}

    def reload_weights(arguments: Mapping[str, Any]) -> Mapping[str, object]:
        folder = None if arguments["folder"] is None else Path(arguments["folder"])
        return {"digest": runner.reload_weights(folder, arguments["names"]).weights_digest}

    def save_weights(arguments: Mapping[str, Any]) -> Mapping[str, object]:
        return {"file": str(runner.save_weights(Path(arguments["folder"])))}

    def start_profile(arguments: Mapping[str, Any]) -> Mapping[str, object]:
        return {"file": str(runner.start_profile(Path(arguments["folder"]), arguments["prefix"]))}

    def collective(arguments: Mapping[str, Any]) -> Mapping[str, object]:
        return {"result": str(functions[arguments["name"]](**arguments["arguments"]))}

    def step_costs(arguments: Mapping[str, Any]) -> Mapping[str, object]:
        return asdict(runner.step_costs(arguments["max_positions"]))

    calls = {
        "step_costs": step_costs,
        "sleep": sleep,
        "wake": wake,
        "reload_weights": reload_weights,
        "save_weights": save_weights,
        "start_profile": start_profile,
        "stop_profile": lambda arguments: {"file": str(runner.stop_profile())},
        "collective": collective,
    }
    return {name: _answering(call) for name, call in calls.items()}


class RunnerControl:
    """Makes one call at a time to all ranks and combines their answers, as `RankCalls` of the loop says."""

    def __init__(self, executor: ControlledExecutor) -> None:
        self._executor = executor

    def call_all(
        self, name: str, arguments: Mapping[str, object] | None = None
    ) -> Sequence[Mapping[str, object]]:
        answers = self._executor.call(name, arguments or {})
        refusals, losses = _all_of(_REFUSAL, answers), _all_of(_LOSS, answers)
        failures = losses + refusals
        if not failures:
            return answers
        if len(failures) < len(answers):
            raise RanksDisagree(f"{name} succeeded on some ranks and failed on others: {failures[0]}")
        if losses:
            raise WeightsLost(losses[0])
        raise Refused(refusals[0])

    def call_each(
        self, name: str, arguments: Mapping[str, object] | None = None, *, undo: str = ""
    ) -> Sequence[Mapping[str, object]]:
        answers = self._executor.call(name, arguments or {})
        if refusals := _all_of(_REFUSAL, answers):
            if undo and len(refusals) < len(answers):
                self._executor.call(undo, {})
            raise Refused(refusals[0])
        return answers


def _all_of(key: str, answers: Sequence[Mapping[str, object]]) -> list[str]:
    return [str(answer[key]) for answer in answers if key in answer]


def _answering(call: Call) -> Call:
    """The call with its refusals as answers: a rank continues after errors that an operator can fix."""

    def answer(arguments: Mapping[str, object]) -> Mapping[str, object]:
        try:
            return call(arguments)
        except (ValueError, OSError) as error:
            return {_REFUSAL: str(error)}
        except WeightsLost as error:
            return {_LOSS: str(error)}

    return answer
