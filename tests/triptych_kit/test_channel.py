from __future__ import annotations

import pytest

from triptych_kit.channel import CHANNEL_OPTIONS, parse_target
from triptych_kit.errors import InvalidArgument


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("grpc://frontend:50051", "frontend:50051"),
        ("grpc://[::1]:50051/", "[::1]:50051"),
        ("http://127.0.0.1:50051/", "127.0.0.1:50051"),
    ],
)
def test_targets(target: str, expected: str) -> None:
    assert parse_target(target) == expected


@pytest.mark.parametrize(
    "target",
    [
        "",
        "host",
        "host:",
        ":50051",
        "host:0",
        "host:70000",
        "ftp://host:80",
        "unix:relative",
        "http://host",
        "host:5x",
        "host:\u0663",
    ],
)
def test_what_is_no_target(target: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_target(target)
    assert caught.value.violations[0][0] == "target"


def test_a_frozen_peer_is_found_by_the_ping_timeout() -> None:
    internal = dict(CHANNEL_OPTIONS["internal"])
    assert internal["grpc.keepalive_time_ms"] == 500
    assert internal["grpc.keepalive_timeout_ms"] == 1500
    assert internal["grpc.http2.ping_timeout_ms"] == 1500
    assert internal["grpc.keepalive_permit_without_calls"] == 1
    assert internal["grpc.http2.max_pings_without_data"] == 0


@pytest.mark.parametrize("profile", ["internal", "public"])
def test_reconnects_are_never_a_second_apart(profile: str) -> None:
    options = dict(CHANNEL_OPTIONS[profile])
    assert options["grpc.max_reconnect_backoff_ms"] <= 1000
    assert options["grpc.max_receive_message_length"] == 64 * 1024 * 1024


@pytest.mark.parametrize("profile", ["internal", "public"])
def test_no_option_is_misspelt_in_the_way_that_circulates(profile: str) -> None:
    assert not [name for name, _ in CHANNEL_OPTIONS[profile] if "recv" in name]
