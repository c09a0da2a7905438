"""Finds out what a port is at which no gRPC connection could be made: HTTP, TLS or nothing."""

from __future__ import annotations

import json
import socket
import ssl

from triptych_kit.addresses import join_address, split_address
from triptych_kit.channel import TLS_SCHEMES, ChannelCredentials, parse_target
from triptych_kit.config import ConfigError
from triptych_kit.errors import InvalidArgument

_SCHEMES = ("", "grpc", "http", "grpcs", "https")
_LIMIT_S = 2.0
_MAX_BYTES = 64 * 1024
# Any HTTP server answers this with a status line; a frontend's with its version and its port of gRPC.
_PATH = "/version"


def untrusted(address: str, error: ssl.SSLCertVerificationError) -> str:
    """A sentence about a server whose certificate is not trusted."""
    return (
        f"the certificate of {address} is not trusted ({error.verify_message}):"
        " --cacert FILE names the CA, TRIPTYCH_CA_CERTS too"
    )


def describe_port(target: str, credentials: ChannelCredentials) -> str:
    """A sentence about what `target` is and which address to take; empty if nothing answers as expected."""
    scheme, _, rest = target.rpartition("://")
    if scheme not in _SCHEMES:
        return ""
    try:
        address = parse_target(rest.partition("/")[0])
    except InvalidArgument:
        return ""
    if address.startswith("unix:"):
        return ""
    place = split_address(address)
    wants_tls = f"{scheme}://" in TLS_SCHEMES or credentials.has_tls
    try:
        sentence = (
            _over_tls(place, address, credentials) if wants_tls else _over_http(place, address, credentials)
        )
    except ConfigError as error:
        return str(error)
    except (OSError, ValueError):
        return ""
    return sentence


def _over_http(place: tuple[str, int], address: str, credentials: ChannelCredentials) -> str:
    with socket.create_connection(place, _LIMIT_S) as connection:
        answer = _answer(connection, address, credentials)
    if answer.startswith(b"HTTP/"):
        return _of_http(answer, address, "grpc")
    # A server of TLS ends the connection, with or without an alert.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(place, _LIMIT_S) as plain,
        context.wrap_socket(plain, server_hostname=place[0]),
    ):
        return f"{address} has TLS: --url grpcs://{address}"


def _over_tls(place: tuple[str, int], address: str, credentials: ChannelCredentials) -> str:
    context = credentials.context()
    # Without it a server of gRPC ends the connection.
    context.set_alpn_protocols(["h2", "http/1.1"])
    name = credentials.server_name or place[0]
    try:
        with (
            socket.create_connection(place, _LIMIT_S) as plain,
            context.wrap_socket(plain, server_hostname=name) as connection,
        ):
            answer = _answer(connection, address, credentials)
    except ssl.SSLCertVerificationError as error:
        return untrusted(address, error)
    except ssl.SSLError as error:
        reason = str(error.reason)
        if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
            return f"{address} has no TLS: --url grpc://{address}"
        if "CERTIFICATE" not in reason:
            return f"no TLS connection to {address}: {reason.lower().replace('_', ' ')}"
        answer = b""
    if not answer and credentials.certificate is None:
        # A server that accepts the caller writes first, whatever the caller writes.
        return (
            f"{address} needs a certificate of the caller:"
            " TRIPTYCH_CERTFILE and TRIPTYCH_KEYFILE name one and its key"
        )
    return _of_http(answer, address, "grpcs") if answer.startswith(b"HTTP/") else ""


def _answer(connection: socket.socket, address: str, credentials: ChannelCredentials) -> bytes:
    key = credentials.read_key()
    lines = [f"GET {_PATH} HTTP/1.1", f"host: {address}", "connection: close"]
    lines += [f"authorization: Bearer {key}"] if key else []
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    answer = b""
    try:
        while len(answer) < _MAX_BYTES and (part := connection.recv(4096)):
            answer += part
    except ConnectionResetError:
        # What came before counts.
        pass
    return answer


def _of_http(answer: bytes, address: str, scheme: str) -> str:
    port = _grpc_port(answer)
    if port is None:
        return f"{address} is an HTTP server: --url takes the address that `triptych serve` shows as gRPC"
    own = join_address(split_address(address)[0], port)
    return f"{address} is the HTTP API (OpenAI's) of a frontend: --url {scheme}://{own} is its gRPC"


def _grpc_port(answer: bytes) -> int | None:
    """The port in the answer of a frontend; None for another server."""
    _, _, body = answer.partition(b"\r\n\r\n")
    try:
        port = json.loads(body).get("grpc_port")
    except (ValueError, AttributeError):
        return None
    return port if isinstance(port, int) else None
