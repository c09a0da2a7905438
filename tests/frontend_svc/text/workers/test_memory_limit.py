"""A bound on memory holds for its block alone."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: the limit is the whole process's.
PROGRAM = """
from frontend_svc.text.workers.process import extra_memory
try:
    with extra_memory(64 * 2**20):
        bytes(32 * 2**20)
        bytes(512 * 2**20)
except MemoryError:
    print("bounded")
print(len(bytes(512 * 2**20)))
"""


def test_what_a_block_may_allocate_is_bounded_and_what_follows_is_not():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["bounded", str(512 * 2**20)]
