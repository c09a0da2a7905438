"""OpenAI's embeddings, and scores and rerankings as vLLM, Jina and Cohere have them."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend_svc.generation.answers.models import ModelAnswers
from frontend_svc.generation.answers.pooling import PoolingAnswers
from frontend_svc.protocols.openai.bodies import Base
from frontend_svc.protocols.openai.call import (
    Handler,
    body_of,
    caller_of,
    json_response,
    unless_disconnected,
    without_rank,
)
from frontend_svc.protocols.openai.requests import set_field
from frontend_svc.text.pooling import read_floats
from triptych.api.v1 import embedding_pb2
from triptych.common.v1 import output_pb2, tensor_pb2
from triptych_kit.errors import InvalidArgument

# Embeddings that are written before other requests are served.
_WRITTEN_AT_ONCE = 16
# The names that vLLM has for both sides of a score, in the order of its releases.
_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
_PROMPT = re.compile(r"\.(prompt|token_ids)$")
_encode = msgspec.json.Encoder().encode

Texts = str | list[str]


class PoolingBody(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str = ""
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None  # vLLM's


class EmbeddingBody(PoolingBody, kw_only=True):
    input: str | list[Any]  # a text, ids, or a list of either
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool | None = None  # vLLM's


class ClassifyBody(PoolingBody, kw_only=True):
    input: str | list[Any]  # as of embeddings


class ScoreBody(PoolingBody, kw_only=True):
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class Document(Base):
    text: str


class RerankBody(PoolingBody, kw_only=True):
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool = True


class EmbeddingRoutes:
    def __init__(self, pooling: PoolingAnswers, models: ModelAnswers) -> None:
        self._pooling, self._models = pooling, models
        self.posts: dict[str, Handler] = {
            "/v1/embeddings": without_rank(self._embeddings),
            "/classify": without_rank(self._classify),
            **dict.fromkeys(("/score", "/v1/score"), without_rank(self._score)),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), without_rank(self._rerank)),
        }

    async def _embeddings(self, request: Request) -> Response:
        body, ignored = await body_of(request, EmbeddingBody)
        model, inputs = self._name_of(body.model), _inputs(body.input)
        api_request = embedding_pb2.EmbedRequest(model=model, inputs=inputs.values())
        set_field(api_request, "request_id", body.request_id)
        set_field(api_request, "truncate_prompt_tokens", body.truncate_prompt_tokens)
        set_field(api_request.pooling, "dimensions", body.dimensions)
        set_field(api_request.pooling, "normalize", body.normalize)
        names = {f"inputs[{index}]": field for index, field in enumerate(inputs)}
        request.state.name_of = _names_of(names | {"inputs": "input"})
        answer = await unless_disconnected(request, self._pooling.embed(api_request, caller_of(request)))
        write = _base64_of if body.encoding_format == "base64" else _floats_of
        data = []
        for index, tensor in enumerate(answer.embeddings):
            if index % _WRITTEN_AT_ONCE == _WRITTEN_AT_ONCE - 1:
                await asyncio.sleep(0)
            shown = {"object": "embedding", "index": index, "embedding": write(tensor)}
            data.append(msgspec.Raw(_encode(shown)))
        content = {
            "id": f"embd-{answer.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": api_request.model,
            "data": data,
            "usage": _usage_of(answer.usage),
        }
        return json_response(content, ignored)

    async def _classify(self, request: Request) -> Response:
        body, ignored = await body_of(request, ClassifyBody)
        model, inputs = self._name_of(body.model), _inputs(body.input)
        api_request = embedding_pb2.ClassifyRequest(model=model, inputs=inputs.values())
        set_field(api_request, "request_id", body.request_id)
        set_field(api_request, "truncate_prompt_tokens", body.truncate_prompt_tokens)
        names = {f"inputs[{index}]": field for index, field in enumerate(inputs)}
        request.state.name_of = _names_of(names | {"inputs": "input"})
        answer = await unless_disconnected(request, self._pooling.classify(api_request, caller_of(request)))
        data = []
        for index, tensor in enumerate(answer.results):
            probs = _floats_of(tensor)
            best = max(range(len(probs)), key=probs.__getitem__)
            label = answer.labels[best] if len(answer.labels) == len(probs) else None
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        content = {
            "id": f"classify-{answer.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": api_request.model,
            "data": data,
            "usage": _usage_of(answer.usage),
        }
        return json_response(content, ignored)

    async def _score(self, request: Request) -> Response:
        body, ignored = await body_of(request, ScoreBody)
        (query_field, queries), (document_field, documents) = _pair_of(body)
        model = self._name_of(body.model)
        api_request = embedding_pb2.ScoreRequest(
            model=model, queries=_texts(queries), documents=_texts(documents)
        )
        set_field(api_request, "request_id", body.request_id)
        set_field(api_request, "truncate_prompt_tokens", body.truncate_prompt_tokens)
        names = {"queries": query_field, "documents": document_field}
        request.state.name_of = _names_of(names)
        answer = await unless_disconnected(request, self._pooling.score(api_request, caller_of(request)))
        content = {
            "id": f"score-{answer.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": api_request.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(answer.scores)
            ],
            "usage": _usage_of(answer.usage),
        }
        return json_response(content, ignored)

    async def _rerank(self, request: Request) -> Response:
        body, ignored = await body_of(request, RerankBody)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        model = self._name_of(body.model)
        api_request = embedding_pb2.RerankRequest(
            model=model, query={"prompt": body.query}, documents=_texts(texts)
        )
        set_field(api_request, "request_id", body.request_id)
        set_field(api_request, "truncate_prompt_tokens", body.truncate_prompt_tokens)
        set_field(api_request, "top_n", body.top_n)
        request.state.name_of = _names_of({"query[0]": "query"})
        answer = await unless_disconnected(request, self._pooling.rerank(api_request, caller_of(request)))
        results = []
        for result in answer.results:
            shown: dict[str, Any] = {"index": result.document_index}
            if body.return_documents:
                shown["document"] = {"text": texts[result.document_index]}
            results.append(shown | {"relevance_score": result.score})
        content = {
            "id": f"rerank-{answer.request_id}",
            "model": api_request.model,
            "usage": _usage_of(answer.usage),
            "results": results,
        }
        return json_response(content, ignored)

    def _name_of(self, model: str) -> str:
        """The name of the only model where the body has none: answers have it."""
        return model or self._models.one("").name


def _inputs(value: str | list[Any]) -> dict[str, embedding_pb2.PoolingInput]:
    """Each text or list of token ids by its field of the body."""
    if isinstance(value, str) or (value and all(type(each) is int for each in value)):
        return {"input": _input("input", value)}
    fields = [f"input[{index}]" for index in range(len(value))]
    return {field: _input(field, each) for field, each in zip(fields, value, strict=True)}


def _input(field: str, value: Any) -> embedding_pb2.PoolingInput:
    if isinstance(value, str):
        return embedding_pb2.PoolingInput(prompt=value)
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise InvalidArgument(f"{field} is neither a text nor a list of token ids", field=field)
    made = embedding_pb2.PoolingInput()
    made.token_ids.SetInParent()
    set_field(made.token_ids, "ids", value, field)
    return made


def _texts(value: Texts) -> list[embedding_pb2.PoolingInput]:
    texts = [value] if isinstance(value, str) else value
    return [embedding_pb2.PoolingInput(prompt=text) for text in texts]


def _pair_of(body: ScoreBody) -> tuple[tuple[str, Texts], tuple[str, Texts]]:
    """The fields of both sides, by whichever of the names they have."""
    fields = {
        name: getattr(body, name) for pair in _PAIRS for name in pair if getattr(body, name) is not None
    }
    for first, second in _PAIRS:
        if fields.keys() == {first, second}:
            return (first, fields[first]), (second, fields[second])
    shown = " and ".join(fields) or "neither"
    raise InvalidArgument(
        f"{shown} given; give text_1 and text_2, or queries and documents", field=next(iter(fields), "text_1")
    )


def _names_of(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function from a field of the request to that of the body."""

    def name_of(field: str) -> str:
        field = _PROMPT.sub("", field.removeprefix("pooling."))
        root = field.partition("[")[0]
        if field in names:
            return names[field]
        return names.get(root, root) + field.removeprefix(root)

    return name_of


def _floats_of(tensor: tensor_pb2.Tensor) -> list[float]:
    return list(read_floats(tensor))


def _base64_of(tensor: tensor_pb2.Tensor) -> str:
    """The numbers as little-endian binary32."""
    content = tensor.inline
    if tensor.dtype != tensor_pb2.D_TYPE_FP32:
        values = read_floats(tensor)
        content = struct.pack(f"<{len(values)}f", *values)
    return base64.b64encode(content).decode()


def _usage_of(usage: output_pb2.Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.num_prompt_tokens, "total_tokens": usage.num_prompt_tokens}
