"""The stubs of a frontend's services over one channel, blocking or awaited. Knows no request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from triptych.api.v1 import (
    chat_pb2_grpc,
    embedding_pb2_grpc,
    inference_pb2_grpc,
    model_pb2_grpc,
    request_pb2_grpc,
    tokenizer_pb2_grpc,
)
from triptych_client.call_options import CallOptions, metadata_pairs
from triptych_client.stream_plan import NextCall


class Stubs:
    """One stub per service."""

    def __init__(self, channel: Any) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.chat = chat_pb2_grpc.ChatServiceStub(channel)
        self.embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)
        self.requests = request_pb2_grpc.RequestServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    def starter(
        self,
        # The return type of a stub's method depends on the channel; generated code has no types for it.
        rpc: Callable[..., Any],
        request: Message,
        options: CallOptions,
    ) -> Callable[[NextCall], Any]:
        """A function that makes the calls of one stream: the first one, its retries, and Resume."""
        metadata = metadata_pairs(options)

        def start(next_call: NextCall) -> Any:
            if next_call.resume is not None:
                return self.inference.Resume(next_call.resume, timeout=next_call.timeout_s, metadata=metadata)
            return rpc(request, timeout=next_call.timeout_s, metadata=metadata)

        return start

    def session_starter(self, options: CallOptions) -> Callable[[Any], Any]:
        """A function that makes the call of a session with the messages that it sends."""
        rpc, metadata = self.inference.GenerateSession, metadata_pairs(options)
        return lambda messages: rpc(messages, timeout=options.get("timeout_s"), metadata=metadata)
