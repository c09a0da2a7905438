"""Signs of life of every rank, in shared memory without a name; each writes its own. Knows no processes."""

from __future__ import annotations

import mmap
import os
import threading

# Two numbers a rank, each rank in a cache line of its own.
_WORDS_PER_RANK = 8
_BEATS, _STEPS = 0, 1


class RankHeartbeats:
    """How often each rank's heart has beaten, and how many messages it has dealt with."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, num_ranks * _WORDS_PER_RANK * 8)
        # Whole words are written at once, so a reader sees the old number or the new one.
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")

    @classmethod
    def create(cls, num_ranks: int) -> RankHeartbeats:
        """A new board, all zeros."""
        fd = os.memfd_create("triptych-progress", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_ranks * _WORDS_PER_RANK * 8)
        return cls(fd, num_ranks)

    def close(self) -> None:
        """Let go of the memory, which ends with the last process that has it."""
        self._words.release()
        self._bytes.release()
        self._memory.close()
        os.close(self.fd)

    def beats(self, rank: int) -> int:
        """Heartbeats so far."""
        return self._words[rank * _WORDS_PER_RANK + _BEATS]

    def steps(self, rank: int) -> int:
        """Messages that the rank has dealt with."""
        return self._words[rank * _WORDS_PER_RANK + _STEPS]

    def beat(self, rank: int) -> None:
        """The rank lives."""
        self._words[rank * _WORDS_PER_RANK + _BEATS] += 1

    def finish_step(self, rank: int) -> None:
        """The rank has dealt with a message."""
        self._words[rank * _WORDS_PER_RANK + _STEPS] += 1


def start_heart(heartbeats: RankHeartbeats, rank: int, interval_s: float) -> None:
    """Beat every `interval_s`, from a thread that ends with the process.

    A process that is stopped, or in which nothing can run any more, falls silent; a long step does not.
    """
    never = threading.Event()

    def run() -> None:
        while not never.wait(interval_s):
            heartbeats.beat(rank)

    threading.Thread(target=run, name="heart", daemon=True).start()
