"""Where ranks stand, and what they exchange."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

from engine_svc.model.facts import KVShape, LayerGroup, group_layers, groups_of_stage
from engine_svc.model.process_parallel import RankPosition
from tests.processes import running, source_environment

FULL, NEAR = KVShape(2, 8, 8), KVShape(2, 8, 8, window=16)


def test_ranks_are_numbered_stage_by_stage() -> None:
    positions = [RankPosition(rank, tp_size=2, pp_size=3) for rank in range(6)]
    assert [(position.pp_rank, position.tp_rank) for position in positions] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert [position.is_last_stage for position in positions] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (4, 1), (1, 4), (2, 3)])
def test_one_rank_of_the_last_stage_reports(tp_size: int, pp_size: int) -> None:
    positions = [RankPosition(rank, tp_size, pp_size) for rank in range(tp_size * pp_size)]
    assert [position.rank for position in positions if position.reports] == [tp_size * (pp_size - 1)]


def test_every_stage_has_the_groups_of_all_layers_with_its_own_layers_in_them() -> None:
    shapes = (FULL, FULL, NEAR, NEAR)
    assert group_layers(shapes) == (LayerGroup(None, (0, 1)), LayerGroup(16, (2, 3)))
    assert groups_of_stage(shapes, 0, 2) == (LayerGroup(None, (0, 1)), LayerGroup(16, ()))
    assert groups_of_stage(shapes, 1, 4) == (LayerGroup(None, (0,)), LayerGroup(16, (1, 2)))
    chunked = KVShape(2, 8, 8, chunk=16)
    groups = (LayerGroup(None, (0,)), LayerGroup(None, (2,), 16), LayerGroup(16, (1,)))
    assert group_layers((FULL, NEAR, chunked)) == groups
    assert groups_of_stage((FULL, NEAR, chunked), 2, 3)[1] == LayerGroup(None, (0,), 16)


# Ranks are forked from one process, as to import torch takes longer than all that they do.
FORK_RANKS = """
import os, sys, torch
from engine_svc.model.process_parallel import RankPosition, ProcessParallel
fd, *outputs = sys.argv[1:]
num_ranks = len(outputs)
for rank, output in enumerate(outputs):
    if os.fork() == 0:
        os.dup2(int(output), 1)
        break
else:
    statuses = [os.wait()[1] for _ in outputs]
    sys.exit(f"ranks ended with {statuses}" if any(statuses) else 0)
"""


EXCHANGE = """
parallel = ProcessParallel(
    RankPosition(rank, 2, 2), store_path=f"/proc/self/fd/{fd}", device=torch.device("cpu"), timeout_s=60.0
)
with torch.inference_mode():
    for dtype in (torch.float32, torch.bfloat16):
        total = parallel.all_reduce(torch.full((3, 5), float(rank + 1), dtype=dtype).t()[1:])
        joined = parallel.all_gather(torch.tensor([[rank, 10.0], [rank, 20.0]], dtype=dtype))
        if rank < 2:
            for number in range(40):
                parallel.send(torch.full((number, 7), number + rank / 2, dtype=dtype))
            got = True
        else:
            received = [parallel.receive((number, 7), dtype) for number in range(40)]
            got = all((received[number] == number + (rank - 2) / 2).all() for number in range(40))
        print([sorted(set(total.flatten().tolist())), list(total.shape), joined.tolist(), bool(got)])
parallel.close()
"""


ADD_UP = """
parallel = ProcessParallel(
    RankPosition(rank, num_ranks, 1),
    store_path=f"/proc/self/fd/{fd}", device=torch.device("cpu"), timeout_s=60.0,
)
with torch.inference_mode():
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.randn(num_ranks, 64, 576, generator=torch.Generator().manual_seed(1)).to(dtype)
        total = sum(part.float() for part in parts)
        for num_rows in (1, 2, 3, 7, 16, 33, 64):
            rows = parallel.all_reduce(parts[rank, :num_rows].clone())
            print(dtype, num_rows, rows.dtype, int((rows != total.to(dtype)[:num_rows]).sum()))
parallel.close()
"""


# An exchange's own threads, by the names that torch gives them. What has closed is still referred to.
COUNT_THREADS = """
from pathlib import Path
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(sum("gloo" in name for name in names))
"""


def test_the_sum_of_a_row_has_the_same_bits_whatever_is_summed_beside_it() -> None:
    num_ranks = 3
    expected = [
        f"{dtype} {num_rows} {dtype} 0"
        for dtype in (torch.float32, torch.bfloat16)
        for num_rows in (1, 2, 3, 7, 16, 33, 64)
    ]
    assert outputs_of(ADD_UP, num_ranks) == [expected] * num_ranks


def test_stages_add_join_pass_on_in_order_and_leave_no_thread_when_they_close() -> None:
    outputs = outputs_of(EXCHANGE + COUNT_THREADS, num_ranks=4)
    for rank, lines in enumerate(outputs):
        first = rank // 2 * 2
        joined = [[first, value, first + 1, value] for value in (10.0, 20.0)]
        assert (
            lines[:-1]
            == [str([[2.0 * first + 3], [4, 3], [[float(x) for x in row] for row in joined], True])] * 2
        )
    assert [lines[-1] for lines in outputs] == ["0"] * 4


def outputs_of(program: str, num_ranks: int) -> list[list[str]]:
    """The lines of each rank that runs `program` and ends well."""
    with contextlib.ExitStack() as stack:
        store, *outputs = (os.memfd_create(name) for name in ("store", *["output"] * num_ranks))
        for fd in (store, *outputs):
            stack.callback(os.close, fd)
        process = stack.enter_context(
            running(
                *(sys.executable, "-c", FORK_RANKS + program, str(store), *map(str, outputs)),
                pass_fds=[store, *outputs],
                env={**source_environment(), "GLOO_SOCKET_IFNAME": "lo"},
            )
        )
        assert process.wait(timeout=120) == 0
        return [Path(f"/proc/self/fd/{fd}").read_text().splitlines() for fd in outputs]
