"""Options of a client's channel: keepalive, message sizes, reconnects. Knows no RPC."""

from __future__ import annotations

from dataclasses import dataclass

# This service is SERVING in the health service when generate requests are accepted.
PUBLIC_SERVICE = "triptych.api.v1.InferenceService"


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Channel options; the defaults match a frontend's public listener.

    A ping is sent every `keepalive_s` while a call is open, and a connection whose answer takes longer
    than `keepalive_timeout_s` is closed.
    """

    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0
    max_request_bytes: int = 16 * 1024 * 1024
    max_response_bytes: int = 64 * 1024 * 1024
    max_reconnect_backoff_s: float = 1.0

    def as_grpc(self) -> list[tuple[str, int | str]]:
        return [
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # A ping's own timeout is one minute by default and wins over the keepalive's.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_send_message_length", self.max_request_bytes),
            ("grpc.max_receive_message_length", self.max_response_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", round(self.max_reconnect_backoff_s * 1000)),
            # gRPC's own policy ends once the response headers have arrived, which the frontend sends at
            # once, and ignores RetryInfo. It only retries attempts that reached no handler.
            ("grpc.service_config_disable_resolution", 1),
        ]


def address_of(target: str) -> str:
    """The gRPC address for `host:port` or `grpc://host:port`."""
    return target.removeprefix("grpc://")
