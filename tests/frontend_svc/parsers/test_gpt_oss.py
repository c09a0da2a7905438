"""The channels of gpt-oss."""

from __future__ import annotations

import pytest

from frontend_svc.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from tests.frontend_svc.parsers.transcripts import Message, calls, parse, run

ANALYSIS = "<|channel|>analysis<|message|>The user asks.\n\nI look.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 4.\n"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris <|end"}'
)
WEATHER = ("get_weather", '{"city": "Paris <|end"}')


@pytest.mark.parametrize("ending", ["", "<|return|>", "<|end|>"])
def test_analysis_is_reasoning_and_final_is_content(ending):
    message = parse(GPT_OSS, ANALYSIS + FINAL + ending)
    assert message == Message("It is 4.\n", "The user asks.\n\nI look.")


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("ending", ["", "<|call|>", "\n<|call|>"])
@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL.replace(" <|constrain|>json", "<|constrain|>json"),
        CALL.replace(" <|constrain|>json", ""),
        CALL.replace(" <|constrain|>json", " json"),
        CALL.replace(
            "<|channel|>commentary to=functions.get_weather", " to=functions.get_weather<|channel|>commentary"
        ),
    ],
)
def test_a_call_is_parsed_for_every_form_of_its_header(call, ending, is_streamed):
    message = parse(GPT_OSS, ANALYSIS + call + ending, streams_arguments=is_streamed)
    assert message.calls == calls(WEATHER)
    assert (message.content, message.reasoning) == ("", "The user asks.\n\nI look.")


def test_commentary_without_a_recipient_is_content():
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    message = parse(GPT_OSS, f"{ANALYSIS}{preamble}{CALL}<|call|>{CALL}")
    assert message.content == "I look it up."
    assert message.calls == calls(WEATHER, WEATHER)


def test_messages_of_one_kind_are_joined_by_a_line_break():
    again = "<|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    message = parse(GPT_OSS, ANALYSIS + preamble + again + FINAL)
    assert message == Message("I look.\nIt is 4.\n", "The user asks.\n\nI look.\nMore.")


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("get_weather", "get_lost"),
        CALL.replace("functions.get_weather", "browser.search"),
        CALL.replace("{", "[", 1),
        CALL[:40],
        "<|channel|>",
        "<|channel|>" + "x" * 600 + "<|message|>y",
        "<|message|>y",
        "<|channel|>ana<b>lysis<|message|>y",
        "plain <| text\n",
        "<|chan",
    ],
)
def test_what_is_no_message_is_content_word_for_word(text, is_streamed):
    message = parse(GPT_OSS, text, streams_arguments=is_streamed)
    assert message == Message(text)


def test_a_call_that_breaks_is_content_and_the_answer_goes_on():
    message = parse(GPT_OSS, CALL[:-1] + ", oops}<|call|>" + FINAL, streams_arguments=False)
    assert message.calls == []
    assert message.content == CALL[:-1] + ", oops}" + "\nIt is 4.\n"


def test_text_without_a_header_is_content():
    assert parse(GPT_OSS, "It is 4.<|return|>") == Message("It is 4.")
    assert parse(GPT_OSS, "<|start|>assistant<|message|>It is 4.") == Message("It is 4.")


def test_without_tools_a_call_stays_text():
    text = ANALYSIS + CALL + "<|call|>"
    message = run(GPT_OSS_REASONING.open(""), text)
    assert message == run(GPT_OSS_REASONING.open(""), [text])
    assert message == Message(CALL, "The user asks.\n\nI look.")
    assert GPT_OSS_REASONING.closing("<|start|>assistant") == ""


def test_without_parallel_calls_only_the_first_is_emitted():
    message = parse(GPT_OSS, CALL + "<|call|>" + CALL + "<|call|>", is_parallel=False)
    assert (message.content, message.calls) == ("", calls(WEATHER))


def test_a_forced_call_goes_on_behind_its_prefix():
    named = parse(GPT_OSS, '{"a": 1}', forced_prefix=GPT_OSS.forced_prefix("get_time"))
    rest = 'get_time <|constrain|>json<|message|>{"a": 1}<|call|>'
    unnamed = parse(GPT_OSS, rest, forced_prefix=GPT_OSS.forced_prefix(None))
    assert named.calls == unnamed.calls == calls(("get_time", '{"a": 1}'))
