"""Counters of every rank: heartbeats, steps, reported failures; in anonymous shared memory.

Knows no processes.
"""

from __future__ import annotations

import mmap
import os
import threading

# Three counters per rank, each rank in a cache line of its own.
_WORDS_PER_RANK = 8
_BEATS, _STEPS, _FAILURES = 0, 1, 2


class RankHeartbeats:
    """Counts each rank's heartbeats, handled messages and reports of failed rows.

    Each rank writes its own counters.
    """

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, num_ranks * _WORDS_PER_RANK * 8)
        # Whole words are written at once, so a reader sees the old value or the new one.
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")

    @classmethod
    def create(cls, num_ranks: int) -> RankHeartbeats:
        """New counters, all zero."""
        fd = os.memfd_create("triptych-progress", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_ranks * _WORDS_PER_RANK * 8)
        return cls(fd, num_ranks)

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._memory.close()
        os.close(self.fd)

    def beats(self, rank: int) -> int:
        return self._words[rank * _WORDS_PER_RANK + _BEATS]

    def steps(self, rank: int) -> int:
        return self._words[rank * _WORDS_PER_RANK + _STEPS]

    @property
    def num_failures(self) -> int:
        """Reports of failed rows by all ranks."""
        return sum(self._words[_FAILURES::_WORDS_PER_RANK])

    def beat(self, rank: int) -> None:
        self._words[rank * _WORDS_PER_RANK + _BEATS] += 1

    def finish_step(self, rank: int) -> None:
        self._words[rank * _WORDS_PER_RANK + _STEPS] += 1

    def count_failure(self, rank: int) -> None:
        self._words[rank * _WORDS_PER_RANK + _FAILURES] += 1


def start_heart(heartbeats: RankHeartbeats, rank: int, interval_s: float) -> None:
    """Beat every `interval_s`, from a thread that ends with the process.

    Heartbeats stop if the process is stopped or no thread can run any more; they do not stop in a long step.
    """
    never = threading.Event()

    def run() -> None:
        while not never.wait(interval_s):
            heartbeats.beat(rank)

    threading.Thread(target=run, name="heart", daemon=True).start()
