"""Builds the objects of a frontend from its configuration. The only module that knows all others."""

from __future__ import annotations

import dataclasses
import functools
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from frontend_svc.api.chat import ChatServicer
from frontend_svc.api.embedding import EmbeddingServicer
from frontend_svc.api.inference import InferenceServicer
from frontend_svc.api.model import ModelServicer
from frontend_svc.api.request import RequestServicer
from frontend_svc.api.tokenizer import TokenizerServicer
from frontend_svc.config import FrontendConfig
from frontend_svc.engines.adoption.takeover import Adoption
from frontend_svc.engines.artifacts import ArtifactStore
from frontend_svc.engines.connection.client import EngineClient, FrontendIdentity
from frontend_svc.engines.connection.stream import HEARTBEAT_S
from frontend_svc.engines.connection.transport import EngineTransport, open_transport
from frontend_svc.engines.coordinator import CoordinatorSession
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.routing.policies import find_policy, first_turn
from frontend_svc.generation.admission import Admission
from frontend_svc.generation.answers.adapters import AdapterAnswers
from frontend_svc.generation.answers.chat import ChatAnswers
from frontend_svc.generation.answers.generate import GenerateAnswers, stream_generate, stream_rest
from frontend_svc.generation.answers.models import ModelAnswers
from frontend_svc.generation.answers.pooling import PoolingAnswers
from frontend_svc.generation.answers.resumable import ResumableStreams
from frontend_svc.generation.answers.session import SessionAnswers
from frontend_svc.generation.answers.tokenizer import TokenizerAnswers
from frontend_svc.generation.drain import Drain
from frontend_svc.generation.failover import Failover
from frontend_svc.generation.generation import Generation
from frontend_svc.generation.metrics import RequestMetrics
from frontend_svc.generation.open_requests import OpenRequests
from frontend_svc.generation.poison import PoisonRecord, ProbationLocks
from frontend_svc.generation.pooling import Pooling
from frontend_svc.generation.tenants import Tenants
from frontend_svc.generation.tracing import RequestTraces
from frontend_svc.metrics import register_frontend
from frontend_svc.output.collector import ReaderLimit
from frontend_svc.output.loss import Loss
from frontend_svc.output.pace import DeliveryPace
from frontend_svc.parsers.registry import ParserNames
from frontend_svc.parts import Answers, EngineParts, PublicAPI, RequestParts, Servers
from frontend_svc.process.frontend import Frontend
from frontend_svc.process.stack_metrics import StackMetrics
from frontend_svc.protocols.openai.body_reader import BodyReader
from frontend_svc.protocols.openai.browsers import for_browsers
from frontend_svc.protocols.openai.call import PROBES
from frontend_svc.protocols.openai.call_ids import CallIds
from frontend_svc.protocols.openai.connection import ConnectionLimits
from frontend_svc.protocols.openai.http_metrics import HTTPCalls
from frontend_svc.protocols.openai.listener import HTTPListener
from frontend_svc.protocols.openai.realtime.session import RealtimeLimits
from frontend_svc.protocols.openai.response_store import ResponseStore
from frontend_svc.protocols.openai.routes import OpenAIRoutes, dialect_of
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.pooling import supports_pooling
from frontend_svc.text.workers.workers import TextWorkers
from frontend_svc.ui.history import History
from frontend_svc.ui.page import About, ui_pages, ui_posts
from frontend_svc.ui.state import StatePage
from triptych.api.v1 import (
    chat_pb2_grpc,
    embedding_pb2_grpc,
    inference_pb2_grpc,
    model_pb2_grpc,
    request_pb2_grpc,
    tokenizer_pb2_grpc,
)
from triptych_kit.addresses import is_loopback, join_address, listen_at, loopback_of, port_in
from triptych_kit.admin import AdminServicer
from triptych_kit.call_turns import CallTurns
from triptych_kit.channel import ChannelCredentials
from triptych_kit.clock import Clock, MonotonicClock
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import METRICS_PATH, TARGETS_PATH, MakePage, Pages, TakeBody, metrics_page
from triptych_kit.http.trace_page import traces_page
from triptych_kit.process.setup import runtime_folder
from triptych_kit.security.listeners import ListenerSecurity
from triptych_kit.security.setup import listener_security, peer_credentials
from triptych_kit.server import ADMIN, PUBLIC, Lifecycle, Registration, Server, ServiceState
from triptych_kit.telemetry.loop_lag import LoopLag
from triptych_kit.telemetry.metrics import Counts, Metrics

