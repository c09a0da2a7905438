"""The GPUs of a group: whose connections are given up when another process ends, also while they are made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # It is there.

from engine_svc.core.errors import PeersLost
from engine_svc.data_parallel.nccl_mesh import NcclMesh
from tests.engine_svc.ranks.shared_rig import TIMEOUT_S

GPU = torch.device("cuda", 0)


class FakeNumbers:
    """The connections of two processes; the other one ends when the test says so."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.num_closes = 0

    def wait_for_end_of(self, rank: int) -> None:
        self.has_ended.wait(TIMEOUT_S)

    def close(self) -> None:
        self.num_closes += 1
        self.has_ended.set()


class FakeNccl:
    """NCCL's part. connect: what it does while the GPUs look for each other."""

    def __init__(self, connect: Callable[[FakeNccl], None]) -> None:
        self._connect = connect
        self.is_aborted = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connect(self)

    def abort(self) -> None:
        self.is_aborted.set()


def wait_for_abort(group: FakeNccl) -> None:
    if group.is_aborted.wait(TIMEOUT_S):
        raise RuntimeError("NCCL communicator was aborted")


def make_mesh(numbers: FakeNumbers, group: FakeNccl) -> NcclMesh:
    return NcclMesh(HashStore(), numbers, GPU, TIMEOUT_S, make_group=lambda *parts: group)


def test_a_process_that_ends_while_the_gpus_connect_ends_the_wait_for_it():
    numbers, group = FakeNumbers(), FakeNccl(wait_for_abort)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(make_mesh, numbers, group)
        numbers.has_ended.set()
        assert isinstance(making.exception(TIMEOUT_S), PeersLost)
    assert group.is_aborted.is_set()


def test_gpus_that_cannot_connect_are_given_up():
    def fail(group: FakeNccl) -> None:
        raise RuntimeError("no route")

    numbers, group = FakeNumbers(), FakeNccl(fail)
    with pytest.raises(PeersLost, match="no route"):
        make_mesh(numbers, group)
    assert group.is_aborted.is_set()
    assert numbers.num_closes > 0


def test_a_process_that_ends_later_is_found_out_by_what_was_computed():
    numbers, group = FakeNumbers(), FakeNccl(lambda group: None)
    mesh = make_mesh(numbers, group)
    mesh.check()
    numbers.has_ended.set()
    assert group.is_aborted.wait(TIMEOUT_S)
    with pytest.raises(PeersLost, match="another rank was lost"):
        mesh.check()
