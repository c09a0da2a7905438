"""The verb `chat` against a frontend that answers what it is told to."""

from __future__ import annotations

from launcher.chat import Turn, embedded_form
from tests.launcher.fakes import fake_frontend, triptych


def test_the_embedded_form_ends_where_the_answer_begins() -> None:
    turns = [Turn("user", " hi "), Turn("assistant", "hello"), Turn("user", "bye")]
    assert embedded_form(turns) == "<|user|>hi<|end|><|assistant|>hello<|end|><|user|>bye<|end|><|assistant|>"


async def test_quick_says_one_thing() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("chat", "--url", served.url, "--quick", "hi", "--max-tokens", "9")
    assert (outcome.exit_code, outcome.out) == (0, "hello world\n")
    [request] = served.frontend.requests
    assert request.prompt == "<|user|>hi<|end|><|assistant|>"
    assert request.sampling.max_tokens == 9
    assert not request.add_special_tokens


async def test_every_line_is_a_turn_that_knows_those_before() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("chat", "--url", served.url, stdin="one\n\ntwo\n/exit\nthree\n")
    assert outcome.out == "hello world\nhello world\n"
    assert [request.prompt for request in served.frontend.requests] == [
        "<|user|>one<|end|><|assistant|>",
        "<|user|>one<|end|><|assistant|>hello world<|end|><|user|>two<|end|><|assistant|>",
    ]


async def test_a_server_that_is_not_there_exits_1() -> None:
    outcome = await triptych("chat", "--url", "grpc://127.0.0.1:1", "--quick", "hi")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("UNAVAILABLE: ")
