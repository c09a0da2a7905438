"""Builds requests for pooling models from keyword arguments. Checks names, not values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from triptych.api.v1 import embedding_pb2, generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_client.call_options import ModelOptions, build_message

PoolingInput: TypeAlias = str | Sequence[int]


class PoolingOptions(ModelOptions, total=False):
    """Options of every request to a pooling model.

    `truncate_prompt_tokens` keeps the first so many tokens of a prompt, -1 as many as the model takes; unset:
    one that is too long is refused.
    """

    request_id: str
    truncate_prompt_tokens: int


class EmbedOptions(PoolingOptions, total=False):
    """Options of vectors.

    `dimensions` keeps the leading ones, `normalize` scales to length 1, `per_token` returns one vector per
    token.
    """

    dimensions: int
    normalize: bool
    per_token: bool


class ScoreOptions(PoolingOptions, total=False):
    """`use_activation`: False returns logits; unset: as the model."""

    use_activation: bool


class RerankOptions(ScoreOptions, total=False):
    """`top_n`: how many of the best documents are returned; unset: all."""

    top_n: int


class ClassifyOptions(ScoreOptions, total=False):
    """`per_token`: classify each token instead of the whole prompt."""

    per_token: bool


def build_embed_request(inputs: Sequence[PoolingInput], options: EmbedOptions) -> embedding_pb2.EmbedRequest:
    rest = dict(options)
    task = sampling_pb2.POOLING_TASK_TOKEN_EMBED if rest.pop("per_token", False) else None
    pooling = {name: rest.pop(name) for name in ("dimensions", "normalize") if name in rest}
    params = sampling_pb2.PoolingParams(task=task, **pooling)  # type: ignore[arg-type]
    return build_message(embedding_pb2.EmbedRequest, {"inputs": _inputs(inputs), "pooling": params}, rest)


def build_score_request(
    queries: Sequence[PoolingInput], documents: Sequence[PoolingInput], options: ScoreOptions
) -> embedding_pb2.ScoreRequest:
    fields = {"queries": _inputs(queries), "documents": _inputs(documents)}
    return build_message(embedding_pb2.ScoreRequest, fields, options)


def build_rerank_request(
    query: PoolingInput, documents: Sequence[PoolingInput], options: RerankOptions
) -> embedding_pb2.RerankRequest:
    fields = {"query": _input(query), "documents": _inputs(documents)}
    return build_message(embedding_pb2.RerankRequest, fields, options)


def build_classify_request(
    inputs: Sequence[PoolingInput], options: ClassifyOptions
) -> embedding_pb2.ClassifyRequest:
    return build_message(embedding_pb2.ClassifyRequest, {"inputs": _inputs(inputs)}, options)


def _inputs(inputs: Sequence[PoolingInput]) -> list[embedding_pb2.PoolingInput]:
    if isinstance(inputs, str):
        raise TypeError("one text was given where a list of texts is taken")
    return [_input(entry) for entry in inputs]


def _input(entry: PoolingInput) -> embedding_pb2.PoolingInput:
    if isinstance(entry, str):
        return embedding_pb2.PoolingInput(prompt=entry)
    return embedding_pb2.PoolingInput(token_ids=generate_pb2.TokenIds(ids=entry))
