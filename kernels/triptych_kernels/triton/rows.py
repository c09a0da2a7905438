"""Which row a program computes, where rows have numbers of tokens that the host does not know."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(query_starts_ptr, num_rows, block, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr):
    """The row of the program at `block`: the programs of row r begin at query_starts[r] // BLOCK_Q + r."""
    num_begun = tl.full((), 0, tl.int32)
    for first in range(0, num_rows, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        start = tl.load(query_starts_ptr + row, mask=row < num_rows, other=0)
        num_begun += tl.sum(((start // BLOCK_Q + row <= block) & (row < num_rows)).to(tl.int32), axis=0)
    return num_begun - 1
