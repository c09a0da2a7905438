"""The blocking client: one channel to a frontend, shared by any number of threads."""

# Written by tools/blocking_client.py from aio.py.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from triptych.api.v1 import model_pb2, request_pb2, tokenizer_pb2
from triptych_client.authorized import AuthorizedChannel
from triptych_client.call_options import CallOptions, ModelOptions, build_message, metadata_pairs
from triptych_client.channel_options import PUBLIC_SERVICE, ChannelOptions, address_of
from triptych_client.chat_events import ChatCompletion, ChatEvent, to_chat_completion, to_chat_event
from triptych_client.chat_request import (
    ApplyTemplateOptions,
    ChatMessage,
    ChatOptions,
    build_chat_request,
    build_template_request,
)
from triptych_client.embedding_requests import (
    ClassifyOptions,
    EmbedOptions,
    PoolingInput,
    RerankOptions,
    ScoreOptions,
    build_classify_request,
    build_embed_request,
    build_rerank_request,
    build_score_request,
)
from triptych_client.embeddings import (
    Classes,
    Embeddings,
    Ranking,
    Scores,
    to_classes,
    to_embeddings,
    to_ranking,
    to_scores,
)
from triptych_client.errors import TriptychError, from_rpc_error, not_reached
from triptych_client.events import Completion, Event, ItemEvent, to_completion, to_event, to_item_event
from triptych_client.generate_request import (
    GenerateOptions,
    Prompt,
    StreamOptions,
    build_batch_request,
    build_generate_request,
)
from triptych_client.request_status import RequestStatus, read_state, to_request_status
from triptych_client.retry import Attempts, RetryPolicy
from triptych_client.session import Session
from triptych_client.stream import Stream
from triptych_client.stream_plan import EventT, StreamPlan
from triptych_client.stubs import Stubs
from triptych_client.tokenizer_requests import (
    DetokenizeOptions,
    TokenizeOptions,
    build_detokenize_request,
    build_tokenize_request,
)
from triptych_client.tokens import (
    FileAssembler,
    RenderedPrompt,
    Token,
    read_prompt,
    read_token_ids,
    read_tokens,
    to_chunk,
)
from triptych_client.waiting import channel_ready, sleep

# An abandoned request ends by itself soon, so its abort is not worth a longer wait.
_ABORT_LIMIT_S = 1.0


