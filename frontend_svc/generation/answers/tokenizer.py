"""Answers from the model's tokenizer and chat template, as requests use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from frontend_svc.engines.directory import Directory
from frontend_svc.text.chat.conversation import check_conversation, conversation_of
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import read_json_object
from frontend_svc.text.prompt import check_text
from triptych.api.v1 import chat_message_pb2, tokenize_pb2, tokenizer_pb2

_CHUNK_BYTES = 1024 * 1024


class TokenizerAnswers:
    """Tokenizes, detokenizes and renders chats for clients, and sends them the files to do so themselves.

    `takes_templates`: whether a request may contain a chat template.
    """

    def __init__(self, directory: Directory, *, takes_templates: bool) -> None:
        self._directory = directory
        self._takes_templates = takes_templates

    async def tokenize(self, request: tokenize_pb2.TokenizeRequest) -> tokenize_pb2.TokenizeResponse:
        model = self._directory.model(request.model)
        has_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        check_text("text", request.text, model)
        response = tokenize_pb2.TokenizeResponse(max_model_len=model.max_model_len)
        if not request.return_tokens:
            response.token_ids[:] = await model.tokenizer.encode(request.text, add_special_tokens=has_special)
            return response
        encoded = await model.tokenizer.encode_with_offsets(request.text, add_special_tokens=has_special)
        response.token_ids[:] = encoded.ids
        response.tokens.extend(encoded.tokens)
        response.start_offsets.extend(encoded.starts)
        response.end_offsets.extend(encoded.ends)
        return response

    async def detokenize(self, request: tokenize_pb2.DetokenizeRequest) -> tokenize_pb2.DetokenizeResponse:
        model = self._directory.model(request.model)
        violations = Violations()
        num_ids = len(request.token_ids)
        if violations.need_count("token_ids", num_ids, "ids", 0, model.max_model_len):
            violations.need_ids("token_ids", request.token_ids, model.vocab_size)
        violations.raise_if_any()
        text = await model.tokenizer.decode(
            request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return tokenize_pb2.DetokenizeResponse(text=text)

    async def apply_chat_template(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """The prompt of a conversation, as Chat makes it, and its tokens if requested."""
        model = self._directory.model(request.model)
        violations = Violations()
        await check_conversation(request, violations, takes_templates=self._takes_templates)
        violations.raise_if_any()
        conversation = await conversation_of(request, shows_tools=True)
        max_chars = model.max_text_chars
        if not request.tokenize:
            text = await model.tokenizer.render(conversation, max_chars=max_chars)
            return tokenizer_pb2.ApplyChatTemplateResponse(prompt=text)
        text, token_ids = await model.tokenizer.render_and_encode(conversation, max_chars=max_chars)
        return tokenizer_pb2.ApplyChatTemplateResponse(prompt=text, token_ids=token_ids)

    async def count(self, chat: chat_message_pb2.ChatRequest) -> int:
        """The number of tokens of the prompt that a chat has."""
        has_tools = chat.tool_choice.mode != chat_message_pb2.TOOL_CHOICE_MODE_NONE
        request = tokenizer_pb2.ApplyChatTemplateRequest(
            model=chat.model,
            messages=chat.messages,
            tools=chat.tools if has_tools else (),
            template_options=chat.template_options,
            tokenize=True,
        )
        return len((await self.apply_chat_template(request)).token_ids)

    def info(self, name: str) -> dict[str, Any]:
        """The tokenizer_config.json of the model `name`, with its chat template. Raises NotFound."""
        files = self._directory.model(name).tokenizer.files
        info = {key: _plain(value) for key, value in read_json_object(files.tokenizer_config).items()}
        if files.chat_template:
            info["chat_template"] = files.chat_template.decode()
        return info

    async def files(
        self, request: tokenizer_pb2.GetTokenizerRequest
    ) -> AsyncGenerator[tokenizer_pb2.GetTokenizerResponse, None]:
        files = self._directory.model(request.model).tokenizer.files
        for file_name, content in files.by_name():
            digest = files.digests[file_name]
            for offset in range(0, len(content), _CHUNK_BYTES):
                yield tokenizer_pb2.GetTokenizerResponse(
                    file_name=file_name,
                    sha256=digest,
                    size_bytes=len(content),
                    offset=offset,
                    chunk=content[offset : offset + _CHUNK_BYTES],
                )


def _plain(value: object) -> object:
    """A value of tokenizer_config.json with the texts of tokens in place of their properties."""
    if isinstance(value, dict):
        content = value.get("content")
        return content if isinstance(content, str) else {key: _plain(one) for key, one in value.items()}
    return value
