"""The ports that a process or a stack listens at, and whether two of them are one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from triptych_kit.addresses import is_wildcard
from triptych_kit.config import ConfigError

_NAMES = {
    "port": "gRPC",
    "http_port": "HTTP",
    "admin_port": "the admin listener",
    "admin_http_port": "the admin HTTP listener",
}
# The options of a service for its listeners: host, port, and the unix socket in their place.
_OF_SERVICE = (
    ("host", "port", "uds"),
    ("host", "http_port", ""),
    ("", "admin_port", "admin_uds"),
    ("admin_http_host", "admin_http_port", "admin_http_uds"),
)


@dataclass(frozen=True, slots=True)
class Listener:
    """A port, and the flag that chooses it; 0 is a free one that the kernel chooses."""

    name: str
    flag: str
    host: str
    port: int


def check_listeners(listeners: Iterable[Listener]) -> None:
    """Raise ConfigError for a port that two listeners would have."""
    for first, second in itertools.combinations(listeners, 2):
        if _collide(first, second):
            raise ConfigError(
                f"port {first.port} is both that of {first.name} ({first.flag}) and that of {second.name} "
                f"({second.flag}): choose another"
            )


def check_service_ports(config: Any) -> None:
    """The same for the listeners in the options of a service."""
    check_listeners(
        Listener(
            _NAMES[port],
            "--" + port.replace("_", "-"),
            getattr(config, host, "127.0.0.1"),
            getattr(config, port, None) or 0,
        )
        for host, port, uds in _OF_SERVICE
        if getattr(config, uds, None) is None
    )


def _collide(first: Listener, second: Listener) -> bool:
    has_wildcard = is_wildcard(first.host) or is_wildcard(second.host)
    return bool(first.port) and first.port == second.port and (has_wildcard or first.host == second.host)
