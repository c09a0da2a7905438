"""Reasoning between tags: what opens it, and what is dropped beside the tags."""

from __future__ import annotations

import pytest

from frontend_svc.parsers.think import MISTRAL_THINK, THINK
from tests.frontend_svc.parsers.transcripts import Message, run

PLAIN = "<|im_start|>assistant\n"
OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def parse(prompt: str, text: str) -> Message:
    """Take `text` apart in one go and character by character, which must be the same."""
    whole = run(THINK.open(prompt), [text])
    assert whole == run(THINK.open(prompt), text)
    return whole


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (PLAIN, "<think>\nHm.\n\nYes.\n</think>\n\nIt is 4."),
        (PLAIN, "\n<think>Hm.\n\nYes.</think>It is 4."),
        (OPENED, "Hm.\n\nYes.\n</think>\n\nIt is 4."),
        (OPENED.rstrip(), "\nHm.\n\nYes.\n</think>\n\nIt is 4."),
        (OPENED, "<think>\nHm.\n\nYes.\n</think>\n\nIt is 4."),
    ],
)
def test_reasoning_comes_first_whether_prompt_or_model_opened_it(prompt, text):
    assert parse(prompt, text) == Message("It is 4.", "Hm.\n\nYes.")


@pytest.mark.parametrize("prompt", [PLAIN, CLOSED, "What does <think> mean?\n" + PLAIN])
@pytest.mark.parametrize(
    "text", ["It is 4.\n", " \n\nIt is <think>4</think>", "</think>", "<thin", "<", "<thinker> is", "\n  \n"]
)
def test_reasoning_that_is_never_opened_is_none(prompt, text):
    assert parse(prompt, text) == Message(text)


@pytest.mark.parametrize("text", ["Hm </thin", "Hm.\n", "a <b", " <", "</thinking", "x</ think>\n\n"])
def test_reasoning_that_is_never_closed_is_reasoning_to_the_end(text):
    assert parse(OPENED, text) == Message("", text)
    assert parse(PLAIN, "<think>" + text) == Message("", text)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [(PLAIN, "<think>\n\n</think>\n\nHi"), (OPENED, "</think>\nHi"), (OPENED, "\n</think>Hi")],
)
def test_empty_reasoning_is_no_piece(prompt, text):
    assert parse(prompt, text) == Message("Hi")


def test_only_line_breaks_beside_tags_are_dropped():
    message = parse(OPENED, "  Hm.  \n </think>\n\n    code\n")
    assert message == Message("    code\n", "  Hm.  \n ")


def test_a_second_closing_tag_is_content():
    assert parse(OPENED, "a</think>b</think>c") == Message("b</think>c", "a")


def test_what_closes_reasoning_before_a_forced_call_depends_on_the_prompt():
    assert THINK.closing(OPENED) == "\n</think>\n\n"
    assert THINK.closing(PLAIN) == THINK.closing(CLOSED) == ""


def test_other_tags_work_alike():
    message = run(MISTRAL_THINK.open("[/INST]"), "[THINK]Hm.[/THINK]It is [THINK].")
    assert message == Message("It is [THINK].", "Hm.")
