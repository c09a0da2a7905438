"""The options of every service that say who may connect to it, and how it connects to others.

Needs no gRPC, as configurations do not; `triptych_kit.security.setup` makes of them what servers use.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych_kit.addresses import is_loopback
from triptych_kit.config import ConfigError, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """A part of the configuration of each service."""

    api_keys: str | None = option(
        None, help="YAML file of API keys and certificates with their roles, read again when it changes"
    )
    ssl_certfile: str | None = option(None, help="certificate of all listeners, PEM; with it they use TLS")
    ssl_keyfile: str | None = option(None, help="key of --ssl-certfile")
    ssl_ca_certs: str | None = option(
        None, help="CA that the certificates of callers are verified with, which each then needs"
    )
    peer_ca_certs: str | None = option(
        None, help="CA of the services that this one connects to; with it those connections use TLS"
    )
    peer_certfile: str | None = option(None, help="certificate to show to the services that it connects to")
    peer_keyfile: str | None = option(None, help="key of --peer-certfile")
    peer_server_name: str | None = option(
        None, help="name to expect in the certificates of these services, instead of their host"
    )
    peer_api_key_file: str | None = option(
        None, help="file with the API key to send to the services that this one connects to"
    )
    uds: str | None = option(
        None, help="unix socket to listen on, for this user alone, instead of --host and --port"
    )
    admin_uds: str | None = option(None, help="unix socket of the admin listener, instead of --admin-port")
    admin_http_uds: str | None = option(
        None, help="unix socket of the admin HTTP listener, instead of its host and port"
    )
    insecure: bool = option(
        False, help="listen at an address that other machines reach although no credentials are needed"
    )

    def check_security(self, host: str, admin_http_host: str, *, has_key: bool = False) -> None:
        """Raise ConfigError for options that do not go together, or listeners that would be open to all.

        has_key: whether there is a key besides those of the file.
        """
        for first, second in (("ssl_certfile", "ssl_keyfile"), ("peer_certfile", "peer_keyfile")):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                raise ConfigError(f"{first} and {second} are needed together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs needs ssl_certfile: callers show certificates with TLS alone")
        if self.insecure or self.api_keys is not None or self.ssl_ca_certs is not None or has_key:
            return
        for name, value, uds in (
            ("host", host, self.uds),
            ("admin_http_host", admin_http_host, self.admin_http_uds),
        ):
            if uds is None and not is_loopback(value):
                raise ConfigError(
                    f"{name} {value} can be reached from other machines, and no credentials are needed: give "
                    "api_keys or ssl_ca_certs, or accept that anyone may call it with --insecure"
                )
