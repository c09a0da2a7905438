"""Tensors in CPU memory that say they are on a GPU, and what a GPU does to its host. Knows no kernel.

Ops are queued, as on a stream, and done when the host waits: a read that comes too early finds what was there
before, and a copy finds what its pinned source has become. What a GPU would not do is refused: operands on
two devices, waiting for the device where that is forbidden, and host memory in a recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
Work = Callable[[], object]

# Take indices of the host, too, which are copied there.
_INDEXING = {aten.index.Tensor, aten.index_put_.default}
# Whose result, or its shape, is known to the host only when the device has come that far.
_WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten._unique2.default,
    aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
# A host that is so far ahead of its device has to wait for it.
_MAX_QUEUED = 4096


class Device:
    """What is kept of the GPU: its memory, its one stream, what is recorded, whether waiting is forbidden."""

    def __init__(self) -> None:
        self.tensors: WeakSet[GpuTensor] = WeakSet()
        # Host memory by its address, which nothing else may ever have.
        self.pinned: dict[int, Tensor] = {}
        self.num_done = 0
        self.recording: list[Work] | None = None
        self.refuses_to_wait = False
        self._queued: deque[Work] = deque()

    @property
    def num_bytes(self) -> int:
        """Of all storages that a tensor of the device lives in."""
        storages = [tensor.memory.untyped_storage() for tensor in list(self.tensors)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def num_given(self) -> int:
        """Pieces of work that were given to it so far."""
        return self.num_done + len(self._queued)

    def give(self, work: Work) -> None:
        if self.recording is not None:
            self.recording.append(work)
            return
        self._queued.append(work)
        if len(self._queued) > _MAX_QUEUED:
            self.finish(self.num_given - _MAX_QUEUED // 2)

    def finish(self, num_given: int | None = None) -> None:
        """Do what was queued, up to that many pieces since the start."""
        while self._queued and (num_given is None or self.num_done < num_given):
            work = self._queued.popleft()
            self.num_done += 1
            work()

    def wait(self, what: object) -> None:
        """The host waits for the device. RuntimeError where it must not."""
        self.refuse_in_recording(what)
        if self.refuses_to_wait:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self.finish()

    def refuse_in_recording(self, what: object) -> None:
        """RuntimeError where work is recorded and not done."""
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    @contextmanager
    def record(self) -> Iterator[list[Work]]:
        """What is given inside is not done, but kept."""
        work: list[Work] = []
        self.recording = work
        try:
            yield work
        finally:
            self.recording = None


DEVICE = Device()


class GpuTensor(Tensor):
    """A tensor of the GPU; `memory` is where it really is."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=GPU,
        )
        made.memory = memory
        DEVICE.tensors.add(made)
        return made

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # The stub leaves out the op.
        cls, op: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(op, args, kwargs or {})


