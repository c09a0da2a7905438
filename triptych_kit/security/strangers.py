"""Limits of gRPC connections whose peers have shown no key: how many an address has, and how much they send.

gRPC has no such limits, and parses whatever it gets. So the sockets of the process are looked at, beside the
path of the data: a connection without a key that exceeds a limit is reset, and unless calls with a key have
come from its address, the kernel drops what that sends to the ports for a minute. Linux alone; elsewhere
nothing is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import ipaddress
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from triptych_kit.addresses import host_of_peer
from triptych_kit.process.setup import release_memory
from triptych_kit.security.refusals import (
    TOO_MANY_BYTES,
    TOO_MANY_CONNECTIONS,
    Refusals,
)

# A client that keeps to its window sends less before its first key has been seen.
_MAX_BYTES = 256 * 1024
_MAX_BYTES_OF_NETWORK = 1024 * 1024  # of all its connections without a key
_MAX_BYTES_PER_S = 4096  # of a connection beyond these; a health check every second has some 200
_ENDED_BYTES_PER_S = 64 * 1024  # of connections of a network that have ended; more is added up
# What a byte costs differs: 28 of a call that is reset take 14 kB until the call is seen. So limits are lower
# while the process's memory grows by more than this, in the last one to two intervals.
_GROWTH_S = 1.0
_GROWTH_BYTES = 24 * 1024 * 1024
_MAX_BYTES_IN_GROWTH = 128 * 1024  # of a network
# The same where more calls without a key have been seen.
_MAX_CALLS = 16
_GROWTH_BYTES_OF_CALLS = 4 * 1024 * 1024
_MAX_BYTES_OF_CALLS = 16 * 1024  # of a connection, and of a network
_MAX_CONNECTIONS = 1024  # or an eighth of the files that the process may open
_MAX_OF_NETWORK = 256  # or half of these
# Clients that connect again at once, as after a restart, may be many behind one address. Younger connections
# count against four times these limits alone.
_SHOWS_KEY_S = 2.0
_NEW = 4
_DROP_S = 60.0
_MAX_DROPPED = 256  # networks, of which the oldest is forgotten
_FRIEND_S = 600.0  # since the last call with a key
_MAX_FRIENDS = 10_000  # as above
_LOOK_S = 0.03
_FIRST_LOOK_S = 0.005  # since the newest connection
_FIRST_LOOKS_FOR_S = 3.0
_WHOLE_LOOK_S = 1.0  # between looks at descriptors that were something else before
_RELEASE_S = 2.0
_RELEASES_FOR_S = 20.0  # after
_LONGEST_DELAY_S = 60.0  # of a release after connections of HTTP
_MANY_REFUSED = 32  # calls and connections
_DESCRIPTORS = "/proc/self/fd"
_MEMORY = "/proc/self/statm"
_NUM_RECEIVED_OFFSET = 128  # of tcpi_bytes_received
_BACKLOG_OFFSET = 24  # of tcpi_unacked, which is that of a listening socket
_TCP_INFO_BYTES = 136
_FAMILY_AND_PORT = struct.Struct("H2s")
_LISTING_BYTES = 32 * 1024
_STATM_BYTES = 256
# Its functions keep the interpreter's lock, so that a look is not interrupted: each would wait for its turn.
_libc = ctypes.PyDLL(None, use_errno=True)

# What a descriptor is that is no connection to a port which is watched; the name of a peer has a space.
_LISTENING, _OTHER, _GONE = "listening", "other", "gone"

_SET_OWNER, _OWNED_BY_THREAD = 15, 0  # F_SETOWN_EX and F_OWNER_TID
_ARRIVAL = signal.SIGIO
_SO_ATTACH_FILTER = 26
_NET_HEADER = 0xFFF00000  # in front of an offset into the header of IP
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x05, 0x15, 0x06
_WHOLE_PACKET = 0xFFFFFFFF
_UNSPECIFIED_ADDRESS = bytes(16)


@dataclass(slots=True)
class _Stranger:
    """A connection without a key. network: of its peer's address."""

    address: str
    network: str
    since: float
    num_bytes: int = 0
    num_calls: int = 0
    is_closed: bool = False


@dataclass(slots=True)
class _Growth:
    """How much larger a size is than it was in the last one to two intervals."""

    least: float = float("inf")
    least_before: float = float("inf")
    since: float = float("-inf")

    def note(self, size: float, now: float) -> float:
        if now - self.since >= _GROWTH_S:
            self.least_before, self.least, self.since = self.least, size, now
        self.least = min(self.least, size)
        return size - min(self.least, self.least_before)


