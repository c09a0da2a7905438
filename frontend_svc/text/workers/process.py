"""Main of a text worker's process: tokenizes and renders, one task after the other, until its pipe is closed.

Started by `TextWorkers` as `python -m frontend_svc.text.workers.process`, with frames on its standard input
and output. It may be killed at any time: by its frontend or, if that is gone, by its own alarm. Imports
little: neither grpc nor a service. Knows no requests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from frontend_svc.text.tokenize.id_column import ID_BYTES, id_column
from frontend_svc.text.tokenize.text_files import TextRefused
from frontend_svc.text.workers.frames import Frame, FrameReader, pack_head, unpack_numbers
from triptych_kit.process.setup import die_with_parent, set_title
from triptych_kit.process.stacks import write_when_asked

if TYPE_CHECKING:
    from frontend_svc.text.chat.template import ChatTemplate

_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STATISTICS = Path("/proc/self/statm")
_DATA_FIELD = 5
_READ_BYTES = 1024 * 1024
# The frontend kills first; this ends a worker whose frontend is gone.
_ALARM_MARGIN_S = 1.0
_RENDER_BYTES = 256 * 1024 * 1024
# A character takes at most four bytes, and a few copies exist while text is assembled.
_RENDER_BYTES_PER_CHAR = 16
_PRIVATE_USE = range(0xE000, 0xF900)


class LoadedText:
    """One model's files, parsed. The chat template is compiled at its first use."""

    def __init__(self, tokenizer: bytes, tokenizer_config: bytes, chat_template: bytes) -> None:
        with _reporting():
            self._tokenizer = Tokenizer.from_buffer(tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = tokenizer_config
        self._template_text = chat_template
        self._template: ChatTemplate | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """The token ids of `text`, packed."""
        with _reporting("the text cannot be tokenized"):
            return id_column(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> tuple[dict[str, object], bytes]:
        """Ids, start and end offsets, each packed, then all tokens as one text with a separator."""
        with _reporting("the text cannot be tokenized"):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        starts, ends = zip(*encoding.offsets, strict=True) if encoding.offsets else ((), ())
        used = set().union(*encoding.tokens)
        separator = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
        if separator is None:
            raise TextRefused("the text has every character of the private use area")
        numbers = id_column(encoding.ids) + id_column(starts) + id_column(ends)
        header: dict[str, object] = {"num_tokens": len(encoding.ids), "separator": separator}
        return header, numbers + separator.join(encoding.tokens).encode()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        with _reporting("the tokens have no text"):
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render(self, conversation: bytes, *, max_chars: int) -> str:
        """The prompt of a conversation given as JSON."""
        with extra_memory(_RENDER_BYTES + _RENDER_BYTES_PER_CHAR * max_chars):
            return self._read_template().render(_read_json(conversation), max_chars=max_chars)

    def encode_prompt(self, prompt: str) -> bytes:
        """The token ids of a rendered prompt, packed. It already has its special tokens from the template."""
        return self.encode(prompt, add_special_tokens=False)

    def _read_template(self) -> ChatTemplate:
        if self._template is None:
            # Imported at first use: a worker without chat requests needs no Jinja.
            from frontend_svc.text.chat.template import (
                CHATML_FALLBACK,
                CHATML_TOKENS,
                PLAIN_FALLBACK,
                ChatTemplate,
                read_special_tokens,
                read_templates,
            )

            config = json.loads(self._config) if self._config else {}
            templates = read_templates(config, self._template_text.decode())
            if not templates:
                has_chatml = all(self._tokenizer.token_to_id(token) is not None for token in CHATML_TOKENS)
                templates = {"default": CHATML_FALLBACK if has_chatml else PLAIN_FALLBACK}
            self._template = ChatTemplate(templates, read_special_tokens(config))
        return self._template


@contextlib.contextmanager
def extra_memory(num_bytes: int) -> Iterator[None]:
    """Within the block, the process's data may grow by `num_bytes`; beyond that, MemoryError is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + num_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    try:
        fields = _STATISTICS.read_text().split()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(fields[_DATA_FIELD]) * resource.getpagesize()


def serve(input_fd: int, output_fd: int) -> None:
    """Answer every frame of `input_fd` on `output_fd`, until one of them is closed."""
    reader = FrameReader()
    loaded: dict[str, LoadedText] = {}
    while (frame := _receive(reader, input_fd)) is not None:
        signal.setitimer(signal.ITIMER_REAL, frame.number("limit_s") + _ALARM_MARGIN_S)
        is_sound = True
        try:
            header, body = _answer(frame, loaded)
        except TextRefused as error:
            header, body = {"refused": str(error), "field": error.field}, b""
            # A panic, which is no Exception, leaves the library in an undefined state.
            is_sound = isinstance(error.__cause__, Exception | None)
        try:
            _send(output_fd, pack_head(header, len(body)))
            _send(output_fd, body)
        except BrokenPipeError:
            return
        if not is_sound:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(frame: Frame, loaded: dict[str, LoadedText]) -> tuple[dict[str, object], bytes]:
    verb, key = frame.text("verb"), frame.text("key")
    if verb == "load":
        tokenizer, rest = frame.split(int(frame.number("num_tokenizer_bytes")))
        split_at = int(frame.number("num_config_bytes"))
        loaded.pop(frame.text("forgotten"), None)
        loaded[key] = LoadedText(tokenizer, rest[:split_at], rest[split_at:])
        return {}, b""
    if verb == "ready":
        return {}, b""
    if verb == "check":
        return _check_message(frame), b""
    if verb == "check_json":
        return _check_json(frame), b""
    text = loaded[key]
    if verb == "encode":
        return {}, text.encode(frame.body.decode(), add_special_tokens=frame.is_on("add_special_tokens"))
    if verb == "encode_all":
        return _encode_all(text, frame)
    if verb == "encode_with_offsets":
        return text.encode_with_offsets(
            frame.body.decode(), add_special_tokens=frame.is_on("add_special_tokens")
        )
    if verb == "decode":
        token_ids = unpack_numbers(frame.body)
        return {}, text.decode(token_ids, skip_special_tokens=frame.is_on("skip_special_tokens")).encode()
    prompt = text.render(frame.body, max_chars=int(frame.number("max_chars")))
    try:
        content = prompt.encode()
    except UnicodeEncodeError as error:
        raise TextRefused("the prompt has half a character (a lone surrogate)") from error
    if verb == "render_and_encode":
        return {"num_text_bytes": len(content)}, content + text.encode_prompt(prompt)
    return {"num_text_bytes": len(content)}, content


def _encode_all(text: LoadedText, frame: Frame) -> tuple[dict[str, object], bytes]:
    fields = frame.header.get("fields")
    columns, rest = [], frame.body
    for index, size in enumerate(frame.numbers("sizes")):
        content, rest = rest[:size], rest[size:]
        try:
            columns.append(
                text.encode(content.decode(), add_special_tokens=frame.is_on("add_special_tokens"))
            )
        except TextRefused as error:
            error.field = str(fields[index]) if isinstance(fields, list) and index < len(fields) else ""
            raise
    return {"counts": [len(column) // ID_BYTES for column in columns]}, b"".join(columns)


def _check_message(frame: Frame) -> dict[str, object]:
    # Imported at first use: a worker without large messages needs no protobuf.
    from google.protobuf import descriptor_pool

    from triptych_kit.wire_check import MessageLimits, WireError, check_wire

    importlib.import_module(frame.text("module"))
    descriptor = descriptor_pool.Default().FindMessageTypeByName(frame.text("message"))
    limits = MessageLimits(int(frame.number("max_fields")), int(frame.number("max_numbers")))
    try:
        check_wire(frame.body, descriptor, limits)
    except WireError as error:
        return {"refused": str(error), "reason": error.reason, "violations": error.violations}
    return {}


def _check_json(frame: Frame) -> dict[str, object]:
    refusal = _excess_of(
        frame.body,
        max_fields=int(frame.number("max_fields")),
        max_numbers=int(frame.number("max_numbers")),
    )
    return {"refused": refusal, "reason": "TOO_MANY_VALUES"} if refusal else {}


def _excess_of(content: bytes, *, max_fields: int, max_numbers: int) -> str:
    """The excess of a JSON text over its limits before it is parsed; empty if there is none.

    As objects it may take fifty times its bytes. Fields are texts, objects and lists; numbers are all other
    values. Does not say whether it is JSON.
    """
    # No more are replaced than may be there, so that a text of tiny strings takes no longer.
    rest, num_texts = _JSON_STRING.subn(b"", content, max_fields + 1)
    num_fields = num_texts + rest.count(b"{") + rest.count(b"[")
    if num_fields > max_fields:
        return f"the body has more than {max_fields} texts, objects and lists"
    # Each but the last of an object or a list is followed by a comma.
    if rest.count(b",") > max_fields + max_numbers:
        return f"the body has more than {max_numbers} numbers"
    return ""


def _read_json(content: bytes) -> dict[str, object]:
    try:
        value: dict[str, object] = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TextRefused(f"the conversation cannot be read: {error}") from error
    return value


@contextlib.contextmanager
def _reporting(what: str = "") -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # The library raises Exception, and panics that are BaseException.
        # Some errors, as of memory, have no text.
        cause = str(error) or type(error).__name__
        raise TextRefused(f"{what}: {cause}" if what else cause) from error


def _receive(reader: FrameReader, fd: int) -> Frame | None:
    while (frame := reader.take()) is None:
        data = os.read(fd, _READ_BYTES)
        if not data:
            return None
        reader.feed(data)
    return frame


def _send(fd: int, content: bytes) -> None:
    with memoryview(content) as view:
        num_sent = 0
        while num_sent < len(view):
            num_sent += os.write(fd, view[num_sent:])


def main() -> int:
    """Serve the frontend that started this process, until it closes the pipe. Returns the exit code."""
    set_title("text-worker")
    # A busy worker would otherwise notice the end of its frontend only after the task.
    die_with_parent(os.getppid())
    # A terminal signals the whole process group; the frontend decides when its workers end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    write_when_asked()
    output_fd = os.dup(1)
    # Output printed by a library must not get between frames.
    os.dup2(2, 1)
    serve(0, output_fd)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
