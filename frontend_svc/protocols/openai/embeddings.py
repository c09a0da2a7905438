"""OpenAI's embeddings, and scores and rerankings as vLLM, Jina and Cohere have them."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend_svc.generation.answers.models import ModelAnswers
from frontend_svc.generation.answers.pooling import PoolingAnswers
from frontend_svc.generation.answers.tokenizer import TokenizerAnswers
from frontend_svc.protocols.openai.bodies import Base, IgnoredFields, Message, TokenizeBody
from frontend_svc.protocols.openai.call import (
    Handler,
    body_of,
    caller_of,
    json_response,
    unless_disconnected,
    without_rank,
)
from frontend_svc.protocols.openai.requests import chat_names, set_field, template_request
from frontend_svc.text.pooling import read_floats
from triptych.api.v1 import embedding_pb2
from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych_kit.errors import InvalidArgument

# Embeddings that are written before other requests are served.
_WRITTEN_AT_ONCE = 16
_TASKS = ("token_embed", "token_classify", "embed", "classify")
_EMBEDDINGS = {
    "embed": sampling_pb2.POOLING_TASK_EMBED,
    "token_embed": sampling_pb2.POOLING_TASK_TOKEN_EMBED,
}
# Fields that concern messages alone.
_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
# The names that vLLM has for both sides of a score, in the order of its releases.
_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
_PROMPT = re.compile(r"\.(prompt|token_ids)$")
_encode = msgspec.json.Encoder().encode

Texts = str | list[str]


class PoolingBody(Base, kw_only=True):
    """use_activation: False for logits of classes. activation: vLLM's older name of it."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str = ""
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None  # vLLM's
    use_activation: bool | None = None  # vLLM's
    activation: bool | None = None


class InputBody(PoolingBody, kw_only=True):
    """Inputs, or vLLM's messages, which make one prompt by the model's chat template."""

    input: str | list[Any] | None = None  # a text, ids, or a list of either
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(InputBody, kw_only=True):
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool | None = None  # vLLM's


class ClassifyBody(InputBody, kw_only=True):
    """As of embeddings."""


