"""Results of `LLM`, and their conversion from protos."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from frontend_svc.text.pooling import check_result, read_floats
from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2
from triptych.common.v1 import output_pb2, tensor_pb2
from triptych_cli.vllm_names import OUTPUT_ATTRIBUTES, RESULT_ATTRIBUTES, with_attribute_hints

Values = list[float] | list[list[float]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; completion tokens are summed over its outputs."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_draft_tokens: int | None = None  # that engines verified; None: none, or not known
    num_accepted_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log probability and its rank in the vocabulary, 1 for the most likely.

    Both are None for the first token of a prompt. `text` is empty without detokenization.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    text: str
    top: tuple[TokenLogprob, ...] = ()  # the most likely tokens at its position, best first


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class OutputStats:
    """Where an output spent its time, and what happened to it; see OutputStats of the contract."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    num_preemptions: int = 0
    num_migrations: int = 0


@with_attribute_hints(**OUTPUT_ATTRIBUTES)
@dataclass(frozen=True, slots=True)
class Completion:
    """One complete output. `stop` is the matched string or token id if `finish_reason` is stop.

    For a conversation, `text` is only the answer, without reasoning and tool calls.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    stop: str | int | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    error_message: str = ""  # set if the reason is `error`
    is_incomplete: bool = False  # whether it is only the beginning of what its constraint asks for
    # Equal outputs need not take equal times.
    stats: OutputStats = field(default=OutputStats(), compare=False)


@with_attribute_hints(**RESULT_ATTRIBUTES)
@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of one prompt. `prompt` is None if it was given as token ids or as a conversation."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The embedding of one prompt: a vector, or one vector per token."""

    index: int
    values: Values


@dataclass(frozen=True, slots=True)
class ClassificationResult:
    """Class probabilities of one prompt. `labels` is empty if the model has no label names."""

    index: int
    values: Values
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The score of one pair of texts."""

    index: int
    score: float


def to_result(response: inference_pb2.GenerateUnaryResponse, prompt: str | None) -> RequestResult:
    outputs = tuple(_completion(output, output.text) for output in sorted(response.outputs, key=_index_of))
    return _result(response.started, outputs, response.usage, prompt)


def to_chat_result(response: chat_pb2.ChatUnaryResponse) -> RequestResult:
    outputs = tuple(
        _completion(
            output,
            "".join(part.text for part in output.message.parts),
            reasoning=output.message.reasoning,
            tool_calls=output.message.tool_calls,
        )
        for output in sorted(response.outputs, key=_index_of)
    )
    return _result(response.started, outputs, response.usage, None)


def _result(
    started: generate_pb2.Started,
    outputs: tuple[Completion, ...],
    usage: output_pb2.Usage,
    prompt: str | None,
) -> RequestResult:
    return RequestResult(
        request_id=started.request_id,
        prompt=prompt,
        prompt_token_ids=tuple(started.prompt_token_ids),
        outputs=outputs,
        num_cached_tokens=started.num_cached_tokens,
        prompt_logprobs=_logprobs(started.prompt_logprobs) if started.HasField("prompt_logprobs") else None,
        usage=Usage(
            usage.num_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_completion_tokens,
            usage.num_draft_tokens if usage.HasField("num_draft_tokens") else None,
            usage.num_accepted_draft_tokens if usage.HasField("num_accepted_draft_tokens") else None,
        ),
    )


def _index_of(output: generate_pb2.Output | chat_message_pb2.ChatOutput) -> int:
    return output.output_index


def _completion(
    output: generate_pb2.Output | chat_message_pb2.ChatOutput,
    text: str,
    *,
    reasoning: str = "",
    tool_calls: Iterable[chat_message_pb2.ToolCall] = (),
) -> Completion:
    return Completion(
        index=output.output_index,
        text=text,
        token_ids=tuple(output.token_ids),
        cumulative_logprob=output.cumulative_logprob if output.HasField("cumulative_logprob") else None,
        logprobs=_logprobs(output.logprobs) if output.HasField("logprobs") else None,
        finish_reason=output_pb2.FinishReason.Name(output.reason).removeprefix("FINISH_REASON_").lower(),
        stop=_stop(output.stop_match),
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments_json) for call in tool_calls),
        error_message=output.error_message,
        is_incomplete=output.is_incomplete,
        stats=OutputStats(
            queue_ms=output.stats.queue_ms,
            prefill_ms=output.stats.prefill_ms,
            decode_ms=output.stats.decode_ms,
            num_preemptions=output.stats.num_preemptions,
            num_migrations=output.stats.num_migrations,
        ),
    )


def _stop(match: output_pb2.StopMatch) -> str | int | None:
    kind = match.WhichOneof("match")
    if kind is None:
        return None
    return match.string if kind == "string" else match.token_id if kind == "token_id" else match.eos


def _logprobs(columns: output_pb2.Logprobs) -> tuple[TokenLogprob, ...]:
    num_tokens = len(columns.token_ids)
    texts: Sequence[str] = columns.texts or [""] * num_tokens
    ranks: Sequence[int] = columns.ranks or [0] * num_tokens
    tops: Sequence[output_pb2.TopLogprobs] = columns.top or [output_pb2.TopLogprobs()] * num_tokens
    columns_by_token = zip(columns.token_ids, columns.logprobs, ranks, texts, tops, strict=True)
    return tuple(
        TokenLogprob(token_id, _number(logprob), rank or None, text, _top(top))
        for token_id, logprob, rank, text, top in columns_by_token
    )


def _top(top: output_pb2.TopLogprobs) -> tuple[TokenLogprob, ...]:
    texts: Sequence[str] = top.texts or [""] * len(top.token_ids)
    return tuple(
        TokenLogprob(token_id, _number(logprob), None, text)
        for token_id, logprob, text in zip(top.token_ids, top.logprobs, texts, strict=True)
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def values_of(tensor: tensor_pb2.Tensor) -> Values:
    """A vector as a list, a matrix as a list of rows. Raises Internal for any other tensor."""
    check_result(tensor, 2 if len(tensor.shape) == 2 else 1)
    numbers = list(read_floats(tensor))
    if len(tensor.shape) == 1:
        return numbers
    width = tensor.shape[1]
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]
