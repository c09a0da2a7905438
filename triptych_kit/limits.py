"""Message limits and keepalive of the three kinds of listeners: public, internal and admin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych_kit.wire_check import MessageLimits

_MIB = 1024 * 1024
_UNCOMPRESSED = 1
_HANDSHAKE_MS = 10_000  # for TLS and the preface of HTTP/2


@dataclass(frozen=True, slots=True)
class LimitProfile:
    """Limits of a listener, and its detection of dead peers."""

    max_receive_bytes: int
    max_send_bytes: int
    max_metadata_bytes: int
    keepalive_time_ms: int
    keepalive_timeout_ms: int
    min_ping_interval_ms: int
    # Calls of a connection. Those that are reset count until they are seen, with 14 kB each.
    max_streams: int = 128
    message_limits: MessageLimits | None = None  # of a request; None: requests are not checked as bytes
    shares_port: bool = False
    max_connection_age_ms: int = 0  # 0: no limit
    max_connection_age_grace_ms: int = 0  # time for calls on a connection beyond its age to end

    def options(self) -> list[tuple[str, int]]:
        """The gRPC server options.

        Unless the port is shared on purpose, a second server on it fails: it must not get half of the calls.
        """
        return [
            ("grpc.so_reuseport", int(self.shares_port)),
            ("grpc.max_receive_message_length", self.max_receive_bytes),
            ("grpc.max_send_message_length", self.max_send_bytes),
            # Compression would bypass the limit of a message: 1 MB of gzip is 1 GB of text.
            ("grpc.compression_enabled_algorithms_bitset", _UNCOMPRESSED),
            ("grpc.per_message_decompression", 0),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.http2.ping_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", self.min_ping_interval_ms),
            ("grpc.http2.max_ping_strikes", 0),
            *self._age_options(),
        ]

    def _age_options(self) -> list[tuple[str, int]]:
        if not self.max_connection_age_ms:
            return []
        return [
            ("grpc.max_connection_age_ms", self.max_connection_age_ms),
            ("grpc.max_connection_age_grace_ms", self.max_connection_age_grace_ms),
        ]


PUBLIC = LimitProfile(
    max_receive_bytes=16 * _MIB,
    max_send_bytes=64 * _MIB,
    max_metadata_bytes=8192,
    keepalive_time_ms=10_000,
    keepalive_timeout_ms=5000,
    min_ping_interval_ms=5000,
    # Far above any `--max-queued-requests`, which refuses with a reason. Calls that have ended count until
    # the client knows, so one that waits at this limit is begun too early, and ends as UNAVAILABLE.
    max_streams=32_768,
    # Our own services need no such check between them. The longest prompts have a million tokens.
    message_limits=MessageLimits(max_fields=131_072, max_numbers=2 * 1024 * 1024),
)
INTERNAL = LimitProfile(
    max_receive_bytes=64 * _MIB,
    max_send_bytes=64 * _MIB,
    max_metadata_bytes=8192,
    keepalive_time_ms=500,
    # As long as three heartbeats: a process that only lacks CPU time may answer later than 500 ms.
    keepalive_timeout_ms=1500,
    min_ping_interval_ms=400,
)
ADMIN = replace(PUBLIC, max_streams=128)
