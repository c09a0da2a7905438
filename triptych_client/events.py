"""What comes back for a prompt, as plain data: events of a stream, or one completion. Knows no channel."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import output_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request took."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was computed. First event of every stream."""

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output. `text` may lag behind `token_ids`: what may begin a stop string is held back."""

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: output_pb2.Logprobs | None


@dataclass(frozen=True, slots=True)
class Finished:
    """One output has ended. `reason` is stop, length, abort, error or repetition.

    `stop_match` is the stop string, or the token id, that a `stop` stopped on.
    """

    output_index: int
    reason: str
    stop_match: int | str | None
    usage: Usage


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Output:
    """One whole output."""

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: output_pb2.Logprobs | None
    reason: str
    stop_match: int | str | None


@dataclass(frozen=True, slots=True)
class Completion:
    """Everything about one prompt, in one answer."""

    started: Started
    outputs: tuple[Output, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text


def to_event(response: generate_pb2.GenerateResponse) -> Event | None:
    """The event in one message of a stream; None for one that this client is too old to know."""
    match response.WhichOneof("event"):
        case "started":
            return _started(response.started)
        case "delta":
            delta = response.delta
            logprobs = delta.logprobs if delta.HasField("logprobs") else None
            return Delta(delta.output_index, delta.text, tuple(delta.token_ids), logprobs)
        case "finished":
            end = response.finished
            return Finished(
                end.output_index, _reason(end.reason), _stop_match(end.stop_match), _usage(end.usage)
            )
        case _:
            return None


def to_completion(response: inference_pb2.GenerateUnaryResponse) -> Completion:
    """The whole answer to one prompt."""
    outputs = tuple(
        Output(
            output.output_index,
            output.text,
            tuple(output.token_ids),
            output.logprobs if output.HasField("logprobs") else None,
            _reason(output.reason),
            _stop_match(output.stop_match),
        )
        for output in response.outputs
    )
    return Completion(_started(response.started), outputs, _usage(response.usage))


def _started(started: generate_pb2.Started) -> Started:
    return Started(
        started.request_id,
        started.model,
        started.num_prompt_tokens,
        started.num_cached_tokens,
        tuple(started.prompt_token_ids),
    )


def _usage(usage: output_pb2.Usage) -> Usage:
    return Usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens)


def _reason(reason: output_pb2.FinishReason) -> str:
    return output_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def _stop_match(match: output_pb2.StopMatch) -> int | str | None:
    kind = match.WhichOneof("match")
    if kind is None:
        return None
    return match.string if kind == "string" else match.token_id if kind == "token_id" else match.eos
