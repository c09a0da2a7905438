"""Allocates a CPU's memory for the KV cache before blocks are used."""

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
    """Makes sure that blocks have memory when they are first used.

    The first store to a page waits until the system has found and zeroed it, which takes virtual machines up
    to 2 ms for a large page, and a step touches the pages of all layers at once. So a thread works ahead:
    first a few blocks, then as many again as have memory, at most one large page per layer. Blocks far from
    use take no memory, unless the size of the cache was configured.
    """

    def __init__(
        self,
        stacks: Sequence[Tensor],
        submit: Callable[[Callable[[], None]], object],
        *,
        at_once: bool = False,
    ) -> None:
        """stacks: [layers, B, G, S, D], contiguous, on the CPU.  submit: runs calls in another thread.

        at_once: allocate all memory from the start, without waiting for blocks to be used.
        """
        self._stacks = tuple(stacks)
        self._submit = submit
        self._at_once = at_once
        self._num_blocks = stacks[0].shape[1]
        self._large_page_blocks = max(-(-LARGE_PAGE_BYTES // stack[0, 0].nbytes) for stack in stacks)
        self._part = self._end = 0

    def restart(self) -> None:
        """Start from the first block, because the memory is new."""
        self._part = self._end = 0
        # A single request should neither wait for a large page per layer nor use it.
        self._advise(prefer_small_pages, 0, min(self._large_page_blocks, self._num_blocks))
        self._advise(prefer_large_pages, self._large_page_blocks, self._num_blocks)
        if all(populate(address, 1) for address, _ in self._ranges(0, 1)):
            self.reach(self._num_blocks - 1 if self._at_once else 0)
        else:
            # The system does not support this: steps allocate all memory themselves, then best in large
            # pages.
            self._advise(prefer_large_pages, 0, self._num_blocks)
            self._end = self._num_blocks

    def reach(self, block_id: int) -> None:
        """Prepare memory for `block_id`, and for more if it is in the second half of the prepared blocks."""
        ends = [self._end]
        while self._end < self._num_blocks and block_id >= self._end - self._part // 2:
            self._part = min(max(self._end, _FIRST_BLOCKS), self._large_page_blocks)
            self._end = min(self._end + self._part, self._num_blocks)
            ends.append(self._end)
        if len(ends) > 1:
            # A weak reference: the call does not keep a cache alive that is freed meanwhile.
            self._submit(partial(_populate, weakref.ref(self), ends))

    def _advise(self, prefer: Callable[[int, int], None], start: int, end: int) -> None:
        for address, num_bytes in self._ranges(start, end):
            prefer(address, num_bytes)

    def populate_part(self, start: int, end: int) -> None:
        """Allocate the memory of blocks `start` to `end`; blocks while the system does it."""
        for address, num_bytes in self._ranges(start, end):
            populate(address, num_bytes)

    def _ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Address and size in bytes of blocks `start` to `end` in every layer."""
        for stack in self._stacks:
            for layer in range(stack.shape[0]):
                # Read each time: a sleeping cache has no memory, and another address when it wakes.
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
    """Run `call` in a thread beside steps, on any core that the process may use."""
    # Rare enough for a new thread each, so no thread is left that would have to be ended.
    # If no thread can be started, steps wait for their memory.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_run_anywhere, args=(call,), name="kv-prefault", daemon=True).start()


def _run_anywhere(call: Callable[[], None]) -> None:
    # A thread inherits the cores of the thread that starts it. Steps may be bound to one core, and need it.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    call()
