"""Answers of pooling models: embeddings, scores, rankings and classes of texts."""

from __future__ import annotations

import asyncio
import hashlib
import operator
from collections.abc import Iterable
from typing import TypeAlias

from frontend_svc.generation.caller import Caller
from frontend_svc.generation.pooling import PooledPrompts, Pooling, PoolingPrompt, PoolingWork
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.pooling import (
    Inputs,
    check_inputs,
    check_pooling,
    check_prompts,
    check_result,
    inputs_of,
    is_per_token,
    read_floats,
    refuse_unsupported,
    spread,
    tokenize_inputs,
    truncated_pair,
)
from frontend_svc.text.score_template import render_pairs
from frontend_svc.text.tokenize.id_column import id_column
from triptych.api.v1 import embedding_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_kit.errors import Internal, InvalidArgument
from triptych_kit.rules import MessageRules

PoolingRequest: TypeAlias = (
    "embedding_pb2.EmbedRequest | embedding_pb2.ClassifyRequest | embedding_pb2.ScoreRequest"
    " | embedding_pb2.RerankRequest"
)
# How long they may be depends on the model.
_INPUTS = tuple(
    f"{name}.{kind}"
    for name in ("inputs", "queries", "documents", "query")
    for kind in ("prompt", "token_ids")
)
_RULES: dict[type[PoolingRequest], MessageRules] = {
    message: MessageRules(message, apart=_INPUTS)
    for message in (
        embedding_pb2.EmbedRequest,
        embedding_pb2.ClassifyRequest,
        embedding_pb2.ScoreRequest,
        embedding_pb2.RerankRequest,
    )
}

# Vectors of documents that are compared before other requests are served.
_COMPARED_AT_ONCE = 16
_EMBED = sampling_pb2.POOLING_TASK_EMBED
_SCORE = sampling_pb2.POOLING_TASK_SCORE
_TOKEN_EMBED = sampling_pb2.POOLING_TASK_TOKEN_EMBED