@dataclass(slots=True)
class Releases:
    """When memory is collected, which keeps all threads waiting for 0.1 s and more.

    Every two seconds while calls are refused and until 20 s later; after connections of HTTP, which leave
    little, once when no more are closed, or a minute after there were enough of them.
    """

    num_refused: int = 0
    until: float = float("-inf")
    num_closed: int = 0
    closed_at: float = float("-inf")
    num_closed_before: int = 0  # the newest release
    few_at: float = float("-inf")  # when too few for a release had been closed last
    released_at: float = float("-inf")

    def is_due(self, num_refused: int, num_closed: int, now: float) -> bool:
        """Whether one begins now. num_refused: calls and requests; num_closed: connections."""
        if num_refused - self.num_refused >= _MANY_REFUSED:
            self.num_refused, self.until = num_refused, now + _RELEASES_FOR_S
        if num_closed != self.num_closed:
            self.num_closed, self.closed_at = num_closed, now
        if num_closed - self.num_closed_before < _MANY_REFUSED:
            self.few_at = now
        is_over = now - self.closed_at > _RELEASE_S or now - self.few_at > _LONGEST_DELAY_S
        is_due = (is_over and self.few_at < now) or self.released_at + _RELEASE_S < now < self.until
        if is_due:
            self.released_at, self.num_closed_before = now, num_closed
        return is_due


