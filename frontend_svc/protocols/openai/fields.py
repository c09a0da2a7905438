"""Fields of OpenAI's bodies that clients send and that are not served: one table for each kind of body.

A field without an effect on an answer is taken, and named in a header; one whose effect would be lost is
refused, unless its value asks for nothing. A new field of a client is a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """Why a field is refused, and its values that ask for nothing beside zero and empty ones.

    default: the truth value that asks for nothing.
    """

    reason: str
    idle: tuple[Any, ...] = ()
    default: bool = False

    def is_idle(self, value: Any) -> bool:
        """An empty object may ask for something by its presence."""
        if isinstance(value, bool):
            return value is self.default
        return value in self.idle or (not value and not isinstance(value, dict))


# About accounts, caches, prices and statistics of a service.
_OF_SERVICE = frozenset(
    {
        "client_metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "user",
    }
)  # fmt: skip
IGNORED_IN_CHATS = _OF_SERVICE | {"guided_decoding_backend", "metadata", "prediction", "store", "verbosity"}
IGNORED_IN_RESPONSES = _OF_SERVICE | {"max_tool_calls"}
# Those of a session that clients send back as they got them are among them.
IGNORED_IN_SESSIONS = _OF_SERVICE | {"expires_at", "id", "include", "object", "tracing"}
# Of messages and tools, as clients of several services write them.
IGNORED_IN_MESSAGES = frozenset(
    {
        "annotations",
        "cache_control",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    }
)
IGNORED_IN_TOOLS = frozenset({"cache_control", "defer_loading", "allowed_callers", "input_examples"})
IGNORED_IN_CALLS = frozenset({"extra_content", "provider_specific_fields"})

# vLLM's, and those of gRPC alone.
_OF_OUTPUTS = {
    "detokenize": Refusal("an answer has its text; return_token_ids adds the ids", default=True),
    "kv_transfer_params": Refusal("KV caches are not transferred between engines", ({},)),
    "length_penalty": Refusal("there is no beam search", (1,)),
    "logits_processors": Refusal("an engine runs no code of a caller"),
    "logprob_token_ids": Refusal("use gRPC"),
    "media_io_kwargs": Refusal("models here read text", ({},)),
    "mm_processor_kwargs": Refusal("models here read text", ({},)),
    "return_tokens_as_token_ids": Refusal("use return_token_ids"),
    "skip_reading_prefix_cache": Refusal("use gRPC"),
    "stream_interval": Refusal("use gRPC", (1,)),
    "use_beam_search": Refusal("there is no beam search"),
    "vllm_xargs": Refusal("engines read the fields that are documented alone", ({},)),
}
REFUSED_IN_CHATS: Mapping[str, Refusal] = {
    **_OF_OUTPUTS,
    "add_special_tokens": Refusal("the chat template writes them"),
    "audio": Refusal("there is no audio"),
    "documents": Refusal("use chat_template_kwargs"),
    "echo": Refusal("use completions"),
    "function_call": Refusal("use tool_choice", ("auto", "none")),
    "functions": Refusal("use tools"),
    "modalities": Refusal("outputs are text", (["text"],)),
    "suffix": Refusal("text is not filled in"),
    "web_search_options": Refusal("there is no web search"),
}
_INCLUDE_REASONING = Refusal("use chat completions", default=True)
REFUSED_IN_COMPLETIONS: Mapping[str, Refusal] = {
    **_OF_OUTPUTS,
    "include_reasoning": _INCLUDE_REASONING,
    "modalities": REFUSED_IN_CHATS["modalities"],
    "prompt_embeds": Refusal("embeddings are sent over gRPC"),
    "suffix": Refusal("the model continues a prompt; it does not fill in text between two"),
}
REFUSED_IN_RESPONSES: Mapping[str, Refusal] = {
    **_OF_OUTPUTS,
    "background": Refusal("use stream"),
    "context_management": Refusal("conversations are not shortened"),
    "conversation": Refusal("use previous_response_id"),
    "include_reasoning": _INCLUDE_REASONING,
    "moderation": Refusal("there is no moderation"),
    "n": Refusal("a response has one output", (1,)),
    "prompt": Refusal("there are no stored prompts; use instructions and input"),
    "request_id": Refusal("a response has an id of its own"),
    "top_logprobs": Refusal("use chat completions"),
}
REFUSED_IN_SESSIONS: Mapping[str, Refusal] = {
    **_OF_OUTPUTS,
    "audio": REFUSED_IN_CHATS["audio"],
    "modalities": Refusal("use output_modalities", (["text"],)),
    "prompt": Refusal("there are no stored prompts; use instructions"),
    **dict.fromkeys(
        ("input_audio_format", "input_audio_transcription", "output_audio_format", "turn_detection", "voice"),
        REFUSED_IN_CHATS["audio"],
    ),
}
REFUSED_IN_TOKENIZE = {
    name: REFUSED_IN_CHATS[name] for name in ("documents", "media_io_kwargs", "mm_processor_kwargs")
}

# Values of `include` of a response: nothing of theirs is in answers here.
IGNORED_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
        "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
        "web_search_call.results",
    }
)  # fmt: skip
# Kinds of parts of messages that are no text, by what they hold.
MEDIA = {
    "image_url": "images", "input_image": "images", "image": "images", "image_file": "images",
    "input_audio": "sounds", "audio_url": "sounds", "audio": "sounds",
    "file": "files", "input_file": "files", "document": "files",
    "video_url": "videos", "input_video": "videos", "video": "videos",
}  # fmt: skip
