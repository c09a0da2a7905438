from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from service_kit.logs import bind_log_fields, log_fields, set_log_level, setup_logs

logger = logging.getLogger("tests.logs")


@pytest.fixture
def log_to() -> Iterator[Callable[[str, str], io.StringIO]]:
    """Sets up logs into a text; what was set up before is put back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def setup(log_format: str, log_level: str) -> io.StringIO:
        stream = io.StringIO()
        setup_logs("engine", instance="1", log_format=log_format, log_level=log_level, stream=stream)
        return stream

    yield setup
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_json_lines_have_all_fields(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("json", "info")
    bind_log_fields(request_id="r1", trace_id="t1")
    logger.info("request finished", extra={"reason": "stop", "num_output_tokens": 3})
    (line,) = lines(stream)
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "tests.logs",
        "service": "engine",
        "instance": "1",
        "msg": "request finished",
        "request_id": "r1",
        "trace_id": "t1",
        "reason": "stop",
        "num_output_tokens": 3,
    }


def test_a_traceback_stays_in_its_line(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("json", "info")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("incident")
    (line,) = lines(stream)
    assert "RuntimeError: broken" in line["exception"]


async def test_text_lines_are_for_people(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("text", "info")
    bind_log_fields(request_id="r1", trace_id="")
    logger.info("aborted", extra={"cause": "client left\nforged line", "step": 3})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('INFO    engine[1] aborted request_id=r1 cause="client left\\nforged line" step=3')


def test_a_second_setup_replaces_the_first(log_to: Callable[[str, str], io.StringIO]) -> None:
    first, second = log_to("json", "info"), log_to("json", "info")
    logger.info("once")
    assert (len(lines(first)), len(lines(second))) == (0, 1)


def test_the_level_can_change_while_running(log_to: Callable[[str, str], io.StringIO]) -> None:
    stream = log_to("json", "warning")
    logger.info("not shown")
    set_log_level("debug")
    logger.debug("shown")
    assert [line["msg"] for line in lines(stream)] == ["shown"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud' is not one of debug, info, warning, error"):
        setup_logs("engine", instance="0", log_format="text", log_level="loud")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml' is not one of text, json"):
        setup_logs("engine", instance="0", log_format="xml", log_level="info")


async def test_bound_fields_add_up() -> None:
    bind_log_fields(request_id="r1")
    bind_log_fields(trace_id="t1", request_id="r2")
    assert dict(log_fields()) == {"request_id": "r2", "trace_id": "t1"}
