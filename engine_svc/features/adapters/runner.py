"""Gives adapters slots as steps need them, and tells the forward the slot of each token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.adapters.checkpoint import module_shapes
from engine_svc.features.adapters.extras import AdapterUse
from engine_svc.features.adapters.options import COLLECTIVE
from engine_svc.features.adapters.store import AdapterStore, LoadedAdapter, load_adapter
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.low_rank import LowRankModel, LowRankTargets
from engine_svc.runner.feature import RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import Ints, to_device

_NO_SLOT = -1


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature | None:
    return AdapterRows(config, context) if config.enable_lora else None


@dataclass(frozen=True, slots=True)
class _StepSlots:
    """The slots of a step's tokens, and the rows and counts of the step: see StepInputs."""

    rows: Ints
    counts: Ints
    slots: Tensor


class AdapterRows(RunnerFeature):
    """The adapters of rows. In a step there are no more different ones than slots: the scheduler's half."""

    prepares = AdapterUse
    every_stage = True

    def __init__(self, config: EngineConfig, context: RunnerContext) -> None:
        self._num_slots, self._max_rank = config.max_loras, config.max_lora_rank
        self._is_whole = config.pipeline_parallel_size == 1
        self._device, self._dtype = context.device, context.dtype
        self._shapes = module_shapes(Path(config.model))
        self._store = AdapterStore(config.num_cpu_loras, self._load)
        self._adapters: dict[int, LoadedAdapter] = {}  # by row
        self._slots: OrderedDict[LoadedAdapter, int] = OrderedDict()  # the one used last comes last
        self._free_slots = list(range(self._num_slots))
        self._num_dropped = 0  # of the store, when slots were cleared last
        self._latest: _StepSlots | None = None  # of the last step; None: its rows have changed
        self._targets = self._enabled(context.model)

    def on_model(self, model: Model) -> None:
        self._targets = self._enabled(model)
        for adapter in self._slots:
            adapter.has_slot = False
        self._slots.clear()
        self._free_slots = list(range(self._num_slots))
        self._latest = None

    def collectives(self) -> Mapping[str, Callable[..., object]]:
        return {COLLECTIVE.name: self._describe}

    def _describe(self) -> str:
        store = self._store
        return (
            f"{store.num_in_memory} in memory, {store.peak_in_memory} at most so far, {len(self._slots)} in "
            "slots"
        )

    def prepare(self, extra: AdapterUse) -> LoadedAdapter:
        return self._store.lease(extra)

    def prepare_at_once(self, extra: AdapterUse) -> LoadedAdapter | None:
        return self._store.lease_loaded(extra)

    def release(self, prepared: LoadedAdapter) -> None:
        self._store.give_back(prepared)

    def is_slow_to_prepare(self, extra: AdapterUse) -> bool:
        return extra.digest not in self._store

    def uses(self, admitted: AdmittedRequest) -> bool:
        return AdapterUse in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._adapters[row] = admitted.extras[AdapterUse]
        self._latest = None

    def remove_row(self, row: int) -> None:
        self._adapters.pop(row, None)
        self._latest = None
        if not self._adapters and self._store.is_full:
            # No step may follow before one of these has to give way.
            self._clear([each for each in self._slots if not each.num_leases])
            self._store.note_release()

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        # Most steps need none of these calls.
        if self._store.num_dropped != self._num_dropped:
            self._clear_dropped()
        if self._store.is_waiting:
            self._store.note_release()
        latest = self._latest
        # Consecutive steps share both arrays while rows stay.
        if latest is None or latest.rows is not inputs.rows or latest.counts is not inputs.counts:
            latest = self._latest = self._give_slots(inputs)
        if latest is not None:
            context.low_rank_slots = latest.slots

    def _give_slots(self, inputs: StepInputs) -> _StepSlots | None:
        """The slots of a step's tokens; None if no row has an adapter."""
        rows = [self._adapters.get(row) for row in inputs.rows.tolist()]
        adapters = dict.fromkeys(each for each in rows if each is not None)
        if not adapters:
            return None
        for adapter in adapters:
            if adapter in self._slots:
                self._slots.move_to_end(adapter)
            else:
                self._give_slot(adapter, adapters)
        slots = np.array([_NO_SLOT if each is None else self._slots[each] for each in rows], dtype=np.int64)
        of_tokens = to_device(np.repeat(slots, inputs.counts), self._device)
        return _StepSlots(inputs.rows, inputs.counts, of_tokens)

    def _give_slot(self, adapter: LoadedAdapter, adapters: dict[LoadedAdapter, None]) -> None:
        if not self._free_slots:
            # The one that was not used for longest.
            self._take_slot(next(each for each in self._slots if each not in adapters))
        slot = self._free_slots.pop()
        for additions, matrices in zip(self._targets.additions, adapter.matrices, strict=True):
            if matrices is None:
                additions.clear(slot)
            else:
                additions.put(slot, matrices)
        self._slots[adapter], adapter.has_slot = slot, True

    def _take_slot(self, adapter: LoadedAdapter) -> None:
        self._free_slots.append(self._slots.pop(adapter))
        adapter.has_slot = False

    def _clear_dropped(self) -> None:
        """Let adapters leave memory that the store has given up and no row uses."""
        num_dropped = self._store.num_dropped
        used = {*self._adapters.values()}
        dropped = [each for each in self._slots if each.is_dropped]
        self._clear([each for each in dropped if each not in used])
        if not used.intersection(dropped):
            self._num_dropped = num_dropped

    def _clear(self, adapters: Sequence[LoadedAdapter]) -> None:
        for adapter in adapters:
            for additions in self._targets.additions:
                additions.clear(self._slots[adapter])
            self._take_slot(adapter)

    def _enabled(self, model: Model) -> LowRankTargets:
        if not isinstance(model, LowRankModel):
            raise UnsupportedModel(f"{type(model).__name__} takes no adapters")
        return model.enable_low_rank(self._num_slots, self._max_rank)

    def _load(self, use: AdapterUse) -> LoadedAdapter:
        return load_adapter(
            use,
            self._targets,
            self._shapes,
            max_rank=self._max_rank,
            dtype=self._dtype,
            is_whole=self._is_whole,
        )
