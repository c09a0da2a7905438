"""The prompt of a conversation: rendered by the model's chat template, then tokenized. Knows no parser."""

from __future__ import annotations

from collections.abc import Callable

from frontend_svc.text.chat.conversation import check_conversation, check_tool_choice, conversation_of
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import chat_message_pb2


class ChatPrompt:
    """The prompt of a ChatRequest.

    suffix_of: gets the rendered text and returns text to append, e.g. the opening of a forced tool call.
    markers: special tokens that stay in the output's text, for the tool and reasoning parsers.
    """

    field = "messages"

    def __init__(
        self,
        request: chat_message_pb2.ChatRequest,
        *,
        shows_tools: bool,
        takes_templates: bool,
        suffix_of: Callable[[str], str],
        markers: frozenset[str] = frozenset(),
    ) -> None:
        self._request = request
        self._shows_tools = shows_tools
        self._takes_templates = takes_templates
        self._suffix_of = suffix_of
        self.markers = markers
        self.text = ""

    async def check(self, model: ServedModel, violations: Violations) -> None:
        """Add violations for an invalid conversation. Raises Unimplemented for media."""
        await check_conversation(self._request, violations, takes_templates=self._takes_templates)
        check_tool_choice(self._request, violations)

    async def tokenize(self, model: ServedModel, *, may_be_long: bool) -> list[int]:
        """The token ids of the rendered text, which is stored in `text`. Raises InvalidArgument."""
        conversation = await conversation_of(self._request, shows_tools=self._shows_tools)
        self.text, token_ids = await model.tokenizer.render_and_encode(
            conversation, max_chars=model.max_text_chars
        )
        suffix = self._suffix_of(self.text)
        if not suffix:
            return token_ids
        self.text += suffix
        # The end of the template and the suffix may share a token.
        return await model.tokenizer.encode(self.text, add_special_tokens=False)