class Strangers:
    """The connections to gRPC ports of this process that have made no call with a key.

    They are looked at in a thread: a flood is what keeps the event loop busy.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._ports: set[int] = set()
        self._thread: threading.Thread | None = None
        self._known: dict[str, float] = {}  # when a peer last made a call with a key
        self._friends: dict[str, float] = {}  # the same for networks
        self._dropped: dict[str, float] = {}  # networks, until when
        self._strangers: dict[str, _Stranger] = {}
        self._ended: Counter[str] = Counter()  # bytes of connections that have ended, by network
        self._growth = _Growth()
        self._others: set[int] = set()  # descriptors that are none of a stranger
        self._listening: set[int] = set()
        self._num_closed = 0
        self._has_backlog = False  # connections that gRPC had yet to accept at the newest look
        self._looked_whole_at = float("-inf")

    @property
    def num_dropped(self) -> int:
        """The number of networks whose packets the kernel drops."""
        return len(self._dropped)

    def note_call(self, peer: str) -> None:
        """Note that a peer, as gRPC names it, has made a call, with valid credentials or without."""
        if self._thread is not None and (stranger := self._strangers.get(_peer(peer))) is not None:
            stranger.num_calls += 1

    def note_known(self, peer: str) -> None:
        """Note that a peer, as gRPC names it, has made a call with valid credentials."""
        if self._thread is not None:
            self._known[_peer(peer)] = time.monotonic()

    def watch(self, port: int) -> None:
        """Limit the connections to a port from now on. Called in the event loop."""
        self._ports.add(port)
        if sys.platform != "linux" or self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = max(2, min(_MAX_CONNECTIONS, num_files // 8))
        self._max_of_network = min(_MAX_OF_NETWORK, self._max_connections // 2)
        self._free, self._spare = os.eventfd(0), os.eventfd(0)
        self._folder = os.open(_DESCRIPTORS, os.O_RDONLY | os.O_DIRECTORY)
        self._memory = os.open(_MEMORY, os.O_RDONLY)
        self._thread = threading.Thread(target=self._run, name="strangers", daemon=True)
        # The thread alone is sent the signal, and has what is blocked here.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {_ARRIVAL})
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def leave(self, port: int) -> None:
        """Do not limit them any more."""
        self._ports.discard(port)
        if self._thread is not None and not self._ports:
            if self._thread.ident is not None:
                signal.pthread_kill(self._thread.ident, _ARRIVAL)
            self._thread.join()
            self._thread = None
            for descriptor in (self._free, self._spare, self._folder, self._memory):
                os.close(descriptor)

    def _run(self) -> None:
        releases = Releases()
        while self._ports:
            now, began_s = time.monotonic(), time.thread_time()
            self._look(now)
            # Without the time that this thread waited for a core and for the interpreter: it waits most when
            # looks are needed most.
            look_s = time.thread_time() - began_s
            num_refused = self._refusals.num_refused + self._num_closed
            if releases.is_due(num_refused, self._refusals.num_closed, now):
                # What many calls took in small parts stays with the process otherwise. This may take long.
                threading.Thread(target=_release_memory, name="release memory", daemon=True).start()
            # Many connections take longer: a tenth of a core at most.
            signal.sigtimedwait({_ARRIVAL}, max(self._pause_s(now), 9 * look_s))

    def _pause_s(self, now: float) -> float:
        if self._has_backlog:
            return _FIRST_LOOK_S
        if not self._strangers:
            return _WHOLE_LOOK_S
        newest_at = max(stranger.since for stranger in self._strangers.values())
        return _FIRST_LOOK_S if now - newest_at < _FIRST_LOOKS_FOR_S else _LOOK_S

    def _look(self, now: float) -> None:
        """Close the connections without a key that exceed a limit."""
        found = self._found(now)
        self._note_ended(found)
        self._strangers = {peer: self._strangers.get(peer) or _stranger(peer, now) for peer in found}
        for peer, stranger in self._strangers.items():
            stranger.num_bytes = round(max(0.0, found[peer][1] - _MAX_BYTES_PER_S * (now - stranger.since)))
        grown_bytes = self._growth.note(_memory_bytes(self._memory), now)
        excess, networks = self._excess(now, grown_bytes)
        if networks:
            friends = {*self._friends, *(_network(_address(peer)) for peer in list(self._known))}
            networks = {network: reason for network, reason in networks.items() if network not in friends}
        closed = []
        for peer, stranger in self._strangers.items():
            reason = networks.get(stranger.network) or excess.get(peer)
            if reason and not stranger.is_closed and self._close(peer, found[peer][0]):
                stranger.is_closed = True
                closed.append((stranger.address, reason))
        self._drop(networks, now)
        if closed:
            # Once for all: each call lets others have the interpreter.
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._note_closed, closed)

    def _note_closed(self, closed: Iterable[tuple[str, str]]) -> None:
        for address, reason in closed:
            self._num_closed += 1
            self._refusals.note_closed(address, reason)

    def _found(self, now: float) -> dict[str, tuple[int, int]]:
        """Descriptors and received bytes of connections without a key, by peer."""
        self._has_backlog = any(map(_backlog, self._listening))
        descriptors = _open_descriptors(self._folder)
        is_whole = now - self._looked_whole_at >= _WHOLE_LOOK_S
        if is_whole:
            self._others.clear()
            self._listening.clear()
        self._others.intersection_update(descriptors)
        strangers: dict[str, tuple[int, int]] = {}
        known = set()
        for descriptor in descriptors:
            if descriptor in self._others:
                continue
            peer, num_bytes = _inspect(descriptor, self._ports)
            if peer == _LISTENING:
                self._listening.add(descriptor)
                _signal_arrivals(descriptor)
            elif peer in self._known:
                known.add(peer)
            elif peer not in (_OTHER, _GONE):
                strangers[peer] = (descriptor, num_bytes)
            if peer != _GONE and peer not in strangers:
                self._others.add(descriptor)
        if is_whole:
            self._looked_whole_at = now
            self._forget(known, now)
        return strangers

    def _forget(self, known: set[str], now: float) -> None:
        """Forget peers that are not connected any more, and networks without calls for long."""
        for peer, at in list(self._known.items()):
            if peer in known or now - at < _WHOLE_LOOK_S:
                self._friends[_network(_address(peer))] = now
            else:
                del self._known[peer]
        for network, at in list(self._friends.items()):
            if now - at > _FRIEND_S or len(self._friends) > _MAX_FRIENDS:
                del self._friends[network]
        # Those without any are left out.
        self._ended -= Counter(dict.fromkeys(self._ended, _ENDED_BYTES_PER_S))

    def _note_ended(self, found: Container[str]) -> None:
        """Count what connections have sent that are not there any more: others may follow at once."""
        for peer, stranger in self._strangers.items():
            if peer not in found and peer not in self._known and not stranger.is_closed:
                self._ended[stranger.network] += stranger.num_bytes

    def _excess(self, now: float, grown_bytes: float) -> tuple[dict[str, str], dict[str, str]]:
        """The reasons of peers whose connections are beyond a limit, and of networks that exceed one."""
        excess: dict[str, str] = {}
        networks: dict[str, str] = {}
        of_network: dict[str, list[str]] = defaultdict(list)
        bytes_of_network, calls_of_network = self._ended.copy(), Counter[str]()
        opened = {peer: each for peer, each in self._strangers.items() if not each.is_closed}
        for peer, stranger in sorted(opened.items(), key=lambda item: item[1].since):
            of_network[stranger.network].append(peer)
            bytes_of_network[stranger.network] += stranger.num_bytes
            calls_of_network[stranger.network] += stranger.num_calls
            of_calls = grown_bytes > _GROWTH_BYTES_OF_CALLS and stranger.num_calls > _MAX_CALLS
            if stranger.num_bytes > (_MAX_BYTES_OF_CALLS if of_calls else _MAX_BYTES):
                excess[peer] = networks[stranger.network] = TOO_MANY_BYTES
        for network, num_bytes in bytes_of_network.items():
            most = _MAX_BYTES_IN_GROWTH if grown_bytes > _GROWTH_BYTES else _MAX_BYTES_OF_NETWORK
            if grown_bytes > _GROWTH_BYTES_OF_CALLS and calls_of_network[network] > _MAX_CALLS:
                most = _MAX_BYTES_OF_CALLS
            if num_bytes > most:
                networks[network] = TOO_MANY_BYTES
        for network, peers in of_network.items():
            if (num_beyond := self._num_beyond(peers, self._max_of_network, now)) > 0:
                networks.setdefault(network, TOO_MANY_CONNECTIONS)
                excess |= dict.fromkeys(peers[:num_beyond], TOO_MANY_CONNECTIONS)
        # Beyond the limit of all, no network is to blame.
        oldest = sorted(opened, key=lambda peer: opened[peer].since)
        num_beyond = max(0, self._num_beyond(oldest, self._max_connections, now))
        return dict.fromkeys(oldest[:num_beyond], TOO_MANY_CONNECTIONS) | excess, networks

    def _num_beyond(self, peers: Sequence[str], limit: int, now: float) -> int:
        """How many of these peers, the oldest first, are beyond a limit."""
        num_old = sum(now - self._strangers[peer].since >= _SHOWS_KEY_S for peer in peers)
        return max(num_old - limit, len(peers) - _NEW * limit)

    def _close(self, peer: str, descriptor: int) -> bool:
        """Reset the connection of a peer; False if that is no longer behind the descriptor."""
        # Only a duplicate cannot become another file meanwhile.
        if _libc.dup3(descriptor, self._spare, os.O_CLOEXEC) < 0:
            return False
        is_same = _inspect(self._spare, self._ports)[0] == peer
        if is_same:
            # Also forgets what was received: megabytes that would still be parsed.
            _libc.connect(self._spare, _UNSPECIFIED_ADDRESS, len(_UNSPECIFIED_ADDRESS))
        _libc.dup3(self._free, self._spare, os.O_CLOEXEC)
        return is_same

    def _drop(self, networks: Iterable[str], now: float) -> None:
        """Have the kernel drop what these networks send to the ports, and no more what others sent."""
        over = [network for network, until in self._dropped.items() if until < now]
        if not networks and not over:
            return
        for network in over:
            del self._dropped[network]
        for network in networks:
            self._dropped[network] = now + _DROP_S
            del self._ended[network]
        while len(self._dropped) > _MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        for descriptor in self._listening:
            drop_packets(descriptor, self._dropped)


def _release_memory() -> None:
    # A call that was refused is in a cycle with its error, and engines collect seldom.
    gc.collect()
    release_memory()


def _open_descriptors(folder: int) -> list[int]:
    """The descriptors of this process, of which `folder` is that of /proc/self/fd."""
    found = []
    content = ctypes.create_string_buffer(_LISTING_BYTES)
    _libc.lseek(folder, 0, os.SEEK_SET)
    while (size := _libc.getdents64(folder, content, _LISTING_BYTES)) > 0:
        start = 0
        while start < size:
            (length,) = struct.unpack_from("H", content, start + 16)
            name = content.raw[start + 19 : start + length].partition(b"\0")[0]
            if name.isdigit():
                found.append(int(name))
            start += length
    return found


def _signal_arrivals(listening: int) -> None:
    """Have each connection that arrives at a socket send this thread a signal.

    Polling is too late: where gRPC has accepted the connection before, nothing is reported.
    """
    with contextlib.suppress(OSError):  # closed meanwhile
        fcntl.fcntl(listening, _SET_OWNER, struct.pack("ii", _OWNED_BY_THREAD, threading.get_native_id()))
        fcntl.fcntl(listening, fcntl.F_SETFL, fcntl.fcntl(listening, fcntl.F_GETFL) | os.O_ASYNC)


def _memory_bytes(descriptor: int) -> int:
    """What this process has that is no file's, of /proc/self/statm."""
    content = ctypes.create_string_buffer(_STATM_BYTES)
    _libc.pread(descriptor, content, _STATM_BYTES - 1, 0)
    _, resident, shared = content.value.split()[:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def _inspect(descriptor: int, ports: Container[int]) -> tuple[str, int]:
    """The peer of a connection to one of the ports, and the bytes received; or what else it is."""
    content, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint32(_TCP_INFO_BYTES)
    if _libc.getsockname(descriptor, content, ctypes.byref(size)) < 0:
        return _OTHER if ctypes.get_errno() == errno.ENOTSOCK else _GONE, 0
    family, port = _FAMILY_AND_PORT.unpack_from(content)
    if family not in (socket.AF_INET, socket.AF_INET6) or int.from_bytes(port, "big") not in ports:
        return _OTHER, 0
    size.value = _TCP_INFO_BYTES
    if _libc.getpeername(descriptor, content, ctypes.byref(size)) < 0:
        size.value = 4
        _libc.getsockopt(descriptor, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, content, ctypes.byref(size))
        return _LISTENING if content.raw[0] else _GONE, 0
    family, port = _FAMILY_AND_PORT.unpack_from(content)
    packed = content.raw[4:8] if family == socket.AF_INET else content.raw[8:24]
    host = socket.inet_ntop(family, packed).removeprefix("::ffff:")
    size.value = _TCP_INFO_BYTES
    _libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, content, ctypes.byref(size))
    (num_bytes,) = struct.unpack_from("Q", content, _NUM_RECEIVED_OFFSET)
    return f"{host} {int.from_bytes(port, 'big')}", num_bytes