_INFERENCE = "triptych.api.v1.InferenceService"
_CHAT = "triptych.api.v1.ChatService"
_EMBEDDING = "triptych.api.v1.EmbeddingService"
_TOKENIZER = "triptych.api.v1.TokenizerService"
_MODEL = "triptych.api.v1.ModelService"
_REQUEST = "triptych.api.v1.RequestService"

Connect: TypeAlias = Callable[[str], EngineTransport]


def build_frontend(
    config: FrontendConfig, *, heartbeat_s: float = HEARTBEAT_S, connect: Connect | None = None
) -> Frontend:
    """Build a frontend that neither listens nor is connected. Raises ConfigError, or OSError for its files.

    connect: opens the transport to the engine with an address; None: over gRPC.
    """
    clock = MonotonicClock()
    security, credentials = listener_security(config, config.client_keys), peer_credentials(config)
    metrics = Metrics("frontend")
    security.register(metrics, "frontend")
    text_workers = TextWorkers(config.text_workers, time_limit_s=config.text_time_limit_s)
    loop_lag = LoopLag(clock)
    # Sampled only while requests are open: a 10 ms timer would cause most of an idle process's CPU time.
    draining = Drain(on_busy=loop_lag.start, on_idle=loop_lag.stop)

    # Called once the parts below are built: no engine is known before `Frontend.connect`.
    def engines_changed() -> None:
        for name in engines.directory.models():
            requests.metrics.of(name)
        _show_readiness(engines.directory, servers)
        engines.failover.engines_changed()
        answers.adapters.engines_changed()

    engines = _engines(
        config,
        clock,
        text_workers,
        credentials,
        heartbeat_s=heartbeat_s,
        connect=connect or functools.partial(open_transport, credentials=credentials),
        on_change=engines_changed,
        endpoint=lambda: frontend.address,
        num_in_flight=lambda: draining.num_open,
    )
    limits = RequestLimits(
        max_n=config.max_n, max_logprobs=config.max_logprobs, stream_interval=config.stream_interval
    )
    requests = _requests(
        config, clock, engines, limits, text_workers, loop_lag, draining, RequestMetrics(metrics)
    )
    answers = _answers(config, clock, engines, requests, limits)
    api = _public_api(answers, requests)
    lifecycle = Lifecycle(lambda: draining.num_open)
    state_page, history = StatePage(engines, requests, clock), History(engines, requests, clock)

    def about() -> About:
        return About(
            address=frontend.address,
            http_address="" if http is None else http.address,
            has_tls=security.tls is not None,
            needs_key=security.authenticator.needs_credentials,
        )

    pages = _admin_pages(answers, metrics, state_page, history, about)
    calls, turns = HTTPCalls(metrics), CallTurns(clock)
    http: HTTPListener | None = None
    if config.http_port is not None:
        http = _http_listener(
            config,
            answers,
            requests,
            engines.directory,
            lifecycle,
            pages,
            security,
            text_workers,
            lambda: frontend.address,
            calls,
            turns,
        )
    servers = Servers(
        lifecycle,
        _public_server(config, api, security, text_workers, turns),
        _admin_server(config, lambda: frontend.status(), engines.failover.poison, lifecycle, security),
        _admin_http(config, pages, security),
        http,
    )
    register_frontend(metrics, engines, requests)
    frontend = Frontend(config.engine, engines, requests, api, servers, metrics, state_page, history)
    return frontend


