"""Log lines of a service, as text or JSON, with the request and trace they belong to."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

_NO_FIELDS: Mapping[str, str] = MappingProxyType({})

_fields: ContextVar[Mapping[str, str]] = ContextVar("triptych_log_fields", default=_NO_FIELDS)

# Attributes of every record; the rest came through `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# The beginning of a message below a warning in either format.
_BELOW_WARNING = re.compile(r'\d\d:\d\d:\d\d\.\d{3} (INFO|DEBUG) |\{"ts": "[^"]*", "level": "(info|debug)"')


def is_below_warning(line: str) -> bool:
    """Whether a line of a service's log is a message of a level below warning."""
    return _BELOW_WARNING.match(line) is not None


def bind_log_fields(**fields: str) -> None:
    """Add fields, e.g. request_id and trace_id, to every later log line of this task or thread."""
    _fields.set({**_fields.get(), **fields})


def log_fields() -> Mapping[str, str]:
    """The fields bound in this task or thread."""
    return _fields.get()


def setup_logs(
    service: str, *, instance: str, log_format: str, log_level: str, stream: TextIO | None = None
) -> None:
    """Send all log lines of this process to `stream` (stderr), replacing the handler of an earlier call."""
    if log_level not in LOG_LEVELS:
        raise ValueError(f"log level {log_level!r} is not one of {', '.join(LOG_LEVELS)}")
    if log_format not in LOG_FORMATS:
        raise ValueError(f"log format {log_format!r} is not one of {', '.join(LOG_FORMATS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name("triptych")
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(service, instance))
    root = logging.getLogger()
    for earlier in [one for one in root.handlers if one.get_name() == "triptych"]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    set_log_level(log_level)


def set_log_level(log_level: str) -> None:
    """Change the level of all loggers. Libraries stay at warning or above unless debug is requested."""
    level = logging.getLevelNamesMapping()[log_level.upper()]
    logging.getLogger().setLevel(level)
    for library in ("asyncio", "grpc", "urllib3", "transformers", "opentelemetry"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))


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