def _backlog(listening: int) -> int:
    """How many connections of a listening socket are not accepted yet."""
    content, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint32(_TCP_INFO_BYTES)
    _libc.getsockopt(listening, socket.IPPROTO_TCP, socket.TCP_INFO, content, ctypes.byref(size))
    return int(struct.unpack_from("I", content, _BACKLOG_OFFSET)[0])


def _peer(peer: str) -> str:
    """The name here of a peer that gRPC names."""
    return f"{host_of_peer(peer)} {peer.rpartition(':')[2]}"


def _stranger(peer: str, now: float) -> _Stranger:
    return _Stranger(_address(peer), _network(_address(peer)), now)


def _address(peer: str) -> str:
    return peer.partition(" ")[0]


@functools.lru_cache(maxsize=_MAX_CONNECTIONS)
def _network(address: str) -> str:
    """The addresses that one host may have: one of IPv4, 2^64 of IPv6."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    return str(ipaddress.ip_network((plain, 32 if plain.version == 4 else 64), strict=False))


def drop_packets(listening: int, networks: Iterable[str]) -> None:
    """Have the kernel drop what a listening socket gets from these networks, /32 or /64, and nothing else."""
    content = _packet_filter(networks)
    kept = ctypes.create_string_buffer(content)
    program = struct.pack("HxxxxxxP", len(content) // 8, ctypes.addressof(kept))
    _libc.setsockopt(listening, socket.SOL_SOCKET, _SO_ATTACH_FILTER, program, len(program))


def _packet_filter(networks: Iterable[str]) -> bytes:
    v4: list[tuple[int, int, int, int]] = [(_LOAD_WORD, 0, 0, _NET_HEADER + 12)]
    v6: list[tuple[int, int, int, int]] = []
    for network in map(ipaddress.ip_network, networks):
        words = struct.unpack_from(">II", network.network_address.packed + bytes(4))
        if network.version == 4:
            v4 += [(_JUMP_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, 0)]
            continue
        v6 += [(_LOAD_WORD, 0, 0, _NET_HEADER + 8), (_JUMP_IF_EQUAL, 0, 3, words[0])]
        v6 += [(_LOAD_WORD, 0, 0, _NET_HEADER + 12), (_JUMP_IF_EQUAL, 0, 1, words[1]), (_RETURN, 0, 0, 0)]
    passes = (_RETURN, 0, 0, _WHOLE_PACKET)
    # The version of IP is in the first half of the first byte. Conditional jumps end within 255 instructions.
    program = [(_LOAD_BYTE, 0, 0, _NET_HEADER), (_SHIFT_RIGHT, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, 4)]
    program += [(_JUMP, 0, 0, len(v4) + 1), *v4, passes, *v6, passes]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
