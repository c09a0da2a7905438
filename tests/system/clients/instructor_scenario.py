# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""instructor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from steps import LONG, MODEL, PROMPT, run
from tower import Tower

MESSAGES = [{"role": "user", "content": PROMPT}]
# These modes leave the form to the model: the embedded one has no sense of it, so the request demands it.
SCHEMA = {"type": "json_schema", "json_schema": {"name": "Tower", "schema": Tower.model_json_schema()}}
CALL = {"tool_choice": "required", "parallel_tool_calls": False}


def created(base: str, mode: instructor.Mode, kind: Any = Tower, **options: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="none", max_retries=0), mode=mode)
    return client.create(
        model=MODEL,
        messages=MESSAGES,
        response_model=kind,
        max_retries=0,
        temperature=0,
        max_tokens=LONG,
        **options,
    )


def tools(base: str) -> None:
    """TOOLS, and its names TOOLS_STRICT and FUNCTIONS"""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.FUNCTIONS):
        assert isinstance(created(base, mode), Tower)


def parallel_tools(base: str) -> None:
    """PARALLEL_TOOLS"""
    (tower,) = created(base, instructor.Mode.PARALLEL_TOOLS, Iterable[Tower], extra_body=CALL)
    assert isinstance(tower, Tower)


def json_schema(base: str) -> None:
    """JSON_SCHEMA, and its name JSON_O1"""
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON_O1):
        assert isinstance(created(base, mode), Tower)


def json_object(base: str) -> None:
    """JSON and MD_JSON, with a `response_format` in `extra_body`"""
    for mode in (instructor.Mode.JSON, instructor.Mode.MD_JSON):
        assert isinstance(created(base, mode, extra_body={"response_format": SCHEMA}), Tower)


def responses_tools(base: str) -> None:
    """RESPONSES_TOOLS, and its name RESPONSES_TOOLS_WITH_INBUILT_TOOLS"""
    for mode in (
        instructor.Mode.RESPONSES_TOOLS,
        instructor.Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
    ):
        assert isinstance(created(base, mode), Tower)


def streams(base: str) -> None:
    """`create_partial` in TOOLS and JSON_SCHEMA: a stream whose last value is whole"""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(
            openai.OpenAI(base_url=base, api_key="none", max_retries=0), mode=mode
        )
        *_, last = client.create_partial(
            model=MODEL, messages=MESSAGES, response_model=Tower, temperature=0, max_tokens=LONG
        )
        Tower.model_validate(last.model_dump())


run(tools, parallel_tools, json_schema, json_object, responses_tools, streams)
