"""Calls to all ranks of an engine besides steps: sleep, wake, reload of weights, profiles, memory use.

`RunnerControl` is the engine's side, `runner_calls` a rank's side; only plain values pass between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine_svc.model.facts import ModelFacts
from engine_svc.runner.executor import Call
from engine_svc.runner.memory.free_memory import num_bytes_in_use
from engine_svc.runner.sleep import WakeTag, WeightsLost

_REFUSAL = "refusal"
_LOSS = "loss"


class Refused(ValueError):
    """The call cannot be done; the message gives the reason, and nothing has changed."""


class RanksDisagree(RuntimeError):
    """Some ranks succeeded and others failed: they no longer hold one model, so the engine ends."""


class ControlledRunner(Protocol):
    """The runner of one rank."""

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: Collection[WakeTag]) -> None: ...

    def reload_weights(self, folder: Path | None) -> ModelFacts: ...

    def start_profile(self, folder: Path, prefix: str) -> Path: ...

    def stop_profile(self) -> Path: ...


class Executor(Protocol):
    """Reaches all ranks of the engine."""

    def call(self, name: str, arguments: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        """Have each rank run the call after the steps launched so far; returns their answers, in order."""
        ...


def runner_calls(runner: ControlledRunner) -> dict[str, Call]:
    """The calls of a rank, by name."""

    def wake(arguments: Mapping[str, object]) -> Mapping[str, object]:
        tags = arguments["tags"]
        assert isinstance(tags, list)
        runner.wake([WakeTag(tag) for tag in tags])
        return {}

    def sleep(arguments: Mapping[str, object]) -> Mapping[str, object]:
        level = arguments["level"]
        assert isinstance(level, int)
        runner.sleep(level)
        return {}

    def reload_weights(arguments: Mapping[str, object]) -> Mapping[str, object]:
        folder = arguments["folder"]
        facts = runner.reload_weights(None if folder is None else Path(str(folder)))
        return {"weights_digest": facts.weights_digest}

    def start_profile(arguments: Mapping[str, object]) -> Mapping[str, object]:
        return {"file": str(runner.start_profile(Path(str(arguments["folder"])), str(arguments["prefix"])))}

    def stop_profile(arguments: Mapping[str, object]) -> Mapping[str, object]:
        return {"file": str(runner.stop_profile())}

    calls = {
        "sleep": sleep,
        "wake": wake,
        "reload_weights": reload_weights,
        "start_profile": start_profile,
        "stop_profile": stop_profile,
        "memory": lambda arguments: {"num_bytes": num_bytes_in_use()},
    }
    return {name: _answering(call) for name, call in calls.items()}


class RunnerControl:
    """Makes one call at a time to all ranks and combines their answers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def sleep(self, level: int) -> None:
        """Level 0 releases nothing, 1 the KV cache and a GPU's weights, which move to the host, 2 everything.

        No step may be in flight, no request may hold blocks, and cached prefixes must be forgotten.
        """
        self._call_all("sleep", level=level)

    def wake(self, tags: Collection[WakeTag] = tuple(WakeTag)) -> None:
        """Bring back the parts that the tags name; the KV cache comes back empty.

        Refused if any rank failed. The others may be awake then, and the next wake changes nothing for them.
        """
        # Parts come back as they were, so ranks still hold one model if only some are awake.
        self._call_each("wake", tags=[tag.value for tag in tags])

    def reload_weights(self, folder: Path | None = None) -> str:
        """Replace the weights by those of `folder`, by default the current folder; returns their digest.

        Cached KV belongs to the old weights and must be forgotten. After Refused all ranks have the old
        weights. After WeightsLost some ranks have none and the others the old ones: wake or reload them.
        """
        answers = self._call_all("reload_weights", folder=None if folder is None else str(folder))
        digests = {str(answer["weights_digest"]) for answer in answers}
        if len(digests) > 1:
            raise RanksDisagree("ranks have different weights: the folder changed while they were read")
        return digests.pop()

    def start_profile(self, folder: Path, prefix: str = "engine") -> list[Path]:
        """Record steps from now on; returns the files, one per rank, that `stop_profile` will write.

        Refused if any rank failed; then either none records, or all continue a recording begun before.
        """
        answers = self._executor.call("start_profile", {"folder": str(folder), "prefix": prefix})
        if refusals := _all_of(_REFUSAL, answers):
            if len(refusals) < len(answers):
                self._executor.call("stop_profile", {})
            raise Refused(refusals[0])
        return [Path(str(answer["file"])) for answer in answers]

    def stop_profile(self) -> list[Path]:
        """Stop recording and write the files. Refused if any rank could not write; none records any more."""
        return [Path(str(answer["file"])) for answer in self._call_each("stop_profile")]

    def num_bytes_in_use(self) -> list[int]:
        """Memory that each rank uses: of its GPU, or on a CPU of its process."""
        return [int(str(answer["num_bytes"])) for answer in self._call_each("memory")]

    def _call_each(self, name: str, **arguments: object) -> Sequence[Mapping[str, object]]:
        """For calls whose effect ranks need not have in common: Refused if any rank failed."""
        answers = self._executor.call(name, arguments)
        if refusals := _all_of(_REFUSAL, answers):
            raise Refused(refusals[0])
        return answers

    def _call_all(self, name: str, **arguments: object) -> Sequence[Mapping[str, object]]:
        """For calls that all ranks must do, or none."""
        answers = self._executor.call(name, arguments)
        refusals, losses = _all_of(_REFUSAL, answers), _all_of(_LOSS, answers)
        failures = losses + refusals
        if not failures:
            return answers
        if len(failures) < len(answers):
            raise RanksDisagree(f"{name} succeeded on some ranks and failed on others: {failures[0]}")
        if losses:
            raise WeightsLost(losses[0])
        raise Refused(refusals[0])


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
