"""Messages of the largest size that a frontend reads, and a process that sends them.

Answers `{"name": NAME, "times": N}` with the statuses of N calls, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.rig.lines import Line, answer_lines, send_line
from triptych_kit.process.setup import prepare_process

prepare_process("client")

import grpc.aio  # noqa: E402  Its import reads what the line above has set.

from triptych.common.v1 import sampling_pb2  # noqa: E402
from triptych_kit.channel import open_channel  # noqa: E402
from triptych_kit.limits import PUBLIC  # noqa: E402

MAX_BYTES = PUBLIC.max_receive_bytes
_ANSWER_LIMIT_S = 60.0
_MAX_FIELDS = 131_072
_MAX_NUMBERS = 2 * 1024 * 1024
_SERVICES = "/triptych.api.v1."
_GENERATE, _BATCH = f"{_SERVICES}InferenceService/Generate", f"{_SERVICES}InferenceService/GenerateBatch"
_CHAT, _TEMPLATE = f"{_SERVICES}ChatService/Chat", f"{_SERVICES}TokenizerService/ApplyChatTemplate"
_EMBED = f"{_SERVICES}EmbeddingService/Embed"
_TOKENIZE, _DETOKENIZE = f"{_SERVICES}TokenizerService/Tokenize", f"{_SERVICES}TokenizerService/Detokenize"

_PROMPT, _TOKEN_IDS, _EMBEDS, _SAMPLING, _REQUEST_ID = 2, 3, 4, 5, 6
_STOP, _LOGIT_BIAS, _BAD_WORDS = (
    sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].number
    for name in ("stop", "logit_bias", "bad_words")
)
_MESSAGES, _TOOLS = 2, 3
_UNKNOWN = 500
_HELLO = b"\x08\x03\x12\x03\x0a\x01h"  # a user's message
_BIAS = b"\x08\x05\x15\x00\x00\x80\x3f"
_X = b"\x12\x01x"  # a prompt
_ONE = b"\x48\x01"  # max_tokens
_ONE_TOKEN = b"\x32\x02" + _ONE  # of a chat


@dataclass(frozen=True, slots=True)
class Message:
    """A serialized request of `method`, which answers with a stream or with one message."""

    method: str
    content: bytes


def _varint(number: int) -> bytes:
    content = bytearray()
    while number > 0x7F:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    content.append(number)
    return bytes(content)


def _part(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _filled(field: int, unit: bytes, prefix: bytes = b"") -> bytes:
    """A field of `unit` as often as a message takes it, behind `prefix`."""
    room = MAX_BYTES - len(prefix) - 16
    return prefix + _part(field, unit * (room // len(unit)))


def _sized(field: int, total: int) -> bytes:
    """A text field, so that its message has `total` bytes."""
    return _part(field, b"a" * (total - len(_varint(field << 3)) - len(_varint(total))))


def _many(field: int, unit: Callable[[int], bytes], count: int) -> bytes:
    """`field` so many times, each of the size with which the message has the largest one."""
    size = (MAX_BYTES - 64) // count - 16
    return _part(field, unit(size)) * count


def _text(size: int) -> bytes:
    return b"w" * size


def _message_of(parts: int) -> Callable[[int], bytes]:
    # A user's message of as many parts.
    return lambda size: b"\x08\x03" + _part(2, _part(1, b"h" * min(60, size // parts))) * parts


def _calls(count: int) -> bytes:
    call = _part(3, b"f") + _part(4, b'{"a": [1, 2, 3], "b": {"c": "' + b"d" * 24 + b'"}}')
    return b"\x08\x04" + _part(5, call) * count


def _tools() -> bytes:
    properties = {f"p{number}": {"type": "string"} for number in range(120)}
    schema = json.dumps({"type": "object", "properties": properties}).encode()
    tools = (_part(_TOOLS, _part(1, f"f{index}".encode()) + _part(3, schema)) for index in range(128))
    return _part(_MESSAGES, _HELLO) + b"".join(tools)


def _chat(content: bytes) -> Message:
    return Message(_CHAT, _ONE_TOKEN + content)


MESSAGES: dict[str, Message] = {
    "a text": Message(_GENERATE, _sized(_PROMPT, MAX_BYTES - 8)),
    "a text of two bytes a character": Message(_GENERATE, _filled(_PROMPT, "é".encode())),
    "ids of a byte": Message(_GENERATE, _part(_TOKEN_IDS, _part(1, b"\x05" * (MAX_BYTES - 64)))),
    "as many ids as are parsed": Message(_GENERATE, _part(_TOKEN_IDS, _part(1, b"\x85\x0e" * _MAX_NUMBERS))),
    "ids that are not packed": Message(_GENERATE, _filled(_TOKEN_IDS, b"\x08\x05")),
    "batch of tiny items": Message(_BATCH, _part(1, _X) * ((MAX_BYTES - 64) // 5)),
    "batch of 1,024 items": Message(_BATCH, _many(1, lambda size: _part(12, _text(size)), 1024)),
    "chat of tiny messages": _chat(_part(_MESSAGES, _message_of(1)(1)) * ((MAX_BYTES - 64) // 9)),
    "chat of 16,384 parts": _chat(_part(_MESSAGES, _message_of(4)(1024)) * 4096),
    "chat of 16,384 parts in one message": _chat(_part(_MESSAGES, _message_of(16_384)(16_384 * 60))),
    "chat of 16,384 calls": _chat(_part(_MESSAGES, _calls(16_384))),
    "template of 16,384 calls": Message(_TEMPLATE, _part(_MESSAGES, _calls(4)) * 4096),
    "chat of 128 tools": _chat(_tools()),
    "deep JSON": Message(_CHAT, _ONE_TOKEN + _part(_MESSAGES, _HELLO) + _part(7, _part(5, b"[" * 524_288))),
    "bad words": Message(_GENERATE, _X + _part(_SAMPLING, _many(_BAD_WORDS, _text, 131_000))),
    "stop strings": Message(_GENERATE, _X + _filled(_SAMPLING, _part(_STOP, b"w"))),
    "logit biases": Message(_GENERATE, _filled(_SAMPLING, _part(_LOGIT_BIAS, _BIAS))),
    "inputs of embeddings": Message(_EMBED, _many(2, lambda size: _part(1, _text(size)), 2048)),
    "a text to tokenize": Message(_TOKENIZE, _sized(2, MAX_BYTES - 8)),
    "ids to detokenize": Message(_DETOKENIZE, _part(2, b"\x85\x0e" * _MAX_NUMBERS)),
    "embeddings": Message(
        _GENERATE, _part(_EMBEDS, _part(1, b"\x08\x01\x12\x04\x80\x80\x01\x20" + _sized(3, MAX_BYTES - 64)))
    ),
    "an id": Message(_GENERATE, _X + _sized(_REQUEST_ID, MAX_BYTES - 64)),
    "unknown fields": Message(_GENERATE, _X + _part(_SAMPLING, _ONE) + _many(_UNKNOWN, _text, 131_000)),
    "no message": Message(_GENERATE, b"\xff" * MAX_BYTES),
}


async def _send(channel: grpc.aio.Channel, message: Message) -> str:
    # Also for a method with one answer: on the wire it is a stream of one.
    method = channel.unary_stream(message.method, request_serializer=None, response_deserializer=None)
    call = method(message.content, timeout=_ANSWER_LIMIT_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def _serve(address: str) -> None:
    async with open_channel(address) as channel:

        async def answer(line: Line) -> Line:
            statuses = Counter([await _send(channel, MESSAGES[line["name"]]) for _ in range(line["times"])])
            return {"statuses": dict(statuses)}

        send_line({"num_messages": len(MESSAGES)})
        await answer_lines(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    asyncio.run(_serve(parser.parse_args().address))


if __name__ == "__main__":
    main()
