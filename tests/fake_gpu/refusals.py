"""That the GPU made of CPU memory refuses what a real one does. `test_fake_gpu` runs this where it is one."""

from __future__ import annotations

import pytest
import torch

from tests.fake_gpu.device import GpuTensor


@pytest.fixture
def column() -> torch.Tensor:
    return torch.arange(4.0, device="cuda")


def test_operands_on_two_devices_are_refused(column):
    with pytest.raises(RuntimeError, match="same device"):
        column + torch.ones(4)
    assert (column + torch.tensor(1.0)).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_is_made_there_stays_there_and_a_copy_is_other_memory(column):
    assert column.device == torch.device("cuda", 0) and column.is_cuda
    assert type(column.view(2, 2)[0]) is GpuTensor
    there = column.to("cpu")
    there[0] = 9.0
    assert type(there) is torch.Tensor and column.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_kernel_takes_no_host_memory(column):
    from triptych_kernels.triton.activation import silu_and_mul

    assert silu_and_mul(column[None]).shape == (1, 2)
    with pytest.raises(ValueError, match="of the host"):
        silu_and_mul(torch.ones(1, 4))


@pytest.mark.parametrize(
    "wait",
    [
        lambda column: column.sum().item(),
        lambda column: column.tolist(),
        lambda column: column.cpu(),
        lambda column: column[column > 1],
        lambda column: column.__setitem__(column > 1, torch.ones(2, device="cuda")),
        lambda column: column.copy_(torch.zeros(4)),
        lambda column: column.copy_(torch.zeros(4), non_blocking=True),
        lambda column: torch.tensor([1.0], device="cuda"),
    ],
)
def test_waiting_is_refused_where_it_is_watched_and_in_a_recording(column, wait):
    wait(column)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait(column)
        column.copy_(torch.zeros(4).pin_memory(), non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait(column)


@pytest.mark.parametrize("wait", [torch.cuda.synchronize, lambda: torch.cuda.Event().synchronize()])
def test_nothing_is_waited_for_in_a_recording(wait):
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait()


def test_a_replay_computes_from_what_is_there_then(column):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = (column.view(2, 2) * 2).sum(1)
        doubled += torch.zeros(2, device="cuda").add_(1)
    assert doubled.isnan().all(), "a recording does nothing yet"
    for number in (5.0, 7.0):
        column.fill_(number)
        graph.replay()
        assert doubled.tolist() == [number * 4 + 1] * 2


def test_what_is_read_before_the_device_was_waited_for_is_not_there(column):
    copied = (column + 1).to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    later = (column + 2).to("cpu", non_blocking=True)
    assert copied.isnan().all()
    done.synchronize()
    assert copied.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert later.isnan().all()
    torch.cuda.synchronize()
    assert later.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_a_copy_finds_what_its_pinned_source_has_become_and_another_source_as_it_was():
    ones = torch.ones(2)
    for source, found in ((ones.pin_memory(), 9.0), (ones, 1.0), (ones.to("cuda").cpu(), 1.0)):
        there = source.to("cuda", non_blocking=True)
        source.fill_(9.0)
        assert there.tolist() == [found] * 2


def test_memory_counts_while_it_is_used():
    before = torch.cuda.memory_allocated()
    large = torch.empty(1 << 20, device="cuda")
    view = large[:4]
    del large
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del view
    assert torch.cuda.memory_allocated() == before
