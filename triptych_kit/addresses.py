"""Addresses that a process listens at: host:port, or the path of a unix socket."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

UNIX = "unix:"
# Listen addresses that nothing can connect to: every address of the machine.
WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]", "*", "")
# Of the path in a socket's address, with its final zero byte.
_MAX_PATH_BYTES = 107


class AddressError(OSError):
    """A listener cannot be bound. The message has the address and the reason."""

    def __str__(self) -> str:
        return self.strerror or "address error"


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's loopback without asking a name server."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listen_at(uds: str | None, host: str, port: int) -> str:
    """Where to listen: at the unix socket `uds`, if it is given, else at host and port."""
    return f"{host}:{port}" if uds is None else UNIX + os.path.abspath(uds)


def port_in(address: str) -> int | None:
    """The port of a bound address; None for a unix socket."""
    return None if address.startswith(UNIX) else int(address.rpartition(":")[2])


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
    host, _, port = listen.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not is_number or int(port) > 65535:
        raise AddressError(errno.EINVAL, f"address {listen} is not host:port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
            # On a shared port a listening probe would get connections, which it would drop.
            if not shares_port:
                probe.listen()
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "is already in use" if is_taken else f"cannot be listened on: {error.strerror or error}"
        raise AddressError(error.errno or errno.EINVAL, f"address {listen} {reason}") from error


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