def _engines(
    config: FrontendConfig,
    clock: Clock,
    text_workers: TextWorkers,
    credentials: ChannelCredentials,
    *,
    heartbeat_s: float,
    connect: Connect,
    on_change: Callable[[], None],
    endpoint: Callable[[], str],
    num_in_flight: Callable[[], int],
) -> EngineParts:
    identity = FrontendIdentity(f"frontend-{config.index}-{secrets.token_hex(4)}", secrets.randbits(63) + 1)

    def note_request(engine_id: str) -> None:
        if coordinator is not None:
            coordinator.note_request(engine_id)

    def lose_engine(loss: Loss) -> None:
        failover.lose_engine(loss)

    artifacts = ArtifactStore(
        text_workers,
        read_tokenizer_override(config.tokenizer),
        ParserNames(config.tool_parser, config.reasoning_parser),
        chat_template=None if config.chat_template is None else Path(config.chat_template).read_bytes(),
    )
    make_client = functools.partial(
        EngineClient,
        identity=identity,
        artifacts=artifacts,
        clock=clock,
        heartbeat_s=heartbeat_s,
        connect=connect,
        on_add=note_request,
        on_loss=lose_engine,
        pace=DeliveryPace(),
    )
    directory = Directory(
        make_client,
        on_change=on_change,
        clock=clock,
        reconnect_window_s=config.reconnect_window_s,
        policy=find_policy(config.routing_policy),
        aliases=config.model_aliases,
        first_turn=first_turn(config.index, identity.epoch),
    )
    folder = runtime_folder()
    locks = ProbationLocks(folder)
    stack = config.coordinator or ",".join(sorted(config.engine))
    poison = PoisonRecord(folder, stack=stack)
    failover = Failover(directory, clock, random.Random(identity.epoch), poison=poison, locks=locks)
    coordinator = None
    if config.coordinator is not None:
        coordinator = CoordinatorSession(
            config.coordinator,
            identity,
            endpoint=endpoint,
            on_engines=functools.partial(directory.set_addresses, "coordinator"),
            on_loads=directory.take_loads,
            num_in_flight=num_in_flight,
            clock=clock,
            wanted=dict(label.split("=", 1) for label in config.engine_label),
            credentials=credentials,
        )
    return EngineParts(identity, directory, locks, failover, coordinator)


def _requests(
    config: FrontendConfig,
    clock: Clock,
    engines: EngineParts,
    limits: RequestLimits,
    text_workers: TextWorkers,
    loop_lag: LoopLag,
    draining: Drain,
    metrics: RequestMetrics,
) -> RequestParts:
    directory, failover = engines.directory, engines.failover
    admission = Admission(config.max_queued_requests, config.max_queued_prompt_tokens)
    reader_limit = ReaderLimit(grace_s=config.slow_reader_s)
    open_requests, tenants = OpenRequests(clock), Tenants(clock)
    traces = RequestTraces(slow_ms=config.trace_slow_ms)
    generation = Generation(
        directory,
        failover,
        admission,
        limits,
        reader_limit,
        open_requests,
        draining,
        metrics,
        traces,
        tenants,
    )
    pooling = Pooling(directory, failover, admission, open_requests, draining, traces, tenants)
    stream_of = functools.partial(stream_generate, generation)
    rest_of = functools.partial(stream_rest, generation, Adoption(directory, clock))
    resumable = ResumableStreams(stream_of, rest_of, reader_limit, draining)
    return RequestParts(
        text_workers,
        loop_lag,
        draining,
        admission,
        open_requests,
        metrics,
        traces,
        tenants,
        generation,
        pooling,
        resumable,
        Counts({("generate",): 0, ("realtime",): 0}),
    )


