"""The prompt of one chat request, and the parsers of its answers."""

from __future__ import annotations

from frontend_svc.parsers.message import MessageParser, open_message
from frontend_svc.parsers.parser import CallRules
from frontend_svc.parsers.registry import reasoning_parser, tool_parser
from frontend_svc.text.chat.prompt import ChatPrompt
from frontend_svc.text.model import ServedModel
from service_kit.errors import Unimplemented
from triptych.api.v1 import chat_message_pb2


class ChatReading:
    """A ChatRequest's prompt, and a parser for each of its answers.

    If the client demands a tool call, the prompt ends with the start of that call, so that the model can only
    continue it. Raises Unimplemented if a call is demanded and no tool parser is known for the model.
    """

    def __init__(
        self, request: chat_message_pb2.ChatRequest, model: ServedModel, *, takes_templates: bool
    ) -> None:
        self.request = request
        self._tools = tool_parser(model.parsers.tool)
        self._reasoning = reasoning_parser(model.parsers.reasoning)
        self._forced_prefix = ""
        shows_tools = not _forbids_calls(request.tool_choice)
        self._tool_names = frozenset(tool.name for tool in request.tools) if shows_tools else frozenset()
        self._is_demanded = _demands_call(request.tool_choice)
        if self._is_demanded and self._tools is None:
            raise Unimplemented(
                f"tool_choice demands a call, but no tool parser is known for model {model.name!r}",
                reason="PARAMETER_NOT_SERVED",
                metadata={"fields": "tool_choice"},
            )
        formats = [each for each in (self._tools, self._reasoning) if each is not None]
        self.prompt = ChatPrompt(
            request,
            shows_tools=shows_tools,
            takes_templates=takes_templates,
            suffix_of=self._suffix_of,
            markers=frozenset().union(*(each.markers for each in formats if each.needs_special_tokens)),
        )

    def new_parser(self, *, streams: bool) -> MessageParser:
        """A parser for an answer, when the prompt is known; with `streams` it emits partial arguments."""
        rules = CallRules(
            self._tool_names,
            is_parallel=self.request.parallel_tool_calls
            if self.request.HasField("parallel_tool_calls")
            else True,
            streams_arguments=streams,
        )
        return open_message(
            self._tools,
            self._reasoning,
            prompt=self.prompt.text,
            rules=rules,
            forced_prefix=self._forced_prefix,
        )

    def _suffix_of(self, prompt: str) -> str:
        if not self._is_demanded or self._tools is None:
            return ""
        choice = self.request.tool_choice
        named = choice.name if choice.WhichOneof("choice") == "name" else None
        self._forced_prefix = self._tools.forced_prefix(named)
        closing = "" if self._reasoning is None else self._reasoning.closing(prompt)
        return closing + self._forced_prefix


def _demands_call(choice: chat_message_pb2.ToolChoice) -> bool:
    if choice.WhichOneof("choice") == "name":
        return True
    return choice.mode == chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED


def _forbids_calls(choice: chat_message_pb2.ToolChoice) -> bool:
    is_mode = choice.WhichOneof("choice") == "mode"
    return is_mode and choice.mode == chat_message_pb2.TOOL_CHOICE_MODE_NONE