class GpuOps(TorchDispatchMode):
    """Sees the ops that make tensors, too, whose operands are of no device."""

    def __torch_dispatch__(self, op: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


class GpuCalls(TorchFunctionMode):
    """What PyTorch would ask a real device for before it comes to an op."""

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        args = tuple(map(_indexed, args))
        kwargs = {name: _indexed(value) for name, value in (kwargs or {}).items()}
        # A build for CPUs can pin no memory.
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs["pin_memory"] = False
        if function is Tensor.pin_memory:
            return _pinned(args[0].clone())
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") == GPU:
            DEVICE.wait(function)
            return GpuTensor(function(*args, **(kwargs | {"device": "cpu"})).clone())
        if function is Tensor.tolist and isinstance(args[0], GpuTensor):
            DEVICE.wait(function)
            return args[0].memory.tolist()
        made = function(*args, **kwargs)
        return _pinned(made) if is_pinned else made


def behind(value: object) -> object:
    """The memory behind a tensor of the GPU; anything else as it is."""
    return value.memory if isinstance(value, GpuTensor) else value


def _indexed(value: object) -> object:
    is_gpu = isinstance(value, str | torch.device) and str(value) == "cuda"
    return GPU if is_gpu else value


def _pinned(tensor: Tensor) -> Tensor:
    DEVICE.pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in DEVICE.pinned


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One op, of which the host gets what it would get before the device has done it."""
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_on_gpu = any(isinstance(operand, GpuTensor) for operand in operands)
    if not is_on_gpu and kwargs.get("device") != GPU:
        return op(*args, **kwargs)
    if op is aten._to_copy.default and kwargs.get("device") is not None:
        return _copied(args[0], kwargs)
    if op is aten.copy_.default:
        _copy(args[0], args[1], is_async=len(args) > 2 and bool(args[2]))
        return args[0]
    if is_on_gpu:
        _refuse(op, args, operands)
    # A number in a tensor of the host is read at once.
    inner, options = tree_map(_inner, (args, kwargs))
    if op._schema.is_mutable:
        DEVICE.give(lambda: op(*inner, **options))
        return _mutated(op, args, kwargs)
    if op.is_view or _waits(op, args):
        return _outer(op(*inner, **options))
    if "device" in options:
        options["device"] = torch.device("cpu")
    return _outer(_promised(op, inner, options))


def _promised(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Memory of the result's shape, where the result comes when the device has come so far."""
    meta = op(*tree_map(_shape_of, args), **tree_map(_shape_of, kwargs | _on_meta(kwargs)))
    made = tree_map(lambda leaf: _room_for(leaf) if isinstance(leaf, Tensor) else leaf, meta)

    def do() -> None:
        for room, value in zip(tree_leaves(made), tree_leaves(op(*args, **kwargs)), strict=True):
            if isinstance(room, Tensor):
                room.copy_(value)

    DEVICE.give(do)
    return made


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if "device" in kwargs else {}


def _shape_of(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value


def _room_for(meta: Tensor) -> Tensor:
    room = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype)
    # What is not computed yet must be seen by its readers.
    return room.fill_(float("nan") if meta.is_floating_point() else 77)


def _copied(source: Tensor, options: dict[str, Any]) -> Tensor:
    """`source` in new memory, on the device that the options name."""
    dtype = options.get("dtype") or source.dtype
    if options["device"] != GPU:
        if not isinstance(source, GpuTensor):
            return source.to(dtype)
        is_async = bool(options.get("non_blocking"))
        room = _room_for(torch.empty_like(source.memory, dtype=dtype, device="meta"))
        _copy(_pinned(room) if is_async else room, source, is_async=is_async)
        return room
    made = GpuTensor(
        torch.empty_like(source.memory if isinstance(source, GpuTensor) else source, dtype=dtype)
    )
    _copy(made, source, is_async=bool(options.get("non_blocking")))
    return made


def _copy(target: Tensor, source: Tensor, *, is_async: bool) -> None:
    """Between the devices only pinned memory is read or written later than now."""
    inner_target, inner_source = behind(target), behind(source)
    assert isinstance(inner_target, Tensor) and isinstance(inner_source, Tensor)
    if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
        DEVICE.give(lambda: inner_target.copy_(inner_source))
        return
    host = source if isinstance(target, GpuTensor) else target
    if DEVICE.recording is not None or not is_async:
        DEVICE.wait("a copy between host and device")
        inner_target.copy_(inner_source)
    elif _is_pinned(host):
        DEVICE.give(lambda: inner_target.copy_(inner_source))
    elif host is source:
        # The driver copies it first, for which it may wait; PyTorch's own watch sees nothing of that.
        if DEVICE.refuses_to_wait:
            raise RuntimeError("called a synchronizing CUDA operation: a copy of memory that is not pinned")
        staged = source.clone()
        DEVICE.give(lambda: inner_target.copy_(staged))
    else:
        DEVICE.finish()
        inner_target.copy_(inner_source)


def _refuse(op: Any, args: tuple[Any, ...], operands: list[Tensor]) -> None:
    """Raise what a GPU would raise. A number in a tensor of the host may go anywhere."""
    strangers = [one for one in operands if not isinstance(one, GpuTensor) and one.dim()]
    if strangers and op not in _INDEXING:
        shapes = [tuple(one.shape) for one in strangers]
        raise RuntimeError(
            f"expected all tensors on the same device, but {op} got {shapes} on cpu and cuda:0"
        )
    if _waits(op, args) or strangers:
        DEVICE.wait(op)


def _waits(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host needs something that the device computes: of a mask, how much it lets through."""
    is_mask = op in _INDEXING and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )
    return (is_mask and not _is_filled(op, args)) or op in _WAITING


def _is_filled(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether one number goes wherever a mask lets it."""
    return op is aten.index_put_.default and args[2].numel() == 1


def _mutated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operands that an op writes to, which it also returns."""
    if not op._schema.returns:
        return None
    positional = zip(op._schema.arguments, args, strict=False)
    by_position = [
        value for argument, value in positional if argument.alias_info and argument.alias_info.is_write
    ]
    by_name = [
        kwargs[argument.name]
        for argument in op._schema.arguments
        if argument.name in kwargs and argument.alias_info and argument.alias_info.is_write
    ]
    written = [*by_position, *by_name]
    return written[0] if len(written) == 1 else tuple(written)


def _inner(value: object) -> object:
    if isinstance(value, Tensor) and not isinstance(value, GpuTensor):
        return value.clone()
    return behind(value)


def _outer(value: Any) -> Any:
    return tree_map(lambda leaf: GpuTensor(leaf) if isinstance(leaf, Tensor) else leaf, value)