class PoolingAnswers:
    """Checks pooling requests, runs them and assembles their results.

    Pairs of texts are scored by the model if it supports that. Otherwise the score of a pair is the cosine
    similarity of their embeddings.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling

    async def embed(self, request: embedding_pb2.EmbedRequest, caller: Caller) -> embedding_pb2.EmbedResponse:
        """One embedding for each input, or one for each of its tokens."""
        params = sampling_pb2.PoolingParams()
        params.CopyFrom(request.pooling)
        params.task = params.task or _EMBED
        tasks = [_EMBED, _TOKEN_EMBED]
        violations = Violations()
        if params.late_interaction_key:
            # Vectors of tokens are kept under it, or a score is made with them.
            tasks = [_TOKEN_EMBED, _SCORE]
            rule = "must be TOKEN_EMBED or SCORE beside late_interaction_key"
            violations.need(params.task in tasks, "pooling.task", params.task, rule)
            # A later query would replace the first.
            is_one = params.task != _TOKEN_EMBED or len(request.inputs) <= 1
            rule = "must be 1 with TOKEN_EMBED and a late_interaction_key"
            violations.need(is_one, "inputs", len(request.inputs), rule)
        check_pooling(request.pooling, tasks, violations)
        violations.need(
            not params.HasField("use_activation"),
            "pooling.use_activation",
            params.use_activation,
            "must be left out, as no classes are asked for",
        )
        inputs = inputs_of("inputs", request.inputs)
        model = self._checked_model(request, inputs, violations)
        refuse_unsupported(model, [_TOKEN_EMBED if params.late_interaction_key else params.task])
        pooled = await self._run(model, params, inputs, request, caller)
        for result in pooled.results:
            is_cut = params.HasField("dimensions") and params.task != _SCORE
            if is_cut and result.tensor.shape[-1] != params.dimensions:
                num_dimensions = result.tensor.shape[-1]
                raise Internal(
                    f"the engine gave {num_dimensions} dimensions where {params.dimensions} were asked for"
                )
        return embedding_pb2.EmbedResponse(
            embeddings=[result.tensor for result in pooled.results],
            usage=_usage(pooled),
            request_id=pooled.request_id,
        )

    async def classify(
        self, request: embedding_pb2.ClassifyRequest, caller: Caller
    ) -> embedding_pb2.ClassifyResponse:
        """Class probabilities, or logits, for each input, or for each of its tokens."""
        task = sampling_pb2.POOLING_TASK_CLASSIFY
        if request.per_token:
            task = sampling_pb2.POOLING_TASK_TOKEN_CLASSIFY
        inputs = inputs_of("inputs", request.inputs)
        model = self._checked_model(request, inputs, Violations())
        refuse_unsupported(model, [task])
        params = sampling_pb2.PoolingParams(task=task, use_activation=_activates(request))
        pooled = await self._run(model, params, inputs, request, caller)
        return embedding_pb2.ClassifyResponse(
            results=[result.tensor for result in pooled.results],
            labels=model.class_labels,
            usage=_usage(pooled),
            request_id=pooled.request_id,
        )

    async def score(self, request: embedding_pb2.ScoreRequest, caller: Caller) -> embedding_pb2.ScoreResponse:
        """The relevance of each document to the query of the same index, or to the only query."""
        violations = Violations()
        queries, documents = inputs_of("queries", request.queries), inputs_of("documents", request.documents)
        num_queries, num_documents = len(queries), len(documents)
        rule = f"must be 1 or as many as documents, {num_documents}"
        violations.need(num_queries in (1, num_documents), "queries", num_queries, rule)
        model = self._checked_model(request, {**queries, **documents}, violations)
        scores, pooled = await self._scores_of(model, queries, documents, request, caller)
        return embedding_pb2.ScoreResponse(scores=scores, usage=_usage(pooled), request_id=pooled.request_id)

    async def rerank(
        self, request: embedding_pb2.RerankRequest, caller: Caller
    ) -> embedding_pb2.RerankResponse:
        """The most relevant documents, best first; documents of equal score stay in order."""
        queries, documents = {"query": request.query}, inputs_of("documents", request.documents)
        model = self._checked_model(request, {**queries, **documents}, Violations())
        scores, pooled = await self._scores_of(model, queries, documents, request, caller)
        best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
        return embedding_pb2.RerankResponse(
            results=[
                embedding_pb2.RerankResult(document_index=index, score=scores[index])
                for index in best_first[: request.top_n or None]
            ],
            usage=_usage(pooled),
            request_id=pooled.request_id,
        )

    def _checked_model(self, request: PoolingRequest, inputs: Inputs, violations: Violations) -> ServedModel:
        model = self._pooling.model(request.model)
        violations.extend(_RULES[type(request)].violations(request, {}))
        most, num_kept = model.max_model_len, request.truncate_prompt_tokens
        violations.need(num_kept <= most, "truncate_prompt_tokens", num_kept, f"must be at most {most}")
        check_inputs(inputs, model, violations, may_be_long=num_kept != 0)
        violations.raise_if_any()
        return model

    async def _run(
        self,
        model: ServedModel,
        params: sampling_pb2.PoolingParams,
        inputs: Inputs,
        request: embedding_pb2.EmbedRequest | embedding_pb2.ClassifyRequest,
        caller: Caller,
    ) -> PooledPrompts:
        async def tokenize() -> list[PoolingPrompt]:
            num_kept = _num_kept(request, model)
            prompts = await tokenize_inputs(inputs, model, num_kept=num_kept)
            check_prompts(inputs, prompts, model)
            return list(map(PoolingPrompt, prompts))

        pooled = await self._pooling.run(
            PoolingWork(request.request_id, request.model, model, params, tokenize), caller
        )
        for result in pooled.results:
            check_result(result.tensor, 2 if is_per_token(params.task) else 1)
        return pooled

    async def _scores_of(
        self,
        model: ServedModel,
        queries: Inputs,
        documents: Inputs,
        request: embedding_pb2.ScoreRequest | embedding_pb2.RerankRequest,
        caller: Caller,
    ) -> tuple[list[float], PooledPrompts]:
        """A score for each document. queries: one, or as many as documents."""
        refuse_unsupported(model, [_SCORE, _EMBED])
        is_by_pairs = "score" in model.supported_tasks
        activates = _activates(request)
        if activates is not None and not is_by_pairs:
            raise InvalidArgument(
                f"use_activation is {str(activates).lower()}, must be left out: scores of model "
                f"{model.name!r} are cosines",
                field="use_activation",
            )
        texts = {**queries, **documents}

        async def tokenize() -> list[PoolingPrompt]:
            num_kept = _num_kept(request, model)
            if not is_by_pairs:
                prompts = await tokenize_inputs(texts, model, num_kept=num_kept)
                check_prompts(texts, prompts, model)
                return list(map(PoolingPrompt, prompts))
            if model.score_template:
                prompts = await render_pairs(queries, documents, model, num_kept)
                check_prompts(documents, prompts, model)
                asked = spread([query.prompt.encode() for query in queries.values()], documents)
                return list(map(PoolingPrompt, prompts, _affinity_keys(asked)))
            is_cut = num_kept is not None
            token_ids = await tokenize_inputs(texts, model, add_special_tokens=False, may_be_long=is_cut)
            firsts, seconds = token_ids[: len(queries)], token_ids[len(queries) :]
            template = model.tokenizer.pair_template
            room = None if num_kept is None else num_kept - template.num_special
            if room is not None and room < 0:
                raise InvalidArgument(
                    f"truncate_prompt_tokens is {num_kept}, must be at least {template.num_special}, "
                    "the special tokens of a pair",
                    field="truncate_prompt_tokens",
                )
            cut = [
                truncated_pair(first, second, room)
                for first, second in zip(spread(firsts, seconds), seconds, strict=True)
            ]
            firsts, pairs = [first for first, _ in cut], [template.join(*pair) for pair in cut]
            check_prompts(documents, pairs, model)
            starts = map(template.second_start, firsts)
            return list(map(PoolingPrompt, pairs, _affinity_keys(map(id_column, firsts)), starts))

        params = sampling_pb2.PoolingParams(task=_SCORE, use_activation=activates)
        if not is_by_pairs:
            params = sampling_pb2.PoolingParams(task=_EMBED, normalize=True)
        pooled = await self._pooling.run(
            PoolingWork(request.request_id, request.model, model, params, tokenize), caller
        )
        return _pair_scores(pooled) if is_by_pairs else await _cosines(pooled, len(queries)), pooled


def _affinity_keys(queries: Iterable[bytes]) -> list[str]:
    """One key per query: all of its pairs go to one engine, whose prefix cache computes it once."""
    return [hashlib.sha256(query).hexdigest() for query in queries]


def _num_kept(request: PoolingRequest, model: ServedModel) -> int | None:
    """How many tokens of each prompt are kept; None: all."""
    num_kept = request.truncate_prompt_tokens
    return model.max_model_len if num_kept < 0 else num_kept or None


def _activates(
    request: embedding_pb2.ClassifyRequest | embedding_pb2.ScoreRequest | embedding_pb2.RerankRequest,
) -> bool | None:
    return request.use_activation if request.HasField("use_activation") else None


def _pair_scores(pooled: PooledPrompts) -> list[float]:
    scores = []
    for result in pooled.results:
        check_result(result.tensor, len(result.tensor.shape))
        values = read_floats(result.tensor)
        if len(values) != 1:
            raise Internal(f"the engine gave {len(values)} scores for a pair")
        scores.append(values[0])
    return scores


async def _cosines(pooled: PooledPrompts, num_queries: int) -> list[float]:
    tensors = [result.tensor for result in pooled.results]
    for tensor in tensors:
        check_result(tensor, 1)
    if len({tensor.shape[0] for tensor in tensors}) != 1:
        raise Internal("the engine gave vectors of different lengths")
    queries, documents = tensors[:num_queries], tensors[num_queries:]
    scores: list[float] = []
    for query, document in zip(spread(queries, documents), documents, strict=True):
        if len(scores) % _COMPARED_AT_ONCE == 0:
            await asyncio.sleep(0)
        # The vectors are normalized, so that the dot product is the cosine.
        scores.append(sum(map(operator.mul, read_floats(query), read_floats(document))))
    return scores


def _usage(pooled: PooledPrompts) -> output_pb2.Usage:
    return output_pb2.Usage(
        num_prompt_tokens=pooled.num_prompt_tokens,
        num_cached_tokens=sum(result.num_cached_tokens for result in pooled.results),
    )
