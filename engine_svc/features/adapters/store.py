"""The adapters that a rank has in memory, laid out for its part of the model."""

from __future__ import annotations

import threading
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
    describe_adapter,
    digest_of,
    read_content,
)
from engine_svc.features.adapters.extras import AdapterUse, Pins
from engine_svc.model.errors import CheckpointError, listed
from engine_svc.model.loading.folder import HeaderEntry
from engine_svc.model.low_rank import LowRankTargets

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """matrices: what it adds to each projection of this rank, by part; None: nothing to any part.

    num_leases: requests that keep it in memory.
    """

    digest: str
    matrices: Sequence[Sequence[Any] | None]
    num_leases: int = 0


class AdapterStore:
    """Loads adapters once, and keeps those that were used last. Used by the threads that prepare requests."""

    def __init__(self, max_loaded: int, load: Callable[[AdapterUse], LoadedAdapter]) -> None:
        self._max_loaded = max_loaded
        self._load = load
        self._lock = threading.Lock()
        self._pins = Pins()
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # the one used last comes last

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def __len__(self) -> int:
        return len(self._loaded)

    def lease(self, use: AdapterUse) -> LoadedAdapter:
        """The adapter, which is loaded if need be, until `give_back`. RequestFailed where it cannot be.

        The scheduler lets no more different ones be in use than there is room for.
        """
        with self._lock:
            self._pins = self._pins.newest(use.pins)
            adapter = self._loaded.get(use.digest)
            if adapter is None:
                self._make_room()
                adapter = self._loaded[use.digest] = self._load(use)
            self._loaded.move_to_end(use.digest)
            adapter.num_leases += 1
            return adapter

    def give_back(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            adapter.num_leases -= 1

    def _make_room(self) -> None:
        while len(self._loaded) >= self._max_loaded:
            unused = [digest for digest, each in self._loaded.items() if not each.num_leases]
            if not unused:
                raise RequestFailed(
                    "RESOURCE_EXHAUSTED",
                    f"{len(self._loaded)} adapters are in use, --max-cpu-loras is {self._max_loaded}",
                )
            # Adapters that were pinned since they came here may be all that is left.
            del self._loaded[min(unused, key=self._pins.digests.__contains__)]


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
    """Read an adapter's files and lay its matrices out. RequestFailed where they have changed or do not fit.

    shapes: of the model's modules.  is_whole: this rank has a part of every module, not of one stage alone.
    """
    try:
        files = describe_adapter(Path(use.folder), shapes, max_rank)
        content = read_content(files)
        digest = digest_of(files, content)
    except CheckpointError as error:
        raise RequestFailed("INVALID_ARGUMENT", str(error), field="adapter") from error
    if digest != use.digest:
        raise RequestFailed(
            "FAILED_PRECONDITION",
            f"the files of adapter {use.name} have changed since it was loaded",
            reason="ADAPTER_CHANGED",
        )
    missing = [weight.module for weight in files.weights if weight.module not in targets.by_name]
    if is_whole and missing:
        raise RequestFailed(
            "INVALID_ARGUMENT",
            f"{use.folder} has additions to {listed(missing)}, which take none here",
            field="adapter",
        )
    found: list[list[Any] | None] = [None for _ in targets.additions]
    for weight in files.weights:
        down, up = (_tensor(content, files, entry).to(dtype) for entry in (weight.down, weight.up))
        for target in targets.by_name.get(weight.module, ()):
            parts = found[target.projection] or [None] * targets.num_parts[target.projection]
            found[target.projection] = parts
            parts[target.index] = target.pack(
                down[:, target.part.inputs], up[target.part.outputs], weight.scale
            )
    return LoadedAdapter(use.digest, found)


def _tensor(content: bytes, files: AdapterFiles, entry: HeaderEntry) -> Tensor:
    # Tensors of a safetensors file need not be aligned.
    first, end = files.data_offset + entry.start, files.data_offset + entry.end
    room = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    room.flatten().view(torch.uint8).numpy()[:] = memoryview(content)[first:end]
    return room
