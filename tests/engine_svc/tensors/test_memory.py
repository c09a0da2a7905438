"""Bytes that requests hold are counted from when they came until nobody holds them."""

from __future__ import annotations

from engine_svc.tensors.host_tensor import HostTensor
from engine_svc.tensors.source import TensorMemory


def test_a_tensor_counts_until_the_last_holder_lets_go():
    memory = TensorMemory(100)
    tensor: HostTensor | None = HostTensor("uint8", (60,), bytes(60))
    memory.count(tensor)
    held = [tensor]
    assert (memory.used_bytes, memory.has_room(40), memory.has_room(41)) == (60, True, False)
    tensor = None
    assert memory.used_bytes == 60
    held.clear()
    assert (memory.used_bytes, memory.has_room(100)) == (0, True)
