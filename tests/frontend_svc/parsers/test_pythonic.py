"""Pythonic calls: a list of calls with literal arguments."""

from __future__ import annotations

import json

import pytest

from frontend_svc.parsers.python_calls import read_python_calls
from frontend_svc.parsers.pythonic import PYTHONIC
from tests.frontend_svc.parsers.transcripts import calls, parse

TIME = ("get_time", "{}")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('[get_weather(city="Paris", days=3), get_time()]', ""),
        ('<|python_start|>[get_weather(city="Paris", days=3), get_time()]<|python_end|>', ""),
        ("\n[ get_weather ( city='Paris',\n days=3 ),get_time( ) ]\n", ""),
        ('[get_weather(city="Paris", days=3)]; [get_time()] [x]', " [x]"),
        ('See [1].\n<|python_start|>[get_weather(city="Paris", days=3), get_time()] [x]', "See [1]. [x]"),
    ],
)
def test_calls_are_emitted_in_order_and_text_around_them_is_content(text, content):
    message = parse(PYTHONIC, text)
    assert message.calls == calls(("get_weather", '{"city": "Paris", "days": 3}'), TIME)
    assert message.content == content


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("None", None),
        ("[True, false, null]", [True, False, None]),
        ("(1, -2.5e3, +7)", [1, -2500.0, 7]),
        ("{'a': {'b': []}, 'c': ''}", {"a": {"b": []}, "c": ""}),
        (r"'it\'s ] ) } \" \\ \n \u00e9 é 🙂'", "it's ] ) } \" \\ \n é é 🙂"),
        (r"'\d+\s'", r"\d+\s"),
        ("'one ' 'two'", "one two"),
        ("'''a'b] ''\n'''", "a'b] ''\n"),
        ('""" \\""" " ) """', ' """ " ) '),
        (r"'''a''\n'b'''", "a''\n'b"),
        ("''", ""),
        (r"'\ud800'", "\ud800"),
    ],
)
def test_literals_become_json(literal, value):
    message = parse(PYTHONIC, f"[get_weather(city={literal})]")
    [(_, _, name, arguments)] = message.calls
    assert (name, json.loads(arguments)) == ("get_weather", {"city": value})
    arguments.encode()


def test_a_tool_may_have_dots_in_its_name():
    assert parse(PYTHONIC, "[math.add(a=1)]").calls == calls(("math.add", '{"a": 1}'))


@pytest.mark.parametrize(
    "text",
    [
        "[get_lost()]",
        "[get_time(), get_lost()]",
        "[get_time]",
        "[get_time(]",
        "[get_time()",
        "[get_time('x')]",
        "[get_time(a=x)]",
        "[get_time(a=1, a=2)]",
        "[get_time(**{'a': 1})]",
        "[get_time(a=f'{1}')]",
        "[get_time(a=get_time())]",
        "[get_time(a=1 + 1)]",
        "[get_time(a=1e999)]",
        "[get_time(a=b'x')]",
        "[get_time(a=[i for i in 'x'])]",
        "[get_time(a=-True)]",
        "[get_time(a={1: 2})]",
        "[get_time(a=\0)]",
        "[get_time(a=" + "[" * 60 + "]" * 60 + ")]",
        "[get_time(a=" + "9" * 5000 + ")]",
        "[get_time(a='" + "x" * 70000 + "')]",
        "[[get_time()]",
        "[get_time('x')] [get_time()]",
        "[get_time()(a=1)]",
        "[get_time(a=)]",
        "[get_time(,)]",
        "[get_time() for x in y]",
        "[]",
        "[1, 2]",
        "<|python_start|>print('x')<|python_end|>",
        "<|python_st",
        "f(x)[0]",
        "] ) }",
    ],
)
def test_what_is_no_call_is_content_word_for_word(text):
    message = parse(PYTHONIC, text)
    assert (message.content, message.calls) == (text, [])


def test_arguments_may_be_named_like_keywords_of_python():
    message = parse(PYTHONIC, "[get_weather(from='a, b', class=[1, 2], in={'x': (3,)})]")
    assert message.calls == calls(("get_weather", '{"from": "a, b", "class": [1, 2], "in": {"x": [3]}}'))


def test_without_parallel_calls_only_the_first_is_emitted():
    message = parse(PYTHONIC, "[get_time(), get_weather(), get_time()]", is_parallel=False)
    assert (message.content, message.calls) == ("", calls(TIME))


def test_a_forced_call_goes_on_behind_its_prefix():
    named = parse(PYTHONIC, 'city="Paris")]', forced_prefix=PYTHONIC.forced_prefix("get_weather"))
    unnamed = parse(PYTHONIC, 'get_weather(city="Paris")]', forced_prefix=PYTHONIC.forced_prefix(None))
    assert named.calls == unnamed.calls == calls(("get_weather", '{"city": "Paris"}'))


@pytest.mark.parametrize(
    "source", ["[f()", "f()", "[f(a=1)] + []", "[f(g.h())]", "[f()()]", "[" * 500 + "]" * 500]
)
def test_anything_but_a_list_of_calls_is_none(source):
    assert read_python_calls(source) == []
