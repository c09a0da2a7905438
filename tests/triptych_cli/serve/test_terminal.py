"""The text that `serve` prints once everything is ready."""

from __future__ import annotations

import pytest

from triptych.engine.v1 import session_pb2
from triptych_cli.serve.terminal import banner


def test_whose_key_the_commands_take_is_said_before_them() -> None:
    text = banner(
        "m", ["127.0.0.1:1"], session_pb2.Ready(), {}, {}, None, "127.0.0.1:2", has_tls=True, has_keys=True
    )
    lines = text.splitlines()
    place = next(index for index, line in enumerate(lines) if "TRIPTYCH_API_KEY is the caller's key" in line)
    assert lines[place].startswith("  with    CA.pem is the CA")
    assert [line.split()[0] for line in lines[place + 1 :]] == ["try", "or", "or"]
    assert "$TRIPTYCH_API_KEY" in lines[place + 1]


@pytest.mark.parametrize(
    ("http", "page"),
    [("127.0.0.1:2", ["127.0.0.1:2"]), ("", ["127.0.0.1:3"]), ("10.0.0.1:2", ["127.0.0.1:3"])],
)
def test_the_page_is_at_the_port_of_http_where_that_is_on_loopback(http: str, page: list[str]) -> None:
    admin_https = {"engine-0": "unix:/x", "frontend-0": "127.0.0.1:3"}
    text = banner("m", ["127.0.0.1:1"], session_pb2.Ready(), {}, admin_https, None, http)
    shown = [line.split()[1] for line in text.splitlines() if line.startswith("  page")]
    assert shown == [f"http://{one}/ui" for one in page]
