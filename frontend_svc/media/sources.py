"""Reads the bytes of media: in a message, in a `data:` URL, or from a host that the operator has listed.

A URL comes from a client, who must not reach through it what the client itself cannot reach: hence the rules
for addresses, see `MediaSources.fetch`. Knows no formats.
"""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from triptych_kit.errors import FailedPrecondition, InvalidArgument

MAX_BYTES = 20 * 1024 * 1024
LIMIT_S = 10.0
_MAX_REDIRECTS = 3
_MAX_URL_CHARS = 8192
_MAX_HEAD_BYTES = 32 * 1024
_READ_BYTES = 64 * 1024
# Decoding this many characters takes about a millisecond.
_BASE64_AT_ONCE = 256 * 1024
_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HOST = re.compile(r"[a-z0-9._-]{1,253}|\[[0-9a-f:.]+\]")
_URL = re.compile(r"[!-~]+")
# Addresses of hosts in IPv6, but for those within them that protocols, tunnels to IPv4 and documentation use.
_UNICAST = ipaddress.IPv6Network("2000::/3")
_SPECIAL = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
# The addresses of a name.
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts that media may be fetched from: `HOST`, with a scheme's default port, or `HOST:PORT`."""

    hosts: frozenset[tuple[str, int | None]] = frozenset()

    @classmethod
    def parse(cls, entries: Sequence[str]) -> AllowedHosts:
        """From names and addresses, an IPv6 address in brackets. Raises ValueError for anything else."""
        return cls(frozenset(_allowed_host(entry) for entry in entries))

    def allows(self, host: str, port: int) -> bool:
        """Whether the host, a name or an address, is listed with this port."""
        is_default = port in _DEFAULT_PORTS.values()
        return (host, port) in self.hosts or (is_default and (host, None) in self.hosts)


@dataclass(frozen=True, slots=True)
class _Target:
    """A checked URL: where to connect, and what to ask for."""

    scheme: str
    host: str
    port: int
    path: str
    address: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


