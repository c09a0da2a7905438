"""Gets a CPU's memory for the KV cache from the system before blocks are used."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from triptych_kernels import LARGE_PAGE_BYTES, populate, prefer_large_pages, prefer_small_pages

_FIRST_BLOCKS = 64


class Prefault:
    """Sees to it that blocks have memory when they are first used.

    Who first stores to a page waits until the system has found and zeroed it, which takes virtual machines
    up to 2 ms for a large page, and a step enters those of all layers at once. So a thread goes
    ahead: a few blocks first, then as many as there are, at most a large page of each layer.
    Blocks far from use take no memory, but where somebody has said how much there is for them.
    """

    def __init__(
        self,
        stacks: Sequence[Tensor],
        submit: Callable[[Callable[[], None]], object],
        *,
        at_once: bool = False,
    ) -> None:
        """stacks: [layers, B, G, S, D], contiguous, on the CPU.  submit: has calls made elsewhere.

        at_once: get all memory from the start on, without waiting for blocks to be used.
        """
        self._stacks = tuple(stacks)
        self._submit = submit
        self._at_once = at_once
        self._num_blocks = stacks[0].shape[1]
        self._most = max(-(-LARGE_PAGE_BYTES // stack[0, 0].nbytes) for stack in stacks)
        self._part = self._end = 0

    def restart(self) -> None:
        """Begin with the first block: the memory is new."""
        self._part = self._end = 0
        # A single request should neither wait for a large page of each layer nor take it.
        self._advise(prefer_small_pages, 0, min(self._most, self._num_blocks))
        self._advise(prefer_large_pages, self._most, self._num_blocks)
        if all(populate(address, 1) for address, _ in self._ranges(0, 1)):
            self.reach(self._num_blocks - 1 if self._at_once else 0)
        else:
            # Steps get all memory themselves, then best in few pieces.
            self._advise(prefer_large_pages, 0, self._num_blocks)
            self._end = self._num_blocks

    def reach(self, block_id: int) -> None:
        """Have memory for `block_id`, and for more where it lies in the second half of what there is."""
        ends = [self._end]
        while self._end < self._num_blocks and block_id >= self._end - self._part // 2:
            self._part = min(max(self._end, _FIRST_BLOCKS), self._most)
            self._end = min(self._end + self._part, self._num_blocks)
            ends.append(self._end)
        if len(ends) > 1:
            # A cache that is let go of meanwhile is not kept.
            self._submit(partial(_populate, weakref.ref(self), ends))

    def _advise(self, prefer: Callable[[int, int], None], start: int, end: int) -> None:
        for address, num_bytes in self._ranges(start, end):
            prefer(address, num_bytes)

    def populate_part(self, start: int, end: int) -> None:
        """Get the memory of blocks `start` to `end`, which takes as long as the system does."""
        for address, num_bytes in self._ranges(start, end):
            populate(address, num_bytes)

    def _ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where blocks `start` to `end` lie in every layer: address and number of bytes."""
        for stack in self._stacks:
            for layer in range(stack.shape[0]):
                # Asked each time: a cache that sleeps has no memory, and other memory when it wakes.
                storage = stack.untyped_storage()
                block_bytes = storage.nbytes() // (stack.shape[0] * self._num_blocks)
                first = layer * self._num_blocks + start
                yield storage.data_ptr() + first * block_bytes, (end - start) * block_bytes


def _populate(reference: weakref.ref[Prefault], ends: Sequence[int]) -> None:
    for start, end in itertools.pairwise(ends):
        prefault = reference()
        if prefault is None:
            return
        prefault.populate_part(start, end)
        del prefault


def run_beside(call: Callable[[], None]) -> None:
    """Have `call` made while steps go on, on any core that the process may use."""
    # Rarely enough for a thread each: none is left that somebody would have to end.
    # Where there may be no more threads, steps wait for their memory.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_run_anywhere, args=(call,), name="kv-prefault", daemon=True).start()


def _run_anywhere(call: Callable[[], None]) -> None:
    # A thread begins on the cores of the one that starts it: the steps may be held to one, and need it.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    call()
