"""Translates answers into OpenAI's bodies, whole or in chunks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2, model_pb2
from triptych.common.v1 import output_pb2
from triptych_kit.errors import Internal, InvalidArgument, ServiceError

# OpenAI has no reason for an output that repeats itself; it is an end by the server, too.
_REASONS = {
    output_pb2.FINISH_REASON_STOP: "stop",
    output_pb2.FINISH_REASON_LENGTH: "length",
    output_pb2.FINISH_REASON_ABORT: "abort",
    output_pb2.FINISH_REASON_REPETITION: "stop",
}
_FINGERPRINT_CHARS = 16
_LEAST_LOGPROB = -9999.0  # as in vLLM: JSON has no infinity

EndedOutput: TypeAlias = generate_pb2.Finished | generate_pb2.Output | chat_message_pb2.ChatOutput


class Answer:
    """The common fields of all bodies and chunks of one answer."""

    def __init__(
        self,
        request_id: str,
        model: str,
        fingerprint: str | None,
        *,
        is_chat: bool,
        is_chunk: bool,
        created: int | None = None,
    ) -> None:
        kind = "chat.completion" if is_chat else "text_completion"
        self.created = int(time.time()) if created is None else created
        self._common = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "object": f"{kind}.chunk" if is_chat and is_chunk else kind,
            "created": self.created,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    @classmethod
    def begin(cls, started: generate_pb2.Started, *, is_chat: bool, is_chunk: bool) -> Answer:
        fingerprint = fingerprint_of(started)
        return cls(started.request_id, started.model, fingerprint, is_chat=is_chat, is_chunk=is_chunk)

    def body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        body = self._common | {"choices": choices}
        return body if usage is None else body | {"usage": usage}


def fingerprint_of(started: generate_pb2.Started) -> str | None:
    """OpenAI's `system_fingerprint`: answers to the same request with the same seed are equal if it is."""
    return f"fp_{started.fingerprint[:_FINGERPRINT_CHARS]}" if started.fingerprint else None


@dataclass(frozen=True, slots=True)
class Echo:
    """How a completion repeats its prompts.

    prompts: their texts, empty ones of prompts of token ids. is_all: the answer is the prompt alone.
    """

    prompts: Sequence[str]
    has_logprobs: bool
    is_all: bool

    def choice(self, index: int, item: int, started: generate_pb2.Started) -> dict[str, Any]:
        """The choice of a stream that has the prompt."""
        return {
            "index": index,
            "text": self.text(item, started),
            "logprobs": columns_of(started.prompt_logprobs) if self.has_logprobs else None,
            "finish_reason": None,
        }

    def text(self, item: int, started: generate_pb2.Started) -> str:
        return self.prompts[item] or "".join(started.prompt_logprobs.texts)


def whole_completion(
    answers: Sequence[inference_pb2.GenerateUnaryResponse],
    *,
    with_ids: bool,
    with_prompt_logprobs: bool,
    echo: Echo | None = None,
) -> dict[str, Any]:
    """One body for the answers to all prompts, in their order."""
    started = answers[0].started
    choices: list[dict[str, Any]] = []
    for item, answer in enumerate(answers):
        of_prompt = prompt_of(answer.started, with_logprobs=with_prompt_logprobs)
        for output in answer.outputs:
            reason, stop = reason_of(output), stop_of(output.stop_match)
            text, token_ids = output.text, list(output.token_ids)
            parts = [output.logprobs] if output.HasField("logprobs") else []
            if echo is not None:
                if echo.is_all:
                    text, token_ids, parts, reason, stop = "", [], [], "length", None
                text = echo.text(item, answer.started) + text
                parts = [answer.started.prompt_logprobs, *parts] if echo.has_logprobs else []
            choice = {
                "index": len(choices),
                "text": text,
                "logprobs": columns_of(*parts) if parts else None,
                "finish_reason": reason,
                "stop_reason": stop,
                **of_prompt,
            }
            if with_ids:
                choice["token_ids"] = token_ids
            choices.append(choice)
    usage = output_pb2.Usage()
    for answer in answers:
        add_usage(usage, answer.usage)
    if echo is not None and echo.is_all:
        usage.num_completion_tokens = 0
    common = Answer.begin(started, is_chat=False, is_chunk=False)
    return common.body(choices, usage_of(usage))


