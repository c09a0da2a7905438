"""What of an answer is shown, and which message it becomes."""

from __future__ import annotations

from launcher.verbs.chat_answer import ChatAnswer
from triptych.api.v1 import chat_message_pb2

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
