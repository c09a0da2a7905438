"""Certificates of listeners: for gRPC and for asyncio, read again when their files change."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from triptych_kit.config import ConfigError
from triptych_kit.security.files import version_of

logger = logging.getLogger(__name__)

_SPIFFE = "spiffe://"
_RETRY_S = 1.0
_MAX_FLIGHTS = 4  # of messages of one handshake


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A certificate with its key, and the CA that certificates of the other side are verified with."""

    certificate: str
    key: str
    ca: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.certificate, self.key, *([] if self.ca is None else [self.ca]))


class ListenerTLS:
    """TLS of the listeners of a process. Every handshake uses the files as they are then.

    With a CA, connections without a certificate that it has signed are refused. Raises ConfigError for files
    that cannot be used; if that happens after a change, the ones read before stay in use.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        # gRPC asks in a thread of its own.
        self._lock = threading.Lock()
        self._version = version_of(files.paths)
        self._unusable, self._tried_at, self._fault = self._version, 0.0, ""
        self._context = _server_context(files)
        self._configuration = _configuration(files)

    @property
    def is_usable(self) -> bool:
        """Whether the files, as they are now, can be used."""
        with self._lock:
            self._read_if_changed()
            return self._version == version_of(self._files.paths)

    @property
    def verifies_clients(self) -> bool:
        return self._files.ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC listener."""

        current = self._configuration

        def newest() -> Any:
            nonlocal current
            with self._lock:
                self._read_if_changed()
                if self._configuration is current:
                    # None: unchanged. gRPC replaces what another thread may be shaking hands with, which has
                    # ended processes (grpcio 1.81) where it was done for every connection.
                    return None
                current = self._configuration
                return current

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._configuration, newest, require_client_authentication=self.verifies_clients
        )
        return credentials

    def context(self) -> ssl.SSLContext:
        """A context for listeners of asyncio, which gives each connection the newest certificate."""
        outer = _server_context(self._files)

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: object) -> None:
            # Called for every connection, also for one without a server name.
            with self._lock:
                self._read_if_changed()
                connection.context = self._context

        outer.sni_callback = choose
        return outer

    def _read_if_changed(self) -> None:
        version = version_of(self._files.paths)
        is_tried = version == self._unusable and time.monotonic() - self._tried_at < _RETRY_S
        if version == self._version or is_tried:
            return
        try:
            context, configuration = _server_context(self._files), _configuration(self._files)
        except ConfigError as error:
            # A certificate and its key may be replaced one after the other: tried again, but not for everyone
            # who connects.
            self._unusable, self._tried_at = version, time.monotonic()
            if str(error) != self._fault:
                self._fault = str(error)
                logger.error("certificates not read again", extra={"cause": self._fault})
            return
        self._fault = ""
        self._version, self._context, self._configuration = version, context, configuration
        logger.info("certificates read again", extra={"certificate": self._files.certificate})


def _server_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # A resumed session is not verified again, and would outlive its CA. TLS 1.2 cannot be kept from resuming.
    verifies = files.ca is not None
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if verifies else ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0
    try:
        context.load_cert_chain(files.certificate, files.key)
        if files.ca is not None:
            context.load_verify_locations(files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"certificates {', '.join(files.paths)} cannot be used: {error}") from error
    return context


def _configuration(files: CertificateFiles) -> Any:
    pair = read_file(files.key), read_file(files.certificate)
    return grpc.ssl_server_certificate_configuration(
        [pair], root_certificates=None if files.ca is None else read_file(files.ca)
    )


def hosts_in(files: CertificateFiles) -> list[str]:
    """The DNS names and addresses that a certificate is for. Raises ConfigError."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate itself is what it is verified with.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        server.load_cert_chain(files.certificate, files.key)
        client.load_verify_locations(files.certificate)
        sides = (
            client.wrap_bio(to_client, to_server),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        # The standard library reads certificates of connections alone.
        for _ in range(_MAX_FLIGHTS):
            for side in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        certificate: Mapping[str, Any] = sides[0].getpeercert() or {}
        return [
            str(ipaddress.ip_address(value.strip())) if kind == "IP Address" else value
            for kind, value in certificate.get("subjectAltName", ())
            if kind in ("DNS", "IP Address")
        ]
    except (OSError, ValueError) as error:
        raise ConfigError(f"certificate {files.certificate} cannot be read: {error}") from error


def read_file(path: str) -> bytes:
    """The content of a file. Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def names_in_auth_context(auth_context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """The names of a gRPC peer's verified certificate: its common name, DNS and URI names.

    Those of SPIFFE are URI names alone: a CA may let others be chosen.
    """

    def names(*keys: str) -> list[str]:
        return [name.decode("utf-8", "replace") for key in keys for name in auth_context.get(key, ())]

    others = names("x509_common_name", "x509_subject_alternative_name")
    return names("peer_spiffe_id") + [name for name in others if not name.startswith(_SPIFFE)]


def names_in_certificate(certificate: Mapping[str, Any] | None) -> list[str]:
    """The same of a certificate as `ssl.SSLObject.getpeercert` returns it; empty without one."""
    if not certificate:
        return []
    subject = [
        value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"
    ]
    alternatives = certificate.get("subjectAltName", ())
    others = subject + [value for kind, value in alternatives if kind == "DNS"]
    return [value for kind, value in alternatives if kind == "URI"] + [
        name for name in others if not name.startswith(_SPIFFE)
    ]
