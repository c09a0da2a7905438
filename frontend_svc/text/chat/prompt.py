"""The prompt of a conversation, rendered by the model's chat template, and the parsers of its answers."""

from __future__ import annotations

from frontend_svc.parsers.declared_tools import (
    call_format,
    call_trigger,
    choice_violations,
    demands_call,
    forbids_calls,
)
from frontend_svc.parsers.message import MessageParser, open_message
from frontend_svc.parsers.parser import CallRules
from frontend_svc.parsers.registry import reasoning_parser, tool_parser
from frontend_svc.text.chat.conversation import check_conversation, conversation_of
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import chat_message_pb2
from triptych_kit.errors import Unimplemented


class ChatPrompt:
    """The prompt of a ChatRequest, and a parser for each of its answers.

    If the client demands a tool call, the prompt ends with the start of that call, so that the model can only
    continue it. A model without a tool parser writes a demanded call as a grammar has it, even where its
    template shows no tools. Raises Unimplemented if there is no such grammar either.
    """

    field = "messages"

    def __init__(
        self,
        request: chat_message_pb2.ChatRequest,
        model: ServedModel,
        *,
        takes_templates: bool,
        streams_arguments: bool = True,
    ) -> None:
        self._request = request
        self._takes_templates = takes_templates
        self._streams_arguments = streams_arguments
        self._tools = call_format(request, model.parsers.tool, model.ready)
        self._reasoning = reasoning_parser(model.parsers.reasoning)
        self._forced_prefix = ""
        self._opening = call_trigger(request, self._tools, model.ready)
        self._text = ""
        self._shows_tools = not forbids_calls(request.tool_choice)
        self._is_demanded = demands_call(request.tool_choice)
        self._may_hide_tools = self._is_demanded and tool_parser(model.parsers.tool) is None
        if self._is_demanded and self._tools is None:
            raise Unimplemented(
                f"tool_choice demands a call, but model {model.name!r} has no tool parser, and its engines "
                "have no grammar backend",
                reason="PARAMETER_NOT_SERVED",
                metadata={"fields": "tool_choice"},
            )

    @property
    def opens_reasoning(self) -> bool:
        return self._reasoning is not None and bool(self._reasoning.closing(self._text))

    @property
    def may_open_reasoning(self) -> bool:
        """Whether the model may open it: a prompt with its end, or the client, says that there is none."""
        options = self._request.template_options
        is_off = options.HasField("enable_thinking") and not options.enable_thinking
        if self._reasoning is None or self._is_demanded or self.opens_reasoning or is_off:
            return False
        return not self._text.rstrip().endswith(self._reasoning.block[1])

    @property
    def markers(self) -> frozenset[str]:
        formats = [each for each in (self._tools, self._reasoning) if each is not None]
        return frozenset().union(*(each.markers for each in formats if each.needs_special_tokens))

    async def check(self, model: ServedModel, violations: Violations) -> None:
        """Add violations for an invalid conversation. Raises Unimplemented for media."""
        await check_conversation(self._request, violations, takes_templates=self._takes_templates)
        violations.extend(choice_violations(self._request))

    async def tokenize(self, model: ServedModel, *, may_be_long: bool) -> list[int]:
        """The token ids of the rendered text. Raises InvalidArgument."""
        conversation = await conversation_of(self._request, shows_tools=self._shows_tools)
        conversation["may_hide_tools"] = self._may_hide_tools
        self._text, token_ids = await model.tokenizer.render_and_encode(
            conversation, max_chars=model.max_text_chars
        )
        suffix = self._suffix(model)
        if not suffix:
            return token_ids
        self._text += suffix
        # The end of the template and the suffix may share a token.
        return await model.tokenizer.encode(self._text, add_special_tokens=False)

    def parser(self, *, streams: bool) -> MessageParser:
        """A parser for an answer, when the prompt is known; with `streams` it emits partial arguments."""
        request = self._request
        tool_names = frozenset(tool.name for tool in request.tools) if self._shows_tools else frozenset()
        is_parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
        rules = CallRules(
            tool_names,
            is_parallel=is_parallel,
            streams_arguments=streams and self._streams_arguments,
            is_continued=request.template_options.continue_final_message,
            opening=self._opening,
            is_demanded=self._is_demanded,
        )
        return open_message(
            self._tools,
            None if self._is_demanded else self._reasoning,
            prompt=self._text,
            rules=rules,
            forced_prefix=self._forced_prefix,
        )

    def _suffix(self, model: ServedModel) -> str:
        """What to append to the rendered text: the opening of a forced call, behind the end of reasoning.

        A grammar has the model write that opening, so that its tokens are those that the model knows.
        """
        if not self._is_demanded or self._tools is None:
            return ""
        choice = self._request.tool_choice
        named = choice.name if choice.WhichOneof("choice") == "name" else None
        if not self._opening:
            self._forced_prefix = self._tools.forced_prefix(named)
        closing = "" if self._reasoning is None else self._reasoning.closing(self._text)
        return closing + self._forced_prefix
