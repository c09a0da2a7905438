"""Builds the objects of a frontend from its configuration. The only module that knows all others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from frontend_svc.api.chat import ChatServicer
from frontend_svc.api.embedding import EmbeddingServicer
from frontend_svc.api.generate_stream import stream_generate, stream_rest
from frontend_svc.api.inference import InferenceServicer
from frontend_svc.api.model import ModelServicer
from frontend_svc.api.request import RequestServicer
from frontend_svc.api.resumable import ResumableStreams
from frontend_svc.api.tokenizer import TokenizerServicer
from frontend_svc.config import FrontendConfig
from frontend_svc.engines.adoption.takeover import Adoption
from frontend_svc.engines.artifacts import ArtifactStore
from frontend_svc.engines.connection.client import EngineClient, FrontendIdentity
from frontend_svc.engines.connection.health import EngineState
from frontend_svc.engines.connection.stream import HEARTBEAT_S
from frontend_svc.engines.connection.transport import EngineTransport, open_transport
from frontend_svc.engines.coordinator import CoordinatorSession
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.routing.policies import find_policy, first_turn
from frontend_svc.generation.admission import Admission
from frontend_svc.generation.drain import Drain, shutting_down
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
from frontend_svc.parsers.registry import ParserNames
from frontend_svc.protocols.openai.body_reader import BodyReader
from frontend_svc.protocols.openai.browsers import for_browsers
from frontend_svc.protocols.openai.call import PROBES
from frontend_svc.protocols.openai.connection import ConnectionLimits
from frontend_svc.protocols.openai.listener import HTTPListener
from frontend_svc.protocols.openai.response_store import ResponseStore
from frontend_svc.protocols.openai.routes import OpenAIRoutes
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.pooling import supports_pooling
from frontend_svc.text.workers.workers import TextWorkers
from frontend_svc.ui.page import ui_pages, ui_posts
from frontend_svc.ui.state import StatePage
from triptych.api.v1 import (
    chat_pb2_grpc,
    embedding_pb2_grpc,
    inference_pb2_grpc,
    model_pb2_grpc,
    request_pb2_grpc,
    tokenizer_pb2_grpc,
)
from triptych_kit import shared_memory
from triptych_kit.addresses import listen_at
from triptych_kit.admin import AdminServicer
from triptych_kit.clock import MonotonicClock
from triptych_kit.http.admin_http import AdminHTTP, MakePage, TakeBody, metrics_page
from triptych_kit.http.trace_page import traces_page
from triptych_kit.process.setup import runtime_folder
from triptych_kit.security.setup import listener_security, peer_credentials
from triptych_kit.server import ADMIN, PUBLIC, Lifecycle, LimitProfile, Registration, Server, ServiceState
from triptych_kit.telemetry.loop_lag import LoopLag
from triptych_kit.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# For so long `cut` waits for calls to end, so that a client that does not read does not delay the others.
_CALLS_END_S = 0.1
# Time to end for calls that the drain does not wait for.
_CALLS_GRACE_S = 0.5
_INFERENCE = "triptych.api.v1.InferenceService"
_CHAT = "triptych.api.v1.ChatService"
_EMBEDDING = "triptych.api.v1.EmbeddingService"
_TOKENIZER = "triptych.api.v1.TokenizerService"
_MODEL = "triptych.api.v1.ModelService"
_REQUEST = "triptych.api.v1.RequestService"


@dataclass(frozen=True, slots=True)
class PublicAPI:
    """The servicers of the public API. A caller in this process may call their methods directly."""

    inference: InferenceServicer
    chat: ChatServicer
    embedding: EmbeddingServicer
    tokenizer: TokenizerServicer
    model: ModelServicer
    request: RequestServicer


class Frontend:
    """The objects of one frontend process: a public and an admin server, and all they use."""

    def __init__(
        self,
        config: FrontendConfig,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        connect: Callable[[str], EngineTransport] | None = None,
    ) -> None:
        clock = MonotonicClock()
        self._security = listener_security(config, config.client_keys)
        self._peer_credentials = peer_credentials(config)
        self.loop_lag = LoopLag(clock)
        self.identity = FrontendIdentity(
            f"frontend-{config.index}-{secrets.token_hex(4)}", secrets.randbits(63) + 1
        )
        self._config = config
        self.address = ""
        self.text_workers = TextWorkers(config.text_workers, time_limit_s=config.text_time_limit_s)
        artifacts = ArtifactStore(
            self.text_workers,
            read_tokenizer_override(config.tokenizer),
            ParserNames(config.tool_parser, config.reasoning_parser),
            chat_template=None if config.chat_template is None else Path(config.chat_template).read_bytes(),
        )
        make_client = functools.partial(
            EngineClient,
            identity=self.identity,
            artifacts=artifacts,
            clock=clock,
            heartbeat_s=heartbeat_s,
            connect=connect or functools.partial(open_transport, credentials=self._peer_credentials),
            on_add=self._note_request,
        )
        self.directory = Directory(
            make_client,
            on_change=self._engines_changed,
            clock=clock,
            reconnect_window_s=config.reconnect_window_s,
            policy=find_policy(config.routing_policy),
            first_turn=first_turn(config.index, self.identity.epoch),
        )
        folder = runtime_folder()
        self._locks = ProbationLocks(folder)
        self.failover = Failover(
            self.directory,
            clock,
            random.Random(self.identity.epoch),
            poison=PoisonRecord(folder),
            locks=self._locks,
        )
        limits = RequestLimits(
            max_n=config.max_n, max_logprobs=config.max_logprobs, stream_interval=config.stream_interval
        )
        self.admission = Admission(config.max_queued_requests, config.max_queued_prompt_tokens)
        reader_limit = ReaderLimit(grace_s=config.slow_reader_s)
        self.requests = OpenRequests(clock)
        self._tenants = Tenants(clock)
        # Sampled only while requests are open: a 10 ms timer would cause most of an idle process's CPU time.
        self.draining = Drain(on_busy=self.loop_lag.start, on_idle=self.loop_lag.stop)
        self.metrics = Metrics("frontend")
        self._request_metrics = RequestMetrics(self.metrics)
        self._traces = RequestTraces(slow_ms=config.trace_slow_ms)
        self.generation = Generation(
            self.directory,
            self.failover,
            self.admission,
            limits,
            reader_limit,
            self.requests,
            self.draining,
            self._request_metrics,
            self._traces,
            self._tenants,
        )
        self.resumable = _resumable_streams(
            self.generation, self.directory, clock, reader_limit, self.draining
        )
        self.api = self._public_api(limits, clock)
        self.public = Server(
            listen=listen_at(config.uds, config.host, config.port),
            registrations=_registrations(self.api),
            profile=public_profile(config),
            service="frontend",
            reflection=config.reflection,
            check_large=self.text_workers.check_message,
            security=self._security,
        )
        self.http = None if config.http_port is None else self._http_listener()
        self.lifecycle = Lifecycle(lambda: self.draining.num_open)
        admin = AdminServicer("frontend", f"frontend-{config.index}", self.status, lifecycle=self.lifecycle)
        self.admin = Server(
            listen=listen_at(config.admin_uds, "127.0.0.1", config.admin_port),
            registrations=[admin.registration()],
            profile=ADMIN,
            service="frontend",
            reflection=config.reflection,
            security=self._security,
            # For a supervisor, which may lack what TLS on the public listener needs.
            health_names=[_INFERENCE],
        )
        self._state_page = StatePage(self, clock)
        pages: dict[str, MakePage] = {
            "/metrics": metrics_page(self.metrics.collect),
            "/traces/last": traces_page,
        }
        posts: dict[str, TakeBody] = {}
        if config.serves_ui:
            pages |= {"/ui/state": self._state_page.make, **ui_pages(lambda: self.address)}
            posts = ui_posts(self.api.inference, self.api.chat)
        self.admin_http = AdminHTTP(
            listen_at(config.admin_http_uds, config.admin_http_host, config.admin_http_port),
            pages,
            posts,
            security=self._security,
        )
        register_frontend(self.metrics, self)
        self._coordinator = self._coordinator_session(clock)
        self._closing: asyncio.Task[None] | None = None

    @property
    def has_coordinator(self) -> bool:
        """Whether there is a session with a coordinator."""
        return self._coordinator is not None and self._coordinator.is_connected

    def wave_of(self, engine_id: str) -> int | None:
        """The wave of the engine's group, as the coordinator announced it; None: there is none."""
        return None if self._coordinator is None else self._coordinator.wave_of(engine_id)

    def connect(self, address: str) -> None:
        """Start connecting to engines and coordinator; `address` is where this frontend listens."""
        if shared_memory.is_available():
            # Segments of frontends that were killed and that no engine has removed.
            shared_memory.sweep()
        self.address = self._traces.address = address
        self.directory.set_addresses("configuration", self._config.engine)
        if self._coordinator is not None:
            self._coordinator.start()

    async def drain(self) -> None:
        """Refuse new requests, and wait for the open ones and for calls that read one."""
        await self.draining.run()

    async def end_calls(self) -> None:
        """After a drain: refuse calls, and end open ones with a status that allows a retry elsewhere."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CALLS_GRACE_S + _CALLS_END_S):
                await self.public.end_calls(shutting_down, grace_s=_CALLS_GRACE_S)

    async def cut(self) -> None:
        """End every call with a status that allows a retry elsewhere; leave resumable requests in engines."""
        calls = asyncio.ensure_future(self.public.end_calls(shutting_down))
        await asyncio.wait({calls}, timeout=_CALLS_END_S)
        await asyncio.gather(self.close(), calls)

    async def close(self) -> None:
        """Close all streams. Requests of resumable streams are left in engines for other frontends."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        # A caller that is cancelled does not cancel the closing.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.loop_lag.stop()
        await self._state_page.close()
        self.directory.leave()
        await self.resumable.close()
        self.failover.close()
        self._locks.close()
        if self._coordinator is not None:
            await self._coordinator.close()
        await self.directory.close()
        await self.text_workers.close()

    def status(self) -> dict[str, str | int | float]:
        """Facts and gauges for an operator."""
        clients, lag = self.directory.clients(), self.loop_lag.summary()
        values: dict[str, str | int | float] = {
            "state": "draining" if self.draining.has_begun else "serving",
            "num_open_requests": self.draining.num_open,
            "num_queued_requests": self.admission.num_queued,
            "num_resumable_streams": len(self.resumable),
            "num_engines": len(clients),
            "num_held_requests": self.failover.num_held,
            "num_moved_requests": self.failover.num_moved,
            "num_suspect_requests": self.failover.suspects.num_on_probation,
            "num_quarantined_requests": self.failover.num_quarantined,
            "retry_budget_left": round(self.failover.budget.left, 1),
            "num_text_workers": len(self.text_workers.process_ids),
            "num_queued_texts": self.text_workers.num_queued,
            "event_loop_lag_p50_ms": lag.p50_ms,
            "event_loop_lag_p99_ms": lag.p99_ms,
            "event_loop_lag_max_ms": lag.max_ms,
        }
        for client in clients:
            values[f"engine.{client.address}.state"] = client.state.value
            values[f"engine.{client.address}.num_in_flight"] = client.requests.num_in_flight
            values[f"engine.{client.address}.stale_outputs"] = client.requests.stale_outputs
            if client.down_reason and client.state is not EngineState.READY:
                values[f"engine.{client.address}.down_reason"] = client.down_reason
        return values

    def _http_listener(self) -> HTTPListener:
        config, api = self._config, self.api
        routes = OpenAIRoutes(
            api.inference,
            api.chat,
            api.model,
            api.tokenizer,
            api.embedding,
            api.request,
            ResponseStore(
                max_responses=config.max_stored_responses, max_bytes=config.max_stored_response_bytes
            ),
            # Requests are served for the drain lag, in which proxies that ask for it leave this frontend out.
            is_ready=lambda: self.directory.is_ready and self.lifecycle.state is not ServiceState.DRAINING,
            heartbeat_s=config.http_heartbeat_s,
            authenticator=self._security.authenticator,
            bodies=BodyReader(self.text_workers.check_json),
        )
        return HTTPListener(
            f"{config.host}:{config.http_port}",
            for_browsers(routes.app, allowed_origins=config.http_allowed_origin, host=config.host),
            shares_port=config.share_port,
            limits=ConnectionLimits(
                max_connections=config.http_max_connections, slow_reader_s=config.slow_reader_s
            ),
            always_served=PROBES,
            forwarded_allow_ips=config.forwarded_allow_ips,
            security=self._security,
        )

    def _public_api(self, limits: RequestLimits, clock: MonotonicClock) -> PublicAPI:
        config = self._config
        pooling = Pooling(
            self.directory,
            self.failover,
            self.admission,
            self.requests,
            self.draining,
            self._traces,
            self._tenants,
        )
        return PublicAPI(
            InferenceServicer(self.generation, self.resumable),
            ChatServicer(self.generation, takes_templates=config.request_templates),
            EmbeddingServicer(pooling, limits),
            TokenizerServicer(self.directory, takes_templates=config.request_templates),
            ModelServicer(
                self.directory, limits, self.identity, clock, max_queued_requests=config.max_queued_requests
            ),
            RequestServicer(self.requests),
        )

    def _coordinator_session(self, clock: MonotonicClock) -> CoordinatorSession | None:
        if self._config.coordinator is None:
            return None
        return CoordinatorSession(
            self._config.coordinator,
            self.identity,
            endpoint=lambda: self.address,
            on_engines=functools.partial(self.directory.set_addresses, "coordinator"),
            on_loads=self.directory.take_loads,
            num_in_flight=lambda: self.draining.num_open,
            clock=clock,
            wanted=dict(label.split("=", 1) for label in self._config.engine_label),
            credentials=self._peer_credentials,
        )

    def _note_request(self, engine_id: str) -> None:
        if self._coordinator is not None:
            self._coordinator.note_request(engine_id)

    def _engines_changed(self) -> None:
        for name in self.directory.models():
            self._request_metrics.of(name)
        self._show_readiness()
        self.failover.engines_changed()

    def _show_readiness(self) -> None:
        is_ready = self.directory.is_ready
        self.public.set_ready(_INFERENCE, is_ready)
        self.admin.set_ready(_INFERENCE, is_ready)
        self.public.set_ready(_CHAT, is_ready)
        self.public.set_ready(_TOKENIZER, is_ready)
        # SERVING only if a model supports pooling, so that clients can find out from the health service.
        can_pool = any(map(supports_pooling, self.directory.models().values()))
        self.public.set_ready(_EMBEDDING, can_pool)


