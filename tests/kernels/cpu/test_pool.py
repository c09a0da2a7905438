"""The pool of threads behind the native kernels."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch

from triptych_kernels import cpu
from triptych_kernels.ops import Ops


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_each_task_runs_once(use_threads: Callable[[int], None], num_threads: int) -> None:
    from triptych_kernels.cpu import _native

    use_threads(num_threads)
    for num_tasks in (0, 1, 2, 7, 1000):
        for _ in range(50):
            assert _native.count_task_runs(num_tasks) == b"\1" * num_tasks


def test_a_job_of_many_tasks_behind_one_of_few_is_not_entered_before_it_is_open(
    use_threads: Callable[[int], None],
) -> None:
    from triptych_kernels.cpu import _native

    use_threads(4)
    for _ in range(20_000):
        assert _native.count_task_runs(3) == b"\1" * 3
        assert _native.count_task_runs(64) == b"\1" * 64


def test_one_thread_is_the_default_and_the_number_is_kept(use_threads: Callable[[int], None]) -> None:
    assert cpu.num_threads() == 1
    use_threads(3)
    assert cpu.num_threads() == 3


@pytest.mark.parametrize("number", [0, -1, 1025])
def test_a_number_of_threads_out_of_range_is_refused(ops: Ops, number: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads is {number}"):
        cpu.set_num_threads(number)


def test_calls_of_two_threads_at_once_both_finish(use_threads: Callable[[int], None], ops: Ops) -> None:
    use_threads(3)
    linear = ops.pack_linear(torch.ones(700, 1024))
    x = torch.ones(40, 1024)
    with ThreadPoolExecutor(2) as executor:
        results = list(executor.map(lambda _: linear(x), range(40)))
    assert all(torch.equal(result, torch.full((40, 700), 1024.0)) for result in results)


def test_a_forked_process_gets_threads_of_its_own(use_threads: Callable[[int], None]) -> None:
    from triptych_kernels.cpu import _native

    use_threads(3)
    assert _native.count_task_runs(100) == b"\1" * 100
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_count_in_child, args=(theirs,), daemon=True)
    child.start()
    assert ours.poll(timeout=60) and ours.recv_bytes() == b"\1" * 100
    child.join(timeout=60)
    assert child.exitcode == 0


def _count_in_child(pipe: Connection) -> None:
    from triptych_kernels.cpu import _native

    pipe.send_bytes(_native.count_task_runs(100))
