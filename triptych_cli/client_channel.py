"""How the verbs connect to services: with the key and the certificates that the environment names."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

import grpc.aio

from triptych_kit.channel import ChannelCredentials, open_channel
from triptych_kit.config import read_environment
from triptych_kit.process.setup import api_key_in_environment

_ca: ContextVar[str] = ContextVar("ca", default="")


def trust(ca: str | None) -> None:
    """Verify servers with this CA from now on, in place of the one that the environment names.

    Raises ConfigError for a file that has none.
    """
    if ca:
        ChannelCredentials(ca=ca).context()
    _ca.set(ca or "")


def client_credentials() -> ChannelCredentials:
    """Credentials of TRIPTYCH_API_KEY, TRIPTYCH_CA_CERTS, _CERTFILE, _KEYFILE and _SERVER_NAME."""
    return ChannelCredentials(
        ca=_ca.get() or read_environment("TRIPTYCH_CA_CERTS") or None,
        certificate=read_environment("TRIPTYCH_CERTFILE") or None,
        certificate_key=read_environment("TRIPTYCH_KEYFILE") or None,
        server_name=read_environment("TRIPTYCH_SERVER_NAME") or None,
        api_key=api_key_in_environment() or "",
    )


def open_client_channel(
    target: str, *, profile: Literal["internal", "public"] = "public"
) -> grpc.aio.Channel:
    """A channel to a service, with these credentials. Raises ConfigError for files that cannot be read."""
    return open_channel(target, profile=profile, credentials=client_credentials())
