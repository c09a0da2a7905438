"""The options of the frontend service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service_kit.channel import parse_target
from service_kit.config import option
from service_kit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Every option of the frontend, with its default."""

    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(50051, help="port to listen on; 0 lets the kernel choose")
    admin_port: int = option(0, help="port of the admin listener, on loopback; 0 lets the kernel choose")
    engine: tuple[str, ...] = option((), help="engine to use, host:port; needs no coordinator")
    coordinator: str | None = option(None, help="coordinator that tells which engines there are, host:port")
    tokenizer: str | None = option(
        None, help="tokenizer.json, or a folder with one, instead of the engine's own"
    )
    tokenizer_threads: int = option(0, help="threads that tokenize; 0 is one a core")
    max_queued_requests: int = option(1024, help="requests without a first token, before more are refused")
    max_queued_prompt_tokens: int = option(
        2_000_000, help="prompt tokens of such requests, before more are refused"
    )
    slow_reader_s: float = option(30.0, help="seconds a client may leave more than its buffer unread")
    drain_deadline_s: float = option(20.0, help="seconds running requests get to finish after SIGTERM")
    reflection: bool = option(True, help="serve gRPC reflection")
    announce_fd: int | None = option(None, help="inherited pipe to write the bound addresses to")
    index: int = option(0, help="number of this instance, for logs")
    log_format: Literal["text", "json"] = option("text", help="how log lines look")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", help="least severe level logged")

    def __post_init__(self) -> None:
        if not self.engine and self.coordinator is None:
            raise ValueError("neither --engine nor --coordinator is given: there would be no engine to use")
        for address in (*self.engine, *([self.coordinator] if self.coordinator else [])):
            try:
                parse_target(address)
            except InvalidArgument as error:
                raise ValueError(f"engine or coordinator: {error}") from error
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} {getattr(self, name)} is not in 0..65535")
        for name in ("max_queued_requests", "max_queued_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        for name in ("tokenizer_threads", "drain_deadline_s", "slow_reader_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")
