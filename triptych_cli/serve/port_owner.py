"""Finds the process that listens on a TCP port, from /proc."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from triptych_kit.addresses import AddressError, bind_socket, join_address

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class PortOwner:
    """A process that listens on a port, as far as it is visible to this user."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})" if self.pid else self.command


def find_port_owner(host: str, port: int) -> PortOwner | None:
    """The process that listens on `host:port`, or None if it is free. Port 0 is always free.

    Raises OSError if it cannot be bound for another reason, such as a host that is not on this machine.
    """
    if _can_bind(host, port):
        return None
    inodes = _listening_inodes(port)
    for folder in Path("/proc").glob("[0-9]*/fd"):
        if _holds_any(folder, inodes):
            pid = int(folder.parent.name)
            return PortOwner(pid, _command_of(pid))
    return PortOwner(None, "a process this user cannot see")


def _can_bind(host: str, port: int) -> bool:
    try:
        bind_socket(join_address(host, port)).close()
    except AddressError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds_any(folder: Path, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        entries = list(folder.iterdir())
    except OSError:
        # The process has ended, or belongs to another user.
        return False
    return any(_target_of(entry) in wanted for entry in entries)


def _target_of(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return "closed meanwhile"


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended meanwhile"
    return b" ".join(words).decode(errors="replace").strip()
