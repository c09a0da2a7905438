"""The coordinator's options: the only source of its flags, environment variables and file keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triptych_kit.config import option
from triptych_kit.listeners import check_service_ports
from triptych_kit.security.options import SecurityOptions

_MIN_LEASE_MS = 300
# After a coordinator is replaced, its frontends wait one lease for the engines to register again.
_MAX_LEASE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class CoordinatorConfig(SecurityOptions):
    host: str = option("127.0.0.1", help="address to listen on for engines and frontends")
    port: int = option(50071, help="port to listen on; 0 lets the kernel choose")
    admin_port: int = option(0, help="loopback port of the admin service; 0 lets the kernel choose")
    admin_http_host: str = option("127.0.0.1", help="address of the admin HTTP listener, with /metrics")
    admin_http_port: int = option(0, help="port of the admin HTTP listener; 0 lets the kernel choose")
    lease_ms: int = option(3000, help="how long an engine stays a member without a report, in ms")
    index: int = option(0, help="number of this instance, for logs and traces")
    announce_fd: int | None = option(None, help="inherited pipe that gets one line with the bound addresses")
    log_format: Literal["auto", "text", "json"] = option(
        "auto", help="format of log lines; auto: text on a terminal, JSON elsewhere"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", help="least severe level logged")
    reflection: bool = option(True, help="serve gRPC reflection")
    plugins: tuple[str, ...] = option(
        ("all",), help="names of the installed plugins to load; all: every one, empty: none"
    )
    drain_deadline_s: float = option(20.0, help="time for sessions to end after SIGTERM, in s")

    def __post_init__(self) -> None:
        self.check_security(self.host, self.admin_http_host)
        check_service_ports(self)
        if not _MIN_LEASE_MS <= self.lease_ms <= _MAX_LEASE_MS:
            raise ValueError(f"lease_ms is {self.lease_ms}, the range is {_MIN_LEASE_MS}..{_MAX_LEASE_MS}")
        if self.drain_deadline_s < 0:
            raise ValueError(f"drain_deadline_s is {self.drain_deadline_s}, the least is 0")
        for name in ("port", "admin_port", "admin_http_port"):
            if not 0 <= (port := getattr(self, name)) <= 65535:
                raise ValueError(f"{name} is {port}, the range is 0..65535")
