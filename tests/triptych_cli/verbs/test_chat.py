"""The verb `chat` against a real frontend, whose engine is scripted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.frontend_svc.fakes import TOKENIZER, FakeEngine, FakeRequest, answer, serving
from tests.processes import START_LIMIT_S, running_async
from tests.triptych_cli.fakes import triptych
from triptych.api.v1 import chat_message_pb2
from triptych_cli.verbs.chat_answer import ChatAnswer

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
    assert request.entry.is_last_step


async def test_every_line_is_a_turn_that_knows_those_before() -> None:
    engine = FakeEngine(answer("hello world"), chat_template=PLAIN_TEMPLATE)
    async with serving(engine) as (_, frontend):
        url = f"grpc://{frontend.address}"
        outcome = await triptych("chat", "--url", url, stdin="one\n\ntwo\n/exit\nthree\n")
    assert outcome.out == "hello world\nhello world\n"
    first, second = (prompt_of(request).strip() for request in engine.requests)
    assert first == "<user>one<assistant>"
    assert second == "<user>one<assistant>hello world<user>two<assistant>"
    (job_id,) = {request.entry.job_id for request in engine.requests}
    assert job_id
    assert not any(request.entry.is_last_step for request in engine.requests)


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
    assert outcome.err.startswith("INVALID_ARGUMENT (INVALID_REQUEST): ")
    assert "--temperature is 9.0, must be" in outcome.err


async def test_commands_are_done_here_and_a_text_with_a_slash_is_a_turn() -> None:
    engine = FakeEngine(answer("a mat"), chat_template=PLAIN_TEMPLATE)
    async with serving(engine) as (_, frontend):
        lines = "/help\n/help me\n/hlep\n/clear\nthe dog\n/exit\nnot sent\n"
        outcome = await triptych("chat", "--url", frontend.address, stdin=lines)
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert "/clear  begins a new conversation" in outcome.out
    assert "unknown command /hlep: /help lists the commands" in outcome.out
    assert outcome.out.count("a mat") == 2
    # One message each: the conversation was begun anew, as another job.
    assert len({request.entry.job_id for request in engine.requests}) == 2
    prompts = [prompt_of(request).strip() for request in engine.requests]
    assert [prompt.count("<user>") for prompt in prompts] == [1, 1]


async def test_the_system_message_is_the_first_one_of_each_turn_until_there_is_none() -> None:
    engine = FakeEngine(answer("a mat"), chat_template=PLAIN_TEMPLATE)
    async with serving(engine) as (_, frontend):
        lines = "/system be brief\nthe dog\n/system be kind\nthe cat\n/system\nthe cow\n/systematic\n"
        outcome = await triptych("chat", "--url", frontend.address, stdin=lines)
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert "unknown command /systematic" in outcome.out
    systems = ["be brief", "be kind", None]
    for request, system, num_turns in zip(engine.requests, systems, (1, 2, 3), strict=True):
        prompt = prompt_of(request)
        assert prompt.count("<user>") == num_turns
        assert prompt.count("<system>") == (system is not None)
        assert prompt.startswith(f"<system>{system}<" if system else "<user>the dog<"), prompt


async def until_asleep(pid: int) -> None:
    """Wait until the main thread of a process waits, for input."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_on_a_terminal_an_interrupt_ends_an_answer_or_clears_the_line() -> None:
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        if len(engine.requests) > 1:
            answer("a mat")(engine, request)
        else:
            # Goes on for ever.
            for token_id in TOKENIZER.encode("hello world and").ids:
                engine.step({request: [token_id]})

    engine = FakeEngine(script, chat_template=PLAIN_TEMPLATE)
    master, slave = os.openpty()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(master), "rb", buffering=0)
    )

    async def write_behind(shown: str, text: str) -> None:
        await asyncio.wait_for(reader.readuntil(shown.encode()), START_LIMIT_S)
        os.write(master, text.encode())

    async with serving(engine) as (_, frontend):
        chat = (sys.executable, "-m", "triptych_cli.cli", "chat", "--url", frontend.address)
        async with running_async(*chat, stdin=slave, stdout=slave, stderr=slave) as process:
            os.close(slave)
            await write_behind("> ", "one\n")
            await asyncio.wait_for(reader.readuntil(b"hello"), START_LIMIT_S)
            process.send_signal(signal.SIGINT)
            await write_behind("> ", "half a line")
            await asyncio.wait_for(reader.readuntil(b"half a line"), START_LIMIT_S)
            # Python handles a signal between two characters only with the next one.
            await asyncio.wait_for(until_asleep(process.pid), START_LIMIT_S)
            process.send_signal(signal.SIGINT)
            await write_behind("> ", "two\n")
            await write_behind("a mat\r\n> ", "\x04")
            assert await asyncio.wait_for(process.wait(), START_LIMIT_S) == 0
    os.close(master)
    _, second = (prompt_of(request) for request in engine.requests)
    assert second.startswith("<user>one<assistant>hello")
    assert second.strip().endswith("<user>two<assistant>")
    assert "half" not in second


# What of an answer is shown, and which message it becomes.

DELTAS = (
    chat_message_pb2.ChatDelta(),
    chat_message_pb2.ChatDelta(reasoning="let me "),
    chat_message_pb2.ChatDelta(reasoning="see", content="I "),
    chat_message_pb2.ChatDelta(content="add."),
)


def call(index: int, arguments: str, *, name: str = "") -> chat_message_pb2.ChatDelta:
    piece = chat_message_pb2.ToolCall(
        index=index, id=name and f"id-{name}", name=name, arguments_json=arguments
    )
    return chat_message_pb2.ChatDelta(tool_calls=[piece])


def test_reasoning_is_dim_on_a_terminal_and_a_line_of_its_own() -> None:
    answer = ChatAnswer(is_terminal=True)
    shown = [answer.take(delta) for delta in DELTAS]
    assert shown == ["", "\x1b[2mlet me ", "see\x1b[22m\nI ", "add."]
    assert answer.end() == "\n"


def test_a_terminal_does_not_stay_dim_where_only_reasoning_came() -> None:
    answer = ChatAnswer(is_terminal=True)
    answer.take(DELTAS[1])
    assert answer.end().startswith("\x1b[22m\n")


def test_elsewhere_only_the_answer_is_shown_but_the_message_keeps_its_reasoning() -> None:
    answer = ChatAnswer(is_terminal=False)
    assert "".join(answer.take(delta) for delta in DELTAS) + answer.end() == "I add.\n"
    message = answer.message()
    assert (message.reasoning, message.parts[0].text) == ("let me see", "I add.")
    assert message.role == chat_message_pb2.CHAT_ROLE_ASSISTANT


def test_calls_are_shown_as_text_once_they_are_whole() -> None:
    answer = ChatAnswer(is_terminal=False)
    for delta in (call(0, '{"a"', name="add"), call(0, ": 1}"), call(1, "{}", name="now")):
        assert answer.take(delta) == ""
    assert answer.end() == 'add({"a": 1})\nnow({})\n'
    message = answer.message()
    assert [(one.id, one.name) for one in message.tool_calls] == [("id-add", "add"), ("id-now", "now")]
    assert len(message.parts) == 0


def test_a_call_that_broke_is_shown_as_such_and_no_part_of_the_conversation() -> None:
    answer = ChatAnswer(is_terminal=False)
    broken = call(0, '{"a', name="add")
    broken.tool_calls[0].incomplete = True
    answer.take(broken)
    assert answer.end() == 'add({"a (incomplete)\n'
    assert len(answer.message().tool_calls) == 0 and len(answer.message().parts) == 1
