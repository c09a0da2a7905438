"""The routes of OpenAI's API: each reads a body, asks for an answer, and writes it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from frontend_svc.generation.answers.adapters import AdapterAnswers
from frontend_svc.generation.answers.chat import ChatAnswers
from frontend_svc.generation.answers.generate import GenerateAnswers, with_prompt_named
from frontend_svc.generation.answers.models import ModelAnswers
from frontend_svc.generation.answers.pooling import PoolingAnswers
from frontend_svc.generation.answers.tokenizer import TokenizerAnswers
from frontend_svc.generation.open_requests import OpenRequests
from frontend_svc.generation.tenants import Rate
from frontend_svc.protocols.anthropic.errors import ANTHROPIC
from frontend_svc.protocols.anthropic.routes import VERSION_HEADER, MessageRoutes, model_info, model_list
from frontend_svc.protocols.openai.adapters import AdapterRoutes
from frontend_svc.protocols.openai.answers import (
    Answer,
    Echo,
    add_usage,
    are_whole,
    chat_choice,
    completion_choice,
    last_choice,
    model_card,
    num_characters,
    prompt_of,
    usage_of,
    whole_chat,
    whole_completion,
)
from frontend_svc.protocols.openai.authorization import Authorization
from frontend_svc.protocols.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
)
from frontend_svc.protocols.openai.body_reader import BodyReader
from frontend_svc.protocols.openai.call import (
    DONE,
    OPENAI,
    Dialect,
    Handler,
    body_of,
    caller_of,
    choose_rank,
    event_of,
    guarded,
    json_response,
    streamed,
    unless_disconnected,
)
from frontend_svc.protocols.openai.embeddings import EmbeddingRoutes
from frontend_svc.protocols.openai.field_names import FieldNames
from frontend_svc.protocols.openai.http_metrics import HTTPCalls, HTTPMetrics
from frontend_svc.protocols.openai.page_routes import PageRoutes
from frontend_svc.protocols.openai.progress import LAST_EVENT_ID, StreamProgress
from frontend_svc.protocols.openai.realtime.routes import RealtimeRoutes
from frontend_svc.protocols.openai.realtime.session import RealtimeLimits, SessionServices
from frontend_svc.protocols.openai.requests import (
    chat_names,
    chat_request,
    completion_names,
    generate_requests,
    note_unstreamed,
    prompt_fields,
    template_request,
)
from frontend_svc.protocols.openai.response_store import ResponseStore
from frontend_svc.protocols.openai.responses import ResponseRoutes
from frontend_svc.protocols.openai.unknown_routes import unknown_route
from triptych.api.v1 import chat_message_pb2, generate_pb2, inference_pb2, tokenize_pb2
from triptych.common.v1 import output_pb2
from triptych_kit.call_turns import CallTurns
from triptych_kit.errors import InvalidArgument, ServiceError, Unavailable
from triptych_kit.http.pages import Pages
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.identity import Identity
from triptych_kit.telemetry.metrics import Counts
from triptych_kit.version import installed_version

# Fields of /tokenize that concern messages alone.
_OF_MESSAGES = (
    "tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"
)  # fmt: skip
# Probes and what is asked for again and again; the pages of the admin HTTP listener besides.
_UNCOUNTED = frozenset({"/health", "/load", "/ping", "/ready", "/version"})
_OPENAI_ALONE = ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/realtime", "/v1/responses")
_T = TypeVar("_T")


class OpenAIRoutes:
    """Serves OpenAI's API over the answers of this frontend."""

    def __init__(
        self,
        generate: GenerateAnswers,
        chat: ChatAnswers,
        models: ModelAnswers,
        tokenizer: TokenizerAnswers,
        pooling: PoolingAnswers,
        requests: OpenRequests,
        responses: ResponseStore,
        *,
        is_ready: Callable[[], bool],
        authenticator: Authenticator,
        turns: CallTurns,
        bodies: BodyReader,
        calls: HTTPCalls,
        rates_of: Callable[[Identity], Mapping[str, Rate]],
        adapters: AdapterAnswers | None = None,
        grpc_port: Callable[[], int | None] = lambda: None,
        pages: Pages | None = None,
        heartbeat_s: float = 15.0,
        realtime_limits: RealtimeLimits | None = None,
        sessions: Counts | None = None,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._generate, self._chat, self._served, self._tokenizer = generate, chat, models, tokenizer
        self._requests, self._is_ready, self._grpc_port = requests, is_ready, grpc_port
        self._authenticator = authenticator
        self._created = int(time.time())
        response_routes = ResponseRoutes(chat, tokenizer, requests, responses)
        services = SessionServices(
            chat, requests, bodies, turns, realtime_limits or RealtimeLimits(), heartbeat_s
        )
        page_routes = None if pages is None else PageRoutes(pages)
        self._page_paths = frozenset() if page_routes is None else page_routes.paths
        gets: dict[str, Handler] = {
            "/": self._start,
            "/health": self._health,
            "/load": self._load,
            "/ping": self._health,
            "/ready": self._ready,
            "/version": self._version,
            "/tokenizer_info": self._tokenizer_info,
            "/v1/models": self._models,
            "/v1/models/{model:path}": self._one_model,
            **response_routes.gets,
            **RealtimeRoutes(models, services, sessions or Counts(), is_draining=is_draining).gets,
            "/v1/streams/{request_id:path}": self._rest_of_stream,
        }
        posts: dict[str, Handler] = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat_completions,
            "/ping": self._health,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            **EmbeddingRoutes(pooling, models, tokenizer).posts,
            **response_routes.posts,
            **MessageRoutes(chat, tokenizer, models).posts,
            **({} if adapters is None else AdapterRoutes(adapters).posts),
        }
        handlers = {"GET": gets, "POST": posts, "DELETE": response_routes.deletes}
        routes = [
            Route(path, guarded(handler, dialect_of), methods=[method])
            for method, by_path in handlers.items()
            for path, handler in by_path.items()
        ]
        route_of = {route.endpoint: "" if route.path in _UNCOUNTED else route.path for route in routes}
        if page_routes is not None:
            routes += page_routes.routes
            route_of |= {route.endpoint: "" for route in page_routes.routes}
        self.app = Starlette(
            routes=routes,
            middleware=[
                Middleware(HTTPMetrics, calls=calls, route_of=route_of),
                Middleware(
                    Authorization,
                    authenticator=authenticator,
                    dialect_of=dialect_of,
                    own_rules=self._page_paths,
                    turns=turns,
                ),
            ],
            exception_handlers={HTTPException: unknown_route(dialect_of)},
        )
        # A client would repeat a POST as a GET.
        self.app.router.redirect_slashes = False
        self.app.state.bodies, self.app.state.rates_of = bodies, rates_of
        self.app.state.heartbeat_s = heartbeat_s

    async def _start(self, request: Request) -> Response:
        """Where a browser goes on to, and what others find here."""
        has_page = "/ui" in self._page_paths
        if has_page and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/ui")
        served = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages", "models": "/v1/models"}
        pages = {"ui": "/ui", "metrics": "/metrics"} if has_page else {}
        return json_response({"name": "triptych", "version": installed_version(), **served, **pages})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _load(self, request: Request) -> Response:
        return json_response({"server_load": len(self._requests)})

    async def _ready(self, request: Request) -> Response:
        if self._authenticator.fault:
            # The log has the file and its fault; this route is for everyone.
            raise Unavailable("the file of API keys cannot be read", reason="KEYS_UNREADABLE")
        return Response(status_code=200 if self._is_ready() else 503)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": installed_version(), "grpc_port": self._grpc_port()})

    async def _models(self, request: Request) -> Response:
        models = list({model.name: model for model in self._served.all().models}.values())
        if VERSION_HEADER in request.headers:
            return json_response(model_list(models, self._created))
        return json_response({"object": "list", "data": [model_card(one, self._created) for one in models]})

    async def _one_model(self, request: Request) -> Response:
        model = self._served.one(request.path_params["model"])
        show = model_info if VERSION_HEADER in request.headers else model_card
        return json_response(show(model, self._created))

    async def _tokenize(self, request: Request) -> Response:
        body, ignored = await body_of(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("give either prompt or messages", field="prompt")
        if body.prompt is not None:
            request.state.name_of = FieldNames({"text": "prompt"})
            ignored.extend(name for name in _OF_MESSAGES if getattr(body, name))
            text, has_special = body.prompt, body.add_special_tokens is not False
        else:
            names = chat_names()
            names.note("text", "messages")
            request.state.name_of = names
            template = template_request(body, ignored)
            rendered = await unless_disconnected(request, self._tokenizer.apply_chat_template(template))
            text, has_special = rendered.prompt, bool(body.add_special_tokens)
        api_request = tokenize_pb2.TokenizeRequest(
            model=body.model,
            text=text,
            add_special_tokens=has_special,
            return_tokens=bool(body.return_token_strs),
        )
        reply = await unless_disconnected(request, self._tokenizer.tokenize(api_request))
        answer: dict[str, Any] = {
            "count": len(reply.token_ids),
            "max_model_len": reply.max_model_len,
            "tokens": list(reply.token_ids),
            "token_strs": list(reply.tokens) if body.return_token_strs else None,
        }
        return json_response(answer, ignored)

    async def _tokenizer_info(self, request: Request) -> Response:
        return json_response(self._tokenizer.info(request.query_params.get("model", "")))

    async def _detokenize(self, request: Request) -> Response:
        body, ignored = await body_of(request, DetokenizeBody)
        api_request = tokenize_pb2.DetokenizeRequest(model=body.model)
        try:
            api_request.token_ids.extend(body.tokens)
        except ValueError as error:
            raise InvalidArgument("tokens has an id that is out of range", field="tokens") from error
        reply = await unless_disconnected(request, self._tokenizer.detokenize(api_request))
        return json_response({"prompt": reply.text}, ignored)

    async def _chat_completions(self, request: Request) -> Response:
        body, ignored = await body_of(request, ChatBody)
        note_unstreamed(body, ignored)
        names = chat_names()
        api_request, caller = chat_request(body, ignored, names), caller_of(request)
        request.state.name_of = names
        choose_rank(request, [api_request])
        if body.stream:
            chunks = self._chat_chunks(body, self._chat.stream(api_request, caller))
            return await streamed(request, chunks, ignored)
        answer = await unless_disconnected(request, self._chat.whole(api_request, caller))
        return json_response(
            whole_chat(answer, with_ids=bool(body.return_token_ids), with_reasoning=body.include_reasoning),
            ignored,
        )

    async def _completions(self, request: Request) -> Response:
        body, ignored = await body_of(request, CompletionBody)
        note_unstreamed(body, ignored)
        if body.stream and body.orphan_grace_ms and LAST_EVENT_ID in request.headers:
            return await self._resumed(request, StreamProgress.read(request.headers[LAST_EVENT_ID]))
        names = completion_names()
        api_requests, caller = generate_requests(body, names), caller_of(request)
        request.state.name_of = names
        choose_rank(request, api_requests)
        fields, echo = prompt_fields(body), None
        if body.echo:
            prompts = [one.prompt for one in api_requests]
            echo = Echo(prompts, has_logprobs=body.logprobs is not None, is_all=body.max_tokens == 0)
        if body.stream:
            if len(api_requests) == 1:
                names.note_whole("token_ids", fields[0])
                names.note_whole("prompt", fields[0])
                responses = _numbered(self._generate.stream(api_requests[0], caller))
            else:
                responses = self._generate.stream_all(api_requests, caller, fields)
            return await streamed(request, self._completion_chunks(body, responses, echo=echo), ignored)

        async def answer(item: int) -> inference_pb2.GenerateUnaryResponse:
            try:
                return await self._generate.whole(api_requests[item], caller)
            except ServiceError as error:
                raise with_prompt_named(error, fields[item]) from error

        async def answer_all() -> list[inference_pb2.GenerateUnaryResponse]:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(answer(item)) for item in range(len(api_requests))]
            return [each.result() for each in answers]

        answers = await unless_disconnected(request, answer_all())
        whole = whole_completion(
            answers,
            with_ids=bool(body.return_token_ids),
            with_prompt_logprobs=body.prompt_logprobs is not None,
            echo=echo,
        )
        return json_response(whole, ignored)

    async def _rest_of_stream(self, request: Request) -> Response:
        progress = StreamProgress.read(request.headers.get(LAST_EVENT_ID, ""))
        if progress.request_id != request.path_params["request_id"]:
            raise InvalidArgument(
                f"{LAST_EVENT_ID} is of request {progress.request_id}, not of that of the path",
                field=LAST_EVENT_ID,
            )
        return await self._resumed(request, progress)

    async def _resumed(self, request: Request, progress: StreamProgress) -> Response:
        """The events behind the last one that the client of a stream has received."""
        if progress.is_finished:
            responses = _nothing()
        else:
            responses = self._generate.resume(progress.resume_request(), caller_of(request))
        chunks = self._completion_chunks(progress.body(), _numbered(responses), progress)
        return await streamed(request, chunks, [])

    async def _chat_chunks(
        self, body: ChatBody, responses: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[bytes, None]:
        with_ids = bool(body.return_token_ids)
        usage = _StreamUsage(body)
        calls_of: dict[int, list[chat_message_pb2.ToolCall]] = {}
        common: Answer | None = None
        async with contextlib.aclosing(responses):
            async for response in responses:
                kind = response.WhichOneof("event")
                if kind == "started":
                    started = response.started
                    common = Answer.begin(started, is_chat=True, is_chunk=True)
                    usage.note_prompt(started)
                    for index in range(body.n or 1):
                        first = {"role": "assistant", "content": ""}
                        choice = {"index": index, "delta": first, "logprobs": None, "finish_reason": None}
                        of_prompt = {} if index else prompt_of(started)
                        yield event_of(usage.chunk(common, choice) | of_prompt)
                    continue
                assert common is not None, "the first response has the id"
                if kind == "delta":
                    calls_of.setdefault(response.delta.output_index, []).extend(response.delta.tool_calls)
                    usage.note_tokens(len(response.delta.token_ids))
                    choice = chat_choice(
                        response.delta, with_ids=with_ids, with_reasoning=body.include_reasoning
                    )
                    # A parser holds back tokens that may begin a call.
                    if choice["delta"] or choice["logprobs"] is not None or with_ids:
                        yield event_of(usage.chunk(common, choice))
                else:
                    finished = response.finished
                    index = finished.output_index
                    usage.note_finished(0, finished.usage)
                    has_calls = are_whole(calls_of.get(index, ()))
                    choice = last_choice(index, finished, is_chat=True, has_calls=has_calls)
                    yield event_of(usage.chunk(common, choice))
        assert common is not None, "every stream begins with its id"
        for chunk in usage.last(common):
            yield event_of(chunk)
        yield DONE

    async def _completion_chunks(
        self,
        body: CompletionBody,
        responses: AsyncGenerator[tuple[int, Any], None],
        progress: StreamProgress | None = None,
        echo: Echo | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, or those behind `progress`."""
        with_ids, num_outputs = bool(body.return_token_ids), body.n or 1
        usage = _StreamUsage(body)
        common: Answer | None = None
        of_prompts: dict[int, dict[str, Any]] = {}  # by the index of a choice without a chunk
        offsets: defaultdict[int, int] = defaultdict(int)  # characters of tokens with logprobs, by choice
        if progress is not None:
            common = progress.answer()
            usage.restore(progress)
            offsets.update(enumerate(output.offset for output in progress.outputs))
        async with contextlib.aclosing(responses):
            async for item, response in responses:
                kind = response.WhichOneof("event")
                if kind == "started":
                    started = response.started
                    if common is None:
                        common = Answer.begin(started, is_chat=False, is_chunk=True)
                    usage.note_prompt(started)
                    if started.resume_token:
                        progress = StreamProgress.begin(started, body, common.created)
                    for index in range(item * num_outputs, (item + 1) * num_outputs):
                        of_prompts[index] = prompt_of(started, with_logprobs=False)
                        if echo is not None:
                            choice = echo.choice(index, item, started) | of_prompts.pop(index)
                            offsets[index] = num_characters(started.prompt_logprobs)
                            yield event_of(usage.chunk(common, choice))
                    continue
                assert common is not None, "the first response has the id"
                if kind == "delta":
                    if echo is not None and echo.is_all:
                        continue
                    index = item * num_outputs + response.delta.output_index
                    usage.note_tokens(len(response.delta.token_ids))
                    offset = offsets[index]
                    choice = completion_choice(index, response.delta, with_ids=with_ids, offset=offset)
                    offsets[index] += num_characters(response.delta.logprobs)
                else:
                    index = item * num_outputs + response.finished.output_index
                    if echo is not None and echo.is_all:
                        response.finished.usage.num_completion_tokens = 0
                        response.finished.reason = output_pb2.FINISH_REASON_LENGTH
                        response.finished.ClearField("stop_match")
                    usage.note_finished(item, response.finished.usage)
                    choice = last_choice(index, response.finished, is_chat=False)
                event_id = ""
                if progress is not None:
                    progress.note(response)
                    event_id = usage.event_id(progress)
                choice |= of_prompts.pop(index, {})
                yield event_of(usage.chunk(common, choice), event_id)
        assert common is not None, "every stream begins with its id"
        if progress is None or not progress.is_over:
            for chunk in usage.last(common):
                yield event_of(chunk, "" if progress is None else usage.event_id(progress, is_over=True))
        yield DONE


def dialect_of(scope: Scope) -> Dialect:
    """The API that a path belongs to; where both have it or none does, the one that the headers name."""
    path = scope["path"]
    if path.startswith(_OPENAI_ALONE):
        return OPENAI
    is_anthropic = path.startswith("/v1/messages") or VERSION_HEADER in Headers(scope=scope)
    return ANTHROPIC if is_anthropic else OPENAI


class _StreamUsage:
    """Counts tokens of a stream, and adds the counts where `stream_options` ask for them."""

    def __init__(self, body: SamplingBody) -> None:
        options = body.stream_options
        self._is_wanted = options is not None and options.include_usage
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._so_far = output_pb2.Usage()
        self._total = output_pb2.Usage()
        self._items: set[int] = set()

    def note_prompt(self, started: generate_pb2.Started) -> None:
        self._so_far.num_prompt_tokens += started.num_prompt_tokens
        self._so_far.num_cached_tokens += started.num_cached_tokens

    def note_tokens(self, count: int) -> None:
        self._so_far.num_completion_tokens += count

    def note_finished(self, item: int, usage: output_pb2.Usage) -> None:
        """Add the usage of one output of an item, whose prompt counts once."""
        if item in self._items:
            self._total.num_completion_tokens += usage.num_completion_tokens
        else:
            add_usage(self._total, usage)
        self._items.add(item)

    def restore(self, progress: StreamProgress) -> None:
        _fill_counts(self._so_far, progress.usage_so_far)
        _fill_counts(self._total, progress.usage_total)
        if any(output.is_finished for output in progress.outputs):
            self._items.add(0)

    def event_id(self, progress: StreamProgress, *, is_over: bool = False) -> str:
        progress.usage_so_far, progress.usage_total = _counts(self._so_far), _counts(self._total)
        progress.is_over = is_over
        return progress.event_id()

    def chunk(self, common: Answer, choice: dict[str, Any]) -> dict[str, Any]:
        if self._is_continuous:
            return common.body([choice], usage_of(self._so_far))
        return common.body([choice]) | ({"usage": None} if self._is_wanted else {})

    def last(self, common: Answer) -> list[dict[str, Any]]:
        return [common.body([], usage_of(self._total))] if self._is_wanted else []


async def _numbered(responses: AsyncGenerator[_T, None]) -> AsyncGenerator[tuple[int, _T], None]:
    async with contextlib.aclosing(responses):
        async for response in responses:
            yield 0, response


def _counts(usage: output_pb2.Usage) -> tuple[int, int, int]:
    return usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens


def _fill_counts(usage: output_pb2.Usage, counts: tuple[int, int, int]) -> None:
    usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens = counts


async def _nothing() -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
    return
    yield