def whole_chat(
    answer: chat_pb2.ChatUnaryResponse, *, with_ids: bool, with_reasoning: bool = True
) -> dict[str, Any]:
    common = Answer.begin(answer.started, is_chat=True, is_chunk=False)
    choices = []
    for output in answer.outputs:
        message = assistant_of(output.message)
        if not with_reasoning:
            message.pop("reasoning_content", None)
        content = tokens_of(output.logprobs)
        choice = {
            "index": output.output_index,
            "message": message | {"refusal": None},
            "logprobs": {"content": content, "refusal": None} if output.HasField("logprobs") else None,
            "finish_reason": reason_of(output, has_calls=are_whole(output.message.tool_calls)),
            "stop_reason": stop_of(output.stop_match),
        }
        if with_ids:
            choice["token_ids"] = list(output.token_ids)
        choices.append(choice)
    return common.body(choices, usage_of(answer.usage)) | prompt_of(answer.started)


def prompt_of(started: generate_pb2.Started, *, with_logprobs: bool = True) -> dict[str, Any]:
    """vLLM's fields about a prompt: those that were requested."""
    shown: dict[str, Any] = {}
    if started.prompt_token_ids:
        shown["prompt_token_ids"] = list(started.prompt_token_ids)
    if with_logprobs and started.HasField("prompt_logprobs"):
        shown["prompt_logprobs"] = _positions_of(started.prompt_logprobs)
    return shown


def completion_choice(
    index: int, delta: generate_pb2.Delta, *, with_ids: bool, offset: int = 0
) -> dict[str, Any]:
    """The choice of a part of an output. offset: the characters of the tokens before it."""
    choice: dict[str, Any] = {
        "index": index,
        "text": delta.text,
        "logprobs": columns_of(delta.logprobs, offset=offset) if delta.HasField("logprobs") else None,
        "finish_reason": None,
    }
    return choice | {"token_ids": list(delta.token_ids)} if with_ids else choice


def chat_choice(delta: chat_message_pb2.ChatDelta, *, with_ids: bool, with_reasoning: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning and with_reasoning:
        shown["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        shown["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    choice: dict[str, Any] = {
        "index": delta.output_index,
        "delta": shown,
        "logprobs": None,
        "finish_reason": None,
    }
    if delta.HasField("logprobs"):
        content = tokens_of(delta.logprobs)
        choice["logprobs"] = {"content": content, "refusal": None}
    return choice | {"token_ids": list(delta.token_ids)} if with_ids else choice


def last_choice(
    index: int, finished: generate_pb2.Finished, *, is_chat: bool, has_calls: bool = False
) -> dict[str, Any]:
    """The choice that ends an output. Raises what `reason_of` does."""
    reason = reason_of(finished, has_calls=has_calls)
    nothing: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    stop = stop_of(finished.stop_match)
    return {"index": index, **nothing, "logprobs": None, "finish_reason": reason, "stop_reason": stop}


def assistant_of(message: chat_message_pb2.ChatMessage) -> dict[str, Any]:
    text = "".join(part.text for part in message.parts)
    shown: dict[str, Any] = {
        "role": "assistant",
        "content": text or (None if message.tool_calls else ""),
    }
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
                **_mark_of(call),
            }
            for call in message.tool_calls
        ]
    return shown


def are_whole(calls: Sequence[chat_message_pb2.ToolCall]) -> bool:
    """Whether there are calls, and a client may run them all."""
    return len(calls) > 0 and not any(call.incomplete for call in calls)


def _mark_of(call: chat_message_pb2.ToolCall) -> dict[str, Any]:
    return {"incomplete": True} if call.incomplete else {}


def _call_delta(call: chat_message_pb2.ToolCall) -> dict[str, Any]:
    """A part of a call; its id and name come with the first part alone."""
    function = {"arguments": call.arguments_json}
    if call.name:
        function = {"name": call.name, **function}
    shown: dict[str, Any] = {"index": call.index, "function": function, **_mark_of(call)}
    return {"id": call.id, "type": "function", **shown} if call.id else shown


def reason_of(ended: EndedOutput, *, has_calls: bool = False) -> str:
    """How an output ended. has_calls: whether it has calls that a client may run.

    Raises for one that an error ended: InvalidArgument if its request leaves it no token, else Internal.
    """
    reason = ended.reason
    if reason not in _REASONS:
        raise _failure_of(ended)
    return "tool_calls" if has_calls and reason == output_pb2.FINISH_REASON_STOP else _REASONS[reason]


def _failure_of(ended: EndedOutput) -> ServiceError:
    if not ended.error_fields:
        message = ended.error_message or "the engine ended the output with an error"
        return Internal(message, reason="OUTPUT_FAILED")
    # Engines name the rules, too, by names of their own.
    what = ended.error_message.partition(": ")[0]
    first, *others = ended.error_fields
    texts = [(first, f"{what}: {first}"), *((field, field) for field in others)]
    return InvalidArgument("; ".join(text for _, text in texts), violations=texts, reason="NO_TOKEN_LEFT")


