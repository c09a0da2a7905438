"""Options of `triptych bench serve`, with checks that do not depend on the model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal
from urllib.parse import urlsplit

from triptych_cli.bench.metrics import ServiceLevel
from triptych_kit.config import option

_POSITIVE = (
    "num_requests",
    "connections",
    "input_len",
    "output_len",
    "num_prefixes",
    "prefix_len",
    "suffix_len",
    "turns",
    "turn_len",
)
# Options of one backend alone.
_OF_TRIPTYCH = ("url", "connections", "detokenize", "stream_interval")
_OF_OPENAI = ("base_url", "vocab_size")


@dataclass(frozen=True, slots=True)
class BenchServeConfig:
    """A load on a running server, and where the results are written."""

    backend: Literal["triptych", "openai"] = option(
        "triptych",
        help="the API of the server: gRPC of triptych, or OpenAI's completions of any server",
        hint="any server of OpenAI's API, vLLM's too, is measured by its completions: --backend openai with "
        "--base-url http://HOST:PORT",
    )
    base_url: str = option("http://127.0.0.1:8000", help="openai: the server, http://host:port[/v1]")
    vocab_size: int = option(1000, help="openai: random ids of prompts are below it")
    cacert: str | None = option(None, help="file of the CA of the server's certificate")
    url: str = option(
        "grpc://127.0.0.1:50051", alias="address", help="triptych: the frontend, grpc://host:port"
    )
    model: str | None = option(None, help="served name of the model; needed if there are several")
    connections: int = option(1, help="triptych: connections to spread the requests over")
    num_requests: int = option(100, help="requests to send; a turn of a conversation is one")
    rate: float = option(math.inf, help="requests (multi-turn: conversations) begun a second; inf is at once")
    burstiness: float = option(1.0, help="shape of the gamma distribution of gaps; 1 is Poisson, less bursts")
    concurrency: int = option(0, help="most requests in flight; 0 is no limit")
    seed: int = option(0, help="of lengths, ids, arrivals and sampling")
    dataset: Literal["random", "shared-prefix", "multi-turn"] = option("random", help="kind of prompts")
    input_len: int = option(256, help="prompt tokens of random, on average")
    output_len: int = option(128, help="tokens to generate, on average")
    range_ratio: float = option(0.0, help="lengths vary by up to this share in both directions, 0 to below 1")
    num_prefixes: int = option(8, help="shared-prefix: different prefixes, taken in turns")
    prefix_len: int = option(256, help="shared-prefix: tokens of a prefix")
    suffix_len: int = option(64, help="shared-prefix: tokens of a request's own, on average")
    turns: int = option(4, help="multi-turn: turns of a conversation")
    turn_len: int = option(64, help="multi-turn: tokens that a turn adds to the prompt, on average")
    ignore_eos: bool = option(True, help="generate all requested tokens, past the end of sequence")
    temperature: float | None = option(None, help="0 is greedy; unset is the model's own")
    top_p: float | None = option(None, help="smallest set of tokens that reaches this share")
    top_k: int | None = option(None, help="the k most likely tokens")
    min_p: float | None = option(None, help="least share of the most likely token")
    logprobs: int | None = option(None, help="likeliest tokens to return per position")
    detokenize: bool = option(True, help="triptych: ask for text, not ids alone")
    stream_interval: int | None = option(None, help="triptych: tokens to gather for a message")
    warmup: int = option(1, help="requests sent before, one after another, and not counted")
    timeout_s: float = option(600.0, help="deadline of a request, in s")
    slo: tuple[str, ...] = option((), help="bound of a good request: ttft_ms=200, tpot_ms=50 or e2e_ms=5000")
    json: str | None = option(None, help="file for all results and every request as JSON")
    plot: str | None = option(None, help="file for the picture, .png; needs the extra triptych[bench]")
    allow_failures: bool = option(False, help="exit 0 even if requests failed")

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in _POSITIVE:
            if values[name] < 1:
                raise ValueError(f"{name} is {values[name]}, the least is 1")
        if not self.rate > 0:
            raise ValueError(f"rate is {self.rate}, it must be above 0")
        if not (0 < self.burstiness < math.inf):
            raise ValueError(f"burstiness is {self.burstiness}, it must be above 0 and finite")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio is {self.range_ratio}, the range is 0 to below 1")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is {self.timeout_s}, it must be above 0 and finite")
        for name in ("seed", "concurrency", "warmup"):
            if values[name] < 0:
                raise ValueError(f"{name} is {values[name]}, the least is 0")
        if self.plot is not None and not self.plot.endswith(".png"):
            raise ValueError(f"plot is {self.plot}, the only format is .png")
        if self.vocab_size < 16:
            raise ValueError(f"vocab_size is {self.vocab_size}, the least is 16")
        if not _is_base(self.base_url):
            raise ValueError(f"base_url is {self.base_url}, not a URL such as http://127.0.0.1:8000")
        self._check_backend()
        self.service_level()

    def _check_backend(self) -> None:
        """Raise ValueError for options of the other backend."""
        of_backend = _OF_TRIPTYCH if self.backend == "openai" else _OF_OPENAI
        for name in of_backend:
            if getattr(self, name) != BenchServeConfig.__dataclass_fields__[name].default:
                other = "triptych" if self.backend == "openai" else "openai"
                raise ValueError(f"{name} is {getattr(self, name)}, which is of --backend {other}")

    def service_level(self) -> ServiceLevel | None:
        """The bounds of `slo`, or None without any."""
        return ServiceLevel.parse(self.slo) if self.slo else None


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
