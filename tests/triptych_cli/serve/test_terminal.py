"""The text that `serve` prints once everything is ready."""

from __future__ import annotations

import pytest

from triptych.engine.v1 import session_pb2
from triptych_cli.serve.terminal import banner


def test_whose_key_the_commands_take_is_said_before_them() -> None:
    text = banner(
        "m",
        ["127.0.0.1:1"],
        session_pb2.Ready(),
        {},
        {},
        None,
        "127.0.0.1:2",
        tls_hosts=["localhost"],
        has_keys=True,
    )
    lines = text.splitlines()
    place = next(index for index, line in enumerate(lines) if "TRIPTYCH_API_KEY is the caller's key" in line)
    assert lines[place].startswith("  with    CA.pem (or TRIPTYCH_CA_CERTS) is the CA")
    assert [line.split()[0] for line in lines[place + 1 :]] == ["try", "or", "or"]
    assert "$TRIPTYCH_API_KEY" in lines[place + 1]


@pytest.mark.parametrize(
    ("address", "hosts", "shown"),
    [
        ("0.0.0.0:1", ["localhost", "gpu.example"], "localhost:1"),
        ("0.0.0.0:1", ["*.example", "gpu.example"], "gpu.example:1"),
        ("127.0.0.1:1", ["localhost"], "localhost:1"),
        ("127.0.0.1:1", ["127.0.0.1", "localhost"], "127.0.0.1:1"),
        ("127.0.0.1:1", ["gpu.example"], "gpu.example:1"),
        ("gpu:1", ["localhost", "gpu"], "gpu:1"),
        ("gpu:1", [], "gpu:1"),
        ("0.0.0.0:1", [], "localhost:1"),
    ],
)
def test_the_commands_have_a_host_that_the_certificate_is_for(
    address: str, hosts: list[str], shown: str
) -> None:
    text = banner(
        "m", [address], session_pb2.Ready(), {}, {}, None, address, tls_hosts=hosts, verifies_clients=True
    )
    assert f"triptych chat --url grpcs://{shown} --cacert CA.pem" in text
    assert f"curl https://{shown}/v1" in text
    assert "TRIPTYCH_CERTFILE" in text


@pytest.mark.parametrize(
    ("http", "page"),
    [("127.0.0.1:2", ["127.0.0.1:2"]), ("", ["127.0.0.1:3"]), ("10.0.0.1:2", ["127.0.0.1:3"])],
)
def test_the_page_is_at_the_port_of_http_where_that_is_on_loopback(http: str, page: list[str]) -> None:
    admin_https = {"engine-0": "unix:/x", "frontend-0": "127.0.0.1:3"}
    text = banner("m", ["127.0.0.1:1"], session_pb2.Ready(), {}, admin_https, None, http)
    shown = [line.split()[1] for line in text.splitlines() if line.startswith("  page")]
    assert shown == [f"http://{one}/ui" for one in page]
