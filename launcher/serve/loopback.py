"""Brings the loopback interface up where it is down, as it is in a fresh network namespace (`unshare -n`).

There, binding 127.0.0.1 works and connecting to it fails with "Network is unreachable". Whoever made the
namespace may set the interface up with one ioctl, which spares every service a second transport.
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
