"""The verb `chat` against a real frontend, whose engine says what it is told to."""

from __future__ import annotations

from tests.frontend_svc.fakes import TOKENIZER, FakeEngine, FakeRequest, answer, serving
from tests.launcher.fakes import triptych

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is undefined %}<think>\n{% endif %}"
    "{% endif %}{# </think> #}"
)
PLAIN_TEMPLATE = TEMPLATE.replace("<think>", "").replace("</think>", "")


def prompt_of(request: FakeRequest) -> str:
    return TOKENIZER.decode(request.prompt, skip_special_tokens=False)


async def test_quick_says_one_thing() -> None:
    engine = FakeEngine(answer("hello world"), chat_template=PLAIN_TEMPLATE)
    async with serving(engine) as (_, frontend):
        url = f"grpc://{frontend.address}"
        outcome = await triptych("chat", "--url", url, "--quick", "hi", "--max-tokens", "99")
    assert (outcome.exit_code, outcome.out) == (0, "hello world\n")
    [request] = engine.requests
    assert prompt_of(request).startswith("<user>hi<assistant>")
    assert request.entry.sampling.max_tokens == 99


async def test_every_line_is_a_turn_that_knows_those_before() -> None:
    engine = FakeEngine(answer("hello world"), chat_template=PLAIN_TEMPLATE)
    async with serving(engine) as (_, frontend):
        url = f"grpc://{frontend.address}"
        outcome = await triptych("chat", "--url", url, stdin="one\n\ntwo\n/exit\nthree\n")
    assert outcome.out == "hello world\nhello world\n"
    first, second = (prompt_of(request).strip() for request in engine.requests)
    assert first == "<user>one<assistant>"
    assert second == "<user>one<assistant>hello world<user>two<assistant>"


async def test_what_is_piped_on_is_the_answer_without_its_reasoning() -> None:
    engine = FakeEngine(answer("hm\n</think>\n\nhello"), chat_template=TEMPLATE)
    async with serving(engine) as (_, frontend):
        outcome = await triptych("chat", "--url", f"grpc://{frontend.address}", "--quick", "hi")
    assert outcome.out.strip() == "hello"


async def test_a_refusal_exits_1_with_its_field() -> None:
    async with serving(FakeEngine()) as (_, frontend):
        url = f"grpc://{frontend.address}"
        outcome = await triptych("chat", "--url", url, "--quick", "hi", "--temperature", "9")
    assert (outcome.exit_code, outcome.out) == (1, "")
    assert outcome.err.startswith("INVALID_ARGUMENT: ")
    assert "  sampling.temperature: " in outcome.err


async def test_a_server_that_is_not_there_exits_1() -> None:
    outcome = await triptych("chat", "--url", "grpc://127.0.0.1:1", "--quick", "hi")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("UNAVAILABLE: ")
