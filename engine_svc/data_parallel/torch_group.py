"""The process groups of a lockstep engine, one after the other in one process. Knows no requests.

How the lockstep uses them, if a model's experts are divided over engines:
when a generation is prepared, `experts.prepare(rank, size)`; when it is committed, with no step in flight,
`experts.adopt()` and `groups.form(meeting)`, in either order; when a rank is lost, or this one leaves,
`group.close()`, which any thread may call, also while the model waits inside a step. At the end, when no
group is open, `groups.close()`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from engine_svc.core.errors import PeersLost
from engine_svc.data_parallel.gloo_mesh import GlooMesh
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.nccl_mesh import NcclMesh
from engine_svc.data_parallel.wave import Vote
from engine_svc.model.expert_exchange import GroupExchange, Mesh

_MAX_WAITING_CONNECTIONS = 128
_SIGNAL_PREFIX = "wake-signal"


class ProcessRankGroups:
    """The RankGroups of an engine. It has a store until it is closed; ranks meet at the store of rank 0.

    host: name or address of this machine for the others.  listen: the address to bind, host if unset.
    timeout_s: how long another rank may take to connect, to answer, or to compute its part of a layer.
    """

    def __init__(
        self,
        exchange: GroupExchange,
        *,
        host: str,
        device: torch.device,
        timeout_s: float,
        listen: str | None = None,
    ) -> None:
        self.host = host
        self._exchange, self._device = exchange, device
        self._timeout_s = timeout_s
        listener = _listener(listen or host)
        self.store_port: int = listener.getsockname()[1]
        # The store owns the socket from here on.
        self._store: Store | None = dist.TCPStore(  # type: ignore[attr-defined]  # It is there.
            host,
            self.store_port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def form(self, meeting: Meeting) -> ProcessRankGroup:
        """See RankGroups.form. After a failure the next meeting has to be of another generation."""
        made: list[Mesh] = []
        try:
            # A separate connection, as a wait blocks all other uses of its connection.
            store = reach_store(meeting.master_address, meeting.store_port, self._timeout_s)
            votes = self._mesh(meeting, "votes", store)
            made.append(votes)
            numbers = self._mesh(meeting, "tensors", store)
            made.append(numbers)
            tensors: Mesh = numbers
            if self._device.type == "cuda":
                prefix = PrefixStore(f"{_store_prefix(meeting)}/nccl", store)
                tensors = NcclMesh(prefix, numbers, self._device, self._timeout_s)
                made.append(tensors)
            # After this swap every rank has connected, so the keys in the store are not needed any more.
            numbers.swap_numbers((meeting.generation,))
        # Addresses and numbers come from other ranks: an invalid one means that the rank cannot be reached.
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            for mesh in made:
                mesh.close()
            if isinstance(error, PeersLost):
                raise
            raise PeersLost(f"generation {meeting.generation} does not meet: {error}") from error
        finally:
            self._forget(meeting)
        return ProcessRankGroup(meeting, votes, tensors, self._exchange)

    def _mesh(self, meeting: Meeting, name: str, store: Store) -> GlooMesh:
        return GlooMesh(
            PrefixStore(f"{_store_prefix(meeting)}/{name}", store),
            meeting.rank,
            meeting.size,
            host=self.host,
            timeout_s=self._timeout_s,
        )

    def close(self) -> None:
        """Close the store. Formed groups stay open."""
        self._store = None

    def _forget(self, meeting: Meeting) -> None:
        """Delete the addresses of ranks and old wake signals from this engine's store."""
        if meeting.rank or self._store is None:
            return
        # If this fails, a few keys of a generation that is not used again remain.
        with contextlib.suppress(RuntimeError):
            for key in self._store.list_keys():
                is_stale_signal = key.startswith(_SIGNAL_PREFIX) and not key.startswith(
                    f"{signal_prefix(meeting)}/"
                )
                if is_stale_signal or key.startswith(f"{_store_prefix(meeting)}/"):
                    self._store.delete_key(key)


class ProcessRankGroup:
    """The RankGroup of a formed generation; the model exchanges `tensors` through it until it is closed."""

    def __init__(self, meeting: Meeting, votes: GlooMesh, tensors: Mesh, exchange: GroupExchange) -> None:
        self.meeting = meeting
        self.tensors = tensors
        self._votes = votes
        self._exchange = exchange
        exchange.enter(tensors)

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._votes.swap_numbers(numbers)

    def count(self, vote: Vote) -> Vote:
        all_numbers = self._votes.swap_numbers((vote.wave, vote.has_work, vote.is_pausing, vote.generation))
        return Vote.count(
            [
                Vote(wave, bool(has_work), bool(is_pausing), ready)
                for wave, has_work, is_pausing, ready in all_numbers
            ]
        )

    def when_all_resumed(self, weights: int, done: Callable[[], None], lost: Callable[[], None]) -> None:
        others = [rank for rank in range(self.meeting.size) if rank != self.meeting.rank]
        resuming = _Resuming(len(others), done, lost)

        def wait_for(rank: int) -> None:
            try:
                has_same = self._votes.wait_for(rank, weights) == weights
            except PeersLost:
                has_same = False
            if has_same:
                resuming.arrive()
            else:
                resuming.fail()

        # One thread per rank: a wait for one rank does not end when another one is gone.
        for rank in others:
            threading.Thread(target=wait_for, args=(rank,), name=f"resuming-{rank}", daemon=True).start()

    def close(self) -> None:
        self._exchange.leave(self.tensors)
        self.tensors.close()
        self._votes.close()


class _Resuming:
    """Counts the ranks that have resumed; calls `done` or `lost` once, in the thread that decides it."""

    def __init__(self, num_missing: int, done: Callable[[], None], lost: Callable[[], None]) -> None:
        self._num_missing = num_missing
        self._done, self._lost = done, lost
        self._is_over = False
        self._lock = threading.Lock()
        self._notify_if_done()

    def arrive(self) -> None:
        with self._lock:
            self._num_missing -= 1
        self._notify_if_done()

    def fail(self) -> None:
        if self._claim_completion(True):
            self._lost()

    def _notify_if_done(self) -> None:
        if self._claim_completion(not self._num_missing):
            self._done()

    def _claim_completion(self, is_complete: bool) -> bool:
        with self._lock:
            is_last = is_complete and not self._is_over
            self._is_over |= is_last
            return is_last


def signal_prefix(meeting: Meeting) -> str:
    """Key prefix of the wake signals of a generation."""
    return f"{_SIGNAL_PREFIX}-{meeting.generation}"


def _store_prefix(meeting: Meeting) -> str:
    """Key prefix of the addresses of a generation's ranks."""
    return f"generation-{meeting.generation}"


def _listener(address: str) -> socket.socket:
    """A listening socket at a port that the kernel chooses."""
    family, kind, protocol, _, socket_address = socket.getaddrinfo(
        address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(socket_address)
        listener.listen(_MAX_WAITING_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def reach_store(address: str, port: int, timeout_s: float) -> Store:
    """A new connection to the store of another rank. Raises RuntimeError or OSError if it is gone."""
    # A store exists as long as its process. Torch's client would wait for a missing one, twice.
    with socket.create_connection((address, port), timeout_s):
        pass
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # It is there.
        address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
    return store
