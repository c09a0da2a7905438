"""The prompt of a request and its token ids. Knows no engine and no sampling."""

from __future__ import annotations

import asyncio
from typing import Protocol

from frontend_svc.parsers.message import MessageParser
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import generate_pb2
from triptych_kit.errors import InvalidArgument
from triptych_kit.rules import rules_of

MAX_ORPHAN_GRACE_MS = int(rules_of(generate_pb2.GenerateRequest, "orphan_grace_ms").maximum)
_IDS_AT_ONCE = 1 << 16
_INPUTS = [field.name for field in generate_pb2.GenerateRequest.DESCRIPTOR.oneofs_by_name["input"].fields]


class Prompt(Protocol):
    """The prompt of a request of any service.

    field: the name of its request field, for violations.
    markers: special tokens that stay in the output's text even if special tokens are skipped.
    opens_reasoning: whether it ends within the model's reasoning, once it is tokenized.
    may_open_reasoning: whether the model may open it then.
    check: adds violations for what can be checked cheaply.
    tokenize: the token ids. Unless it `may_be_long`, to be truncated, text that cannot fit is refused early.
    parser: of an answer that is a message, once the prompt is tokenized; with `streams` it emits arguments of
    tool calls that are not whole.
    """

    @property
    def field(self) -> str: ...

    @property
    def markers(self) -> frozenset[str]: ...

    @property
    def opens_reasoning(self) -> bool: ...

    @property
    def may_open_reasoning(self) -> bool: ...

    async def check(self, model: ServedModel, violations: Violations) -> None: ...

    async def tokenize(self, model: ServedModel, *, may_be_long: bool) -> list[int]: ...

    def parser(self, *, streams: bool) -> MessageParser | None: ...


class RequestPrompt:
    """The prompt of a GenerateRequest: a text, token ids, or an input of which a request option knows."""

    markers: frozenset[str] = frozenset()
    opens_reasoning = may_open_reasoning = False  # nothing is known of the text of a client

    def __init__(self, request: generate_pb2.GenerateRequest) -> None:
        self._request = request
        self._kind = request.WhichOneof("input")
        # Each access of the field decodes it again.
        self._text = request.prompt

    @property
    def field(self) -> str:
        """The input that is set, such as `prompt` or `token_ids`."""
        return self._kind or "input"

    async def check(self, model: ServedModel, violations: Violations) -> None:
        """Add violations for an input that is missing, or for token ids that break their rules."""
        request = self._request
        if self._kind is None:
            violations.add("input", None, f"must be one of {', '.join(_INPUTS)}")
        elif self._kind == "token_ids":
            ids = request.token_ids.ids
            violations.need(len(ids) > 0, "token_ids", [], "must not be empty")
            if violations.need_count("token_ids", len(ids), "ids", 0, model.max_text_chars):
                for start in range(0, len(ids), _IDS_AT_ONCE):
                    part = ids[start : start + _IDS_AT_ONCE]
                    if not violations.need_ids("token_ids", part, model.vocab_size, first=start):
                        break
                    if len(ids) > _IDS_AT_ONCE:
                        # The ids of the longest prompts take longer than a stream beside them should wait.
                        await asyncio.sleep(0)

    async def tokenize(self, model: ServedModel, *, may_be_long: bool) -> list[int]:
        """The token ids, none for an option's input. Raises InvalidArgument for text that is too long."""
        request = self._request
        if self._kind == "token_ids":
            num_ids = len(request.token_ids.ids)
            if num_ids >= model.max_model_len and not may_be_long:
                raise too_long("token_ids", str(num_ids), num_ids, model.max_model_len)
            return list(request.token_ids.ids)
        if self._kind != "prompt":
            return []
        if not may_be_long:
            check_fits("prompt", self._text, model)
        check_text("prompt", self._text, model)
        has_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return await model.tokenizer.encode(self._text, add_special_tokens=has_special)

    def parser(self, *, streams: bool) -> MessageParser | None:
        """None: its answers are texts."""
        return None


def check_text(field: str, text: str, model: ServedModel) -> None:
    """Raise InvalidArgument for text that takes too long to tokenize."""
    violations = Violations()
    violations.need_count(field, len(text), "characters", 0, model.max_text_chars)
    violations.raise_if_any()


def check_fits(field: str, text: str, model: ServedModel) -> None:
    """Raise InvalidArgument for text that cannot fit the model, by a lower bound of its number of tokens."""
    at_least = model.tokenizer.min_num_tokens(text)
    if at_least >= model.max_model_len:
        raise too_long(field, f"at least {at_least}", at_least, model.max_model_len)


def too_long(field: str, shown: str, num_tokens: int, limit: int) -> InvalidArgument:
    """The error for a prompt that leaves no room for output."""
    return InvalidArgument(
        f"{field} has {shown} tokens, the model takes {limit} with at least 1 of them for the output",
        field=field,
        reason="CONTEXT_LENGTH_EXCEEDED",
        metadata={"num_tokens": str(num_tokens), "max_model_len": str(limit)},
    )
