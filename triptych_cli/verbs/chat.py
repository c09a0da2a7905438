"""The verb `chat`: a conversation with a running server, turn by turn."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.api.v1 import chat_message_pb2, chat_pb2_grpc, model_pb2, model_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_cli.client_channel import open_client_channel
from triptych_cli.verbs.chat_answer import ChatAnswer
from triptych_cli.verbs.failures import Target, print_failure
from triptych_kit.errors import ServiceError, rpc_errors_translated

_MODEL_LIMIT_S = 10.0
_COMMANDS = {
    "/help": "lists the commands",
    "/clear": "begins a new conversation",
    "/system": "TEXT sets the system message; without a text there is none",
    "/exit": "ends, as does the end of the input (Ctrl-D); Ctrl-C ends an answer, or clears the line",
}
# A text may begin with a slash, too, such as a path.
_COMMAND = re.compile("/[a-z]+")
_SYSTEM = re.compile(r"/system(?: +(.*))?")


@dataclass(frozen=True, slots=True)
class Chat:
    """Options of a conversation."""

    url: str
    model: str
    sampling: sampling_pb2.SamplingParams
    quick: str | None  # the only message; None: every line of stdin is a turn


def run_chat(chat: Chat) -> int:
    """Run the conversation until the input ends. Returns 0, or 1 with the error on stderr.

    An interrupt ends the running answer, what there is of it stays in the conversation. On a terminal it
    clears a line that is typed, elsewhere it ends the conversation.
    """
    messages: list[chat_message_pb2.ChatMessage] = []
    job_id = _new_job()
    try:
        if chat.quick is None and sys.stdin.isatty():
            print(f"{asyncio.run(_model(chat))}: /help lists the commands, /exit ends")
        for text in _lines() if chat.quick is None else [chat.quick]:
            if text == "/clear":
                messages, job_id = [], _new_job()
                continue
            if (command := _SYSTEM.fullmatch(text)) is not None:
                messages = _with_system(messages, command[1] or "")
                continue
            conversation = [*messages, _message(chat_message_pb2.CHAT_ROLE_USER, text)]
            answer = ChatAnswer(is_terminal=sys.stdout.isatty())
            try:
                asyncio.run(_receive(answer, chat, conversation, job_id))
                messages = [*conversation, answer.message()]
            except KeyboardInterrupt:
                print()
                if answer.content:
                    messages = [*conversation, answer.message(is_whole=False)]
    except ServiceError as error:
        print_failure(error, Target(chat.url, flags={"target": "--url", "model": "--model"}))
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def _lines() -> Iterator[str]:
    """The turns of the user, `/clear` and `/system`; other commands are done here."""
    if sys.stdin.isatty():
        # Makes `input` edit lines, with a history.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while (line := _next_line()) is not None and line != "/exit":
        if line == "/help":
            print("\n".join(f"{command:<8}{help_}" for command, help_ in _COMMANDS.items()))
        elif _COMMAND.fullmatch(line) and line not in _COMMANDS:
            print(f"unknown command {line}: /help lists the commands")
        elif line:
            yield line


def _next_line() -> str | None:
    """A line without white space around it; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        # It may have been meant for an answer that has just ended.
        print()
        return ""
    except EOFError:
        print()
        return None


async def _model(chat: Chat) -> str:
    async with open_client_channel(chat.url) as channel:
        stub: Any = model_pb2_grpc.ModelServiceStub(channel)
        with rpc_errors_translated():
            answer = await stub.GetModel(model_pb2.GetModelRequest(model=chat.model), timeout=_MODEL_LIMIT_S)
    return str(answer.model.name)


def _with_system(
    messages: Sequence[chat_message_pb2.ChatMessage], text: str
) -> list[chat_message_pb2.ChatMessage]:
    """The conversation with another system message; empty: with none."""
    role = chat_message_pb2.CHAT_ROLE_SYSTEM
    first = [_message(role, text)] if text else []
    return [*first, *(message for message in messages if message.role != role)]


def _message(role: chat_message_pb2.ChatRole, text: str) -> chat_message_pb2.ChatMessage:
    return chat_message_pb2.ChatMessage(role=role, parts=[chat_message_pb2.ChatPart(text=text)])


def _new_job() -> str:
    """The id of a conversation, of which engines that serve jobs keep the blocks between two turns."""
    return f"chat-{secrets.token_hex(8)}"


async def _receive(
    answer: ChatAnswer, chat: Chat, messages: Sequence[chat_message_pb2.ChatMessage], job_id: str
) -> None:
    """Receive the next message, and print it as it arrives."""
    request = chat_message_pb2.ChatRequest(
        model=chat.model,
        messages=messages,
        sampling=chat.sampling,
        job_id=job_id,
        is_last_step=chat.quick is not None,
    )
    async with open_client_channel(chat.url) as channel:
        stub: Any = chat_pb2_grpc.ChatServiceStub(channel)
        call = stub.Chat(request)
        try:
            with rpc_errors_translated():
                async for response in call:
                    print(answer.take(response.delta), end="", flush=True)
            print(answer.end(), end="", flush=True)
        finally:
            # An interrupted answer must not leave the terminal dimmed.
            print(answer.brighten(), end="", flush=True)
            call.cancel()
