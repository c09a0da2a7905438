"""Builds tokenizer requests from keyword arguments. Checks names, not values."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.api.v1 import tokenize_pb2
from triptych_client.call_options import ModelOptions, build_message


class TokenizeOptions(ModelOptions, total=False):
    """`add_special_tokens`: add the tokenizer's special tokens around the text; unset: true."""

    add_special_tokens: bool


class DetokenizeOptions(ModelOptions, total=False):
    """`skip_special_tokens`: omit special tokens from the text; unset: false."""

    skip_special_tokens: bool


def build_tokenize_request(
    text: str, options: TokenizeOptions, *, return_tokens: bool
) -> tokenize_pb2.TokenizeRequest:
    """The request for the tokens of a text, with names and offsets if `return_tokens`."""
    return build_message(
        tokenize_pb2.TokenizeRequest, {"text": text, "return_tokens": return_tokens}, options
    )


def build_detokenize_request(
    token_ids: Sequence[int], options: DetokenizeOptions
) -> tokenize_pb2.DetokenizeRequest:
    return build_message(tokenize_pb2.DetokenizeRequest, {"token_ids": token_ids}, options)