class MediaSources:
    """Reads media within limits of size and time.

    resolve, trust: tests replace them.
    """

    def __init__(
        self,
        allowed: AllowedHosts,
        *,
        max_bytes: int = MAX_BYTES,
        limit_s: float = LIMIT_S,
        resolve: Resolve | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = allowed
        self._max_bytes = max_bytes
        self._limit_s = limit_s
        self._resolve = resolve or _addresses_of
        self._trust = trust

    async def read(self, url: str, field: str) -> bytes:
        """The bytes that a URL of a request's `field` contains or leads to. Raises InvalidArgument for a URL
        that is refused, FailedPrecondition for one that cannot be fetched."""
        if url[:5].lower() == "data:":
            return await self.decode(url, field)
        return await self.fetch(url, field)

    def check_size(self, num_bytes: int, field: str) -> None:
        """Raise InvalidArgument for a medium that is empty or too large."""
        if num_bytes == 0:
            raise InvalidArgument(f"{field} is empty", field=field, reason="MEDIA_REFUSED")
        if num_bytes > self._max_bytes:
            raise InvalidArgument(
                f"{field} has {num_bytes} bytes, must have at most {self._max_bytes}",
                field=field,
                reason="MEDIA_TOO_LARGE",
            )

    async def decode(self, url: str, field: str) -> bytes:
        """The bytes of a `data:` URL in base64. Other tasks run between parts of a large one."""
        comma = url.find(",", 0, _MAX_URL_CHARS)
        if comma < 0 or not url[:comma].lower().endswith(";base64"):
            raise _refused(field, "a data: URL must be like data:image/png;base64,...")
        num_chars = len(url) - comma - 1
        # A size that no padding can bring below the limit.
        self.check_size(num_chars // 4 * 3 - 2 if num_chars > 4 else num_chars, field)
        content = bytearray()
        for start in range(comma + 1, len(url), _BASE64_AT_ONCE):
            try:
                content += binascii.a2b_base64(url[start : start + _BASE64_AT_ONCE], strict_mode=True)
            except ValueError as error:  # binascii.Error, or characters beyond ASCII
                raise _refused(field, f"the data: URL has no base64: {error}") from error
            if start + _BASE64_AT_ONCE < len(url):
                # Padding is at the end alone.
                if url[start + _BASE64_AT_ONCE - 1] == "=":
                    raise _refused(field, "the data: URL has no base64: padding before its end")
                await asyncio.sleep(0)
        self.check_size(len(content), field)
        return bytes(content)

    async def fetch(self, url: str, field: str) -> bytes:
        """The body at an http or https URL whose host is listed.

        Its name is resolved once, all its addresses must be public ones, or listed as addresses themselves,
        and one of them is dialled. Each redirect is checked in the same way. Reads no proxy variables.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                for _ in range(_MAX_REDIRECTS + 1):
                    target = await self._check(url, field)
                    content, location = await self._get(target, field)
                    if location is None:
                        self.check_size(len(content), field)
                        return content
                    # Joining would take out what is refused.
                    _check_characters(location, field)
                    try:
                        url = urljoin(url, location)
                    except ValueError as error:
                        raise _refused(field, f"the URL of a redirect cannot be read: {error}") from error
        except TimeoutError as error:
            raise _failed(field, f"it took longer than {self._limit_s:g} s") from error
        raise _refused(field, f"more than {_MAX_REDIRECTS} redirects")

    async def _check(self, url: str, field: str) -> _Target:
        parts = _split(url, field)
        host, scheme = (parts.hostname or "").rstrip("."), parts.scheme
        try:
            port = _DEFAULT_PORTS[scheme] if parts.port is None else parts.port
        except ValueError as error:
            raise _refused(field, f"the URL's port is no port: {error}") from error
        if not self._allowed.allows(_plain(host), port):
            raise _refused(field, f"host {host!r}, port {port}, is not in --allowed-media-domains")
        try:
            addresses = await self._resolve(host, port)
        except OSError as error:
            raise _failed(field, f"host {host!r} has no address: {error.strerror or error}") from error
        for address in addresses:
            if not self._is_allowed_address(address, port):
                raise _refused(
                    field,
                    f"host {host!r} has the address {address}, which is not public, nor itself in "
                    "--allowed-media-domains",
                )
        if not addresses:
            raise _failed(field, f"host {host!r} has no address")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return _Target(scheme, host, port, path, addresses[0])

    def _is_allowed_address(self, address: str, port: int) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return is_public(parsed) or self._allowed.allows(str(parsed), port)

    async def _get(self, target: _Target, field: str) -> tuple[bytes, str | None]:
        """The body of the answer, or the location of a redirect."""
        tls = None
        if target.scheme == "https":
            # Made once, as that reads all authorities.
            tls = self._trust = self._trust or ssl.create_default_context()
        try:
            reader, writer = await asyncio.open_connection(
                target.address,
                target.port,
                ssl=tls,
                server_hostname=target.host if tls is not None else None,
            )
        except OSError as error:  # ssl.SSLError is one
            raise _failed(field, f"no connection to {target.authority}: {error}") from error
        try:
            return await self._exchange(target, field, reader, writer)
        except h11.RemoteProtocolError as error:
            raise _failed(field, f"{target.authority} speaks no HTTP: {error}") from error
        except OSError as error:
            raise _failed(field, f"the connection to {target.authority} was lost: {error}") from error
        finally:
            # Not closed politely: the peer may never read.
            writer.transport.abort()

    async def _exchange(
        self, target: _Target, field: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[bytes, str | None]:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        headers = [
            ("host", target.authority),
            ("accept", "*/*"),
            ("accept-encoding", "identity"),
            ("user-agent", "triptych"),
            ("connection", "close"),
        ]
        request = h11.Request(method="GET", target=target.path, headers=headers)
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        content = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                location = self._read_head(event, target, field)
                if location is not None:
                    return b"", location
            elif isinstance(event, h11.Data):
                content += event.data
                self.check_size(len(content), field)
            elif isinstance(event, h11.EndOfMessage):
                return bytes(content), None
            elif isinstance(event, h11.ConnectionClosed):
                raise _failed(field, f"{target.authority} sent no answer")

    def _read_head(self, response: h11.Response, target: _Target, field: str) -> str | None:
        """The location of a redirect. Raises an error unless it is one, or has a body to read."""
        headers = {bytes(name): bytes(value) for name, value in response.headers}
        if response.status_code in _REDIRECTS:
            return headers.get(b"location", b"").decode("latin-1")
        if response.status_code != 200:
            raise _failed(field, f"{target.authority} answered {response.status_code}")
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.lower() != "identity":
            raise _failed(field, f"{target.authority} sent the content encoding {encoding!r}")
        length = headers.get(b"content-length", b"")
        if length.isdigit():
            self.check_size(int(length), field)
        return None


def is_public(address: Address) -> bool:
    """Whether an address is of one host anywhere, and stands for no other address."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    return address in _UNICAST and not any(address in network for network in _SPECIAL)


async def _addresses_of(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _allowed_host(entry: str) -> tuple[str, int | None]:
    host, port = entry.strip().lower(), None
    name, _, digits = host.rpartition(":")
    if name and digits.isascii() and digits.isdigit() and (":" not in name or name.startswith("[")):
        host, port = name, int(digits)
    if not _HOST.fullmatch(host) or (port is not None and not 1 <= port <= 65535):
        raise ValueError(f"{entry!r} is not HOST or HOST:PORT")
    return _plain(host.strip("[]").rstrip(".")), port


def _plain(host: str) -> str:
    """An address in its one spelling; a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _split(url: str, field: str) -> SplitResult:
    """The parts of an http or https URL without credentials."""
    _check_characters(url, field)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _refused(field, f"the URL cannot be read: {error}") from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise _refused(field, f"the URL's scheme {parts.scheme!r} must be one of http, https, data")
    if "@" in parts.netloc:
        raise _refused(field, "the URL has credentials, must have none")
    host = parts.netloc.lower().rpartition(":")[0] if parts.netloc.count(":") == 1 else parts.netloc.lower()
    if host.startswith("["):
        host = host[: host.find("]") + 1]
    if not _HOST.fullmatch(host):
        raise _refused(field, f"the URL's host {host!r} is neither a name nor an address")
    return parts


def _check_characters(url: str, field: str) -> None:
    if not 0 < len(url) <= _MAX_URL_CHARS:
        raise _refused(field, f"the URL has {len(url)} characters, must have 1..{_MAX_URL_CHARS}")
    # Parsers of URLs disagree about these.
    if not _URL.fullmatch(url) or "\\" in url:
        raise _refused(field, "the URL has white space, a backslash, or a character beyond ASCII")


def _refused(field: str, cause: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {cause}", field=field, reason="MEDIA_URL_REFUSED")


def _failed(field: str, cause: str) -> FailedPrecondition:
    return FailedPrecondition(f"{field} cannot be fetched: {cause}", reason="MEDIA_FETCH_FAILED")
