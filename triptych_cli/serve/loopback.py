"""Brings up the loopback interface if it is down, as in a new network namespace (`unshare -n`).

There, binding 127.0.0.1 works, but connecting to it fails with "Network is unreachable". The creator of the
namespace may set the interface up with one ioctl, so that no service needs a second transport.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_IFREQ = struct.Struct("16sh22x")


def ensure_loopback() -> None:
    """Set `lo` up if it is down; exits with a clear message if that is not allowed. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        flags = _IFREQ.unpack(request)[1]
        if flags & _IFF_UP:
            return
        try:
            fcntl.ioctl(control, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))
        except PermissionError as error:
            raise SystemExit(
                "the loopback interface is down and this user may not set it up: run `ip link set lo up`"
            ) from error
