"""Finds the identity of a caller from its key or its certificate."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

from triptych_kit.errors import Unauthenticated
from triptych_kit.security.credentials import Credentials
from triptych_kit.security.identity import UNRESTRICTED, Identity, Role
from triptych_kit.security.refusals import Refusals

AUTHORIZATION = "authorization"
# Longer keys are refused before they are hashed.
_MAX_HEADER_CHARACTERS = 1024
# An identity of SPIFFE, whose path is our role and a name.
_SPIFFE = re.compile(r"spiffe://[a-z0-9._-]{1,255}/(?P<role>[a-z]+)/[A-Za-z0-9._-]{1,128}")


class Authenticator:
    """Identifies the callers of a listener that needs credentials.

    With `verifies_certificates` the listener accepts only connections with a certificate of its CA. Without
    `credentials` as well, everyone is unrestricted.
    """

    def __init__(self, credentials: Credentials | None, *, verifies_certificates: bool) -> None:
        self._credentials = credentials
        self._verifies_certificates = verifies_certificates
        self.refusals = Refusals()

    @property
    def needs_credentials(self) -> bool:
        """Whether a caller has to prove who it is."""
        return self._credentials is not None or self._verifies_certificates

    @property
    def has_file(self) -> bool:
        """Whether credentials are in a file."""
        return self._credentials is not None and self._credentials.has_file

    @property
    def fault(self) -> str:
        """Why callers cannot be identified by the file of credentials now; empty if they can."""
        return "" if self._credentials is None else self._credentials.fault

    def identify(self, authorization: str, certificate_names: Iterable[str]) -> Identity:
        """The identity of a caller. Raises Unauthenticated, or Unavailable where it cannot be known now.

        authorization: the header of that name, Bearer KEY or, as browsers send it, Basic with the key as the
        password; empty without one.  certificate_names: of the certificate that the connection has proved.
        """
        if not self.needs_credentials:
            return UNRESTRICTED
        names = list(certificate_names)
        if authorization and self._credentials is not None:
            return self._credentials.by_key(_key_in(authorization))
        if self._verifies_certificates and names:
            return self._by_certificate(names)
        raise Unauthenticated(
            "no credentials: send the header authorization with Bearer and an API key",
            reason="NO_CREDENTIALS",
        )

    def _by_certificate(self, names: list[str]) -> Identity:
        if self._credentials is not None:
            identity = self._credentials.by_certificate(names)
            if identity is not None:
                return identity
        for name in names:
            spiffe = _SPIFFE.fullmatch(name)
            if spiffe is not None and spiffe["role"] in list(Role):
                return Identity(name, frozenset((Role(spiffe["role"]),)))
        raise Unauthenticated(
            "no entry names this certificate, and it has no URI such as spiffe://DOMAIN/engine/NAME",
            reason="UNKNOWN_CERTIFICATE",
        )


def _key_in(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if len(authorization) <= _MAX_HEADER_CHARACTERS:
        if scheme.lower() == "bearer":
            return value.strip()
        if scheme.lower() == "basic":
            try:
                return base64.b64decode(value, validate=True).decode().partition(":")[2]
            except ValueError:  # neither base64 nor, in a header of HTTP, ASCII
                pass
    raise Unauthenticated(
        "the header authorization is not Bearer and an API key", reason="MALFORMED_CREDENTIALS"
    )
