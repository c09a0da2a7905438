"""Releases a runner's device memory for a while: weights, recorded steps, the KV cache.

Knows no plan and no request: a caller must have no step in flight, and must forget which KV was cached.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine_svc.core.control import WakeTag, WeightsLost
from engine_svc.core.errors import InvalidTransition, clear_frames
from engine_svc.model.decoder import Model
from engine_svc.model.errors import CheckpointError
from engine_svc.model.facts import ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.runner.memory.parked_memory import NoRoom, ParkedMemory, return_free_memory, tensors_of

if TYPE_CHECKING:
    from engine_svc.runner.cuda_graphs import DecodeGraphs
    from engine_svc.runner.memory.kv_tensors import KVTensors

logger = logging.getLogger(__name__)

# What another checkpoint must have in common with the one it replaces: caches and rows are made for it.
_FORM = ("architecture", "kv_shapes", "state_shapes", "vocab_size", "max_position", "dtype")


class Location(enum.Enum):
    DEVICE = "device"
    HOST = "host"  # of a GPU's machine
    NOWHERE = "nowhere"


_TRANSITIONS: dict[Location, frozenset[Location]] = {
    Location.DEVICE: frozenset({Location.HOST, Location.NOWHERE}),
    Location.HOST: frozenset({Location.DEVICE, Location.NOWHERE}),
    Location.NOWHERE: frozenset({Location.DEVICE}),
}


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Loads a runner's weights, and makes what depends on them."""

    checkpoint: Checkpoint
    load: Callable[[Checkpoint], tuple[Model, ModelFacts]]  # in the same way as the first one
    record: Callable[[Model], DecodeGraphs | None]  # records decode steps: tensors may have other addresses
    drop: Callable[[], None] = lambda: None  # forgets what else refers to the weights


