"""A whole engine over the embedded model, whose requests have constraints."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import triptych_cli.tiny_model
from engine_svc.build.engine import build_engine, build_served_engine
from engine_svc.config import EngineConfig
from engine_svc.core.extras import Extra
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.loop.mailbox import Add, Stop
from engine_svc.loop.step_output import FinishedRow
from tests.engine_svc.loop.frontend import Frontend

MODEL = Path(triptych_cli.tiny_model.__file__).parent / "weights"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = 0
LIMIT_S = 60


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode([token for token in token_ids if token != EOS], skip_special_tokens=False)


def spec(kind: ConstraintKind, text: str = "", **fields: Any) -> StructuredOutput:
    choices = fields.pop("choices", ())
    return StructuredOutput(Constraint(kind, text, choices), eos_token_ids=(EOS,), **fields)


def schema_spec(schema: object) -> StructuredOutput:
    return spec(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def regex_spec(pattern: str, **fields: Any) -> StructuredOutput:
    return spec(ConstraintKind.REGEX, pattern, **fields)


@dataclass
class Asked:
    """One request of a test. output: what another engine has answered already."""

    spec: StructuredOutput | None = None
    extras: tuple[Extra, ...] = ()
    prompt: str = "The answer is "
    output: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def request(self, number: int) -> Request:
        sampling = SamplingParams(
            **{"max_tokens": 48, "temperature": 1.0, "seed": number, "eos_token_id": EOS} | self.options
        )
        prompt = ids(self.prompt)
        request = Request(f"r{number}", [*prompt, *self.output], len(prompt), sampling, arrival_at=number)
        for extra in (*self.extras, *([self.spec] if self.spec is not None else [])):
            request.extras[type(extra)] = extra
        return request


@dataclass
class Answered:
    token_ids: list[int]
    end: FinishedRow
    request: Request


class Rig:
    """An engine that answers requests at once, and ends with the test that made it."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "model": str(MODEL), "dtype": "float32", "num_threads": 1, "kv_cache_memory": 2**26,
            "max_model_len": 240, "max_num_seqs": 16,
        }  # fmt: skip
        if "num_kv_blocks" in options:
            del defaults["kv_cache_memory"]
        config = EngineConfig(**defaults | options)
        self.served = build_served_engine(config)
        self.engine, self.core = build_engine(
            config,
            self.served,
            progress=lambda progress: None,
            defer=lambda work: None,
        )
        self._thread = threading.Thread(target=self.engine.run)
        self._thread.start()
        self._frontend = Frontend()
        self._num_handles = 0

    def answer(self, asked: list[Asked]) -> list[Answered]:
        """The answers to requests that come together; the seed of each is its index."""
        handles = range(self._num_handles, self._num_handles + len(asked))
        self._num_handles += len(asked)
        requests = {}
        for index, (handle, one) in enumerate(zip(handles, asked, strict=True)):
            request = replace(one.request(index), request_id=f"r{handle}")
            requests[handle] = request
            assert self.core.refusal(request) is None
            self.core.prepare(request)
            self.served.inbox.put(Add(request, self._frontend.outbox, handle))
        self._frontend.read_until_ended(self._num_handles)
        tokens, ends = self._frontend.tokens, self._frontend.end_of
        return [Answered(tokens.get(handle, []), ends[handle], requests[handle]) for handle in handles]

    def metric(self, name: str, *labels: str) -> float:
        reading: Any = self.served.metrics.families[name].read()
        return float(reading[labels] if isinstance(reading, dict) else reading)

    def num_observed(self, name: str) -> int:
        reading: Any = self.served.metrics.families[name].read()
        return sum(reading[()].counts)

    def close(self) -> None:
        self.served.inbox.put(Stop())
        self._thread.join(LIMIT_S)