class TaskBody(EmbeddingBody, kw_only=True):
    """vLLM's /pooling. task: unset, the first of these that the model supports."""

    task: Literal["token_embed", "token_classify", "embed", "classify"] | None = None


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
    def __init__(self, pooling: PoolingAnswers, models: ModelAnswers, tokenizer: TokenizerAnswers) -> None:
        self._pooling, self._models, self._tokenizer = pooling, models, tokenizer
        self.posts: dict[str, Handler] = {
            "/v1/embeddings": without_rank(self._embeddings),
            "/classify": without_rank(self._classify),
            "/pooling": without_rank(self._pool),
            **dict.fromkeys(("/score", "/v1/score"), without_rank(self._score)),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), without_rank(self._rerank)),
        }

    async def _embeddings(self, request: Request) -> Response:
        body, ignored = await body_of(request, EmbeddingBody)
        api_request = await self._embed_request(request, body, ignored, "embed")
        answer = await unless_disconnected(request, self._pooling.embed(api_request, caller_of(request)))
        write = _base64_of if body.encoding_format == "base64" else _floats_of
        data = []
        for index, tensor in enumerate(answer.embeddings):
            if index % _WRITTEN_AT_ONCE == _WRITTEN_AT_ONCE - 1:
                await asyncio.sleep(0)
            shown = {"object": "embedding", "index": index, "embedding": write(tensor)}
            data.append(msgspec.Raw(_encode(shown)))
        content = _listed(f"embd-{answer.request_id}", api_request.model, data, answer.usage)
        return json_response(content, ignored)

    async def _classify(self, request: Request) -> Response:
        body, ignored = await body_of(request, ClassifyBody)
        api_request = await self._classify_request(request, body, ignored)
        answer = await unless_disconnected(request, self._pooling.classify(api_request, caller_of(request)))
        data = []
        for index, tensor in enumerate(answer.results):
            probs = _floats_of(tensor)
            best = max(range(len(probs)), key=probs.__getitem__)
            label = answer.labels[best] if len(answer.labels) == len(probs) else None
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        content = _listed(f"classify-{answer.request_id}", api_request.model, data, answer.usage)
        return json_response(content, ignored)

    async def _pool(self, request: Request) -> Response:
        body, ignored = await body_of(request, TaskBody)
        task = body.task or self._first_task(body.model)
        tensors: Sequence[tensor_pb2.Tensor]
        if task in ("classify", "token_classify"):
            _refuse(body, ("dimensions", "normalize"), task)
            classify = await self._classify_request(request, body, ignored)
            classify.per_token = task == "token_classify"
            classes = await unless_disconnected(request, self._pooling.classify(classify, caller_of(request)))
            name, tensors, usage = classes.request_id, classes.results, classes.usage
        else:
            embed = await self._embed_request(request, body, ignored, task)
            vectors = await unless_disconnected(request, self._pooling.embed(embed, caller_of(request)))
            name, tensors, usage = vectors.request_id, vectors.embeddings, vectors.usage
        write = _base64_of if body.encoding_format == "base64" else _nested_of
        data = []
        for index, tensor in enumerate(tensors):
            if index % _WRITTEN_AT_ONCE == _WRITTEN_AT_ONCE - 1:
                await asyncio.sleep(0)
            data.append(msgspec.Raw(_encode({"index": index, "object": "pooling", "data": write(tensor)})))
        return json_response(_listed(f"pool-{name}", self._name_of(body.model), data, usage), ignored)

    async def _score(self, request: Request) -> Response:
        body, ignored = await body_of(request, ScoreBody)
        (query_field, queries), (document_field, documents) = _pair_of(body)
        model = self._name_of(body.model)
        api_request = embedding_pb2.ScoreRequest(
            model=model, queries=_texts(queries), documents=_texts(documents)
        )
        set_field(api_request, "request_id", body.request_id)
        set_field(api_request, "truncate_prompt_tokens", body.truncate_prompt_tokens)
        names = {"queries": query_field, "documents": document_field, **_set_activation(api_request, body)}
        request.state.name_of = _names_of(names)
        answer = await unless_disconnected(request, self._pooling.score(api_request, caller_of(request)))
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(answer.scores)
        ]
        content = _listed(f"score-{answer.request_id}", api_request.model, data, answer.usage)
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
        request.state.name_of = _names_of(_set_activation(api_request, body))
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

    async def _embed_request(
        self, request: Request, body: EmbeddingBody, ignored: IgnoredFields, task: str
    ) -> embedding_pb2.EmbedRequest:
        _refuse(body, ("use_activation", "activation"), task)
        inputs = await self._inputs_of(request, body, ignored)
        api_request = embedding_pb2.EmbedRequest(model=self._name_of(body.model), inputs=inputs)
        set_field(api_request, "request_id", body.request_id)
        set_field(api_request, "truncate_prompt_tokens", body.truncate_prompt_tokens)
        api_request.pooling.task = _EMBEDDINGS[task]
        set_field(api_request.pooling, "dimensions", body.dimensions)
        set_field(api_request.pooling, "normalize", body.normalize)
        return api_request

    async def _classify_request(
        self, request: Request, body: InputBody, ignored: IgnoredFields
    ) -> embedding_pb2.ClassifyRequest:
        inputs = await self._inputs_of(request, body, ignored)
        api_request = embedding_pb2.ClassifyRequest(model=self._name_of(body.model), inputs=inputs)
        _set_activation(api_request, body)
        set_field(api_request, "request_id", body.request_id)
        set_field(api_request, "truncate_prompt_tokens", body.truncate_prompt_tokens)
        return api_request

    async def _inputs_of(
        self, request: Request, body: InputBody, ignored: IgnoredFields
    ) -> list[embedding_pb2.PoolingInput]:
        """The inputs of a body, or the one that its messages make. Errors name the body's fields."""
        if (body.input is None) == (body.messages is None):
            how = "is missing: give it or messages" if body.input is None else "is given beside messages"
            raise InvalidArgument(f"input {how}", field="input")
        if body.input is not None:
            ignored.extend(name for name in _OF_MESSAGES if getattr(body, name))
            inputs = _inputs(body.input)
            names = {f"inputs[{index}]": field for index, field in enumerate(inputs)}
            request.state.name_of = _names_of(names | {"inputs": "input"})
            return list(inputs.values())
        given = {name: getattr(body, name) for name in ("messages", *_OF_MESSAGES)}
        # vLLM's default here; a chat opens the answer.
        given["add_generation_prompt"] = bool(body.add_generation_prompt)
        request.state.name_of = chat_names()
        template = template_request(TokenizeBody(model=body.model, **given), ignored)
        template.tokenize = True
        rendered = await unless_disconnected(request, self._tokenizer.apply_chat_template(template))
        request.state.name_of = _names_of({"inputs[0]": "messages", "inputs": "messages"})
        return [embedding_pb2.PoolingInput(token_ids={"ids": rendered.token_ids})]

    def _first_task(self, model: str) -> str:
        """The task of a body that names none. The first one is refused by name where there is none."""
        supported = self._models.one(model).supported_tasks
        return next((task for task in _TASKS if task in supported), _TASKS[0])

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


def _refuse(body: PoolingBody, names: Sequence[str], task: str) -> None:
    """Raise InvalidArgument if the body has a field that the task does not take."""
    for name in names:
        if getattr(body, name) is not None:
            raise InvalidArgument(f"{name} is given, must be left out with task {task}", field=name)


def _set_activation(api_request: Any, body: PoolingBody) -> dict[str, str]:
    """Set `use_activation` if the body has it, by either name, and return the body's name by this one."""
    if body.activation is None:
        set_field(api_request, "use_activation", body.use_activation)
        return {}
    if body.use_activation is not None:
        raise InvalidArgument("activation is given beside use_activation, its newer name", field="activation")
    api_request.use_activation = body.activation
    return {"use_activation": "activation"}


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


def _nested_of(tensor: tensor_pb2.Tensor) -> list[float] | list[list[float]]:
    """The numbers, of each token apart where there are results of tokens."""
    values = _floats_of(tensor)
    if len(tensor.shape) == 1:
        return values
    width = tensor.shape[1]
    return [values[start : start + width] for start in range(0, len(values), width)]


def _base64_of(tensor: tensor_pb2.Tensor) -> str:
    """The numbers as little-endian binary32."""
    content = tensor.inline
    if tensor.dtype != tensor_pb2.D_TYPE_FP32:
        values = read_floats(tensor)
        content = struct.pack(f"<{len(values)}f", *values)
    return base64.b64encode(content).decode()


def _listed(name: str, model: str, data: Sequence[object], usage: output_pb2.Usage) -> dict[str, object]:
    """The body of an answer that is a list."""
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage_of(usage),
    }


def _usage_of(usage: output_pb2.Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.num_prompt_tokens, "total_tokens": usage.num_prompt_tokens}
