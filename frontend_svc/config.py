"""The options of the frontend service."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from frontend_svc.engines.routing.policies import DEFAULT_POLICY, find_policy
from frontend_svc.parsers.registry import ParserNames
from triptych.common.v1 import sampling_pb2
from triptych_kit.addresses import is_loopback
from triptych_kit.channel import parse_target
from triptych_kit.config import option
from triptych_kit.errors import InvalidArgument
from triptych_kit.listeners import check_service_ports
from triptych_kit.process.setup import api_key_in_environment
from triptych_kit.rules import rules_of
from triptych_kit.security.credentials import Entry, digest_of
from triptych_kit.security.identity import Identity, Role
from triptych_kit.security.options import SecurityOptions

_MAX_WORKERS = 64
_SAMPLING = sampling_pb2.SamplingParams
_MAX_TEXT_WORKERS = 1024
_MAX_TEXT_TIME_S = 600
# gRPC counts milliseconds in 31 bits.
_MAX_AGE_S = 2_000_000


@dataclass(frozen=True, slots=True)
class FrontendConfig(SecurityOptions):
    """Every option of the frontend, with its default."""

    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(50051, help="port to listen on; 0 lets the kernel choose")
    http_port: int | None = option(
        None, help="port of OpenAI's HTTP API, on --host; 0 lets the kernel choose; unset: it is not served"
    )
    http_max_connections: int = option(
        1024,
        help="limit of open HTTP connections; beyond it the one that waits longest for a request is closed",
    )
    http_allowed_origin: tuple[str, ...] = option(
        (), help="scheme://host[:port] of a site whose pages may use the HTTP API (CORS); *: every site"
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (), help="address or network of a proxy whose X-Forwarded-For and -Proto count; *: every client"
    )
    http_heartbeat_s: float = option(
        15.0,
        help="seconds of silence after which a stream of HTTP gets a comment, a WebSocket a ping; 0 is never",
    )
    http_unknown_fields: Literal["refuse", "ignore"] = option(
        "refuse", help="unknown fields of HTTP bodies: ignore takes them and names them in a header"
    )
    realtime_max_sessions: int = option(
        64, help="limit of open sessions of /v1/realtime of a tenant, or of an address without keys; 0: none"
    )
    realtime_idle_s: float = option(
        600.0, help="seconds after which a session of /v1/realtime without an event or a response is closed"
    )
    admin_port: int = option(0, help="port of the admin listener, on loopback; 0 lets the kernel choose")
    admin_http_host: str = option("127.0.0.1", help="address of the admin HTTP listener, with /metrics")
    admin_http_port: int = option(0, help="port of the admin HTTP listener; 0 lets the kernel choose")
    metrics_sockets: str | None = option(
        None, help="folder with the admin HTTP sockets of the stack, for /metrics; set by `triptych serve`"
    )
    ui: bool = option(False, help="serve the page /ui at an admin HTTP listener that is not on loopback, too")
    engine: tuple[str, ...] = option((), help="engine to use, host:port; needs no coordinator")
    coordinator: str | None = option(None, help="coordinator that lists the engines, host:port")
    routing_policy: str = option(
        DEFAULT_POLICY,
        help="which engine gets a request: kv-aware, prefix-affinity, load, p2c, round-robin or a plugin's",
    )
    engine_label: tuple[str, ...] = option(
        (),
        help="key=value that a coordinator's engine needs to be used: a label, or host, dp_rank, dp_group",
    )
    tokenizer: str | None = option(
        None, help="tokenizer.json or tokenizer.model, or a folder with one, instead of the engine's own"
    )
    text_workers: int = option(0, help="processes that tokenize and render chats; 0 is one per core")
    text_time_limit_s: float = option(5.0, help="time limit for tokenizing one text or chat, in seconds")
    max_queued_requests: int = option(1024, help="limit of requests without a first token; more are refused")
    max_queued_prompt_tokens: int = option(
        2_000_000, help="limit of prompt tokens of requests without a first token; more are refused"
    )
    max_sessions: int = option(1024, help="limit of open calls of GenerateSession; more are refused")
    max_stored_responses: int = option(
        10_000, help="limit of responses of OpenAI's API that are kept to be continued; 0: none is kept"
    )
    max_stored_response_bytes: int = option(
        256 * 1024 * 1024, help="limit of the memory of stored responses, in bytes"
    )
    tool_parser: str = option("auto", help="how tool calls are read: auto, none or the name of a format")
    reasoning_parser: str = option("auto", help="how reasoning is read: auto, none or the name of a format")
    chat_template: str | None = option(
        None, help="file of a Jinja chat template, instead of the model's own; of all models that are served"
    )
    model_alias: tuple[str, ...] = option(
        (), help="another name of the only model, or ALIAS=MODEL; answers have the model's own name"
    )
    allow_runtime_lora: bool = option(
        False, help="let admins load and unload LoRA by HTTP, at engines that allow it"
    )
    request_templates: bool = option(False, help="accept chat templates in requests")
    max_n: int = option(int(rules_of(_SAMPLING, "n").maximum), help="most outputs a request may ask for")
    max_logprobs: int = option(
        int(rules_of(_SAMPLING, "logprobs").maximum),
        help="most log probabilities a token a request may ask for; -1 is the vocabulary",
    )
    stream_interval: int = option(1, help="fewest tokens in a delta but the first and the last")
    slow_reader_s: float = option(
        30.0, help="seconds that a slow client may exceed its buffer before it is aborted"
    )
    reconnect_window_s: float = option(
        10.0, help="seconds that requests wait for an engine after the last one of their model was lost"
    )
    drain_deadline_s: float = option(20.0, help="drain timeout: seconds for running requests after SIGTERM")
    drain_lag_s: float = option(
        1.0, help="seconds after SIGTERM in which new requests are still served, for slow load balancers"
    )
    plugins: tuple[str, ...] = option(
        ("all",), help="names of the installed plugins to load; all: every one, empty: none"
    )
    reflection: bool = option(True, help="serve gRPC reflection")
    workers: int = option(1, help="processes that share the port, each a frontend with its own limits")
    share_port: bool = option(False, help="let other processes listen on the port too; set by --workers")
    max_connection_age_s: float = option(
        0.0, help="seconds after which a connection gets GOAWAY, to rebalance clients; 0 is never"
    )
    max_connection_age_grace_s: float = option(
        600.0, help="seconds for calls to finish on a connection after GOAWAY"
    )
    announce_fd: int | None = option(None, help="inherited pipe to write the bound addresses to")
    index: int = option(0, help="number of this instance, for logs")
    trace_slow_ms: int = option(
        60_000, help="a request that takes so long is exported as a trace even if unsampled; 0 is never"
    )
    log_format: Literal["auto", "text", "json"] = option(
        "auto", help="format of log lines; auto: text on a terminal, JSON elsewhere"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", help="least severe level logged")

    @property
    def serves_ui(self) -> bool:
        return self.ui or is_loopback(self.admin_http_host)

    @property
    def model_aliases(self) -> dict[str, str]:
        """The names of models by alias; empty: of the only one."""
        return {alias: name for alias, _, name in (one.partition("=") for one in self.model_alias)}

    @property
    def client_keys(self) -> tuple[Entry, ...]:
        """The key in TRIPTYCH_API_KEY, for all clients. It is no option: options are logged."""
        key = api_key_in_environment()
        if key is None:
            return ()
        identity = Identity("TRIPTYCH_API_KEY", frozenset((Role.CLIENT,)), is_shared=True)
        return (Entry(identity, digest=digest_of(key, "TRIPTYCH_API_KEY")),)

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key, or a certificate with an entry."""
        return self.api_keys is not None or bool(self.client_keys)

    def __post_init__(self) -> None:
        self.check_security(self.host, self.admin_http_host, has_key=bool(self.client_keys))
        check_service_ports(self)
        if not self.engine and self.coordinator is None:
            raise ValueError("neither --engine nor --coordinator is given: no engine could be used")
        for address in (*self.engine, *([self.coordinator] if self.coordinator else [])):
            try:
                parse_target(address)
            except InvalidArgument as error:
                raise ValueError(f"engine or coordinator: {error}") from error
        find_policy(self.routing_policy)
        for label in self.engine_label:
            if not label.partition("=")[0] or "=" not in label:
                raise ValueError(f"engine_label {label!r} is not key=value")
        if self.engine_label and self.coordinator is None:
            raise ValueError(
                "engine_label chooses among a coordinator's engines, and there is no --coordinator"
            )
        for name in ("port", "http_port", "admin_port", "admin_http_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ValueError(f"{name} {getattr(self, name)} is not in 0..65535")
        for origin in self.http_allowed_origin:
            _check_origin(origin)
        for proxy in self.forwarded_allow_ips:
            _check_proxy(proxy)
        for name in (
            "http_max_connections",
            "max_queued_requests",
            "max_queued_prompt_tokens",
            "max_sessions",
            "max_n",
            "stream_interval",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        if not all(self.model_aliases):
            raise ValueError("model_alias has an alias without characters")
        ParserNames(self.tool_parser, self.reasoning_parser)
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            raise ValueError(f"tokenizer {self.tokenizer} does not exist")
        if self.chat_template is not None:
            _check_chat_template(self.chat_template)
        if not 0 < self.realtime_idle_s <= _MAX_AGE_S:
            raise ValueError(f"realtime_idle_s {self.realtime_idle_s} is not in 0..{_MAX_AGE_S}, without 0")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs {self.max_logprobs} is below -1")
        for name in (
            "drain_deadline_s",
            "drain_lag_s",
            "http_heartbeat_s",
            "slow_reader_s",
            "reconnect_window_s",
            "trace_slow_ms",
            "max_stored_responses",
            "max_stored_response_bytes",
            "realtime_max_sessions",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")
        if not 0 <= self.text_workers <= _MAX_TEXT_WORKERS:
            raise ValueError(f"text_workers {self.text_workers} is not in 0..{_MAX_TEXT_WORKERS}")
        if not 0 < self.text_time_limit_s <= _MAX_TEXT_TIME_S:
            raise ValueError(f"text_time_limit_s {self.text_time_limit_s} is not in 0..{_MAX_TEXT_TIME_S}")
        for name in ("max_connection_age_s", "max_connection_age_grace_s"):
            if not 0 <= getattr(self, name) <= _MAX_AGE_S:
                raise ValueError(f"{name} {getattr(self, name)} is not in 0..{_MAX_AGE_S}")
        if not 1 <= self.workers <= _MAX_WORKERS:
            raise ValueError(f"workers {self.workers} is not in 1..{_MAX_WORKERS}")
        if self.workers > 1 and self.admin_port + self.workers - 1 > 65535:
            raise ValueError(
                f"admin_port {self.admin_port} leaves no port for each of {self.workers} workers after it"
            )
        if self.workers > 1 and self.uds is not None:
            raise ValueError(f"workers is {self.workers}: they cannot share the socket of uds")
        if self.share_port and not self.port:
            raise ValueError("share_port needs a port: with port 0 each process would get another one")


def _check_origin(origin: str) -> None:
    if origin in ("*", "null"):
        return
    parts = urlsplit(origin)
    if not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
        raise ValueError(f"http_allowed_origin {origin!r} is not scheme://host[:port], null or *")


def _check_proxy(proxy: str) -> None:
    if proxy == "*":
        return
    try:
        ipaddress.ip_network(proxy)
    except ValueError as error:
        raise ValueError(f"forwarded_allow_ips {proxy!r} is no address or network: {error}") from error


def _check_chat_template(path: str) -> None:
    # Imported here: it takes long, and few use it.
    from frontend_svc.text.chat.template import check_template

    try:
        check_template(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"chat_template {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"chat_template {path}: {error}") from error
