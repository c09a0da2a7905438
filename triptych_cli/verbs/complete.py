"""The verb `complete`: one request to a running server, its answer as text or JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_cli.client_channel import open_client_channel
from triptych_cli.verbs.failures import Target, run_verb
from triptych_cli.verbs.generation import Generation, event_record
from triptych_kit.errors import InvalidArgument
from triptych_kit.plain_fields import plain_fields

# Fields that take ids in the format of --prompt-token-ids.
_ID_LISTS = frozenset(
    name for name, kind in plain_fields(sampling_pb2.SamplingParams).items() if str(kind) == "list[int]"
)
_SHOWN_AS_JSON = ("logprobs", "prompt_logprobs", "logprob_token_ids")

_USAGE_ERROR = 2

SamplingValue = int | float | bool | list[str] | list[int]


class UsageError(Exception):
    """Options that cannot be used together."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Options of a completion. `sampling` has the API's field names; None is unset."""

    url: str
    prompt: str | None
    prompt_token_ids: str | None
    model: str
    request_id: str
    sampling: Mapping[str, SamplingValue | None]
    as_json: bool
    stream: bool
    timeout_s: float | None


def run_complete(completion: Completion) -> int:
    """Send the request and print the answer.

    Returns 0; 1 with the error on stderr; 2 for options that contradict each other.
    """
    try:
        completion = dataclasses.replace(completion, prompt=_prompt(completion))
        _check_shown(completion)
    except UsageError as error:
        print(f"triptych complete: {error}", file=sys.stderr)
        return _USAGE_ERROR
    flags = {"token_ids.ids": "--prompt-token-ids", "token_ids": "--prompt-token-ids", "model": "--model"}
    flags |= {"request_id": "--request-id", "target": "--url"}
    return run_verb(_complete(completion), Target(completion.url, completion.timeout_s, flags=flags))


def request_of(completion: Completion) -> generate_pb2.GenerateRequest:
    """The request; raises InvalidArgument for values that a message cannot hold."""
    request = generate_pb2.GenerateRequest(
        model=completion.model,
        request_id=completion.request_id,
        sampling=sampling_of(completion.sampling),
        return_prompt_token_ids=completion.as_json,
    )
    if completion.prompt is not None:
        request.prompt = completion.prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_token_ids(completion.prompt_token_ids or "", field="token_ids.ids"))
    return request


def sampling_of(values: Mapping[str, SamplingValue | None]) -> sampling_pb2.SamplingParams:
    """Sampling parameters from values by field name."""
    sampling = sampling_pb2.SamplingParams()
    # The names come from the command line's options.
    one_field: Any = sampling_pb2.SamplingParams
    for name, value in values.items():
        if value is None:
            continue
        if name in _ID_LISTS and isinstance(value, list):
            value = _token_ids(",".join(map(str, value)), field=f"sampling.{name}")
        try:
            sampling.MergeFrom(one_field(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"sampling.{name} cannot be {value}: {error}", field=f"sampling.{name}"
            ) from error
    return sampling


async def _complete(completion: Completion) -> int:
    request = request_of(completion)
    async with open_client_channel(completion.url) as channel:
        generation = Generation(channel, request)
        # Several outputs arrive interleaved; as text each is printed whole.
        num_outputs = completion.sampling.get("n") or 1
        async for response in generation.events(completion.timeout_s):
            if completion.as_json and completion.stream:
                print(json.dumps(event_record(response, generation.answer.trace_id)), flush=True)
            elif not completion.as_json and num_outputs == 1:
                print(response.delta.text, end="", flush=True)
    if completion.as_json:
        if not completion.stream:
            print(json.dumps(generation.answer.record()))
    elif num_outputs == 1:
        print()
    else:
        for output in generation.answer.outputs:
            print(f"[{output.output_index}]\n{output.text}")
    return 0


def _prompt(completion: Completion) -> str | None:
    """The prompt as text, which may come on stdin; None if it is given as ids."""
    if completion.prompt is not None and completion.prompt_token_ids is not None:
        raise UsageError("give one of PROMPT and --prompt-token-ids")
    if completion.prompt is not None or completion.prompt_token_ids is not None:
        return completion.prompt
    if sys.stdin.isatty():
        raise UsageError("give a prompt: PROMPT, --prompt-token-ids, or a text on stdin")
    # The end of the last line is the shell's.
    return sys.stdin.read().removesuffix("\n")


def _check_shown(completion: Completion) -> None:
    """Raise UsageError for options whose effect would not be seen as text."""
    if completion.as_json:
        return
    is_set = {name: completion.sampling.get(name) is not None for name in _SHOWN_AS_JSON}
    is_set |= {"stream": completion.stream, "no_detokenize": completion.sampling.get("detokenize") is False}
    for name, has_value in is_set.items():
        if has_value:
            raise UsageError(f"--{name.replace('_', '-')} needs --json: text alone does not show its effect")


def _token_ids(text: str, *, field: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidArgument(f"{field} is {text!r}, not a list of ids like 1,2,3", field=field) from error
    for token_id in ids:
        if not 0 <= token_id < 2**32:
            raise InvalidArgument(f"{field} has {token_id}, which is not in 0..4294967295", field=field)
    return ids