class Client:
    """A client of one frontend. Every call that fails raises TriptychError.

    A call that fails before its first message is retried according to `retry`. The options of every call
    are those of CallOptions.
    """

    def __init__(
        self,
        target: str,
        *,
        options: ChannelOptions | None = None,
        retry: RetryPolicy | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
    ) -> None:
        """Open a channel to `host:port` or `grpc://host:port`; it connects with the first call.

        `credentials` None is plain text. `api_key` is sent with every call.
        """
        settings = (options or ChannelOptions()).as_grpc()
        self._address = address_of(target)
        self._retry = retry or RetryPolicy()
        if credentials is None:
            self._channel = grpc.insecure_channel(self._address, options=settings)
        else:
            self._channel = grpc.secure_channel(self._address, credentials, options=settings)
        self._stubs = Stubs(self._channel if api_key is None else AuthorizedChannel(self._channel, api_key))

    def connect(self, *, timeout_s: float = 10.0) -> None:
        """Wait until the frontend is connected; raises UNAVAILABLE after `timeout_s`."""
        try:
            channel_ready(self._channel, timeout_s)
        except TimeoutError as error:
            raise not_reached(self._address, timeout_s) from error

    def generate(self, prompt: Prompt, **options: Unpack[StreamOptions]) -> Stream[Event]:
        """Stream the outputs for a text or for token ids.

        With `orphan_grace_ms` a stream continues over the next connection if its connection breaks.
        """
        request = build_generate_request(prompt, options)
        grace_s = options.get("orphan_grace_ms", 0) / 1000
        return self._stream(self._stubs.inference.Generate, request, to_event, options, grace_s=grace_s)

    def generate_unary(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The complete outputs for a text or for token ids."""
        request = build_generate_request(prompt, options)
        return to_completion(self._call(self._stubs.inference.GenerateOnce, request, options))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[GenerateOptions] = (),
        **options: Unpack[GenerateOptions],
    ) -> Stream[ItemEvent]:
        """Stream the outputs of many prompts; a refused prompt does not affect the others.

        `options` apply to all prompts; an entry of `each` overrides them for one prompt.
        """
        request = build_batch_request(prompts, each, options)
        return self._stream(self._stubs.inference.GenerateBatch, request, to_item_event, options)

    def chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> Stream[ChatEvent]:
        """Stream the next message of a conversation."""
        request = build_chat_request(messages, options)
        return self._stream(self._stubs.chat.Chat, request, to_chat_event, options)

    def chat_unary(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> ChatCompletion:
        """The complete next message of a conversation."""
        request = build_chat_request(messages, options)
        return to_chat_completion(self._call(self._stubs.chat.ChatOnce, request, options))

    def session(self, **options: Unpack[GenerateOptions]) -> Session:
        """Turns over one call, each of which continues all tokens before it; `options` are those of each.

        The call is not retried, and ends with its connection.
        """
        return Session(self._stubs.session_starter(options), options)

    def embed(self, inputs: Sequence[PoolingInput], **options: Unpack[EmbedOptions]) -> Embeddings:
        """One vector per text, or one per token."""
        request = build_embed_request(inputs, options)
        return to_embeddings(self._call(self._stubs.embedding.Embed, request, options))

    def score(
        self,
        queries: Sequence[PoolingInput],
        documents: Sequence[PoolingInput],
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """The score of each document for the query at the same index, or for the only query."""
        request = build_score_request(queries, documents, options)
        return to_scores(self._call(self._stubs.embedding.Score, request, options))

    def rerank(
        self, query: PoolingInput, documents: Sequence[PoolingInput], **options: Unpack[RerankOptions]
    ) -> Ranking:
        """The documents with the highest scores for the query, best first."""
        request = build_rerank_request(query, documents, options)
        return to_ranking(self._call(self._stubs.embedding.Rerank, request, options))

    def classify(self, inputs: Sequence[PoolingInput], **options: Unpack[ClassifyOptions]) -> Classes:
        """Class probabilities of each text, or of each of its tokens."""
        request = build_classify_request(inputs, options)
        return to_classes(self._call(self._stubs.embedding.Classify, request, options))

    def tokenize(self, text: str, **options: Unpack[TokenizeOptions]) -> list[int]:
        request = build_tokenize_request(text, options, return_tokens=False)
        return read_token_ids(self._call(self._stubs.tokenizer.Tokenize, request, options))

    def tokenize_with_offsets(self, text: str, **options: Unpack[TokenizeOptions]) -> list[Token]:
        """The tokens of `text` with their names and offsets."""
        request = build_tokenize_request(text, options, return_tokens=True)
        return read_tokens(self._call(self._stubs.tokenizer.Tokenize, request, options))

    # The name before this release; it will be removed in the next one.
    tokenize_with_places = tokenize_with_offsets

    def detokenize(self, token_ids: Sequence[int], **options: Unpack[DetokenizeOptions]) -> str:
        request = build_detokenize_request(token_ids, options)
        response = self._call(self._stubs.tokenizer.Detokenize, request, options)
        return str(response.text)

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], **options: Unpack[ApplyTemplateOptions]
    ) -> RenderedPrompt:
        """The rendered prompt of a conversation, as text and as token ids."""
        request = build_template_request(messages, options)
        return read_prompt(self._call(self._stubs.tokenizer.ApplyChatTemplate, request, options))

    def get_tokenizer(self, **options: Unpack[ModelOptions]) -> dict[str, bytes]:
        """The files of the tokenizer by name, checked against their digests."""
        request = build_message(tokenizer_pb2.GetTokenizerRequest, {}, options)
        assembler = FileAssembler()
        with self._stream(self._stubs.tokenizer.GetTokenizer, request, to_chunk, options) as chunks:
            for chunk in chunks:
                assembler.add(chunk)
        return assembler.files()

    def abort(self, request_id: str, **options: Unpack[CallOptions]) -> str:
        """Abort a request; its stream ends with the reason `abort`.

        Returns its state before: queued, running, or finished, which means that the abort was too late.
        """
        request = request_pb2.AbortRequest(request_id=request_id)
        return read_state(self._call(self._stubs.requests.Abort, request, options))

    def get_request(self, request_id: str, **options: Unpack[CallOptions]) -> RequestStatus:
        request = request_pb2.GetRequestRequest(request_id=request_id)
        return to_request_status(self._call(self._stubs.requests.GetRequest, request, options))

    def list_models(self, **options: Unpack[CallOptions]) -> list[model_pb2.Model]:
        response = self._call(self._stubs.models.ListModels, model_pb2.ListModelsRequest(), options)
        return list(response.models)

    def get_model(self, **options: Unpack[ModelOptions]) -> model_pb2.Model:
        request = build_message(model_pb2.GetModelRequest, {}, options)
        response: model_pb2.GetModelResponse = self._call(self._stubs.models.GetModel, request, options)
        return response.model

    def server_info(self, **options: Unpack[CallOptions]) -> model_pb2.GetServerInfoResponse:
        """The frontend's version, its limits, and the engines it knows."""
        request = model_pb2.GetServerInfoRequest()
        response: model_pb2.GetServerInfoResponse = self._call(
            self._stubs.models.GetServerInfo, request, options
        )
        return response

    def is_ready(self, *, timeout_s: float | None = 5.0) -> bool:
        """Whether the frontend accepts requests now. False also if it does not answer."""
        request = health_pb2.HealthCheckRequest(service=PUBLIC_SERVICE)
        try:
            response = self._stubs.health.Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(
        self,
        # Generated code has no types for the methods of a stub.
        rpc: Callable[..., Any],
        request: Message,
        options: CallOptions,
    ) -> Any:
        attempts = Attempts(self._retry, options.get("timeout_s"))
        while True:
            try:
                return rpc(request, timeout=attempts.remaining_s(), metadata=metadata_pairs(options))
            except grpc.RpcError as error:
                delay_s = attempts.next_after_s(from_rpc_error(error))
            sleep(delay_s)

    def _stream(
        self,
        rpc: Callable[..., Any],
        request: Message,
        to_event: Callable[[Any], EventT | None],
        options: CallOptions,
        *,
        grace_s: float = 0.0,
    ) -> Stream[EventT]:
        plan = StreamPlan(to_event, Attempts(self._retry, options.get("timeout_s")), grace_s=grace_s)
        abort = functools.partial(self._abort_quietly, options.get("metadata", {}))
        return Stream(self._stubs.starter(rpc, request, options), plan, abort)

    def _abort_quietly(self, metadata: Mapping[str, str], request_id: str) -> None:
        """Abort a request with the metadata of its call, by which a proxy finds its frontend."""
        with contextlib.suppress(TriptychError):
            self.abort(request_id, timeout_s=_ABORT_LIMIT_S, metadata=metadata)
