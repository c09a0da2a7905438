"""Memory leaves tensors and comes back under them, for all that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from engine_svc.runner.memory.parked_memory import NoRoom, ParkedMemory, return_free_memory, tensors_of
from triptych_kernels import REFERENCE


@dataclass(slots=True)
class _Layer:
    weight: Tensor
    ops: object = REFERENCE
    parts: dict[str, object] = field(default_factory=dict)


def test_kept_content_comes_back_under_every_view():
    whole = torch.arange(12.0)
    view, slice_of_it = whole.view(3, 4), whole[4:8]
    parked = ParkedMemory([whole, view, slice_of_it], keep=True)
    assert parked.num_bytes == 48
    assert whole.untyped_storage().nbytes() == 0
    parked.restore()
    assert view.tolist() == torch.arange(12.0).view(3, 4).tolist()
    assert slice_of_it.tolist() == [4.0, 5.0, 6.0, 7.0]
    view[1, 0] = -1.0
    assert whole[4] == slice_of_it[0] == -1.0


def test_memory_that_is_not_kept_comes_back_in_its_size():
    stack = torch.zeros(2, 3, 5, dtype=torch.bfloat16)
    layer = stack[1]
    parked = ParkedMemory([stack], keep=False)
    assert stack.untyped_storage().nbytes() == 0
    parked.restore()
    assert stack.untyped_storage().nbytes() == 60
    layer.fill_(2.0)
    assert stack[1].eq(2.0).all()


@dataclass(slots=True)
class FullDevice:
    """Stands in for a tensor, and for its memory on a device that has no room for it until others leave."""

    num_bytes: int = 8 << 20
    is_full: bool = True

    def untyped_storage(self) -> FullDevice:
        return self

    def data_ptr(self) -> int:
        return 1

    def nbytes(self) -> int:
        return self.num_bytes

    def resize_(self, num_bytes: int) -> None:
        if num_bytes and self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_bytes = num_bytes


def test_what_finds_no_room_stays_away_until_it_does():
    first, full = torch.ones(4), FullDevice()
    parked = ParkedMemory([first, full], keep=False)  # type: ignore[list-item]  # What is asked of a tensor.
    with pytest.raises(NoRoom, match="8 MiB cannot be allocated"):
        parked.restore()
    assert (first.untyped_storage().nbytes(), full.num_bytes) == (0, 0)
    full.is_full = False
    parked.restore()
    assert (first.untyped_storage().nbytes(), full.num_bytes) == (16, 8 << 20)


def test_a_device_that_is_lost_is_not_taken_for_one_that_is_full():
    class LostDevice(FullDevice):
        device = torch.device("cuda")

        def resize_(self, num_bytes: int) -> None:
            if num_bytes:
                raise RuntimeError("an illegal memory access was encountered")

    parked = ParkedMemory([LostDevice()], keep=False)  # type: ignore[list-item]  # What is asked of a tensor.
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        parked.restore()
    assert not isinstance(caught.value, NoRoom)


def test_tensors_without_memory_and_of_inference_mode_are_no_trouble():
    with torch.inference_mode():
        made = torch.ones(4)
    parked = ParkedMemory([torch.empty(0), torch.empty(0), made], keep=True)
    assert parked.num_bytes == 16
    parked.restore()
    assert made.tolist() == [1.0] * 4


def test_tensors_are_found_in_whatever_holds_them_and_not_beyond():
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.register_buffer("steps", torch.zeros(4))

    module = Module()
    deep = torch.zeros(5)
    layers = [_Layer(torch.zeros(6), parts={"deep": (deep,)}), _Layer(torch.zeros(7, device="meta"))]
    hidden = torch.zeros(8)

    def function() -> Tensor:
        return hidden

    found = tensors_of([layers, module, function, layers], "cpu")
    wanted = {id(deep), id(layers[0].weight), id(module.steps)}
    assert wanted <= {id(each) for each in found}
    assert sorted(each.numel() for each in found) == [3, 4, 5, 6, 6]
    assert [each.numel() for each in tensors_of(layers, "meta")] == [7]


def test_free_memory_is_returned_and_what_was_frozen_stays_so():
    import gc

    gc.freeze()
    try:
        return_free_memory(torch.device("cpu"))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    return_free_memory(torch.device("cpu"))
    assert gc.get_freeze_count() == 0