def _answers(
    config: FrontendConfig, clock: Clock, engines: EngineParts, requests: RequestParts, limits: RequestLimits
) -> Answers:
    directory, takes_templates = engines.directory, config.request_templates
    return Answers(
        GenerateAnswers(requests.generation, requests.resumable),
        SessionAnswers(requests.generation, requests.sessions, max_sessions=config.max_sessions),
        ChatAnswers(requests.generation, takes_templates=takes_templates),
        PoolingAnswers(requests.pooling),
        TokenizerAnswers(directory, takes_templates=takes_templates),
        ModelAnswers(
            directory, limits, engines.identity, clock, max_queued_requests=config.max_queued_requests
        ),
        AdapterAnswers(directory),
    )


def _public_api(answers: Answers, requests: RequestParts) -> PublicAPI:
    return PublicAPI(
        InferenceServicer(answers.generate, answers.session),
        ChatServicer(answers.chat),
        EmbeddingServicer(answers.pooling),
        TokenizerServicer(answers.tokenizer),
        ModelServicer(answers.models),
        RequestServicer(requests.open),
    )


def _public_server(
    config: FrontendConfig,
    api: PublicAPI,
    security: ListenerSecurity,
    text_workers: TextWorkers,
    turns: CallTurns,
) -> Server:
    add = functools.partial
    return Server(
        listen=listen_at(config.uds, config.host, config.port),
        registrations=[
            Registration(
                _INFERENCE, add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, api.inference)
            ),
            Registration(_CHAT, add(chat_pb2_grpc.add_ChatServiceServicer_to_server, api.chat)),
            Registration(
                _EMBEDDING, add(embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server, api.embedding)
            ),
            Registration(
                _TOKENIZER, add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, api.tokenizer)
            ),
            Registration(
                _MODEL, add(model_pb2_grpc.add_ModelServiceServicer_to_server, api.model), is_ready=True
            ),
            Registration(
                _REQUEST,
                add(request_pb2_grpc.add_RequestServiceServicer_to_server, api.request),
                is_ready=True,
            ),
        ],
        profile=dataclasses.replace(
            PUBLIC,
            shares_port=config.share_port,
            max_connection_age_ms=round(config.max_connection_age_s * 1000),
            max_connection_age_grace_ms=round(config.max_connection_age_grace_s * 1000),
        ),
        service="frontend",
        reflection=config.reflection,
        check_large=text_workers.check_message,
        security=security,
        turns=turns,
    )


def _admin_server(
    config: FrontendConfig,
    status: Callable[[], dict[str, str | int | float]],
    poison: PoisonRecord,
    lifecycle: Lifecycle,
    security: ListenerSecurity,
) -> Server:
    name = f"frontend-{config.index}"
    servicer = AdminServicer("frontend", name, status, lifecycle=lifecycle, quarantine=poison)
    return Server(
        listen=listen_at(config.admin_uds, loopback_of(config.host), config.admin_port),
        registrations=[servicer.registration()],
        profile=ADMIN,
        service="frontend",
        reflection=config.reflection,
        security=security,
        # For a supervisor, which may lack what TLS on the public listener needs.
        health_names=[_INFERENCE],
    )


