"""Channels to our own services: keepalive that detects a frozen peer, message sizes, quick reconnects."""

from __future__ import annotations

from typing import Literal

import grpc.aio

from service_kit.errors import InvalidArgument

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


def open_channel(target: str, *, profile: Literal["internal", "public"] = "internal") -> grpc.aio.Channel:
    """A channel to a target such as `grpc://host:port`. Connects with the first call; close it when done.

    `internal` is for connections between our services: a hanging peer is noticed quickly, no proxy is used.
    """
    return grpc.aio.insecure_channel(parse_target(target), options=CHANNEL_OPTIONS[profile])


def parse_target(target: str) -> str:
    """`host:port` of a target, which may have the scheme grpc or http, as other tools write the same address.

    Raises InvalidArgument for another scheme or an invalid port.
    """
    address = target.removeprefix("grpc://").removeprefix("http://").removesuffix("/")
    host, colon, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not colon or "/" in address or not is_number or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{target!r} is not an address such as grpc://host:50051", field="target")
    return address
