"""DeepSeek: calls between special tokens, with and without a fence."""

from __future__ import annotations

import pytest

from frontend_svc.parsers.deepseek import DEEPSEEK, DEEPSEEK_V31
from tests.frontend_svc.parsers.transcripts import calls, parse

WEATHER = ("get_weather", '{"city": "杭州", "note": "``` <｜tool▁call▁end｜>"}')
TIME = ("get_time", "{}")
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("write", [v3, v31])
@pytest.mark.parametrize("between", ["", "\n"])
def test_calls_are_emitted_in_order_and_text_around_them_is_content(write, between, is_streamed):
    text = f"先看看。\n\n{BEGIN}{write(*WEATHER)}{between}{write(*TIME)}{END}"
    message = parse(DEEPSEEK, text, streams_arguments=is_streamed)
    assert (message.content, message.calls) == ("先看看。", calls(WEATHER, TIME))
    message = parse(DEEPSEEK, f"{text}\nb", streams_arguments=is_streamed)
    assert (message.content, message.calls) == ("先看看。\nb", calls(WEATHER, TIME))


def test_a_tool_may_be_called_function():
    message = parse(DEEPSEEK, BEGIN + v31("function", "{}") + END, tool_names=frozenset({"function"}))
    assert message.calls == calls(("function", "{}"))


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        BEGIN,
        BEGIN + END,
        BEGIN + v3("get_lost", "{}") + END,
        BEGIN + v31("get_lost", "{}") + END,
        BEGIN + v3("get_time", "[]") + END,
        BEGIN + v3("get_time", "{}").replace("json", "yaml") + END,
        BEGIN + v3("get_time", "{}").replace("function", "func") + END,
        BEGIN + v3("get_time", "{}")[:40],
        BEGIN[:-3],
        END,
    ],
)
def test_what_is_no_call_is_content_word_for_word(text, is_streamed):
    message = parse(DEEPSEEK, f"a {text}", streams_arguments=is_streamed)
    assert (message.content, message.calls) == (f"a {text}", [])


def test_a_broken_call_between_whole_ones_is_content_and_no_marker_around_them_leaks():
    broken = v31("get_time", "{oops}")
    message = parse(DEEPSEEK, BEGIN + v31(*TIME) + broken + v31(*TIME) + END, streams_arguments=False)
    assert (message.content, message.calls) == (broken, calls(TIME, TIME))


@pytest.mark.parametrize("num_cut", [0, 1, len(END), len(END) + len("<｜tool▁call▁end｜>")])
def test_a_call_counts_once_its_arguments_are_whole(num_cut):
    text = BEGIN + v3(*TIME) + END
    assert parse(DEEPSEEK, text[: len(text) - num_cut], streams_arguments=False).calls == calls(TIME)


def test_without_parallel_calls_only_the_first_is_emitted():
    message = parse(DEEPSEEK, BEGIN + v3(*TIME) + v3(*WEATHER) + END, is_parallel=False)
    assert (message.content, message.calls) == ("", calls(TIME))


def test_a_forced_call_goes_on_behind_its_prefix():
    named = parse(DEEPSEEK, "{}\n```", forced_prefix=DEEPSEEK.forced_prefix("get_time"))
    unnamed = parse(DEEPSEEK, "get_time\n```json\n{}\n```", forced_prefix=DEEPSEEK.forced_prefix(None))
    newer = parse(DEEPSEEK_V31, "{}", forced_prefix=DEEPSEEK_V31.forced_prefix("get_time"))
    unnamed_newer = parse(
        DEEPSEEK_V31, "get_time<｜tool▁sep｜>{}", forced_prefix=DEEPSEEK_V31.forced_prefix(None)
    )
    assert named == unnamed == newer == unnamed_newer
    assert (named.content, named.calls) == ("", calls(TIME))
