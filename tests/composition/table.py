"""What is combined: each option, condition and fault is one line here, and each refusal of a combination.

A new feature adds its line to OPTIONS, and to REFUSALS what it cannot be combined with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.composition import draws
from tests.composition.draws import among, between
from tests.composition.faults import Scene, cancel_stream, cancel_turns, kill_engine
from triptych.api.v1 import generate_pb2
from triptych.common.v1.sampling_pb2 import OUTPUT_KIND_CUMULATIVE, OUTPUT_KIND_FINAL_ONLY

# The models, by what makes them.
EMBEDDED, MIXTURE, HYBRID = "embedded", "mixture", "hybrid"


@dataclass(frozen=True, slots=True)
class Option:
    """Of one request. Its name begins with the field that it sets, or is none of a field."""

    name: str
    share: float  # of the requests that draw it
    choose: draws.Choose
    kind: str = ""  # at most one of a kind is drawn


@dataclass(frozen=True, slots=True)
class Condition:
    """Of the engines. What answers depend on is kept where a request is alone.

    flags: {model} in them is the folder of the model, {adapters} that of its adapters.
    is_quantized: the model's projections are.
    number: decides in which rigs it is, see `conditions_of`; 0: its position, from 1 on.
    rules_out: conditions that are not in its rigs.
    """

    name: str
    flags: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    model: str = EMBEDDED
    is_quantized: bool = False
    is_kept: bool = False
    number: int = 0
    rules_out: frozenset[str] = frozenset()


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
    Option("a session", 0.2, draws.turns),
    Option("shared prefix", 0.4, draws.shared_prefix),
    Option("thinking_token_budget", 0.2, draws.thinking_budget),
    Option("prompt", 0.2, draws.text_prompt, "input"),
    Option("embeds", 0.2, draws.embeds_prompt, "input"),
    Option("truncate_prompt_tokens", 0.15, between(1, 40)),
    Option("add_special_tokens false", 0.2, among(False)),
    Option("return_prompt_token_ids", 0.2, among(True)),
    Option("cache_salt", 0.2, among("pepper", "salt")),
    Option("priority", 0.3, between(-9, 9)),
    Option("session_id", 0.15, among("one", "two")),
    Option("job_id", 0.3, among("one", "two", "three")),
    Option("is_last_step", 0.15, among(True)),
    Option("temperature 0", 0.35, among(0.0), "temperature"),
    Option("temperature", 0.5, between(0.3, 1.6), "temperature"),
    Option("top_k", 0.2, among(1, 5, 50)),
    Option("top_p", 0.2, between(0.3, 0.98)),
    Option("min_p", 0.2, between(0.01, 0.3)),
    Option("n", 0.15, between(2, 3)),
    Option("min_tokens", 0.25, draws.min_tokens),
    Option("ignore_eos", 0.3, among(True)),
    Option("stop", 0.2, draws.some((" t", "he", "and", "o", ". ", "zq"), 2)),
    Option("include_stop_in_output", 0.2, among(True)),
    Option("stop_token_ids", 0.2, draws.token_ids(20)),
    Option("presence_penalty", 0.2, between(-1.5, 1.5)),
    Option("frequency_penalty", 0.2, between(-1.5, 1.5)),
    Option("repetition_penalty", 0.2, between(0.7, 1.5)),
    Option("logit_bias", 0.2, draws.biases),
    Option("allowed_token_ids", 0.15, draws.token_ids(100)),
    Option("bad_words", 0.2, draws.words(60)),
    Option("repetition_detection", 0.2, draws.repetition),
    Option("logprobs", 0.3, between(0, 4)),
    Option("logprob_token_ids", 0.2, draws.token_ids(3)),
    Option("prompt_logprobs", 0.2, between(0, 3)),
    Option("skip_reading_prefix_cache", 0.15, among(True, False)),
    Option("max_draft_tokens", 0.2, between(0, 8)),
    Option("detokenize false", 0.15, among(False)),
    Option("skip_special_tokens false", 0.15, among(False)),
    Option("stream_interval", 0.2, between(2, 8)),
    Option("output_kind CUMULATIVE", 0.15, among(OUTPUT_KIND_CUMULATIVE), "output_kind"),
    Option("output_kind FINAL_ONLY", 0.15, among(OUTPUT_KIND_FINAL_ONLY), "output_kind"),
    Option("orphan_grace_ms", 0.2, among(5000)),
    Option("structured_output", 0.2, draws.structured_output),
    Option("return_hidden_states", 0.2, among(True)),
    Option("adapter", 0.3, among("first", "second", "third")),
    Option("media", 0.01, among([generate_pb2.Media(mime_type="image/png")])),
)

# Of every engine, for what has to be turned on.
ENGINE_FLAGS = (
    "--enable-prompt-embeds",
    "--enable-lora",
    "--max-loras=2",
    "--lora-dir={adapters}",
    "--max-forward-output-bytes=16777216",
)

CONDITIONS = (
    Condition("chunked prefill", ("--max-num-batched-tokens=24",)),
    Condition("preemption", ("--block-size=4", "--num-kv-blocks=29")),
    Condition("tensor parallelism 2", tensor_parallel_size=2, is_kept=True),
    Condition("two steps in flight", ("--steps-in-flight=2",)),
    Condition("policy priority", ("--scheduling-policy=priority",)),
    Condition("few rows", ("--max-num-seqs=3",)),
    Condition("windows and experts", model=MIXTURE, is_kept=True),
    Condition("drafts", ("--speculative=suffix", "--draft-limit=none")),
    Condition(
        "draft model",
        (
            "--speculative=draft",
            "--speculative-model={model}",
            "--num-speculative-tokens=3",
            "--draft-window=64",
            "--draft-limit=none",
        ),
    ),
    Condition("policy continuum", ("--scheduling-policy=continuum",)),
    Condition("quantized weights", is_quantized=True, is_kept=True),
    Condition(
        "layers with states",
        ("--state-interval=16",),
        model=HYBRID,
        is_kept=True,
        number=15,
        rules_out=frozenset(
            {
                "tensor parallelism 2",
                "windows and experts",
                "drafts",
                "draft model",
                "quantized weights",
            }
        ),
    ),
)

FAULTS = (
    Fault("kill -9 of an engine", 0.05, kill_engine, ends_engine=True),
    Fault("a client that goes away", 0.3, cancel_stream),
    Fault("turns that are cancelled", 0.2, cancel_turns),
)


ENTRIES: tuple[Option | Condition | Fault, ...] = (*OPTIONS, *CONDITIONS, *FAULTS)


def _refused(*names: str, status: str = "INVALID_ARGUMENT", field: str, reason: str) -> Refusal:
    return Refusal(frozenset(names), status, field, reason)


_SERVED_LATER = {"status": "UNIMPLEMENTED", "reason": "is not served yet"}
_IN_SESSION = {"reason": "a session has one output a turn, of tokens, and ends with its stream"}
_NEEDS_TOKENS = "needs a token at every position of the prompt"

REFUSALS = (
    _refused("temperature 0", "n", field="sampling.n", reason="greedy outputs are all the same"),
    _refused("stop", "detokenize false", field="sampling.detokenize", reason="stop strings are text"),
    _refused("embeds", "prompt_logprobs", field="sampling.prompt_logprobs", reason=_NEEDS_TOKENS),
    _refused("embeds", "return_prompt_token_ids", field="return_prompt_token_ids", reason=_NEEDS_TOKENS),
    _refused("embeds", "truncate_prompt_tokens", field="truncate_prompt_tokens", reason=_NEEDS_TOKENS),
    _refused("a session", "n", field="sampling.n", **_IN_SESSION),
    _refused("a session", "embeds", field="embeds", **_IN_SESSION),
    _refused("a session", "orphan_grace_ms", field="orphan_grace_ms", **_IN_SESSION),
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
