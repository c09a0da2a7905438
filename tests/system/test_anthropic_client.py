"""The unmodified `anthropic` package of PyPI, alone in its environment: the texts are those of gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.test_openai_client import environment_with, seen_by, servers

pytestmark = pytest.mark.network

SCENARIO = Path(__file__).with_name("anthropic_scenario.py")


async def test_the_anthropic_package_gets_messages_streams_and_calls(tmp_path):
    python = environment_with("anthropic", folder=tmp_path / "venv")
    async with servers(tmp_path) as expected:
        seen = await seen_by(str(python), str(SCENARIO), expected.base.removesuffix("/v1"))
    assert seen["text"] == expected.greedy_text
    assert set(seen["texts"][:4]) == {expected.greedy_text}
    assert len(set(seen["texts"][4:])) == 4
    assert len({word for text in seen["texts"] for word in text.split()}) >= 20
    assert seen["kinds"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert seen["stopped"] == ["stop_sequence", True]
    assert [call["city"] in ("Paris", "Pisa") for call in seen["calls"]] == [True, True]
    assert seen["errors"] == [
        "NotFoundError not_found_error with an id",
        "BadRequestError invalid_request_error with an id",
    ]