class Resident:
    """A model, its recorded steps and KV cache, in memory or not. Without a source it keeps the weights."""

    def __init__(
        self,
        model: Model,
        facts: ModelFacts,
        kv: KVTensors,
        *,
        graphs: DecodeGraphs | None = None,
        source: WeightSource | None = None,
        on_model: Callable[[Model], object] = lambda model: None,
    ) -> None:
        """on_model: called with the model of weights that were loaded again."""
        self.facts = facts
        self.graphs = graphs
        self._model: Model | None = model
        self._kv = kv
        self._source = source
        self._on_model = on_model
        self._locations = dict.fromkeys((WakeTag.WEIGHTS, WakeTag.KV_CACHE), Location.DEVICE)
        self._parked: dict[WakeTag, ParkedMemory] = {}

    @property
    def asleep(self) -> frozenset[WakeTag]:
        """The parts that are not on the device."""
        return frozenset(tag for tag, location in self._locations.items() if location is not Location.DEVICE)

    def awake_model(self) -> Model:
        """The model. RuntimeError while any part that a step needs is asleep."""
        if self._model is None or self._parked:
            away = ", ".join(sorted(tag.value for tag in self.asleep))
            raise RuntimeError(f"a step cannot run: asleep are {away}")
        return self._model

    def sleep(self, level: int) -> None:
        """Release memory. Released parts stay released; nothing changes for parts at a deeper level.

        0: nothing.  1: the KV cache; on a GPU also the weights, which are kept in host memory, while a CPU
        keeps them where they are.  2: both, and weights have to be loaded again.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level is {level}, it has to be 0, 1 or 2")
        if level == 0:
            return
        if level == 2 and self._source is None:
            raise ValueError("sleep level 2 drops the weights, and there is nothing to load them from")
        self.graphs = None
        if self._locations[WakeTag.KV_CACHE] is Location.DEVICE:
            self._park_cache()
        if level == 2 and self._locations[WakeTag.WEIGHTS] is not Location.NOWHERE:
            self._give_up_weights()
        elif self._locations[WakeTag.WEIGHTS] is Location.DEVICE and self._kv.device.type != "cpu":
            self._move_to(WakeTag.WEIGHTS, Location.HOST)
            tensors = tensors_of(self._model, self._kv.device.type)
            self._parked[WakeTag.WEIGHTS] = ParkedMemory(tensors, keep=True)
        return_free_memory(self._kv.device)
        logger.info("asleep", extra={"level": level, "parts": sorted(tag.value for tag in self.asleep)})

    def wake(self, tags: Iterable[WakeTag] = tuple(WakeTag)) -> None:
        """Bring back the named parts that are asleep. The KV cache comes back empty.

        Raises CheckpointError if weights cannot be loaded again or have changed, NoRoom if the device has too
        little memory; then all parts are asleep as before.
        """
        wanted = self.asleep.intersection(tags)
        if WakeTag.KV_CACHE in wanted:
            self._restore(WakeTag.KV_CACHE)
            self._kv.renew()
        if WakeTag.WEIGHTS in wanted:
            try:
                self._bring_back_weights()
            except (ValueError, OSError):
                if WakeTag.KV_CACHE in wanted:
                    self._park_cache()
                raise
        self._record_again()
        if wanted:
            logger.info("awake", extra={"parts": sorted(tag.value for tag in wanted)})

    def reload(self, folder: Path | None = None, names: Collection[str] = ()) -> ModelFacts:
        """Replace the weights by those of `folder`, by default the folder of the current ones.

        names: tensors to replace, if not all; each has the shape of the one that it replaces. All others are
        read again from where they came from.
        If they cannot be loaded, raises CheckpointError or UnsupportedModel and restores the old ones. If
        these cannot be loaded either, e.g. because the folder was overwritten, raises WeightsLost, and the
        weights are asleep. After any other error the weights are the old ones, or asleep. New weights are on
        the device, even if the KV cache is asleep.
        """
        if self._source is None:
            raise ValueError("weights cannot be reloaded: there is nothing to load them from")
        checkpoint = self._source.checkpoint.replacing(names, folder)
        source = replace(self._source, checkpoint=checkpoint)
        had_weights = self._locations[WakeTag.WEIGHTS] is not Location.NOWHERE
        if had_weights:
            self.graphs = None
            self._give_up_weights()
            return_free_memory(self._kv.device)
        try:
            self._take_new(source)
        except (ValueError, OSError) as error:
            if had_weights:
                self._return_to_old(error)
            raise
        logger.info(
            "weights reloaded", extra={"folder": str(checkpoint.folder), "digest": self.facts.weights_digest}
        )
        return self.facts

    def _take_new(self, source: WeightSource) -> None:
        old = self.facts
        self._take(*self._loaded(source))
        try:
            self._record_again()
        except Exception:
            # The caller gets an error and not the new facts, so a wake must load the old weights.
            self._give_up_weights()
            self.facts = old
            raise
        self._source = source

    def _return_to_old(self, error: Exception) -> None:
        """Restore the weights that were dropped for the reload that `error` has ended."""
        # The error's frames hold what was read: old and new weights together may not fit.
        clear_frames(error)
        return_free_memory(self._kv.device)
        try:
            self._bring_back_weights()
        except (ValueError, OSError) as again:
            reasons = dict.fromkeys((str(error), str(again)))
            raise WeightsLost("; ".join(reasons)) from again
        self._record_again()

    def _move_to(self, part: WakeTag, location: Location) -> None:
        present = self._locations[part]
        if location not in _TRANSITIONS[present]:
            raise InvalidTransition(f"{part.value} cannot go from {present.value} to {location.value}")
        self._locations[part] = location

    def _park_cache(self) -> None:
        self._move_to(WakeTag.KV_CACHE, Location.NOWHERE)
        self._parked[WakeTag.KV_CACHE] = ParkedMemory(self._kv.stacks, keep=False)

    def _give_up_weights(self) -> None:
        self._move_to(WakeTag.WEIGHTS, Location.NOWHERE)
        self._parked.pop(WakeTag.WEIGHTS, None)
        self._model = None
        if self._source is not None:
            self._source.drop()

    def _bring_back_weights(self) -> None:
        if WakeTag.WEIGHTS in self._parked:
            self._restore(WakeTag.WEIGHTS)
            return
        assert self._source is not None, "weights are dropped only if they can be loaded again"
        model, facts = self._loaded(self._source)
        if facts.weights_digest != self.facts.weights_digest:
            raise CheckpointError(
                f"{self._source.checkpoint.folder} has other weights than when it was loaded: "
                "reload them, or restore the folder"
            )
        self._take(model, facts)

    def _restore(self, part: WakeTag) -> None:
        self._parked[part].restore()
        del self._parked[part]
        self._move_to(part, Location.DEVICE)

    def _loaded(self, source: WeightSource) -> tuple[Model, ModelFacts]:
        try:
            model, facts = source.load(source.checkpoint)
        except torch.OutOfMemoryError as error:
            raise NoRoom(
                f"weights of {source.checkpoint.folder} cannot be allocated: free memory used by others, "
                "and try again"
            ) from error
        ours, theirs = _form(self.facts), _form(facts)
        for name, old, new in zip(_FORM, ours, theirs, strict=True):
            if old != new:
                raise CheckpointError(
                    f"{source.checkpoint.folder} has {name} {new}, the weights to replace have {old}"
                )
        return model, facts

    def _take(self, model: Model, facts: ModelFacts) -> None:
        self._move_to(WakeTag.WEIGHTS, Location.DEVICE)
        self._model, self.facts = model, facts
        self._on_model(model)

    def _record_again(self) -> None:
        if self._source is not None and self.graphs is None and not self.asleep:
            self.graphs = self._source.record(self.awake_model())


def _form(facts: ModelFacts) -> tuple[object, ...]:
    return (
        facts.architecture,
        facts.kv_shapes,
        facts.state_shapes,
        facts.vocab_size,
        facts.max_position,
        facts.dtype,
    )
