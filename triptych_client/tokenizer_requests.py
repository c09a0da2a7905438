"""From keyword arguments to the requests about tokens. Checks names, not values."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.api.v1 import tokenize_pb2
from triptych_client.call_options import ModelOptions, build_message


class TokenizeOptions(ModelOptions, total=False):
    """Whether the tokenizer's own special tokens stand around the text; left out: they do."""

    add_special_tokens: bool


class DetokenizeOptions(ModelOptions, total=False):
    """Whether special tokens are left out of the text; left out: they are shown."""

    skip_special_tokens: bool


def build_tokenize_request(
    text: str, options: TokenizeOptions, *, return_tokens: bool
) -> tokenize_pb2.TokenizeRequest:
    """The request for the tokens of a text, with their names and places where `return_tokens`."""
    return build_message(
        tokenize_pb2.TokenizeRequest, {"text": text, "return_tokens": return_tokens}, options
    )


def build_detokenize_request(
    token_ids: Sequence[int], options: DetokenizeOptions
) -> tokenize_pb2.DetokenizeRequest:
    """The request for the text of tokens."""
    return build_message(tokenize_pb2.DetokenizeRequest, {"token_ids": token_ids}, options)