def stop_of(match: output_pb2.StopMatch) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or token that ended the output, None for its own end."""
    kind = match.WhichOneof("match")
    if kind == "string":
        return match.string
    return match.token_id if kind == "token_id" else None


def add_usage(total: output_pb2.Usage, usage: output_pb2.Usage) -> None:
    total.num_prompt_tokens += usage.num_prompt_tokens
    total.num_cached_tokens += usage.num_cached_tokens
    total.num_completion_tokens += usage.num_completion_tokens


def usage_of(usage: output_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def columns_of(*parts: output_pb2.Logprobs, offset: int = 0) -> dict[str, Any]:
    """Logprobs of a completion, as parallel columns. The first token of a prompt has none.

    offset: the characters of the tokens before these.
    """
    texts = [text for part in parts for text in _texts_of(part.texts, len(part.token_ids))]
    ends = list(itertools.accumulate(map(len, texts), initial=offset))
    return {
        "tokens": texts,
        "token_logprobs": [_shown_logprob(logprob) for part in parts for logprob in part.logprobs],
        "top_logprobs": [_likely_at(part, index) for part in parts for index in range(len(part.token_ids))],
        "text_offset": ends[:-1],
    }


def num_characters(logprobs: output_pb2.Logprobs) -> int:
    """Characters of the tokens, by which `text_offset` goes on behind them."""
    return sum(map(len, logprobs.texts))


def _likely_at(logprobs: output_pb2.Logprobs, index: int) -> dict[str, float | None] | None:
    """The most likely tokens of a position and the token itself, by their texts.

    Of tokens with one text, such as parts of a character, the position's own has the text, or else the most
    likely one; the others have their ids.
    """
    own = logprobs.token_ids[index]
    if math.isnan(logprobs.logprobs[index]):
        return None
    keys = {own: logprobs.texts[index] if logprobs.texts else ""}
    values: dict[int, float] = {}
    if len(logprobs.top):
        top = logprobs.top[index]
        values = dict(zip(top.token_ids, top.logprobs, strict=True))
        taken = set(keys.values())
        for token_id, text in zip(top.token_ids, _texts_of(top.texts, len(top.token_ids)), strict=True):
            if token_id not in keys:
                keys[token_id] = f"token_id:{token_id}" if text in taken else text
                taken.add(text)
    values.setdefault(own, logprobs.logprobs[index])
    likely: dict[str, float | None] = {}
    for token_id, value in values.items():
        likely.setdefault(keys[token_id], _shown_logprob(value))
    return likely


def tokens_of(logprobs: output_pb2.Logprobs) -> list[dict[str, Any]]:
    """Logprobs of a chat: of each token, and of the most likely ones at its position."""
    texts = _texts_of(logprobs.texts, len(logprobs.token_ids))
    return [
        _token(text, logprob) | {"top_logprobs": _top_of(logprobs.top[index]) if len(logprobs.top) else []}
        for index, (text, logprob) in enumerate(zip(texts, logprobs.logprobs, strict=True))
    ]


def _top_of(top: output_pb2.TopLogprobs) -> list[dict[str, Any]]:
    texts = _texts_of(top.texts, len(top.token_ids))
    return [_token(text, logprob) for text, logprob in zip(texts, top.logprobs, strict=True)]


def _texts_of(texts: Sequence[str], count: int) -> Sequence[str]:
    return texts if len(texts) else [""] * count


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _shown_logprob(logprob), "bytes": list(text.encode())}


def _shown_logprob(logprob: float) -> float | None:
    # The first token of a prompt has none.
    return None if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)


def _positions_of(logprobs: output_pb2.Logprobs) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: of each position the token and the most likely ones, by their ids."""
    count = len(logprobs.token_ids)
    texts, tops = _texts_of(logprobs.texts, count), logprobs.top or [output_pb2.TopLogprobs()] * count
    positions: list[dict[str, Any] | None] = []
    for own, top in zip(
        zip(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, texts, strict=True), tops, strict=True
    ):
        if math.isnan(own[1]):
            positions.append(None)
            continue
        likely = zip(
            top.token_ids, top.logprobs, itertools.count(1), _texts_of(top.texts, len(top.token_ids))
        )
        tokens: dict[str, Any] = {}
        for token_id, logprob, rank, text in (own, *likely):
            shown = {"logprob": max(logprob, _LEAST_LOGPROB), "rank": rank, "decoded_token": text}
            tokens.setdefault(str(token_id), shown)
        positions.append(tokens)
    return positions


def model_card(model: model_pb2.Model, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "triptych",
        "root": model.folder or model.name,
        "parent": model.base_model or None,
        "max_model_len": model.max_model_len,
    }
