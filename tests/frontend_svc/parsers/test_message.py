"""Reasoning and tool calls of one message together."""

from __future__ import annotations

from frontend_svc.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from frontend_svc.parsers.hermes import HERMES
from frontend_svc.parsers.message import MessageParser, open_message
from frontend_svc.parsers.parser import ContentPiece, ReasoningPiece, ToolCallPiece
from frontend_svc.parsers.think import THINK
from tests.frontend_svc.parsers.transcripts import Message, calls, rules, run

CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
TEXT = f"<think>\nI call {CALL}\n</think>\n\nMoment.\n{CALL}"
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.get_time<|message|>{}"
)


def parse(parser: MessageParser, text: str) -> Message:
    return run(parser, text)


def test_calls_are_found_behind_the_reasoning_only():
    parser = open_message(HERMES, THINK, prompt="", rules=rules())
    message = parse(parser, TEXT)
    assert message == Message("Moment.", f"I call {CALL}", calls(("get_time", "{}")))
    assert parser.num_calls == 1


def test_pieces_come_in_the_order_of_the_text():
    parser = open_message(HERMES, THINK, prompt="", rules=rules())
    assert parser.feed(f"<think>Hm.</think>So.{CALL}") == [
        ReasoningPiece("Hm."),
        ContentPiece("So."),
        ToolCallPiece(0, "c0", "get_time", "{}"),
    ]
    assert parser.finish() == []


def test_without_tools_calls_are_content():
    parser = open_message(HERMES, THINK, prompt="", rules=rules(tool_names=frozenset()))
    assert parse(parser, TEXT) == Message(f"Moment.\n{CALL}", f"I call {CALL}")
    assert parser.num_calls == 0


def test_without_parsers_everything_is_content():
    parser = open_message(None, None, prompt="<think>", rules=rules())
    assert parse(parser, TEXT) == Message(TEXT)
    assert parser.feed("") == []


def test_a_prompt_that_opened_reasoning_is_heeded():
    parser = open_message(None, THINK, prompt="<think>\n", rules=rules())
    assert parse(parser, "Hm.\n</think>\n\nSo.") == Message("So.", "Hm.")


def test_there_is_no_reasoning_in_a_forced_call():
    prefix = HERMES.forced_prefix("get_time")
    parser = open_message(HERMES, THINK, prompt="<think>\n", rules=rules(), forced_prefix=prefix)
    assert parse(parser, "{}}\n</tool_call>") == Message("", "", calls(("get_time", "{}")))


def test_channels_are_taken_apart_once_with_tools_and_without():
    parser = open_message(GPT_OSS, GPT_OSS_REASONING, prompt="", rules=rules())
    assert parse(parser, HARMONY) == Message("", "Hm.", calls(("get_time", "{}")))
    parser = open_message(GPT_OSS, GPT_OSS_REASONING, prompt="", rules=rules(tool_names=frozenset()))
    assert parse(parser, HARMONY).reasoning == "Hm."
