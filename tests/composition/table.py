"""What is combined: each option, condition and fault is one line here, and each refusal of a combination.

A new feature adds its line to OPTIONS, and to REFUSALS what it cannot be combined with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.composition import draws
from tests.composition.draws import among, between, request_field, sampling_field, sampling_list
from tests.composition.faults import Scene, cancel_stream, kill_engine

# The models, by what makes them.
EMBEDDED, MIXTURE = "embedded", "mixture"


@dataclass(frozen=True, slots=True)
class Option:
    """Of one request. At most one of a kind is drawn, if the kind is not empty."""

    name: str
    share: float  # of the requests that draw it
    change: draws.Change
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """Of the engines: flags, and on what answers depend, so that the request alone has it too."""

    name: str
    flags: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    model: str = EMBEDDED


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes while the requests of a seed are answered."""

    name: str
    share: float  # of the seeds that draw it
    strike: Callable[[Scene], Awaitable[None]]
    ends_engine: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """What cannot be asked for together, and the answer to it."""

    names: frozenset[str]
    status: str
    field: str
    reason: str


OPTIONS = (
    Option("shared prefix", 0.4, draws.shared_prefix),
    Option("thinking_token_budget", 0.2, draws.thinking),
    Option("prompt", 0.2, draws.text_prompt, "input"),
    Option("embeds", 0.2, draws.embeds_prompt, "input"),
    Option("truncate_prompt_tokens", 0.15, request_field("truncate_prompt_tokens", between(1, 40))),
    Option("add_special_tokens false", 0.2, request_field("add_special_tokens", among(False))),
    Option("return_prompt_token_ids", 0.2, request_field("return_prompt_token_ids", among(True))),
    Option("cache_salt", 0.2, request_field("cache_salt", among("pepper", "salt"))),
    Option("priority", 0.3, request_field("priority", between(-9, 9))),
    Option("session_id", 0.15, request_field("session_id", among("one", "two"))),
    Option("temperature 0", 0.35, sampling_field("temperature", among(0.0)), "temperature"),
    Option("temperature", 0.5, sampling_field("temperature", between(0.3, 1.6)), "temperature"),
    Option("top_k", 0.2, sampling_field("top_k", among(1, 5, 50))),
    Option("top_p", 0.2, sampling_field("top_p", between(0.3, 0.98))),
    Option("min_p", 0.2, sampling_field("min_p", between(0.01, 0.3))),
    Option("n", 0.15, sampling_field("n", between(2, 3))),
    Option("min_tokens", 0.25, sampling_field("min_tokens", draws.min_tokens)),
    Option("ignore_eos", 0.3, sampling_field("ignore_eos", among(True))),
    Option("stop", 0.2, sampling_list("stop", draws.some((" t", "he", "and", "o", ". ", "zq"), 2))),
    Option("include_stop_in_output", 0.2, sampling_field("include_stop_in_output", among(True))),
    Option("stop_token_ids", 0.2, sampling_list("stop_token_ids", draws.token_ids(20))),
    Option("presence_penalty", 0.2, sampling_field("presence_penalty", between(-1.5, 1.5))),
    Option("frequency_penalty", 0.2, sampling_field("frequency_penalty", between(-1.5, 1.5))),
    Option("repetition_penalty", 0.2, sampling_field("repetition_penalty", between(0.7, 1.5))),
    Option("logit_bias", 0.2, sampling_list("logit_bias", draws.biases)),
    Option("allowed_token_ids", 0.15, sampling_list("allowed_token_ids", draws.token_ids(100))),
    Option("bad_words", 0.2, sampling_list("bad_words", draws.words(60))),
    Option("repetition_detection", 0.2, draws.repetition),
    Option("logprobs", 0.3, sampling_field("logprobs", between(0, 4))),
    Option("logprob_token_ids", 0.2, sampling_list("logprob_token_ids", draws.token_ids(3))),
    Option("prompt_logprobs", 0.2, sampling_field("prompt_logprobs", between(0, 3))),
    Option(
        "skip_reading_prefix_cache", 0.15, sampling_field("skip_reading_prefix_cache", among(True, False))
    ),
    Option("detokenize false", 0.15, sampling_field("detokenize", among(False))),
    Option("skip_special_tokens false", 0.15, sampling_field("skip_special_tokens", among(False))),
    Option("stream_interval", 0.2, sampling_field("stream_interval", between(2, 8))),
    Option("output_kind CUMULATIVE", 0.15, sampling_field("output_kind", among(2)), "output_kind"),
    Option("output_kind FINAL_ONLY", 0.15, sampling_field("output_kind", among(3)), "output_kind"),
    Option("orphan_grace_ms", 0.2, request_field("orphan_grace_ms", among(5000))),
    Option("structured_output", 0.01, draws.structured_output),
    Option("adapter", 0.01, request_field("adapter", among("none"))),
    Option("media", 0.01, draws.media),
)

CONDITIONS = (
    Condition("chunked prefill", ("--max-num-batched-tokens=24",)),
    Condition("preemption", ("--block-size=4", "--num-kv-blocks=29")),
    Condition("tensor parallelism 2", tensor_parallel_size=2),
    Condition("two steps in flight", ("--steps-in-flight=2",)),
    Condition("policy priority", ("--scheduling-policy=priority",)),
    Condition("few rows", ("--max-num-seqs=3",)),
    Condition("windows and experts", model=MIXTURE),
)

FAULTS = (
    Fault("kill -9 of an engine", 0.05, kill_engine, ends_engine=True),
    Fault("a client that goes away", 0.3, cancel_stream),
)


ENTRIES: tuple[Option | Condition | Fault, ...] = (*OPTIONS, *CONDITIONS, *FAULTS)


def _refused(*names: str, status: str = "INVALID_ARGUMENT", field: str, reason: str) -> Refusal:
    return Refusal(frozenset(names), status, field, reason)


_SERVED_LATER = {"status": "UNIMPLEMENTED", "reason": "is not served yet"}
_NEEDS_TOKENS = "needs a token at every position of the prompt"

REFUSALS = (
    _refused("temperature 0", "n", field="sampling.n", reason="greedy outputs are all the same"),
    _refused("stop", "detokenize false", field="sampling.detokenize", reason="stop strings are text"),
    _refused("embeds", "prompt_logprobs", field="sampling.prompt_logprobs", reason=_NEEDS_TOKENS),
    _refused("embeds", "return_prompt_token_ids", field="return_prompt_token_ids", reason=_NEEDS_TOKENS),
    _refused("embeds", "truncate_prompt_tokens", field="truncate_prompt_tokens", reason=_NEEDS_TOKENS),
    _refused(
        "embeds", "tensor parallelism 2",
        status="UNIMPLEMENTED", field="embeds", reason="only a model in one process takes embeddings",
    ),
    _refused("structured_output", field="sampling.structured_output", **_SERVED_LATER),
    _refused("adapter", field="adapter", **_SERVED_LATER),
    _refused("media", field="media", **_SERVED_LATER),
)  # fmt: skip


def refusals_of(names: frozenset[str]) -> list[Refusal]:
    return [refusal for refusal in REFUSALS if refusal.names <= names]


def as_markdown() -> str:
    """The refusals as docs/api.md prints them."""
    rows = [
        f"| {' with '.join(sorted(each.names))} | {each.status} | `{each.field}` | {each.reason} |"
        for each in REFUSALS
    ]
    return "\n".join(["| asked for | status | field | reason |", "|---|---|---|---|", *rows]) + "\n"
