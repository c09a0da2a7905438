"""Makes of the options of a service what its listeners and its connections use."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from triptych_kit.channel import ChannelCredentials
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.credentials import Credentials, Entry, read_entries
from triptych_kit.security.listeners import ListenerSecurity
from triptych_kit.security.options import SecurityOptions
from triptych_kit.security.tls import CertificateFiles, ListenerTLS

logger = logging.getLogger(__name__)


def listener_security(options: SecurityOptions, extra_keys: Iterable[Entry] = ()) -> ListenerSecurity:
    """TLS and credentials of the listeners. Raises ConfigError for files that cannot be used."""
    tls = _tls_of(options)
    extra = tuple(extra_keys)
    if options.insecure:
        logger.warning("listeners may be reachable without credentials", extra={"cause": "--insecure"})
    credentials = Credentials(options.api_keys, extra) if options.api_keys is not None or extra else None
    verifies = tls is not None and tls.verifies_clients
    return ListenerSecurity(Authenticator(credentials, verifies_certificates=verifies), tls)


def check_files(options: SecurityOptions) -> None:
    """Raise ConfigError for files that a service with these options could not use."""
    _tls_of(options)
    if options.api_keys is not None:
        read_entries(options.api_keys)
    peer_credentials(options)


def _tls_of(options: SecurityOptions) -> ListenerTLS | None:
    if options.ssl_certfile is None or options.ssl_keyfile is None:
        return None
    return ListenerTLS(CertificateFiles(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs))


def peer_credentials(options: SecurityOptions) -> ChannelCredentials:
    """Credentials for connections to other services. Raises ConfigError for files that cannot be read."""
    credentials = ChannelCredentials(
        ca=options.peer_ca_certs,
        certificate=options.peer_certfile,
        certificate_key=options.peer_keyfile,
        server_name=options.peer_server_name,
        api_key_file=options.peer_api_key_file,
    )
    credentials.check()
    return credentials
