"""Which failures of an exporter reach the log."""

from __future__ import annotations

import logging

import pytest
from grpc import StatusCode

from triptych_kit.telemetry.otlp_failures import FirstFailures

FAILED = "Failed to export %s to %s, error code: %s"


def test_a_failure_is_logged_once_until_an_export_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    # Not the logger of the exporter, which drops repeated messages by itself for some seconds.
    logger = logging.getLogger("tests.exporter")
    failures = FirstFailures("traces")
    logger.addFilter(failures)
    for code in (StatusCode.UNAVAILABLE, StatusCode.UNAVAILABLE, StatusCode.UNIMPLEMENTED):
        logger.error(FAILED, "traces", "collector", code)
    logger.error(FAILED, "metrics", "collector", StatusCode.UNAVAILABLE)
    logger.error(FAILED, "metrics", "collector", StatusCode.UNAVAILABLE)
    logger.error("something else")
    assert len(caplog.records) == 5
    failures.forget()
    logger.error(FAILED, "traces", "collector", StatusCode.UNAVAILABLE)
    assert len(caplog.records) == 6
    failures.close()
    logger.removeFilter(failures)
