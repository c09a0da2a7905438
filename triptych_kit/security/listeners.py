"""Access control and TLS of a process's listeners."""

from __future__ import annotations

from dataclasses import dataclass

from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.tls import ListenerTLS


@dataclass(frozen=True, slots=True)
class ListenerSecurity:
    """Credentials and certificates of a process's listeners; None: no TLS."""

    authenticator: Authenticator
    tls: ListenerTLS | None = None


# Everyone may call; such listeners are on loopback, or were asked for.
OPEN_LISTENERS = ListenerSecurity(Authenticator(None, verifies_certificates=False))
