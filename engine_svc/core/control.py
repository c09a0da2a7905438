"""Calls of an operator that reach the device: what they name, and how they fail. Knows no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class WakeTag(Enum):
    """A part of a sleeping engine that can be woken alone; values are names on the wire.

    The runner has no SCHEDULING.
    """

    SCHEDULING = "scheduling"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Refused(ValueError):
    """The call cannot be done; the message gives the reason, and nothing has changed."""


class RanksDisagree(RuntimeError):
    """Some ranks succeeded and others failed: they no longer hold one model, so the engine ends."""


class WeightsLost(RuntimeError):
    """Neither new weights nor the old ones could be loaded: there are none until a wake or a reload."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A function that an operator can have every rank run by name. Its result is reported as a text.

    parameters: the types of the arguments, which are all required: str, int, float or bool.
    """

    name: str
    parameters: Mapping[str, type] = field(default_factory=dict)

    def check(self, arguments: Mapping[str, object]) -> None:
        """Raise ValueError unless these are its arguments."""
        if arguments.keys() != self.parameters.keys():
            raise ValueError(
                f"collective {self.name} has the parameters {sorted(self.parameters)}, and there are "
                f"{len(arguments)} arguments"
            )
        for name, kind in self.parameters.items():
            if type(arguments[name]) is not kind:
                raise ValueError(
                    f"argument {name} of collective {self.name} is of type {type(arguments[name]).__name__}, "
                    f"it has to be {kind.__name__}"
                )
