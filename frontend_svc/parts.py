"""The parts of a frontend, which `build.py` makes: engines, requests, the public API and servers."""

from __future__ import annotations

from dataclasses import dataclass

from frontend_svc.api.chat import ChatServicer
from frontend_svc.api.embedding import EmbeddingServicer
from frontend_svc.api.inference import InferenceServicer
from frontend_svc.api.model import ModelServicer
from frontend_svc.api.request import RequestServicer
from frontend_svc.api.tokenizer import TokenizerServicer
from frontend_svc.engines.connection.connection import FrontendIdentity
from frontend_svc.engines.coordinator import CoordinatorSession
from frontend_svc.engines.directory import Directory
from frontend_svc.generation.admission import Admission
from frontend_svc.generation.answers.adapters import AdapterAnswers
from frontend_svc.generation.answers.chat import ChatAnswers
from frontend_svc.generation.answers.generate import GenerateAnswers
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
from frontend_svc.generation.poison import ProbationLocks
from frontend_svc.generation.pooling import Pooling
from frontend_svc.generation.tenants import Tenants
from frontend_svc.generation.tracing import RequestTraces
from frontend_svc.protocols.openai.listener import HTTPListener
from frontend_svc.text.workers.workers import TextWorkers
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.server import Lifecycle, Listener, Server
from triptych_kit.telemetry.loop_lag import LoopLag
from triptych_kit.telemetry.metrics import Counts


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The connections to engines, the moves of requests between them, and the session with a coordinator."""

    identity: FrontendIdentity
    directory: Directory
    locks: ProbationLocks
    failover: Failover
    coordinator: CoordinatorSession | None

    @property
    def has_coordinator(self) -> bool:
        """Whether there is a session with a coordinator."""
        return self.coordinator is not None and self.coordinator.is_connected

    def wave_of(self, engine_id: str) -> int | None:
        """The wave of the engine's group, as the coordinator announced it; None: there is none."""
        return None if self.coordinator is None else self.coordinator.wave_of(engine_id)


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The open requests, what limits, counts and traces them, and the processes that handle their texts."""

    text_workers: TextWorkers
    loop_lag: LoopLag
    draining: Drain
    admission: Admission
    open: OpenRequests
    metrics: RequestMetrics
    traces: RequestTraces
    tenants: Tenants
    generation: Generation
    pooling: Pooling
    resumable: ResumableStreams
    sessions: Counts  # that are open, by API


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to public requests, of which every protocol is a translation."""

    generate: GenerateAnswers
    session: SessionAnswers
    chat: ChatAnswers
    pooling: PoolingAnswers
    tokenizer: TokenizerAnswers
    models: ModelAnswers
    adapters: AdapterAnswers


@dataclass(frozen=True, slots=True)
class PublicAPI:
    """The servicers of the public API. A caller in this process may call their methods directly."""

    inference: InferenceServicer
    chat: ChatServicer
    embedding: EmbeddingServicer
    tokenizer: TokenizerServicer
    model: ModelServicer
    request: RequestServicer


@dataclass(frozen=True, slots=True)
class Servers:
    """The listeners of a frontend, and the lifecycle that they report. http: OpenAI's API."""

    lifecycle: Lifecycle
    public: Server
    admin: Server
    admin_http: AdminHTTP
    http: HTTPListener | None

    def listeners(self) -> list[Listener]:
        """All, in the order in which they are announced."""
        return [self.public, self.admin, self.admin_http, *([self.http] if self.http else [])]
