"""A program that prints what of attention is loaded ahead, and into how much memory, with no GPU at hand.

    python -m tests.kernels.triton.attention_loads

Prints JSON: by compute capability, size of heads and number of queries, how many loads are under way while a
tile is computed, and the bytes of shared memory.
"""

from __future__ import annotations

import json
import re

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.triton.compile_all import AbsentGPU
from triptych_kernels import AttentionBatch
from triptych_kernels.triton.paged_attention import paged_attention

_CAPABILITIES = (89, 90)
_HEAD_DIMS = (64, 128, 256)
_LENGTHS = (1, 300)
_NUM_KEYS = 1200


def list_loads() -> dict[str, tuple[int, int]]:
    """Loads under way and bytes of shared memory, of each form."""
    loads_by_form: dict[str, tuple[int, int]] = {}
    run = JITFunction.run
    compiled = []

    def compile_only(self, *arguments, grid, warmup, **options):
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))
        return compiled[-1]

    JITFunction.run = compile_only
    for capability in _CAPABILITIES:
        driver.set_active(AbsentGPU(capability))
        for head_dim in _HEAD_DIMS:
            for length in _LENGTHS:
                attend(head_dim, length)
                kernel = compiled[-1]
                waits = re.findall(r"async_wait.*num = (\d+)", kernel.asm["ttgir"])
                loads = max(map(int, waits), default=0)
                loads_by_form[f"{capability} {head_dim} {length}"] = loads, kernel.metadata.shared
    return loads_by_form


def attend(head_dim: int, length: int) -> None:
    query = torch.zeros(length, 8, head_dim, dtype=torch.bfloat16)
    keys = torch.zeros(2, 2, 16, head_dim, dtype=torch.bfloat16)
    table = torch.zeros(1, _NUM_KEYS // 16, dtype=torch.int32)
    paged_attention(query, keys, keys, AttentionBatch.of(table, [length], [_NUM_KEYS], 16), scale=0.1)


if __name__ == "__main__":
    print(json.dumps(list_loads()))
