import asyncio
import contextlib
import gc
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.certificates import CertificateAuthority
from triptych_kit.addresses import split_address
from triptych_kit.channel import ChannelCredentials, open_channel
from triptych_kit.config import ConfigError
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import Page
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.credentials import Credentials
from triptych_kit.security.identity import Role, current_identity
from triptych_kit.security.listeners import ListenerSecurity
from triptych_kit.security.tls import CertificateFiles, ListenerTLS, names_in_certificate
from triptych_kit.server import ADMIN, Listener, Registration, Server

SERVICE = "triptych.api.v1.ModelService"


def register(server: grpc.aio.Server) -> None:
    async def who(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return current_identity().name.encode()

    handlers = {"GetModel": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def server_of(security: ListenerSecurity) -> Server:
    registration = Registration(SERVICE, register, is_ready=True)
    return Server(
        listen="127.0.0.1:0", registrations=[registration], profile=ADMIN, service="x", security=security
    )


async def ask(address: str, credentials: ChannelCredentials, method: str = f"{SERVICE}/GetModel") -> str:
    async with open_channel(address, credentials=credentials) as channel:
        call: Any = channel.unary_unary(f"/{method}", None, None)
        return (await call(b"", timeout=10)).decode()


def shown(files: CertificateFiles, ca: CertificateAuthority) -> ChannelCredentials:
    return ChannelCredentials(ca=ca.file, certificate=files.certificate, certificate_key=files.key)


async def test_certificates_are_verified_on_both_sides_and_give_the_identity(tmp_path: Path):
    ca, other_ca = CertificateAuthority(tmp_path), CertificateAuthority(tmp_path, "other")
    (tmp_path / "keys").write_text("- {name: alice, certificate: alice.example, role: client}")
    tls = ListenerTLS(ca.issue("server"))
    credentials = Credentials(str(tmp_path / "keys"))
    server = server_of(ListenerSecurity(Authenticator(credentials, verifies_certificates=True), tls))
    address = await server.start()
    try:
        assert await ask(address, shown(ca.issue("alice.example"), ca)) == "alice"
        uri = "spiffe://example/client/bob"
        assert await ask(address, shown(ca.issue("x", uri=uri), ca)) == uri
        for files, reason in (
            (ca.issue("mallory"), grpc.StatusCode.UNAUTHENTICATED),
            # An identity of SPIFFE is a URI name.
            (ca.issue(uri, file="common"), grpc.StatusCode.UNAUTHENTICATED),
            (ca.issue("e", uri="spiffe://example/engine/e"), grpc.StatusCode.PERMISSION_DENIED),
            # The handshake fails.
            (ca.issue("alice.example", is_expired=True, file="old"), grpc.StatusCode.UNAVAILABLE),
            (other_ca.issue("alice.example", file="forged"), grpc.StatusCode.UNAVAILABLE),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(address, shown(files, ca))
            assert caught.value.code() is reason
        for without in (ChannelCredentials(ca=ca.file), ChannelCredentials(), shown(ca.issue("c"), other_ca)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(address, without)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


def test_an_identity_of_spiffe_is_a_uri_name():
    uri = "spiffe://example/admin/a"
    shown = {
        "subject": ((("commonName", uri),), (("commonName", "cn"),)),
        "subjectAltName": (("DNS", uri), ("DNS", "dns"), ("URI", "spiffe://example/client/b")),
    }
    assert names_in_certificate(shown) == ["spiffe://example/client/b", "cn", "dns"]


async def test_a_key_is_sent_over_tls_with_the_name_of_another_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    ca, key = CertificateAuthority(tmp_path), "triptych-0123456789abcdef"
    (tmp_path / "keys").write_text(f"- {{name: alice, key: {key}, role: client}}")
    (tmp_path / "key").write_text(key + "\n")
    files = ca.issue("server")
    tls = ListenerTLS(CertificateFiles(files.certificate, files.key))
    security = ListenerSecurity(
        Authenticator(Credentials(str(tmp_path / "keys")), verifies_certificates=False), tls
    )
    server = server_of(security)
    address = await server.start()
    try:
        channel = ChannelCredentials(ca=ca.file, server_name="localhost", api_key_file=str(tmp_path / "key"))
        assert await ask(address, channel) == "alice"
        # Probes have no key, and learn nothing else.
        no_key = ChannelCredentials(ca=ca.file)
        assert await ask(address, no_key, "grpc.health.v1.Health/Check") == "\x08\x01"
        for method in (f"{SERVICE}/GetModel", "grpc.health.v1.Health/List", "made.up.Service/Method"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(address, no_key, method)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        [line] = [vars(record) for record in caplog.records if hasattr(record, "client")]
        assert (line["code"], line["client"]) == ("UNAUTHENTICATED", "127.0.0.1")
        assert line["reason"] == "NO_CREDENTIALS"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(address, channel, "made.up.Service/Method")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(address, ChannelCredentials(ca=ca.file, server_name="other.example"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


async def test_an_alert_of_a_client_is_no_error_of_the_listener(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    authority = CertificateAuthority(tmp_path)
    files = authority.issue("server")
    tls = ListenerTLS(CertificateFiles(files.certificate, files.key))
    security = ListenerSecurity(Authenticator(None, verifies_certificates=False), tls)
    listener = AdminHTTP("127.0.0.1:0", {}, security=security)
    host, port = split_address(await listener.start())
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.create_default_context()  # which does not know the CA
        context.maximum_version = version
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost")
    context = ssl.create_default_context(cafile=authority.file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES128-SHA:@SECLEVEL=0")  # which the listener does not have
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost")
    await listener.stop(0)
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def serial_of(address: str, ca: CertificateAuthority) -> str:
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=ca.file)
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return str(certificate["serialNumber"])


async def test_a_replaced_certificate_is_used_from_the_next_connection_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ca = CertificateAuthority(tmp_path)
    files = ca.issue("server")
    tls = ListenerTLS(CertificateFiles(files.certificate, files.key))
    security = ListenerSecurity(Authenticator(None, verifies_certificates=False), tls)

    async def page(target: str) -> Page:
        return Page(b"")

    listeners: list[Listener] = [
        server_of(security),
        AdminHTTP("127.0.0.1:0", {"/x": page}, security=security),
    ]
    addresses = [await listener.start() for listener in listeners]
    try:
        first = [await serial_of(address, ca) for address in addresses]
        ca.issue("server")
        second = [await serial_of(address, ca) for address in addresses]
        Path(files.key).write_text("half of a key")
        third = [await serial_of(address, ca) for address in addresses]
        assert not tls.is_usable
        # Those who connect cannot fill the log.
        assert [one.getMessage() for one in caplog.records].count("certificates not read again") == 1
        ca.issue("server")
        fourth = [await serial_of(address, ca) for address in addresses]
        assert tls.is_usable
    finally:
        for listener in listeners:
            await listener.stop(0)
    assert first[0] == first[1] != second[0] == second[1]
    assert third == second
    assert fourth[0] == fourth[1] != third[0]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_of_a_certificate_is_not_resumed_after_its_ca_was_replaced(
    tmp_path: Path, version: ssl.TLSVersion
):
    ca = CertificateAuthority(tmp_path)
    files = ca.issue("admin", uri="spiffe://example/admin/a")
    security = ListenerSecurity(
        Authenticator(None, verifies_certificates=True), ListenerTLS(ca.issue("server"))
    )
    context = ssl.create_default_context(cafile=ca.file)
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(files.certificate, files.key)

    async def page(target: str) -> Page:
        return Page(b"content")

    def read(address: str, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        host, port = address.split(":")
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"GET /x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            content = b"".join(iter(lambda: connection.recv(4096), b""))
            return content, connection.session

    listener = AdminHTTP("127.0.0.1:0", {"/x": page}, security=security)
    address = await listener.start()
    try:
        content, session = b"", None
        with contextlib.suppress(ssl.SSLError):
            content, session = await asyncio.to_thread(read, address, None)
        assert content.endswith(b"content") == (version is ssl.TLSVersion.TLSv1_3)
        CertificateAuthority(tmp_path).issue("server")
        # The new server certificate is not that which the client wants; that it is refused is the point.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        content = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            content, _ = await asyncio.to_thread(read, address, session)
        assert not content
    finally:
        await listener.stop(0)


@pytest.mark.parametrize("broken", ["certificate", "key", "ca"])
def test_files_that_cannot_be_used(tmp_path: Path, broken: str):
    files = CertificateAuthority(tmp_path).issue("server")
    path = getattr(files, broken)
    Path(path).write_text("no certificate")
    with pytest.raises(ConfigError, match=path):
        ListenerTLS(files)
    Path(path).unlink()
    with pytest.raises(ConfigError, match=path):
        ListenerTLS(files)


async def get(address: str, path: str, authorization: str = "") -> tuple[int, str]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    header = f"authorization: {authorization}\r\n" if authorization else ""
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{header}connection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer


async def test_pages_of_an_admin_listener_are_for_admins(tmp_path: Path):
    keys = {role: f"triptych-{role}-0123456789" for role in Role}
    entries = [f"- {{name: {role}, key: {key}, role: {role}}}" for role, key in keys.items()]
    (tmp_path / "keys").write_text("\n".join(entries))
    authenticator = Authenticator(Credentials(str(tmp_path / "keys")), verifies_certificates=False)

    async def page(target: str) -> Page:
        return Page(b"content")

    pages = {"/metrics": page, "/ui": page}
    for host in ("127.0.0.1", "0.0.0.0"):
        listener = AdminHTTP(f"{host}:0", pages, security=ListenerSecurity(authenticator))
        address = (await listener.start()).replace("0.0.0.0", "127.0.0.1")
        try:
            for role, key in keys.items():
                assert (await get(address, "/metrics", f"Bearer {key}"))[0] == 200
                assert (await get(address, "/ui", f"Bearer {key}"))[0] == (200 if role is Role.ADMIN else 403)
            assert (await get(address, "/metrics"))[0] == (200 if host == "127.0.0.1" else 401)
            status, text = await get(address, "/ui")
            assert status == 401
            assert 'www-authenticate: Basic realm="triptych"' in text
            assert (await get(address, "/ui", "Bearer wrong"))[0] == 401
        finally:
            await listener.stop(0)


async def test_grpc_gets_a_certificate_again_only_when_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fetchers: list[Any] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda first, fetch, **options: fetchers.append(fetch)
    )
    ca = CertificateAuthority(tmp_path)
    ListenerTLS(ca.issue("server")).grpc_credentials()
    (fetch,) = fetchers
    assert [fetch(), fetch()] == [None, None]
    ca.issue("server")
    assert [fetch() is None for _ in range(3)] == [False, True, True]
