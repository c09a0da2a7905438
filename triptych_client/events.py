"""Results of prompts as plain data: events of a stream, or one completion. Knows no channel."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import output_pb2
from triptych_client.errors import TriptychError, from_error_status
from triptych_client.logprobs import TokenLogprob, read_logprobs

Logprobs = tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_draft_tokens: int | None = None  # that engines verified; None: none, or not known
    num_accepted_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was computed. First event of every stream.

    `prompt_token_ids` and `prompt_logprobs` are set if they were requested, `resume_token` if the request has
    an orphan grace.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Logprobs = None
    resume_token: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output. `text` may lag behind `token_ids`, as text that may begin a stop string is held back."""

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Finished:
    """One output has ended. `reason` is stop, length, abort, error or repetition.

    `stop_match` is the stop string or token id if `reason` is stop. `cumulative_logprob` is the sum over the
    tokens, None if no logprobs were requested or one of them is unknown.
    `error_message` describes an error; `error_fields` are those of the request that leave no token together,
    if that is the error. `is_incomplete`: whether a constrained output is only the beginning of what its
    constraint asks for.
    """

    output_index: int
    reason: str
    stop_match: int | str | None
    usage: Usage
    cumulative_logprob: float | None = None
    error_message: str = ""
    is_incomplete: bool = False
    error_fields: tuple[str, ...] = ()


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class ItemEvent:
    """An event of one prompt of many; an error is the last event of its prompt and affects no other."""

    item_index: int
    event: Event | TriptychError


@dataclass(frozen=True, slots=True)
class Output:
    """One complete output. The fields are those of Delta and Finished."""

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: Logprobs
    reason: str
    stop_match: int | str | None
    cumulative_logprob: float | None = None
    error_message: str = ""
    is_incomplete: bool = False
    error_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete response to one prompt."""

    started: Started
    outputs: tuple[Output, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.outputs[0].text


def to_event(response: generate_pb2.GenerateResponse) -> Event | None:
    """The event of one message of a stream; None for a kind of a newer API."""
    match response.WhichOneof("event"):
        case "started":
            return read_started(response.started)
        case "delta":
            delta = response.delta
            return Delta(delta.output_index, delta.text, tuple(delta.token_ids), logprobs_of(delta))
        case "finished":
            return read_finished(response.finished)
        case _:
            return None


def to_item_event(response: inference_pb2.GenerateBatchResponse) -> ItemEvent | None:
    """The event of one prompt of many; None for a kind of a newer API."""
    if response.HasField("error"):
        return ItemEvent(response.item_index, from_error_status(response.error))
    event = to_event(response.response)
    return None if event is None else ItemEvent(response.item_index, event)


def to_completion(response: inference_pb2.GenerateUnaryResponse) -> Completion:
    outputs = tuple(
        Output(
            output.output_index,
            output.text,
            tuple(output.token_ids),
            logprobs_of(output),
            reason_of(output.reason),
            stop_match_of(output.stop_match),
            output.cumulative_logprob if output.HasField("cumulative_logprob") else None,
            output.error_message,
            output.is_incomplete,
            tuple(output.error_fields),
        )
        for output in response.outputs
    )
    return Completion(read_started(response.started), outputs, read_usage(response.usage))


def read_started(started: generate_pb2.Started) -> Started:
    return Started(
        started.request_id,
        started.model,
        started.num_prompt_tokens,
        started.num_cached_tokens,
        tuple(started.prompt_token_ids),
        read_logprobs(started.prompt_logprobs) if started.HasField("prompt_logprobs") else None,
        started.resume_token,
    )


def read_finished(finished: generate_pb2.Finished) -> Finished:
    return Finished(
        finished.output_index,
        reason_of(finished.reason),
        stop_match_of(finished.stop_match),
        read_usage(finished.usage),
        finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
        finished.error_message,
        finished.is_incomplete,
        tuple(finished.error_fields),
    )


def read_usage(usage: output_pb2.Usage) -> Usage:
    return Usage(
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_completion_tokens,
        usage.num_draft_tokens if usage.HasField("num_draft_tokens") else None,
        usage.num_accepted_draft_tokens if usage.HasField("num_accepted_draft_tokens") else None,
    )


def reason_of(reason: output_pb2.FinishReason) -> str:
    """`stop` for FINISH_REASON_STOP, and so on."""
    return output_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def stop_match_of(match: output_pb2.StopMatch) -> int | str | None:
    """The stop string or the token id; None if there is none."""
    kind = match.WhichOneof("match")
    if kind is None:
        return None
    return match.string if kind == "string" else match.token_id if kind == "token_id" else match.eos


def logprobs_of(message: generate_pb2.Delta | generate_pb2.Output) -> Logprobs:
    """The log probabilities of a message; None if none were requested."""
    return read_logprobs(message.logprobs) if message.HasField("logprobs") else None
