"""What is asked of all ranks of an engine beside steps: sleep, wake, other weights, profiles, memory.

The engine's half is `RunnerControl`, a rank's half `runner_calls`; between them go plain values alone.
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
    """What was asked for cannot be had; the message says why, and everything is as it was."""


class RanksDisagree(RuntimeError):
    """Some ranks did what others refused, or otherwise: they hold no model together; the engine ends."""


class ControlledRunner(Protocol):
    """The runner of one rank."""

    def sleep(self, level: int) -> None:
        """Give memory back."""

    def wake(self, tags: Collection[WakeTag]) -> None:
        """Take it again."""

    def reload_weights(self, folder: Path | None) -> ModelFacts:
        """Put other weights in the place of these."""
        ...

    def start_profile(self, folder: Path, prefix: str) -> Path:
        """Begin to record steps, for this file."""
        ...

    def stop_profile(self) -> Path:
        """Write the file."""
        ...


class Executor(Protocol):
    """Whoever reaches all ranks."""

    def call(self, name: str, arguments: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        """Have each rank do this behind the steps launched so far; their answers, in order."""
        ...


def runner_calls(runner: ControlledRunner) -> dict[str, Call]:
    """What a rank does when it is called by name."""

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
    """Asks all ranks for one thing, and tells what became of it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def sleep(self, level: int) -> None:
        """0 gives nothing back, 1 the KV cache and a GPU's weights, which the host keeps, 2 all.

        No step may be under way, no request may hold blocks, and what is cached has to be forgotten.
        """
        self._ask("sleep", level=level)

    def wake(self, tags: Collection[WakeTag] = tuple(WakeTag)) -> None:
        """Bring back what the tags name; the KV cache comes back empty.

        Refused where any rank could not: others may be awake then, for whom the next wake has nothing to do.
        """
        # What is awake is what was there before: ranks that are not all awake still hold one model.
        self._ask_each("wake", tags=[tag.value for tag in tags])

    def reload_weights(self, folder: Path | None = None) -> str:
        """Put the weights of `folder`, or the present ones' anew, in place; returns their digest.

        What is cached is of the old ones and has to be forgotten. Refused leaves the old ones; WeightsLost
        leaves none in some ranks, and the old ones in the others: they have to be woken, or reloaded.
        """
        answers = self._ask("reload_weights", folder=None if folder is None else str(folder))
        digests = {str(answer["weights_digest"]) for answer in answers}
        if len(digests) > 1:
            raise RanksDisagree("ranks have different weights: the folder changed while they were read")
        return digests.pop()

    def start_profile(self, folder: Path, prefix: str = "engine") -> list[Path]:
        """Record what steps do from now on; the files, one a rank, that the stop will write.

        Refused where any rank could not; then none records, or all do so as before.
        """
        answers = self._executor.call("start_profile", {"folder": str(folder), "prefix": prefix})
        if refusals := _all_of(_REFUSAL, answers):
            if len(refusals) < len(answers):
                self._executor.call("stop_profile", {})
            raise Refused(refusals[0])
        return [Path(str(answer["file"])) for answer in answers]

    def stop_profile(self) -> list[Path]:
        """End that, and write them. Refused where any rank could not write its own; none records any more."""
        return [Path(str(answer["file"])) for answer in self._ask_each("stop_profile")]

    def num_bytes_in_use(self) -> list[int]:
        """Memory that each rank holds: its GPU's, or on a CPU that of its process."""
        return [int(str(answer["num_bytes"])) for answer in self._ask_each("memory")]

    def _ask_each(self, name: str, **arguments: object) -> Sequence[Mapping[str, object]]:
        """What changes nothing that ranks hold together: Refused where any of them could not."""
        answers = self._executor.call(name, arguments)
        if refusals := _all_of(_REFUSAL, answers):
            raise Refused(refusals[0])
        return answers

    def _ask(self, name: str, **arguments: object) -> Sequence[Mapping[str, object]]:
        """What all ranks have to do, or none."""
        answers = self._executor.call(name, arguments)
        refusals, losses = _all_of(_REFUSAL, answers), _all_of(_LOSS, answers)
        failures = losses + refusals
        if not failures:
            return answers
        if len(failures) < len(answers):
            raise RanksDisagree(f"{name} was done by some ranks, and others say: {failures[0]}")
        if losses:
            raise WeightsLost(losses[0])
        raise Refused(refusals[0])


def _all_of(key: str, answers: Sequence[Mapping[str, object]]) -> list[str]:
    return [str(answer[key]) for answer in answers if key in answer]


def _answering(call: Call) -> Call:
    """The call, whose refusals are answers too: a rank outlives what people can mend."""

    def answer(arguments: Mapping[str, object]) -> Mapping[str, object]:
        try:
            return call(arguments)
        except (ValueError, OSError) as error:
            return {_REFUSAL: str(error)}
        except WeightsLost as error:
            return {_LOSS: str(error)}

    return answer
