# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""instructor."""

from __future__ import annotations

import instructor
import openai
from steps import LONG, MODEL, PROMPT, Tower, run


def answer(base: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": PROMPT}]
    tower = client.create(
        model=MODEL, messages=messages, response_model=Tower, max_retries=0, temperature=0, max_tokens=LONG
    )
    assert isinstance(tower, Tower)


def tools(base: str) -> None:
    """TOOLS"""
    answer(base, instructor.Mode.TOOLS)


def strict_tools(base: str) -> None:
    """TOOLS_STRICT"""
    answer(base, instructor.Mode.TOOLS_STRICT)


def json_schema(base: str) -> None:
    """JSON_SCHEMA"""
    answer(base, instructor.Mode.JSON_SCHEMA)


def responses_tools(base: str) -> None:
    """RESPONSES_TOOLS"""
    answer(base, instructor.Mode.RESPONSES_TOOLS)


run(tools, strict_tools, json_schema, responses_tools)
