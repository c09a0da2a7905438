"""The adapters that a rank has in memory, laid out for its part of the model."""

from __future__ import annotations

import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_svc.core.errors import RequestFailed
from engine_svc.features.adapters.checkpoint import (
    AdapterFiles,
    decoder_name,
    describe_adapter,
    digest_of,
    read_content,
)
from engine_svc.features.adapters.extras import AdapterUse, Pins
from engine_svc.model.errors import CheckpointError, listed
from engine_svc.model.loading.folder import HeaderEntry
from engine_svc.model.low_rank import LowRankTargets

# How long a load waits for what it replaces to leave memory: steps, and seconds for one to begin.
_MAX_STEPS = 64
_IDLE_S = 0.25
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LAYER = re.compile(r".*?\.\d+\.")


@dataclass(slots=True, eq=False, weakref_slot=True)
class LoadedAdapter:
    """matrices: what it adds to each projection of this rank, by part; None: nothing to any part.

    num_leases: requests that keep it in memory.  has_slot: set by the thread of steps.  is_dropped: the
    store has it no longer, and its slot is to be cleared.
    """

    digest: str
    matrices: Sequence[Sequence[Any] | None]
    num_leases: int = 0
    has_slot: bool = False
    is_dropped: bool = False


class AdapterStore:
    """Loads adapters once, and keeps those that were used last. Used by the threads that prepare requests."""

    def __init__(
        self,
        max_loaded: int,
        load: Callable[[AdapterUse], LoadedAdapter],
    ) -> None:
        self._max_loaded = max_loaded
        self._load = load
        self._load_lock = threading.Lock()  # one load at a time
        self._lock = threading.Lock()  # of all else: held for moments, as the thread of steps takes it
        self._has_released = threading.Condition()
        self.is_waiting = False  # a load, for that
        self._pins = Pins()
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # the one used last comes last
        self._in_memory: weakref.WeakSet[LoadedAdapter] = weakref.WeakSet()  # also those in slots alone
        self.peak_in_memory = 0
        self.num_dropped = 0  # so far

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def is_full(self) -> bool:
        """Whether the next load drops an adapter."""
        return len(self._loaded) >= self._max_loaded

    @property
    def num_in_memory(self) -> int:
        """Adapters of this process, wherever they are kept."""
        return len(self._in_memory)

    def lease(self, use: AdapterUse) -> LoadedAdapter:
        """The adapter, which is loaded if need be, until `give_back`. RequestFailed where it cannot be.

        The scheduler lets no more different ones be in use than there is room for.
        """
        adapter = self.lease_loaded(use)
        if adapter is not None:
            return adapter
        with self._load_lock:
            with self._lock:
                # Another thread may have loaded it meanwhile.
                if use.digest in self._loaded:
                    return self._leased(use.digest)
                self._make_room()
            self._wait_for_room()
            adapter = self._load(use)
            with self._lock:
                self._in_memory.add(adapter)
                self.peak_in_memory = max(self.peak_in_memory, len(self._in_memory))
                self._loaded[use.digest] = adapter
                return self._leased(use.digest)

    def lease_loaded(self, use: AdapterUse) -> LoadedAdapter | None:
        """The same for one that is loaded; else None. Waits for nothing."""
        with self._lock:
            self._pins = self._pins.newest(use.pins)
            return self._leased(use.digest) if use.digest in self._loaded else None

    def _leased(self, digest: str) -> LoadedAdapter:
        adapter = self._loaded[digest]
        self._loaded.move_to_end(digest)
        adapter.num_leases += 1
        return adapter

    def give_back(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            adapter.num_leases -= 1

    def note_release(self) -> None:
        """The thread of steps has released what was dropped before a step."""
        if self.is_waiting:
            with self._has_released:
                self._has_released.notify_all()

    def _wait_for_room(self) -> None:
        """Until what was dropped has left memory: a row or a slot may have it up to the next step."""
        with self._has_released:
            self.is_waiting = True
            num_steps = 0
            # An idle engine has no step before this load is done.
            while len(self._in_memory) >= self._max_loaded and num_steps < _MAX_STEPS:
                num_steps += 1 if self._has_released.wait(_IDLE_S) else _MAX_STEPS
            self.is_waiting = False

    def _make_room(self) -> None:
        while len(self._loaded) >= self._max_loaded:
            unused = [each for each in self._loaded.values() if not each.num_leases]
            if not unused:
                raise RequestFailed(
                    "RESOURCE_EXHAUSTED",
                    f"{len(self._loaded)} adapters are in use, --max-cpu-loras is {self._max_loaded}",
                )
            # Adapters that were pinned since they came here may be all that is left. One with a slot stays in
            # memory until the next step.
            dropped = min(unused, key=lambda each: (each.digest in self._pins.digests, each.has_slot))
            del self._loaded[dropped.digest]
            dropped.is_dropped = True
            self.num_dropped += 1


@torch.inference_mode()
def load_adapter(
    use: AdapterUse,
    targets: LowRankTargets,
    shapes: dict[str, tuple[int, ...]],
    *,
    max_rank: int,
    dtype: torch.dtype,
    is_whole: bool,
) -> LoadedAdapter:
    """Read an adapter's checked files and lay its matrices out. RequestFailed where they have changed.

    shapes: see `module_shapes`.  is_whole: this rank has a part of every module, not of one stage alone.
    """
    try:
        files = describe_adapter(Path(use.folder), shapes, max_rank)
        content = read_content(files)
        digest = digest_of(files, content)
    except CheckpointError as error:
        raise _changed(use, f": {error}") from error
    if digest != use.digest:
        raise _changed(use)
    by_name = {decoder_name(name): found for name, found in targets.by_name.items()}
    layers = {_layer_of(name) for name in by_name}
    others = [weight.module for weight in files.weights if weight.module not in by_name]
    # A stage knows the modules of its own layers alone.
    missing = [module for module in others if is_whole or _layer_of(module) in layers]
    if missing:
        raise RequestFailed(
            "INVALID_ARGUMENT",
            f"adapter {use.name} has additions to {listed(missing)}, which take none here",
            field="adapter",
        )
    matrices: list[list[Any] | None] = [None for _ in targets.additions]
    for weight in files.weights:
        down, up = (_tensor(content, files, entry).to(dtype) for entry in (weight.down, weight.up))
        for target in by_name.get(weight.module, ()):
            parts = matrices[target.projection] or [None] * targets.num_parts[target.projection]
            matrices[target.projection] = parts
            parts[target.index] = target.pack(
                down[:, target.part.inputs], up[target.part.outputs], weight.scale
            )
    return LoadedAdapter(use.digest, matrices)


def _changed(use: AdapterUse, how: str = "") -> RequestFailed:
    return RequestFailed(
        "FAILED_PRECONDITION",
        f"the files of adapter {use.name} have changed since it was loaded{how}",
        reason="ADAPTER_CHANGED",
    )


def _layer_of(module: str) -> str:
    """The name of its layer; its own if it is in none."""
    match = _LAYER.match(module)
    return match[0] if match else module


def _tensor(content: bytes, files: AdapterFiles, entry: HeaderEntry) -> Tensor:
    # Tensors of a safetensors file need not be aligned.
    first, end = files.data_offset + entry.start, files.data_offset + entry.end
    room = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    room.flatten().view(torch.uint8).numpy()[:] = memoryview(content)[first:end]
    return room
