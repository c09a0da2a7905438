"""Log lines of a service, as text or JSON, with the request and trace they belong to.

What cannot be written is dropped: the log never changes what the service does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import select
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

from triptych_kit.config import read_environment

LOG_FORMATS = ("auto", "text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
AUDIT_LOGGER = "triptych.audit"
_GRPC_LOGGER = "grpc._cython.cygrpc"

# Set for a child process whose output is copied to a terminal.
COPIED_TO_TERMINAL = "TRIPTYCH_COPIED_TO_TERMINAL"

_NO_FIELDS: Mapping[str, str] = MappingProxyType({})

_fields: ContextVar[Mapping[str, str]] = ContextVar("triptych_log_fields", default=_NO_FIELDS)

# Attributes of every record; the rest came through `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# The beginning of a message below a warning in either format.
_BELOW_WARNING = re.compile(r'\d\d:\d\d:\d\d\.\d{3} (INFO|DEBUG) |\{"ts": "[^"]*", "level": "(info|debug)"')


def is_below_warning(line: str) -> bool:
    """Whether a line of a service's log is a message of a level below warning."""
    return _BELOW_WARNING.match(line) is not None


# The kernel takes as much at once from a process that it has reported a pipe as writable to.
_MAX_WRITE_BYTES = select.PIPE_BUF
# Time for a slow reader; one that does not read holds up one line for it.
_PATIENCE_MS = 50
# A bar may be drawn in the line of the cursor.
ERASE_LINE = "\r\x1b[2K"


class LogStream:
    """Writes to a stream, and drops what its reader does not take: writing neither fails nor waits for long.

    The reader of a pipe may be gone or not read, a disk may be full, a terminal may be closed or halted.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_stalled = False

    def write(self, text: str) -> None:
        """Write whole lines."""
        if self._stream is None:
            return
        # ValueError: the stream is closed, or has no file descriptor.
        with contextlib.suppress(OSError, ValueError):
            try:
                fd = self._stream.fileno()
            except OSError:
                self._stream.write(text)
                return
            self._stream.flush()
            if os.isatty(fd):
                text = ERASE_LINE + text
            self._write_all(fd, text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Nothing is buffered."""

    def _write_all(self, fd: int, data: bytes) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while data:
            self._is_stalled = not poll.poll(0 if self._is_stalled else _PATIENCE_MS)
            if self._is_stalled:
                return
            data = data[os.write(fd, data[:_MAX_WRITE_BYTES]) :]


@functools.lru_cache(maxsize=1)
def _log_stream(stream: TextIO | None) -> LogStream:
    return LogStream(stream)


def write_log_line(line: str) -> None:
    """Write a line to stderr as it is, if it can be written."""
    _log_stream(sys.stderr).write(f"{line}\n")


def bind_log_fields(**fields: str) -> None:
    """Add fields, e.g. request_id and trace_id, to every later log line of this task or thread."""
    _fields.set({**_fields.get(), **fields})


def log_fields() -> Mapping[str, str]:
    """The fields bound in this task or thread."""
    return _fields.get()


def setup_logs(
    service: str, *, instance: str, log_format: str, log_level: str, stream: TextIO | None = None
) -> None:
    """Send all log lines of this process to `stream` (stderr), replacing the handler of an earlier call.

    The format `auto` is text on a terminal and JSON elsewhere.
    """
    if log_level not in LOG_LEVELS:
        raise ValueError(f"log level {log_level!r} is not one of {', '.join(LOG_LEVELS)}")
    if log_format not in LOG_FORMATS:
        raise ValueError(f"log format {log_format!r} is not one of {', '.join(LOG_FORMATS)}")
    handler = logging.StreamHandler(LogStream(stream) if stream else _log_stream(sys.stderr))
    handler.set_name("triptych")
    if log_format == "auto":
        log_format = "text" if is_shown_on_terminal(stream or sys.stderr) else "json"
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(service, instance))
    root = logging.getLogger()
    for earlier in [one for one in root.handlers if one.get_name() == "triptych"]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    logging.getLogger(_GRPC_LOGGER).addFilter(_has_no_metadata)
    set_log_level(log_level)


def _has_no_metadata(record: logging.LogRecord) -> bool:
    # gRPC logs metadata that is not UTF-8, which may be a key, before anyone is asked who calls.
    return not str(record.msg).startswith("Invalid encoding")


def is_shown_on_terminal(stream: TextIO | None) -> bool:
    """Whether people read it as it is written: it is a terminal, or a parent process copies it to one."""
    if stream is None:
        return False
    # ValueError: it is closed.
    with contextlib.suppress(ValueError):
        return stream.isatty() or bool(read_environment(COPIED_TO_TERMINAL))
    return False


def set_log_level(log_level: str) -> None:
    """Change the level of all loggers. Libraries stay at warning or above unless debug is requested."""
    level = logging.getLevelNamesMapping()[log_level.upper()]
    logging.getLogger().setLevel(level)
    for library in ("asyncio", "grpc", "urllib3", "transformers", "opentelemetry"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    # An admin who sets the level must not be able to hide what follows.
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, service, instance, msg, bound and extra fields."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._service = service
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "service": self._service,
            "instance": self._instance,
            "msg": record.getMessage(),
        }
        line |= _fields.get()
        line |= _extra(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _printable(json.dumps(line, default=str, ensure_ascii=False))


class TextFormatter(logging.Formatter):
    """One readable line: time, level, service and instance, message, then fields as key=value."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._process = f"{service}[{instance}]"

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = {**_fields.get(), **_extra(record)}
        shown = "".join(f" {key}={_shown(value)}" for key, value in fields.items() if value != "")
        line = f"{time} {record.levelname:<7} {self._process} {record.getMessage()}{shown}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return _printable(line)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _printable(line: str) -> str:
    # A client's text must not act on a terminal. Only texts of exceptions have line breaks here.
    if line.isprintable():
        return line
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in line)


def _shown(value: object) -> str:
    # Escaped, so that a client's value cannot break the line.
    text = str(value)
    return (
        json.dumps(text, ensure_ascii=False)
        if not text or any(c.isspace() or c == '"' for c in text)
        else text
    )
