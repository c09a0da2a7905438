"""Assembles an assistant's message from its deltas, and formats them for display. Knows no server."""

from __future__ import annotations

from triptych.api.v1 import chat_message_pb2

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


class ChatAnswer:
    """One answer while it is received.

    Reasoning is shown dimmed on a terminal, and left out elsewhere, so that a pipe gets only the answer.
    """

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._is_dim = False
        self.content = ""
        self._reasoning = ""
        self._calls: dict[int, chat_message_pb2.ToolCall] = {}

    def take(self, delta: chat_message_pb2.ChatDelta) -> str:
        """Add a delta; returns the text to print."""
        self.content += delta.content
        self._reasoning += delta.reasoning
        for piece in delta.tool_calls:
            call = self._calls.setdefault(piece.index, chat_message_pb2.ToolCall(index=piece.index))
            call.id, call.name = call.id + piece.id, call.name + piece.name
            call.arguments_json += piece.arguments_json
            call.incomplete |= piece.incomplete
        return self._shown_reasoning(delta.reasoning) + self._shown_content(delta.content)

    def end(self) -> str:
        """The last text to print: the end of the line, then the tool calls, one per line."""
        calls = [
            f"{call.name}({call.arguments_json}{' (incomplete)' if call.incomplete else ')'}"
            for _, call in sorted(self._calls.items())
        ]
        is_empty = bool(calls) and not self.content
        return self.brighten() + ("" if is_empty else "\n") + "".join(f"{call}\n" for call in calls)

    def brighten(self) -> str:
        """The escape sequence that ends the dimming, if it is active."""
        if not self._is_dim:
            return ""
        self._is_dim = False
        return _PLAIN + "\n"

    def message(self, *, is_whole: bool = True) -> chat_message_pb2.ChatMessage:
        """The message to append to the conversation. A call that broke, or may have, is no part of it."""
        calls = [call for _, call in sorted(self._calls.items()) if is_whole and not call.incomplete]
        message = chat_message_pb2.ChatMessage(
            role=chat_message_pb2.CHAT_ROLE_ASSISTANT,
            reasoning=self._reasoning,
            tool_calls=calls,
        )
        if self.content or not calls:
            message.parts.add(text=self.content)
        return message

    def _shown_reasoning(self, text: str) -> str:
        if not text or not self._is_terminal:
            return ""
        if self._is_dim:
            return text
        self._is_dim = True
        return _DIM + text

    def _shown_content(self, text: str) -> str:
        return self.brighten() + text if text else ""
