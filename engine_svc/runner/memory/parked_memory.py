"""Takes the memory from under tensors and puts it back: views and all who hold them stay as they are.

Knows no model and no cache.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor

from triptych_kernels import Ops

# Beyond these lies the rest of the program.
_BORDERS = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Ops, str, bytes, int, float)


_MIB = 1 << 20


class NoRoom(ValueError):
    """The device has too little free memory for what is to come back; the message says how much that is."""


class ParkedMemory:
    """Memory of tensors, given back to the device; with `keep`, its content waits in the host's memory."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool) -> None:
        storages = {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in tensors)}
        self._parked = [
            (storage, storage.nbytes(), _on_host(storage) if keep else None)
            for storage in storages.values()
            if storage.nbytes()
        ]
        for storage, _, _ in self._parked:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """What the device has got back."""
        return sum(num_bytes for _, num_bytes, _ in self._parked)

    def restore(self) -> None:
        """Give the tensors memory again, with what was kept in it; else with what happens to be there.

        Raises NoRoom, and leaves all as it is, where there is not enough.
        """
        try:
            for storage, num_bytes, _ in self._parked:
                storage.resize_(num_bytes)
        except RuntimeError as error:
            # The allocator of a CPU has no error of its own for it; other errors of a GPU mean other things.
            if not isinstance(error, torch.OutOfMemoryError) and storage.device.type != "cpu":
                raise
            for storage, _, _ in self._parked:
                storage.resize_(0)
            raise NoRoom(
                f"{self.num_bytes / _MIB:.0f} MiB cannot be allocated: others hold the memory; free it and "
                "wake again"
            ) from error
        for storage, _, kept in self._parked:
            if kept is not None:
                _bytes_of(storage).copy_(kept)
        self._parked = []


def tensors_of(root: object, device_type: str) -> list[Tensor]:
    """Every tensor on such a device that `root` holds, however deep.

    Models of two roads and their packed projections have no list of their tensors in common; what they have
    in common is that the collector of garbage knows what they refer to.
    """
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _BORDERS):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor) and each.device.type == device_type and each.layout is torch.strided:
            found.append(each)
        waiting += gc.get_referents(each)
    return found


def return_free_memory(device: torch.device) -> None:
    """Let the device's memory that nothing uses any more be used by others."""
    # What was alive when the engine was built is kept from the collector; a model may be a cycle.
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    try:
        # Freed blocks of the C library's heap stay with the process otherwise.
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        # Of the GNU library alone.
        return


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    content = _bytes_of(storage)
    room = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.device.type != "cpu")
    return room.copy_(content)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
