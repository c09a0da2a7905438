"""Channels to our own services: keepalive that detects a frozen peer, message sizes, credentials."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import grpc.aio

from triptych_kit.addresses import split_address
from triptych_kit.config import ConfigError
from triptych_kit.errors import InvalidArgument
from triptych_kit.security.files import Version, version_of
from triptych_kit.security.tls import CertificateFiles, read_file

_MIB = 1024 * 1024

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 * _MIB),
    ("grpc.max_send_message_length", 64 * _MIB),
    ("grpc.http2.max_pings_without_data", 0),
)

# A stopped process still acknowledges TCP, so only the ping timeout detects it; its default is a minute.
CHANNEL_OPTIONS: dict[str, tuple[tuple[str, int], ...]] = {
    "internal": (
        *_COMMON_OPTIONS,
        ("grpc.keepalive_time_ms", 500),
        ("grpc.keepalive_timeout_ms", 1500),
        ("grpc.http2.ping_timeout_ms", 1500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 500),
        # Channels with equal options share their connections, and so the wait after a failed one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ),
    "public": (
        *_COMMON_OPTIONS,
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.ping_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ),
}


_LOOK_S = 1.0
TLS_SCHEMES = ("grpcs://", "https://")
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ChannelCredentials:
    """The files by which a caller proves its identity and verifies the server's.

    The files are read when a channel is opened, so that the next one uses what has replaced them.
    """

    ca: str | None = None  # file of the CA of servers; None: the system's, where TLS is asked for by a scheme
    certificate: str | None = None
    certificate_key: str | None = None
    server_name: str | None = None  # expected in the server's certificate, instead of the host of the target
    api_key: str = ""
    api_key_file: str | None = None

    @property
    def has_tls(self) -> bool:
        """Whether connections use TLS without a scheme that asks for it."""
        return self.ca is not None or self.certificate is not None

    @property
    def version(self) -> Version:
        """Differs after one of the files was replaced."""
        paths = (self.ca, self.certificate, self.certificate_key, self.api_key_file)
        return version_of([path for path in paths if path is not None])

    async def until_renewed(self, version: Version) -> None:
        """Wait until the files are no longer those of `version`."""
        if not version:
            await asyncio.Event().wait()
        while self.version == version:  # noqa: ASYNC110  There is no event for files.
            await asyncio.sleep(_LOOK_S)

    def check(self) -> None:
        """Raise ConfigError for a file that cannot be read."""
        self.grpc_credentials()
        self.read_key()

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC channel with TLS. Raises ConfigError."""
        files = CertificateFiles(self.certificate or "", self.certificate_key or "")
        return grpc.ssl_channel_credentials(
            root_certificates=None if self.ca is None else read_file(self.ca),
            private_key=read_file(files.key) if self.certificate else None,
            certificate_chain=read_file(files.certificate) if self.certificate else None,
        )

    def context(self) -> ssl.SSLContext:
        """The same for connections of asyncio. Raises ConfigError."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.certificate_key)
        except OSError as error:
            files = ", ".join(filter(None, (self.ca, self.certificate, self.certificate_key)))
            raise ConfigError(f"certificates {files} cannot be used: {error}") from error
        return context

    def read_key(self) -> str:
        """The API key; empty without one. Raises ConfigError."""
        if self.api_key_file is None:
            return self.api_key
        try:
            return read_file(self.api_key_file).decode("ascii").strip()
        except UnicodeDecodeError:
            raise ConfigError(f"{self.api_key_file} is not a key") from None


NO_CREDENTIALS = ChannelCredentials()


def open_channel(
    target: str,
    *,
    profile: Literal["internal", "public"] = "internal",
    credentials: ChannelCredentials = NO_CREDENTIALS,
) -> grpc.aio.Channel:
    """A channel to a target such as `grpc://host:port`. Connects with the first call; close it when done.

    `internal` is for connections between our services: a hanging peer is noticed quickly, no proxy is used.
    There is TLS if the credentials have files for it, or the scheme is grpcs or https; never on a unix
    socket. Raises ConfigError for a file that cannot be read.
    """
    return secured_channel(target, CHANNEL_OPTIONS[profile], credentials)


def secured_channel(
    target: str, options: Sequence[tuple[str, int | str]], credentials: ChannelCredentials
) -> grpc.aio.Channel:
    """The same with other channel options."""
    address, options = parse_target(target), list(options)
    is_unix = address.startswith(_UNIX)
    if (credentials.has_tls or target.startswith(TLS_SCHEMES)) and not is_unix:
        if credentials.server_name is not None:
            options.append(("grpc.ssl_target_name_override", credentials.server_name))
        channel = grpc.aio.secure_channel(address, credentials.grpc_credentials(), options=options)
    else:
        channel = grpc.aio.insecure_channel(address, options=options)
    key = "" if is_unix else credentials.read_key()
    return _AuthorizedChannel(channel, key) if key else channel


def parse_target(target: str) -> str:
    """The address in a target: `host:port` or `unix:/path`.

    The scheme may be grpc or http, or with TLS grpcs or https, as other tools write the same address. Raises
    InvalidArgument for another scheme or an invalid port.
    """
    if target.startswith(_UNIX + "/"):
        return target
    address = target
    for scheme in ("grpc://", "http://", *TLS_SCHEMES):
        address = address.removeprefix(scheme)
    address = address.removesuffix("/")
    try:
        host, port = split_address(address)
    except ValueError:
        host, port = "", 0
    if not host or not port or "/" in address:
        raise InvalidArgument(f"{target!r} is not an address such as grpc://host:50051", field="target")
    return address


class _AuthorizedChannel(grpc.aio.Channel):
    """A channel whose calls carry an API key.

    gRPC's own call credentials exist with TLS alone, and its interceptors make another kind of call.
    """

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {key}"),)

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close(None)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_key(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_key(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_key(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_key(self._channel.stream_stream(*args, **kwargs))

    def _with_key(self, method: Any) -> Any:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return call
