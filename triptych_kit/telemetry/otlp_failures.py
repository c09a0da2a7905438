"""Failures of an OTLP exporter in the log: each kind once, until an export succeeds again.

A collector may be away for days, or take traces and answer UNIMPLEMENTED to metrics. The exporter itself
logs every attempt.
"""

from __future__ import annotations

import logging

from grpc import StatusCode

_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.grpc.exporter"


class FirstFailures(logging.Filter):
    """Log filter that passes each kind of OTLP export failure once. signal: traces or metrics."""

    def __init__(self, signal: str) -> None:
        super().__init__()
        self._signal = signal
        self._logged: set[tuple[str, StatusCode]] = set()
        logging.getLogger(_EXPORTER_LOG).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if self._signal not in arguments:
            return True
        code = next((value for value in arguments if isinstance(value, StatusCode)), StatusCode.UNKNOWN)
        if (record.msg, code) in self._logged:
            return False
        self._logged.add((record.msg, code))
        return True

    def forget(self) -> None:
        """Reset after a successful export: the next failure of each kind passes again."""
        self._logged.clear()

    def close(self) -> None:
        logging.getLogger(_EXPORTER_LOG).removeFilter(self)
