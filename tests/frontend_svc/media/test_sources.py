"""Where media come from, with real sockets: what a URL may reach, and what it may not."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from frontend_svc.media.sources import AllowedHosts, MediaSources, is_public
from tests.certificates import CertificateAuthority
from triptych_kit.errors import FailedPrecondition, InvalidArgument, ServiceError

FIELD = "messages[0].parts[1].media"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"


class Listener:
    """Answers each connection with the same bytes, and counts them."""

    def __init__(self, answer: bytes = OK) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.port = 0
        self._serving: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def open(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Listener]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            # Each ends when its client closes, as all do.
            await asyncio.gather(*self._serving)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(b"")
        self._serving.append(asyncio.ensure_future(self._serve(len(self.heads) - 1, reader, writer)))

    async def _serve(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            self.heads[index] = await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer)
            # The client closes: some answers have no end.
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


class Names:
    """A name server whose answers change with each question: the first first, the last for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.num_questions = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_questions += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


def sources(*entries: str, **options: object) -> MediaSources:
    return MediaSources(AllowedHosts.parse(entries), **options)


# PORT is that of a listener on loopback that must see no connection. Each host is listed by its name.
FORBIDDEN = {
    "address": ("http://127.0.0.1:PORT/", "is not in --allowed-media-domains"),
    "other_port": ("http://picture.test:1/", "is not in --allowed-media-domains"),
    "unlisted": ("http://other.test:PORT/", "is not in --allowed-media-domains"),
    "suffix": ("http://a.picture.test:PORT/", "is not in --allowed-media-domains"),
    "decimal": ("http://2130706433:PORT/", "not public"),
    "hexadecimal": ("http://0x7f000001:PORT/", "not public"),
    "octal": ("http://0177.0.0.1:PORT/", "not public"),
    "short": ("http://127.1:PORT/", "not public"),
    "localhost": ("http://localhost:PORT/", "not public"),
    "mapped": ("http://[::ffff:127.0.0.1]:PORT/", "is not in --allowed-media-domains"),
    "compatible": ("http://[::127.0.0.1]:PORT/", "is not in --allowed-media-domains"),
    "loopback_of_ipv6": ("http://[::1]:PORT/", "is not in --allowed-media-domains"),
    "zone": ("http://[fe80::1%25lo]:PORT/", "neither a name nor an address"),
    "percent_host": ("http://127%2e0.0.1:PORT/", "neither a name nor an address"),
    "no_host": ("http://:PORT/", "neither a name nor an address"),
    "credentials": ("http://user:key@picture.test:PORT/", "credentials"),
    "name_as_credentials": ("http://picture.test:PORT@127.0.0.1:PORT/", "credentials"),
    "backslash": ("http://127.0.0.1:PORT\\@picture.test:PORT/", "backslash"),
    "white_space": ("http://picture.test:PORT/a b", "white space"),
    "line_break": ("http://picture.test:PORT/\r\nhost: a", "white space"),
    "beyond_ascii": ("http://ⓛocalhost:PORT/", "beyond ASCII"),
    "port": ("http://picture.test:99999/", "port"),
    "file": ("file:///etc/hostname", "scheme 'file'"),
    "file_with_host": ("file://picture.test:PORT/etc/hostname", "scheme 'file'"),
    "gopher": ("gopher://127.0.0.1:PORT/_GET", "scheme 'gopher'"),
    "ftp": ("ftp://picture.test:PORT/a.png", "scheme 'ftp'"),
    "unix": ("unix:/run/a", "scheme 'unix'"),
    "no_scheme": ("//picture.test:PORT/", "scheme ''"),
    "path": ("/etc/hostname", "scheme ''"),
    "empty": ("", "has 0 characters"),
    "long": ("http://picture.test:PORT/" + "a" * 9000, "must have 1..8192"),
}
LISTED = ("picture.test", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost")


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_forbidden_urls_are_refused_by_name_without_a_connection(name: str) -> None:
    url, cause = FORBIDDEN[name]
    async with Listener().open() as secret:
        allowed = [f"{host}:{secret.port}" for host in LISTED]
        with pytest.raises(InvalidArgument, match=cause) as refused:
            await sources(*allowed).read(url.replace("PORT", str(secret.port)), FIELD)
        assert refused.value.violations[0][0] == FIELD and refused.value.reason == "MEDIA_URL_REFUSED"
        assert secret.heads == []


REDIRECTS = {
    "loopback": ("http://127.0.0.1:PORT/", "is not in --allowed-media-domains"),
    "name_of_loopback": ("http://localhost:PORT/", "not public"),
    "file": ("file:///etc/hostname", "scheme 'file'"),
    "gopher": ("gopher://127.0.0.1:PORT/", "scheme 'gopher'"),
    "data": ("data:image/png;base64,QQ==", "scheme 'data'"),
    "credentials": ("http://user@localhost:PORT/", "credentials"),
    "without_scheme": ("//127.0.0.1:PORT/", "is not in --allowed-media-domains"),
    "line_break": ("http://localhost:PORT/\tb", "white space"),
    "no_url": ("http://[::1", "cannot be read"),
}


@pytest.mark.parametrize("name", REDIRECTS)
async def test_each_redirect_is_checked_as_the_first_url_is(name: str) -> None:
    location, cause = REDIRECTS[name]
    async with Listener().open() as secret, Listener().open() as public:
        public.answer = redirect(location.replace("PORT", str(secret.port)))
        reader = sources(f"127.0.0.1:{public.port}", f"localhost:{secret.port}")
        with pytest.raises(InvalidArgument, match=cause):
            await reader.read(f"http://127.0.0.1:{public.port}/a.png", FIELD)
        assert len(public.heads) == 1 and secret.heads == []


async def test_at_most_three_redirects_are_followed() -> None:
    async with Listener().open() as public:
        public.answer = redirect("/again")
        with pytest.raises(InvalidArgument, match="more than 3 redirects"):
            await sources(f"127.0.0.1:{public.port}").read(f"http://127.0.0.1:{public.port}/", FIELD)
        assert len(public.heads) == 4


async def test_the_address_that_was_checked_is_dialled_whatever_the_name_means_then() -> None:
    async with Listener().open() as listener:
        host, url = f"picture.test:{listener.port}", f"http://picture.test:{listener.port}/a.png?b=c#d"
        names = Names(["127.0.0.1"], ["127.0.0.2"])
        reader = sources(host, f"127.0.0.1:{listener.port}", resolve=names)
        assert await reader.read(url, FIELD) == b"body"
        assert names.num_questions == 1
        assert listener.heads[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\n")
        assert b"host: " + host.encode() in listener.heads[0].lower()
        # Not even where one address of several is forbidden.
        for addresses in (["127.0.0.1", "10.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1"], ["nonsense"]):
            with pytest.raises(InvalidArgument, match="not public"):
                await sources(host, f"127.0.0.1:{listener.port}", resolve=Names(addresses)).read(url, FIELD)
        assert len(listener.heads) == 1


async def test_proxy_variables_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Listener().open() as proxy, Listener().open() as public:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        reader = sources(f"127.0.0.1:{public.port}")
        assert await reader.read(f"http://127.0.0.1:{public.port}/", FIELD) == b"body"
        assert proxy.heads == []


async def test_tls_is_verified_for_the_name_in_the_url(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    files = authority.issue("server")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(files.certificate, files.key)
    trust = ssl.create_default_context(cafile=authority.file)
    async with Listener().open(server_tls) as listener:
        at = f"127.0.0.1:{listener.port}"
        hosts = (at, f"localhost:{listener.port}", f"picture.test:{listener.port}")
        reader = sources(*hosts, resolve=Names(["127.0.0.1"]), trust=trust)
        assert await reader.read(f"https://localhost:{listener.port}/", FIELD) == b"body"
        with pytest.raises(FailedPrecondition, match="no connection to picture"):
            await reader.read(f"https://picture.test:{listener.port}/", FIELD)
        with pytest.raises(FailedPrecondition, match="certificate"):
            await sources(at).read(f"https://{at}/", FIELD)


ANSWERS: dict[str, tuple[bytes, str]] = {
    "status": (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "answered 404"),
    "announced": (b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n", "101 bytes"),
    "too_large": (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(101), "101 bytes"),
    "empty": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "is empty"),
    "encoded": (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n", "content encoding 'gzip'"),
    "no_http": (b"\x89PNG\r\n\r\n", "speaks no HTTP"),
    "long_head": (b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000, "speaks no HTTP"),
    "never_ends": (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nbody", "longer than 0.2 s"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_beyond_the_limits_end_the_fetch(name: str) -> None:
    answer, cause = ANSWERS[name]
    async with Listener(answer).open() as listener:
        reader = sources(f"127.0.0.1:{listener.port}", max_bytes=100, limit_s=0.2)
        with pytest.raises(ServiceError, match=cause):
            await reader.read(f"http://127.0.0.1:{listener.port}/", FIELD)


async def test_a_closed_port_is_a_failed_fetch() -> None:
    async with Listener().open() as listener:
        at = f"127.0.0.1:{listener.port}"
    with pytest.raises(FailedPrecondition, match="no connection"):
        await sources(at).read(f"http://{at}/", FIELD)


async def test_a_data_url_needs_no_host() -> None:
    content = bytes(range(256)) * 3000
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    assert await sources().read(url, FIELD) == content
    assert await sources().read("DATA:;base64,QQ==", FIELD) == b"A"


DATA = {
    "no_comma": ("data:image/png;base64", "must be like"),
    "no_base64": ("data:text/plain,abc", "must be like"),
    "characters": ("data:;base64,QQ=*", "no base64"),
    "beyond_ascii": ("data:;base64,ÄÄÄÄ", "no base64"),
    "length": ("data:;base64,QQ", "no base64"),
    "inner_padding": ("data:;base64," + "QQ==" * 100_000, "no base64"),
    "empty": ("data:;base64,", "is empty"),
    "too_large": ("data:;base64," + "QUFB" * 1_000_000, "must have at most 1000000"),
}


@pytest.mark.parametrize("name", DATA)
async def test_broken_data_urls_are_refused(name: str) -> None:
    url, cause = DATA[name]
    with pytest.raises(InvalidArgument, match=cause) as refused:
        await sources(max_bytes=1_000_000).read(url, FIELD)
    assert refused.value.violations[0][0] == FIELD


def test_public_addresses_are_those_of_one_host_anywhere() -> None:
    public = ("8.8.8.8", "192.0.1.1", "2606:4700::1", "2a00:1450:4001::1")
    special = (
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.9.9.9", "169.254.169.254", "172.16.0.1", "192.168.1.1"),
        *("198.18.0.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1"),
        *("fc00::1", "fec0::1", "ff02::1", "::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("2001::1", "2001:db8::1", "3fff::1"),
    )
    assert [address for address in public if not is_public(ipaddress.ip_address(address))] == []
    assert [address for address in special if is_public(ipaddress.ip_address(address))] == []


def test_entries_of_allowed_hosts() -> None:
    allowed = AllowedHosts.parse(["Pictures.test", "10.0.0.1:8000", "[::1]:8000", "[::ffff:10.0.0.2]"])
    assert allowed.allows("pictures.test", 80) and allowed.allows("pictures.test", 443)
    assert not allowed.allows("pictures.test", 8000)
    assert allowed.allows("10.0.0.1", 8000) and allowed.allows("::1", 8000) and not allowed.allows("::1", 80)
    for entry in ("", "::1", "http://a", "a:0", "a:99999", "a/b", "user@a", "*.a"):
        with pytest.raises(ValueError, match="HOST"):
            AllowedHosts.parse([entry])
