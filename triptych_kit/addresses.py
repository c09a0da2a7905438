"""Addresses that a process listens at: host:port, an IPv6 host in brackets, or the path of a unix socket."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

UNIX = "unix:"
# Listen addresses that nothing can connect to: every address of the machine.
_WILDCARD_HOSTS = ("0.0.0.0", "::", "*", "")
# Of the path in a socket's address, with its final zero byte.
_MAX_PATH_BYTES = 107


class AddressError(OSError):
    """A listener cannot be bound. The message has the address and the reason."""

    def __str__(self) -> str:
        return self.strerror or "address error"


def join_address(host: str, port: int | str) -> str:
    """`host:port`; an IPv6 address, with brackets or without, gets them."""
    plain = host.strip("[]")
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of `host:port`. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    has_brackets = host.startswith("[") and host.endswith("]")
    if not host or not is_number or int(port) > 65535 or (":" in host and not has_brackets):
        raise ValueError(f"{address} is not host:port")
    return host.strip("[]"), int(port)


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for every address of the machine, to which nothing can connect."""
    return host.strip("[]") in _WILDCARD_HOSTS


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's loopback without asking a name server."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def loopback_of(host: str) -> str:
    """The loopback address of the family of a host's address: a host may have but one of them."""
    return "::1" if ":" in host else "127.0.0.1"


def listen_at(uds: str | None, host: str, port: int) -> str:
    """Where to listen: at the unix socket `uds`, if it is given, else at host and port."""
    return join_address(host, port) if uds is None else UNIX + os.path.abspath(uds)


def port_in(address: str) -> int | None:
    """The port of a bound address; None for a unix socket."""
    return None if address.startswith(UNIX) else int(address.rpartition(":")[2])


def host_of_peer(peer: str) -> str:
    """The address in a peer of gRPC, such as `ipv6:%5B::1%5D:50051`; the peer itself for a unix socket."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


def unix_path(listen: str) -> str | None:
    """The path in `unix:/path`; None for another address."""
    return listen.removeprefix(UNIX) if listen.startswith(UNIX) else None


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files and sockets that are made inside of the block belong to this user alone (mode 0600)."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def check_address(listen: str, *, shares_port: bool = False) -> None:
    """Raise AddressError unless `listen`, host:port, can be bound, with `shares_port` next to others.

    At `unix:/path` the socket of a process that is gone is removed.
    """
    path = unix_path(listen)
    if path is not None:
        _check_path(path)
        return
    # On a shared port a listening probe would get connections, which it would drop.
    bind_socket(listen, shares_port=shares_port, backlog=0 if shares_port else 1).close()


def bind_socket(address: str, *, shares_port: bool = False, backlog: int = 0) -> socket.socket:
    """A TCP socket bound at host:port, listening if it has a backlog. Raises AddressError.

    `::` is every address of the machine, those of IPv4 too.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise AddressError(errno.EINVAL, f"address {error}") from None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name with both, as `localhost`, the address that clients without IPv6 can dial.
        family, kind, protocol, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(place)
            if backlog:
                bound.listen(backlog)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "is already in use" if is_taken else f"cannot be listened on: {error.strerror or error}"
        raise AddressError(error.errno or errno.EINVAL, f"address {address} {reason}") from error
    return bound


def remove_socket(path: str) -> None:
    """Remove the socket of a listener that has stopped, where gRPC does not do so."""
    Path(path).unlink(missing_ok=True)


def _check_path(path: str) -> None:
    listen = UNIX + path
    if not path.startswith("/") or len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise AddressError(
            errno.EINVAL, f"address {listen} is not an absolute path of up to {_MAX_PATH_BYTES} bytes"
        )
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise AddressError(errno.EEXIST, f"address {listen} is a file, and no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
        raise AddressError(errno.EADDRINUSE, f"address {listen} is already in use")
    except ConnectionRefusedError:
        Path(path).unlink(missing_ok=True)
    except FileNotFoundError:
        if not Path(path).parent.is_dir():
            raise AddressError(errno.ENOENT, f"address {listen} is in no folder") from None
    except AddressError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise AddressError(
            error.errno or errno.EINVAL, f"address {listen} cannot be listened on: {reason}"
        ) from error
