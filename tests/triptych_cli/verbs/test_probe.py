"""What a port is at which gRPC fails: HTTP, TLS with another certificate, or nothing."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.certificates import CertificateAuthority
from tests.triptych_cli.fakes import triptych
from triptych_cli.verbs.probe import describe_port
from triptych_kit.channel import ChannelCredentials
from triptych_kit.config import ConfigError
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.listeners import OPEN_LISTENERS, ListenerSecurity
from triptych_kit.security.tls import CertificateFiles, ListenerTLS, hosts_in
from triptych_kit.server import PUBLIC, Server

FRONTEND = '{"version": "1", "grpc_port": 50051}'


@asynccontextmanager
async def http_server(body: str) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


@asynccontextmanager
async def grpc_server(files: CertificateFiles | None) -> AsyncIterator[str]:
    tls = None if files is None else ListenerTLS(files)
    security = (
        ListenerSecurity(Authenticator(None, verifies_certificates=False), tls) if tls else OPEN_LISTENERS
    )
    server = Server(
        listen="127.0.0.1:0",
        registrations=[],
        profile=PUBLIC,
        service="x",
        reflection=False,
        security=security,
    )
    try:
        yield await server.start()
    finally:
        await server.stop(0)


async def described(target: str, ca: str | None = None) -> str:
    return await asyncio.to_thread(describe_port, target, ChannelCredentials(ca=ca))


@pytest.mark.parametrize(
    ("target", "body", "sentence"),
    [
        ("grpc://{}", FRONTEND, "{} is the HTTP API (OpenAI's) of a frontend: --url grpc://127.0.0.1:50051"),
        ("{}", FRONTEND, "{} is the HTTP API (OpenAI's) of a frontend: --url grpc://127.0.0.1:50051"),
        (
            "http://{}/v1",
            FRONTEND,
            "{} is the HTTP API (OpenAI's) of a frontend: --url grpc://127.0.0.1:50051",
        ),
        ("http://{}/", "<html>", "{} is an HTTP server: --url takes the address"),
        ("http://{}", "[]", "{} is an HTTP server: --url takes the address"),
        ("ftp://{}", FRONTEND, ""),
    ],
)
async def test_a_server_of_http_is_named_with_the_address_to_take(target, body, sentence) -> None:
    async with http_server(body) as address:
        found = await described(target.format(address))
    assert found.startswith(sentence.format(address))
    assert bool(found) == bool(sentence)


async def test_a_certificate_that_is_not_trusted_is_the_cause(tmp_path: Path) -> None:
    ca, other = CertificateAuthority(tmp_path), CertificateAuthority(tmp_path, "other")
    issued = ca.issue("server")
    async with grpc_server(CertificateFiles(issued.certificate, issued.key)) as address:
        not_trusted = await described(f"grpcs://{address}", other.file)
        trusted = await described(f"grpcs://{address}", ca.file)
        without = await described(f"grpc://{address}")
    assert not_trusted.startswith(f"the certificate of {address} is not trusted (")
    assert "--cacert FILE" in not_trusted
    assert trusted == ""
    assert without == f"{address} has TLS: --url grpcs://{address}"


async def test_a_server_that_asks_for_a_certificate_is_named(tmp_path: Path) -> None:
    ca = CertificateAuthority(tmp_path)
    async with grpc_server(ca.issue("server")) as address:
        found = await described(f"grpcs://{address}", ca.file)
    assert found.startswith(f"{address} needs a certificate of the caller: TRIPTYCH_CERTFILE")


async def test_a_server_without_tls_is_named(tmp_path: Path) -> None:
    async with grpc_server(None) as address:
        assert await described(f"grpcs://{address}") == f"{address} has no TLS: --url grpc://{address}"
        assert await described(f"grpc://{address}") == ""


async def test_where_nothing_listens_there_is_nothing_to_say() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for target in (f"grpc://127.0.0.1:{port}", f"grpcs://127.0.0.1:{port}", "nonsense", "unix:/no/socket"):
        assert await described(target) == ""


async def test_a_verb_says_what_its_address_is() -> None:
    async with http_server(FRONTEND) as address:
        for target in (address, f"http://{address}/v1"):
            outcome = await triptych("complete", "--url", target, "hi")
            assert outcome.exit_code == 1
            assert outcome.err.startswith(
                f"{address} is the HTTP API (OpenAI's) of a frontend: --url grpc://"
            )
            assert len(outcome.err.splitlines()) == 1


async def test_a_verb_trusts_the_ca_of_its_flag(tmp_path: Path) -> None:
    ca = CertificateAuthority(tmp_path)
    issued = ca.issue("server")
    async with grpc_server(CertificateFiles(issued.certificate, issued.key)) as address:
        asked = ("health", "--url", f"grpcs://{address}", "--service", "no.such.Service")
        trusting = await triptych(*asked, "--cacert", ca.file)
        without = await triptych(*asked)
    assert trusting.out == "SERVICE_UNKNOWN\n"
    assert without.err.startswith(f"the certificate of {address} is not trusted (")


async def test_each_verb_names_the_certificate_and_takes_the_flag_for_its_ca(tmp_path: Path) -> None:
    ca = CertificateAuthority(tmp_path)
    issued = ca.issue("server")
    own = CertificateFiles(issued.certificate, issued.key)
    security = ListenerSecurity(Authenticator(None, verifies_certificates=False), ListenerTLS(own))
    pages = AdminHTTP("127.0.0.1:0", {}, security=security)
    async with grpc_server(own) as address:
        page = await pages.start()
        outcomes = await asyncio.gather(
            triptych("admin", f"grpcs://{address}", "status"),
            triptych("collect-env", "--target", f"grpcs://{address}"),
            triptych("top", "--once", "--url", f"https://{page}"),
            triptych("trace", "last", "--url", f"https://{page}"),
        )
        trusting = await triptych("admin", f"grpcs://{address}", "status", "--cacert", ca.file)
        broken = await triptych("chat", "--url", f"grpcs://{address}", "--cacert", issued.key)
        missing = await triptych(
            "run-batch", "-i", "x", "-o", "y", environment={"TRIPTYCH_CA_CERTS": str(tmp_path / "none")}
        )
        await pages.stop(0)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert re.search(r"the certificate of 127.0.0.1:\d+ is not trusted", outcome.out + outcome.err)
    assert "not trusted" not in trusting.err
    assert (broken.exit_code, "cannot be used" in broken.err) == (2, True)
    assert "Traceback" not in missing.err


def test_the_hosts_of_a_certificate_are_read(tmp_path: Path) -> None:
    issued = CertificateAuthority(tmp_path).issue("server", uri="spiffe://x/engine/a")
    assert hosts_in(issued) == ["localhost", "127.0.0.1", "::1"]
    with pytest.raises(ConfigError, match="cannot be read"):
        hosts_in(CertificateFiles(issued.key, issued.key))
