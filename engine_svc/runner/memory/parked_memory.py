"""Releases the memory of tensors and restores it later; views and other references stay valid.

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

# The search for tensors stops here: beyond these objects is the rest of the program.
_BORDERS = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Ops, str, bytes, int, float)


_MIB = 1 << 20


class NoRoom(ValueError):
    """The device has too little free memory to restore tensors; the message states the size."""


class ParkedMemory:
    """Memory of tensors that was released to the device; with `keep`, its content is in host memory."""

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
        return sum(num_bytes for _, num_bytes, _ in self._parked)

    def restore(self) -> None:
        """Allocate memory for the tensors again, with the kept content; otherwise uninitialized.

        Raises NoRoom, and changes nothing, if there is not enough memory.
        """
        try:
            for storage, num_bytes, _ in self._parked:
                storage.resize_(num_bytes)
        except RuntimeError as error:
            # A CPU's allocator has no specific error for this; other errors of a GPU have other causes.
            if not isinstance(error, torch.OutOfMemoryError) and storage.device.type != "cpu":
                raise
            for storage, _, _ in self._parked:
                storage.resize_(0)
            raise NoRoom(
                f"{self.num_bytes / _MIB:.0f} MiB cannot be allocated: the memory is in use by others; "
                "free it and wake again"
            ) from error
        for storage, _, kept in self._parked:
            if kept is not None:
                _bytes_of(storage).copy_(kept)
        self._parked = []


def tensors_of(root: object, device_type: str) -> list[Tensor]:
    """Every tensor on this type of device that `root` refers to, directly or not.

    Native models, transformers' models and packed projections have no common list of their tensors. The
    garbage collector knows the references of all of them.
    """
    tensors: list[Tensor] = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _BORDERS):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor) and each.device.type == device_type and each.layout is torch.strided:
            tensors.append(each)
        waiting += gc.get_referents(each)
    return tensors


def return_free_memory(device: torch.device) -> None:
    """Release the device's unused memory to other processes."""
    # Objects from the start of the engine are frozen, i.e. not collected; a model may be a reference cycle.
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    try:
        # Otherwise freed blocks of the C library's heap stay with the process.
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        # Only the GNU library has it.
        return


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    content = _bytes_of(storage)
    room = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.device.type != "cpu")
    return room.copy_(content)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
