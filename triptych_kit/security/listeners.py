"""Access control and TLS of a process's listeners."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.strangers import Strangers
from triptych_kit.security.tls import ListenerTLS
from triptych_kit.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ListenerSecurity:
    """Credentials and certificates of a process's listeners; None: no TLS."""

    authenticator: Authenticator
    tls: ListenerTLS | None = None
    strangers: Strangers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strangers", Strangers(self.authenticator.refusals))

    def register(self, metrics: Metrics, service: str) -> None:
        """Register metrics of refused credentials, and of the files that are read again when they change."""
        refusals = self.authenticator.refusals
        metrics.counter(
            f"triptych_{service}_refused_credentials_total",
            "Calls that were refused for the lack of valid credentials, or reset without any, by reason.",
            lambda: {(reason,): float(count) for reason, count in refusals.by_reason.items()},
            labels=("reason",),
        )
        metrics.counter(
            f"triptych_{service}_closed_connections_total",
            "Connections without a key that were closed, by reason.",
            lambda: {(reason,): float(count) for reason, count in refusals.closed_by_reason.items()},
            labels=("reason",),
        )
        metrics.gauge(
            f"triptych_{service}_dropped_networks",
            "Addresses (of IPv6 /64) whose packets to the gRPC ports are dropped for a minute.",
            lambda: float(self.strangers.num_dropped),
        )
        metrics.gauge(
            f"triptych_{service}_security_files_usable",
            "Whether files can be used as they are now: api_keys (at 0 no key is valid), certificates (at 0 "
            "the earlier ones are used).",
            self._usable_files,
            labels=("files",),
        )

    def _usable_files(self) -> dict[tuple[str, ...], float]:
        usable: dict[tuple[str, ...], float] = {}
        if self.authenticator.has_file:
            usable["api_keys",] = not self.authenticator.fault
        if self.tls is not None:
            usable["certificates",] = self.tls.is_usable
        return usable


# Everyone may call; such listeners are on loopback, or were asked for.
OPEN_LISTENERS = ListenerSecurity(Authenticator(None, verifies_certificates=False))