def _admin_http(config: FrontendConfig, pages: AdminPages, security: ListenerSecurity) -> AdminHTTP:
    return AdminHTTP(
        listen_at(config.admin_http_uds, config.admin_http_host, config.admin_http_port),
        {**pages.facts, **pages.ui} if config.serves_ui else pages.facts,
        pages.posts if config.serves_ui else {},
        security=security,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class AdminPages:
    """The pages of a frontend for its operators: facts, the page /ui, and the calls that this makes."""

    facts: dict[str, MakePage]
    ui: dict[str, MakePage]
    posts: dict[str, TakeBody]


def _admin_pages(
    answers: Answers,
    metrics: Metrics,
    state_page: StatePage,
    history: History,
    about: Callable[[], About],
) -> AdminPages:
    return AdminPages(
        {METRICS_PATH: metrics_page(metrics.collect), "/traces/last": traces_page},
        {"/ui/state": state_page.make, "/ui/history": history.make, **ui_pages(about)},
        ui_posts(answers.generate, answers.chat),
    )


def _http_listener(
    config: FrontendConfig,
    answers: Answers,
    requests: RequestParts,
    directory: Directory,
    lifecycle: Lifecycle,
    admin_pages: AdminPages,
    security: ListenerSecurity,
    text_workers: TextWorkers,
    address_of: Callable[[], str],
    calls: HTTPCalls,
    turns: CallTurns,
) -> HTTPListener:
    pages = None
    # Of several workers behind one port, each has metrics of its own: the admin HTTP listener adds them up.
    if is_loopback(config.host) and not config.share_port:
        facts = admin_pages.facts
        if config.metrics_sockets is not None:
            stack = StackMetrics(
                Path(config.metrics_sockets),
                f"frontend-{config.index}",
                facts[METRICS_PATH],
                address=lambda: listener.address,
                has_tls=security.tls is not None,
            )
            facts = {**facts, METRICS_PATH: stack.metrics, TARGETS_PATH: stack.targets}
        pages = Pages(
            {**facts, **admin_pages.ui},
            admin_pages.posts,
            security.authenticator,
            on_loopback=True,
        )
    routes = OpenAIRoutes(
        answers.generate,
        answers.chat,
        answers.models,
        answers.tokenizer,
        answers.pooling,
        requests.open,
        ResponseStore(max_responses=config.max_stored_responses, max_bytes=config.max_stored_response_bytes),
        # Requests are served for the drain lag, in which proxies that ask for it leave this frontend out.
        is_ready=lambda: directory.is_ready and lifecycle.state is not ServiceState.DRAINING,
        heartbeat_s=config.http_heartbeat_s,
        authenticator=security.authenticator,
        turns=turns,
        bodies=BodyReader(text_workers.check_json, takes_unknown=config.http_unknown_fields == "ignore"),
        calls=calls,
        grpc_port=lambda: port_in(address_of()),
        rates_of=requests.tenants.rates,
        adapters=answers.adapters if config.allow_runtime_lora else None,
        pages=pages,
        realtime_limits=RealtimeLimits(config.realtime_max_sessions, config.realtime_idle_s),
        sessions=requests.sessions,
        is_draining=lambda: requests.draining.has_begun,
    )
    listener = HTTPListener(
        join_address(config.host, config.http_port or 0),
        CallIds(
            for_browsers(
                routes.app,
                allowed_origins=config.http_allowed_origin,
                checks_hosts=is_loopback(config.host) and not security.authenticator.needs_credentials,
                open_paths=PROBES,
            ),
            dialect_of,
        ),
        shares_port=config.share_port,
        limits=ConnectionLimits(
            max_connections=config.http_max_connections, slow_reader_s=config.slow_reader_s
        ),
        always_served=PROBES,
        forwarded_allow_ips=config.forwarded_allow_ips,
        security=security,
    )
    return listener


def _show_readiness(directory: Directory, servers: Servers) -> None:
    is_ready = directory.is_ready
    servers.admin.set_ready(_INFERENCE, is_ready)
    for name in (_INFERENCE, _CHAT, _TOKENIZER):
        servers.public.set_ready(name, is_ready)
    # SERVING only if a model supports pooling, so that clients can find out from the health service.
    can_pool = any(map(supports_pooling, directory.models().values()))
    servers.public.set_ready(_EMBEDDING, can_pool)


def read_tokenizer_override(path: str | None) -> bytes | None:
    """The bytes of `--tokenizer`: tokenizer.json or tokenizer.model, or a folder with one. Raises OSError."""
    if path is None:
        return None
    file = Path(path)
    if not file.is_dir():
        return file.read_bytes()
    fast, slow = file / "tokenizer.json", file / "tokenizer.model"
    return (slow if slow.is_file() and not fast.is_file() else fast).read_bytes()
