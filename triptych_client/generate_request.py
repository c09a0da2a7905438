"""Builds a GenerateRequest from keyword arguments. Checks names; the server checks values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import sampling_pb2
from triptych_client.call_options import CALL_OPTION_NAMES, CallOptions
from triptych_client.plain_options import PlainSamplingOptions

SessionPrompt: TypeAlias = str | Sequence[int]
Prompt: TypeAlias = SessionPrompt | generate_pb2.PromptEmbeds

_OUTPUT_KINDS = {
    "delta": sampling_pb2.OUTPUT_KIND_DELTA,
    "cumulative": sampling_pb2.OUTPUT_KIND_CUMULATIVE,
    "final_only": sampling_pb2.OUTPUT_KIND_FINAL_ONLY,
}


class SamplingOptions(PlainSamplingOptions, total=False):
    """How tokens are sampled and returned, with the names of SamplingParams.

    `stop` may be one string. `logit_bias` is by token id. Without `max_tokens` an output goes on to the
    model's own max_new_tokens, else until its context is full.
    """

    stop: str | Sequence[str]
    logit_bias: Mapping[int, float]
    structured_output: sampling_pb2.StructuredOutput
    output_kind: Literal["delta", "cumulative", "final_only"]
    repetition_detection: sampling_pb2.RepetitionDetection


class PlacementOptions(TypedDict, total=False):
    """Model, request id, and placement of a request."""

    model: str
    request_id: str
    priority: int
    cache_salt: str
    session_id: str
    job_id: str
    is_last_step: bool
    adapter: str
    data_parallel_rank: int
    truncate_prompt_tokens: int
    return_prompt_token_ids: bool


class GenerateOptions(SamplingOptions, PlacementOptions, CallOptions, total=False):
    """All options of a prompt."""

    media: Sequence[generate_pb2.Media]
    add_special_tokens: bool
    return_hidden_states: bool
    return_routed_experts: bool


class StreamOptions(GenerateOptions, total=False):
    """Options of a stream, which may be resumable.

    With `orphan_grace_ms` the request continues for that time when its connection breaks, and the stream
    resumes over another connection.
    """

    orphan_grace_ms: int


def build_generate_request(prompt: Prompt, options: GenerateOptions) -> generate_pb2.GenerateRequest:
    """The request for a text, for token ids or for embeddings.

    Raises TypeError for an unknown name.
    """
    fields, sampling = split_options(options, generate_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    if isinstance(prompt, str):
        fields["prompt"] = prompt
    elif isinstance(prompt, generate_pb2.PromptEmbeds):
        fields["embeds"] = prompt
    else:
        fields["token_ids"] = generate_pb2.TokenIds(ids=prompt)
    # mypy assumes one type for all unpacked values; protobuf checks each one.
    return generate_pb2.GenerateRequest(sampling=sampling, **fields)  # type: ignore[arg-type]


def build_batch_request(
    prompts: Sequence[Prompt], each: Sequence[GenerateOptions], options: GenerateOptions
) -> inference_pb2.GenerateBatchRequest:
    """The request for many prompts: `options` for all, overridden by the entry of `each` for a prompt.

    Raises ValueError if `each` and `prompts` differ in length.
    """
    if each and len(each) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and options for {len(each)}")
    given = each or [GenerateOptions()] * len(prompts)
    requests = [
        build_generate_request(prompt, {**options, **own}) for prompt, own in zip(prompts, given, strict=True)
    ]
    return inference_pb2.GenerateBatchRequest(requests=requests)


def build_session_message(
    prompt: SessionPrompt, options: GenerateOptions, own: SamplingOptions, *, is_first: bool
) -> inference_pb2.GenerateSessionRequest:
    """The message with an input of a session: all `options` with the first, those of sampling with each.

    `own` are those of its turn, in place of the same ones of `options`. Raises TypeError for an unknown name.
    """
    split_options(own, {})
    request = build_generate_request(prompt, {**options, **own})
    if is_first:
        return inference_pb2.GenerateSessionRequest(start=request)
    # Without parameters those of the turn before would stay.
    append = inference_pb2.SessionAppend(sampling=request.sampling)
    if isinstance(prompt, str):
        append.prompt = prompt
    else:
        append.token_ids.CopyFrom(request.token_ids)
    return inference_pb2.GenerateSessionRequest(append=append)


def split_options(
    options: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[dict[str, object], sampling_pb2.SamplingParams | None]:
    """Split options into `fields` of a request and sampling parameters; the latter None if there are none.

    Raises TypeError for an unknown name, and ValueError for an unknown output kind.
    """
    of_request: dict[str, object] = {}
    of_sampling: dict[str, object] = {}
    for name, value in options.items():
        if name in CALL_OPTION_NAMES:
            continue
        if name in fields:
            of_request[name] = value
        elif name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
            of_sampling[name] = _sampling_value(name, value)
        else:
            raise TypeError(f"there is no option {name!r}")
    if not of_sampling:
        return of_request, None
    return of_request, sampling_pb2.SamplingParams(**of_sampling)  # type: ignore[arg-type]


def _sampling_value(name: str, value: object) -> object:
    if name == "stop" and isinstance(value, str):
        return [value]
    if name == "logit_bias" and isinstance(value, Mapping):
        return [sampling_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in value.items()]
    if name == "output_kind":
        if value not in _OUTPUT_KINDS:
            raise ValueError(f"output_kind is {value!r}, must be one of {', '.join(_OUTPUT_KINDS)}")
        return _OUTPUT_KINDS[str(value)]
    return value
