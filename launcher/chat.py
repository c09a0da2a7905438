"""The verb `chat`: a conversation with a running server, turn by turn."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from launcher.complete import print_failure
from launcher.generation import Generation
from service_kit.channel import open_channel
from service_kit.errors import ServiceError, from_rpc_error
from triptych.api.v1 import chat_message_pb2, generate_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from triptych.common.v1 import sampling_pb2

_ROLES = {
    "user": chat_message_pb2.CHAT_ROLE_USER,
    "assistant": chat_message_pb2.CHAT_ROLE_ASSISTANT,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str  # user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Whom to talk to, and how."""

    url: str
    model: str
    sampling: sampling_pb2.SamplingParams
    quick: str | None  # the only thing to say; without it, every line of stdin is a turn


def run_chat(chat: Chat) -> int:
    """Talk until the input ends. Returns 0, or 1 after it has said on stderr what went wrong.

    An interrupt ends the answer that is being given, and the conversation where none is.
    """
    turns: list[Turn] = []
    try:
        for said in _lines() if chat.quick is None else [chat.quick]:
            asked = [*turns, Turn("user", said)]
            try:
                turns = [*asked, Turn("assistant", asyncio.run(_answer(chat, asked)))]
            except KeyboardInterrupt:
                print()
    except ServiceError as error:
        print_failure(error)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def embedded_form(turns: Iterable[Turn]) -> str:
    """The conversation in the form the embedded model was trained on."""
    return "".join(f"<|{turn.role}|>{turn.content.strip()}<|end|>" for turn in turns) + "<|assistant|>"


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


async def _answer(chat: Chat, turns: list[Turn]) -> str:
    async with open_channel(chat.url, profile="public") as channel:
        request = generate_pb2.GenerateRequest(
            model=chat.model,
            prompt=await _prompt(channel, chat.model, turns),
            sampling=chat.sampling,
            # The form of a conversation has its special tokens already.
            add_special_tokens=False,
        )
        generation = Generation(channel, request)
        async for response in generation.events():
            print(response.delta.text, end="", flush=True)
        print()
        return generation.answer.text


async def _prompt(channel: grpc.aio.Channel, model: str, turns: list[Turn]) -> str:
    """The conversation by the model's own template, or in the embedded model's form where none is applied."""
    stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    request = tokenizer_pb2.ApplyChatTemplateRequest(model=model)
    for turn in turns:
        message = request.messages.add(role=_ROLES[turn.role])
        message.parts.add(text=turn.content)
    try:
        answer = await stub.ApplyChatTemplate(request, timeout=10)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return embedded_form(turns)
        raise from_rpc_error(error) from error
    return str(answer.prompt)
