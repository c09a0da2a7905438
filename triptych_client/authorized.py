"""A channel whose calls carry an API key. Knows no RPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio


class AuthorizedChannel:
    """What a stub needs of a channel, blocking or awaited; adds the key to the metadata of each call.

    gRPC's own call credentials exist with TLS alone.
    """

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel, api_key: str) -> None:
        self._metadata = (("authorization", f"Bearer {api_key}"),)
        self.unary_unary = self._with_key(channel.unary_unary)
        self.unary_stream = self._with_key(channel.unary_stream)
        self.stream_unary = self._with_key(channel.stream_unary)
        self.stream_stream = self._with_key(channel.stream_stream)

    def _with_key(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            method = make(*args, **kwargs)

            def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
                return method(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

            return call

        return made
