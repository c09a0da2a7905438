"""How many bytes of tensors requests may hold at once, whoever sent them. Knows no wire and no request."""

from __future__ import annotations

import weakref
from collections import deque

from engine_svc.tensors.host_tensor import HostTensor


class TensorMemory:
    """Counts tensors from when they came until nobody holds them, in whatever thread that is."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        # Appended to by whoever lets go of a tensor, where no lock may be taken.
        self._freed: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        """What is held now."""
        while self._freed:
            self._used_bytes -= self._freed.popleft()
        return self._used_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more may be held."""
        return self.used_bytes + num_bytes <= self._max_bytes

    def count(self, tensor: HostTensor) -> None:
        """Count a tensor until it is gone."""
        self._used_bytes += len(tensor.data)
        weakref.finalize(tensor, self._freed.append, len(tensor.data)).atexit = False