def _registrations(api: PublicAPI) -> list[Registration]:
    add = functools.partial
    return [
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
            _REQUEST, add(request_pb2_grpc.add_RequestServiceServicer_to_server, api.request), is_ready=True
        ),
    ]


def _resumable_streams(
    generation: Generation, directory: Directory, clock: MonotonicClock, limit: ReaderLimit, drain: Drain
) -> ResumableStreams:
    stream_of = functools.partial(stream_generate, generation)
    rest_of = functools.partial(stream_rest, generation, Adoption(directory, clock))
    return ResumableStreams(stream_of, rest_of, limit, drain)


def public_profile(config: FrontendConfig) -> LimitProfile:
    """Limits of the public listener under `config`."""
    return dataclasses.replace(
        PUBLIC,
        shares_port=config.share_port,
        max_connection_age_ms=round(config.max_connection_age_s * 1000),
        max_connection_age_grace_ms=round(config.max_connection_age_grace_s * 1000),
    )


def read_tokenizer_override(path: str | None) -> bytes | None:
    """The bytes of `--tokenizer`: tokenizer.json or tokenizer.model, or a folder with one. Raises OSError."""
    if path is None:
        return None
    file = Path(path)
    if not file.is_dir():
        return file.read_bytes()
    fast, slow = file / "tokenizer.json", file / "tokenizer.model"
    return (slow if slow.is_file() and not fast.is_file() else fast).read_bytes()
