"""EmbeddingService through a whole frontend, with an engine that pools scripted tensors."""

from __future__ import annotations

import asyncio
import math
import re
import struct
from collections.abc import Callable, Sequence

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer, models, processors

from tests.frontend_svc.fakes import (
    EOS_ID,
    MAX_MODEL_LEN,
    TOKENIZER,
    VOCAB_SIZE,
    WAIT_S,
    Client,
    FakeEngine,
    FakeRequest,
    Script,
    details_of,
    read_all,
    serving,
    serving_one,
)
from tests.frontend_svc.tokenizers import EOS, byte_level_tokenizer
from triptych.api.v1 import embedding_pb2
from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych.engine.v1 import engine_pb2, session_pb2, step_pb2

SCORE_TEMPLATE = (
    "Judge. {{ (messages | selectattr('role', 'eq', 'query') | first).content }}: "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }} Answer."
)
NOT_SHOWN = ": the chat template does not show this message"
ENGINE_TASKS = ("embed", "token_embed", "classify", "token_classify")


def tensor(values: Sequence[float], shape: Sequence[int] | None = None) -> tensor_pb2.Tensor:
    content = struct.pack(f"<{len(values)}f", *values)
    dimensions = [len(values)] if shape is None else shape
    return tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=dimensions, inline=content)


def text(prompt: str) -> embedding_pb2.PoolingInput:
    return embedding_pb2.PoolingInput(prompt=prompt)


def ids(*token_ids: int) -> embedding_pb2.PoolingInput:
    return embedding_pb2.PoolingInput(token_ids={"ids": token_ids})


def pooling(make: Callable[[FakeRequest], tensor_pb2.Tensor | None], *, num_cached: int = 0) -> Script:
    """A script that ends each request with the result that `make` has for it."""
    return lambda engine, request: engine.pool(request, make(request), num_cached=num_cached)


def length_vector(request: FakeRequest) -> tensor_pb2.Tensor:
    return tensor([float(len(request.prompt)), 0.5])


def rendered_pair(query: str, document: str) -> list[int]:
    return TOKENIZER.encode(f"Judge. {query}: {document} Answer.", add_special_tokens=False).ids


async def error_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_model_supports_pooling_once_its_engine_announces_it():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        name = health_pb2.HealthCheckRequest(service="triptych.api.v1.EmbeddingService")
        async for response in client.health.Watch(name, timeout=WAIT_S):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
            engine.supported_tasks = ("generate", "embed")
            engine.become_ready()


async def health_of(client: Client) -> int:
    name = health_pb2.HealthCheckRequest(service="triptych.api.v1.EmbeddingService")
    return (await client.health.Check(name)).status


async def test_embed_gives_a_vector_for_each_input_in_order_and_counts_tokens():
    engine = FakeEngine(pooling(length_vector, num_cached=2), supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        request = embedding_pb2.EmbedRequest(
            inputs=[text("the cat sat on the mat"), ids(5, 6), text("the cat")],
            pooling={"dimensions": 2, "normalize": False},
            request_id="mine",
        )
        response = await client.embedding.Embed(request, timeout=WAIT_S)
    lengths = [len(TOKENIZER.encode("the cat sat on the mat").ids), 2, len(TOKENIZER.encode("the cat").ids)]
    assert list(response.embeddings) == [tensor([length, 0.5]) for length in lengths]
    assert (response.usage.num_prompt_tokens, response.usage.num_cached_tokens) == (sum(lengths), 6)
    assert response.request_id == "mine"
    params = sampling_pb2.PoolingParams(task=sampling_pb2.POOLING_TASK_EMBED, dimensions=2, normalize=False)
    assert all(request.entry.pooling == params for request in engine.requests)
    assert {request.entry.external_request_id for request in engine.requests} == {"mine"}
    assert len({request.entry.request_id for request in engine.requests}) == 3


async def test_more_inputs_than_are_sent_at_once_come_back_in_order_whatever_ends_first():
    held: list[FakeRequest] = []

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        held.append(request)
        if len(held) % 5 == 0 or len(engine.requests) == 101:
            for one in reversed(held):
                engine.pool(one, length_vector(one))
            held.clear()

    engine = FakeEngine(script, supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        inputs = [ids(*range(1, 2 + index % 7)) for index in range(101)]
        response = await client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=inputs), timeout=WAIT_S)
    expected = [float(1 + index % 7) for index in range(101)]
    assert [struct.unpack("<2f", vector.inline)[0] for vector in response.embeddings] == expected


async def test_per_token_results_compute_every_position_of_the_prompt():
    def rows(request: FakeRequest) -> tensor_pb2.Tensor:
        num_tokens = len(request.prompt)
        return tensor([1.0] * 3 * num_tokens, [num_tokens, 3])

    engine = FakeEngine(pooling(rows), supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        embed = embedding_pb2.EmbedRequest(
            inputs=[ids(5, 6)], pooling={"task": sampling_pb2.POOLING_TASK_TOKEN_EMBED}
        )
        classify = embedding_pb2.ClassifyRequest(inputs=[ids(5, 6, 7)], per_token=True)
        embedded = await client.embedding.Embed(embed, timeout=WAIT_S)
        classified = await client.embedding.Classify(classify, timeout=WAIT_S)
    assert list(embedded.embeddings[0].shape) == [2, 3]
    assert list(classified.results[0].shape) == [3, 3]
    assert [request.entry.pooling.task for request in engine.requests] == [
        sampling_pb2.POOLING_TASK_TOKEN_EMBED,
        sampling_pb2.POOLING_TASK_TOKEN_CLASSIFY,
    ]
    assert all(request.entry.skip_reading_prefix_cache for request in engine.requests)


async def test_classes_have_the_names_that_the_model_gives_them():
    config = {"id2label": {"1": "good", "0": "bad"}}
    engine = FakeEngine(pooling(lambda _: tensor([0.25, 0.75])), supported_tasks=ENGINE_TASKS, config=config)
    async with serving(engine) as (client, _):
        request = embedding_pb2.ClassifyRequest(inputs=[text("the cat")])
        response = await client.embedding.Classify(request, timeout=WAIT_S)
    assert list(response.labels) == ["bad", "good"]
    assert list(response.results) == [tensor([0.25, 0.75])]
    assert not engine.requests[0].entry.skip_reading_prefix_cache


async def test_an_input_is_cut_to_what_the_model_takes():
    engine = FakeEngine(pooling(length_vector), supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        given = [ids(*[5] * (MAX_MODEL_LEN + 3))]
        long = embedding_pb2.EmbedRequest(inputs=given, truncate_prompt_tokens=-1)
        response = await client.embedding.Embed(long, timeout=WAIT_S)
    assert response.usage.num_prompt_tokens == MAX_MODEL_LEN


async def test_pairs_are_scored_together_where_the_model_does_that():
    engine = FakeEngine(
        pooling(lambda request: tensor([float(request.prompt[-1])])), supported_tasks=["score"]
    )
    async with serving(engine) as (client, _):
        one = embedding_pb2.ScoreRequest(queries=[ids(1, 2)], documents=[ids(3), ids(4, 5)])
        response = await client.embedding.Score(one, timeout=WAIT_S)
        each = embedding_pb2.ScoreRequest(queries=[ids(1), ids(2)], documents=[ids(3), ids(4)])
        await client.embedding.Score(each, timeout=WAIT_S)
    assert list(response.scores) == [3.0, 5.0]
    # This tokenizer puts nothing between two texts.
    assert [request.prompt for request in engine.requests] == [[1, 2, 3], [1, 2, 4, 5], [1, 3], [2, 4]]
    assert response.usage.num_prompt_tokens == 7
    assert {request.entry.pooling.task for request in engine.requests} == {sampling_pb2.POOLING_TASK_SCORE}


async def test_a_pair_is_cut_to_its_special_tokens_and_no_further():
    engine = FakeEngine(pooling(lambda request: tensor([0.5])), supported_tasks=["score"])
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", pair=f"{EOS} $A {EOS} $B {EOS}", special_tokens=[(EOS, EOS_ID)]
    )
    engine.files[session_pb2.ARTIFACT_KIND_TOKENIZER] = tokenizer.to_str().encode()
    async with serving(engine) as (client, _):
        request = embedding_pb2.ScoreRequest(
            queries=[text("the cat")], documents=[text("sat")], truncate_prompt_tokens=3
        )
        await client.embedding.Score(request, timeout=WAIT_S)
        request.truncate_prompt_tokens = 2
        error = await error_of(client.embedding.Score(request, timeout=WAIT_S))
    assert [request.prompt for request in engine.requests] == [[EOS_ID] * 3]
    assert error.details() == "truncate_prompt_tokens is 2, must be at least 3, the special tokens of a pair"


async def test_a_score_template_makes_the_prompt_of_a_pair():
    engine = FakeEngine(
        pooling(lambda request: tensor([0.5])),
        supported_tasks=["classify", "score"],
        chat_template=SCORE_TEMPLATE,
    )
    async with serving(engine) as (client, _):
        documents = [text("sat"), text("a mat")]
        request = embedding_pb2.ScoreRequest(queries=[text("the cat")], documents=documents)
        await client.embedding.Score(request, timeout=WAIT_S)
        given = embedding_pb2.ScoreRequest(queries=[ids(1)], documents=documents)
        error = await error_of(client.embedding.Score(given, timeout=WAIT_S))
    shown = [rendered_pair("the cat", document) for document in ("sat", "a mat")]
    assert [request.prompt for request in engine.requests] == shown
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "queries[0] is 'token_ids', must be a text: the model has a score template"


async def test_the_document_of_a_score_template_is_cut_and_what_is_behind_it_stays():
    engine = FakeEngine(
        pooling(lambda request: tensor([0.5])), supported_tasks=["score"], chat_template=SCORE_TEMPLATE
    )
    least = len(rendered_pair("the cat", ""))
    async with serving(engine) as (client, _):
        request = embedding_pb2.RerankRequest(
            query=text("the cat"), documents=[text("sat on the mat " * 9)], truncate_prompt_tokens=least + 4
        )
        await client.embedding.Rerank(request, timeout=WAIT_S)
        request.truncate_prompt_tokens = least - 1
        error = await error_of(client.embedding.Rerank(request, timeout=WAIT_S))
    (sent,) = engine.requests
    assert least < len(sent.prompt) <= least + 4
    assert TOKENIZER.decode(sent.prompt).startswith("Judge. the cat: sat")
    assert TOKENIZER.decode(sent.prompt).endswith(" Answer.")
    assert "tokens of the score template and the query of documents[0]" in error.details()


@pytest.mark.parametrize(
    ("shown", "message", "field"),
    [
        ("{{ raise_exception('no pair') }}", "no pair", "documents[0]"),
        ("{{ messages[0].content }}", f"documents[0]{NOT_SHOWN}", "documents[0]"),
        ("{{ messages[1].content }}", f"query{NOT_SHOWN}", "query"),
    ],
    ids=["raises", "hides the document", "hides the query"],
)
async def test_errors_of_a_score_template_name_the_texts_of_the_request(shown, message, field):
    engine = FakeEngine(supported_tasks=["score"], chat_template="{# 'query' 'document' #}" + shown)
    async with serving(engine) as (client, _):
        request = embedding_pb2.RerankRequest(query=text("the cat"), documents=[text("sat"), text("a mat")])
        error = await error_of(client.embedding.Rerank(request, timeout=WAIT_S))
    assert error.details() == message
    assert f'field: "{field}"' in details_of(error)


async def test_the_longest_text_is_rendered_whatever_the_score_template_adds():
    engine = FakeEngine(supported_tasks=["score"], chat_template=SCORE_TEMPLATE)
    longest = "the cat " * (1 << 17)
    async with serving(engine) as (client, _):
        request = embedding_pb2.RerankRequest(query=text("the cat"), documents=[text(longest)])
        error = await error_of(client.embedding.Rerank(request, timeout=WAIT_S))
        request.documents[0].prompt += "!"
        longer = await error_of(client.embedding.Rerank(request, timeout=WAIT_S))
    assert re.match(rf"documents\[0\] has \d+ tokens, must have 1\.\.{MAX_MODEL_LEN}", error.details())
    assert longer.details() == (
        f"documents[0].prompt has {len(longest) + 1} characters, must have 1..{len(longest)}"
    )


async def test_a_query_meets_all_of_its_documents_in_one_engine_and_other_queries_may_go_elsewhere():
    engines = [
        FakeEngine(pooling(lambda request: tensor([0.5])), dp_rank=rank, supported_tasks=("score",))
        for rank in range(4)
    ]
    queries = [1, 2, 3, 4, 5, 6, 7, 8]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(4)
        for _ in range(2):
            request = embedding_pb2.ScoreRequest(
                queries=[ids(query) for query in queries for _ in range(3)],
                documents=[ids(10, index) for _ in queries for index in range(3)],
            )
            await client.embedding.Score(request, timeout=WAIT_S)
    met = {query: set() for query in queries}
    for engine in engines:
        for request in engine.requests:
            met[request.prompt[0]].add(engine.dp_rank)
    assert all(len(ranks) == 1 for ranks in met.values())
    assert len(set.union(*met.values())) > 1


async def test_without_pairs_the_score_is_the_cosine_of_two_vectors():
    angles = {1: 0.0, 2: math.pi / 3, 3: math.pi}

    def on_circle(request: FakeRequest) -> tensor_pb2.Tensor:
        angle = angles[request.prompt[0]]
        return tensor([math.cos(angle), math.sin(angle)])

    engine = FakeEngine(pooling(on_circle), supported_tasks=["embed"])
    async with serving(engine) as (client, _):
        request = embedding_pb2.ScoreRequest(queries=[ids(1)], documents=[ids(2), ids(3), ids(1)])
        response = await client.embedding.Score(request, timeout=WAIT_S)
    assert list(response.scores) == pytest.approx([0.5, -1.0, 1.0], abs=1e-6)
    assert len(engine.requests) == 4
    assert all(request.entry.pooling.normalize for request in engine.requests)


async def test_rerank_gives_the_best_first_and_equal_ones_in_order():
    engine = FakeEngine(
        pooling(lambda request: tensor([float(request.prompt[-1])])), supported_tasks=["score"]
    )
    documents = [ids(3), ids(9), ids(3), ids(5)]
    async with serving(engine) as (client, _):
        for top_n, order in ((0, [1, 3, 0, 2]), (3, [1, 3, 0]), (9, [1, 3, 0, 2])):
            request = embedding_pb2.RerankRequest(query=ids(1), documents=documents, top_n=top_n)
            response = await client.embedding.Rerank(request, timeout=WAIT_S)
            assert [result.document_index for result in response.results] == order
            assert response.results[0].score == 9.0


@pytest.mark.parametrize("activates", [None, True, False])
async def test_classes_and_scores_are_probabilities_or_logits(activates: bool | None):
    engine = FakeEngine(pooling(lambda _: tensor([0.5])), supported_tasks=("classify", "score"))
    given = {"use_activation": activates}
    async with serving(engine) as (client, _):
        await client.embedding.Classify(embedding_pb2.ClassifyRequest(inputs=[ids(1)], **given))
        pair = embedding_pb2.ScoreRequest(queries=[ids(1)], documents=[ids(1)], **given)
        await client.embedding.Score(pair, timeout=WAIT_S)
        await client.embedding.Rerank(embedding_pb2.RerankRequest(query=ids(1), documents=[ids(1)], **given))
    assert [request.entry.pooling for request in engine.requests] == [
        sampling_pb2.PoolingParams(task=task, **given)
        for task in (sampling_pb2.POOLING_TASK_CLASSIFY, *[sampling_pb2.POOLING_TASK_SCORE] * 2)
    ]


async def test_vectors_and_their_cosines_have_no_activation():
    engine = FakeEngine(pooling(length_vector), supported_tasks=("embed", "token_embed"))
    async with serving(engine) as (client, _):
        calls = [
            client.embedding.Embed(
                embedding_pb2.EmbedRequest(inputs=[ids(1)], pooling={"use_activation": False})
            ),
            client.embedding.Score(
                embedding_pb2.ScoreRequest(queries=[ids(1)], documents=[ids(1)], use_activation=False)
            ),
            client.embedding.Rerank(
                embedding_pb2.RerankRequest(query=ids(1), documents=[ids(1)], use_activation=True)
            ),
        ]
        errors = [await error_of(call) for call in calls]
    assert {error.code() for error in errors} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert [error.details() for error in errors] == [
        "pooling.use_activation is false, must be left out, as no classes are asked for",
        "use_activation is false, must be left out: scores of model 'tiny' are cosines",
        "use_activation is true, must be left out: scores of model 'tiny' are cosines",
    ]
    assert not engine.requests


async def test_92_a_generate_model_refuses_by_name_what_it_does_not_support():
    async with serving_one() as (engine, client, _):
        calls = [
            client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=[ids(1)])),
            client.embedding.Classify(embedding_pb2.ClassifyRequest(inputs=[ids(1)])),
            client.embedding.Score(embedding_pb2.ScoreRequest(queries=[ids(1)], documents=[ids(1)])),
            client.embedding.Rerank(embedding_pb2.RerankRequest(query=ids(1), documents=[ids(1)])),
        ]
        errors = [await error_of(call) for call in calls]
        assert await health_of(client) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert [error.code() for error in errors] == [grpc.StatusCode.UNIMPLEMENTED] * 4
    assert errors[0].details() == "model 'tiny' does not support embed; it supports: generate"
    assert "TASK_NOT_SUPPORTED" in details_of(errors[0])
    assert "score or embed" in errors[2].details()
    assert not engine.requests


async def test_92_a_pooling_model_refuses_to_generate():
    engine = FakeEngine(supported_tasks=["embed"])
    async with serving(engine) as (client, _):
        error = await error_of(read_all(client.generate("the cat")))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == "model 'tiny' does not support generate; it supports: embed"
    assert not engine.requests


async def test_the_service_is_ready_once_a_model_supports_a_task_of_it():
    engine = FakeEngine(pooling(length_vector), supported_tasks=["generate", "embed"])
    async with serving(engine) as (client, _):
        assert await health_of(client) == health_pb2.HealthCheckResponse.SERVING


async def test_every_violation_is_reported_at_once_with_its_index():
    engine = FakeEngine(pooling(length_vector), supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        request = embedding_pb2.EmbedRequest(
            inputs=[text(""), ids(), ids(VOCAB_SIZE), embedding_pb2.PoolingInput()],
            pooling={"dimensions": 0, "task": sampling_pb2.POOLING_TASK_SCORE},
            request_id="x" * 129,
        )
        details = details_of(await error_of(client.embedding.Embed(request)))
        empty = await error_of(client.embedding.Embed(embedding_pb2.EmbedRequest()))
        many = embedding_pb2.EmbedRequest(inputs=[ids(1)] * 2049)
        too_many = await error_of(client.embedding.Embed(many))
        pairs = embedding_pb2.ScoreRequest(queries=[ids(1)] * 2, documents=[ids(1)] * 3)
        uneven = await error_of(client.embedding.Score(pairs))
        negative = embedding_pb2.RerankRequest(query=ids(1), documents=[ids(1)], top_n=-1)
        top_n = await error_of(client.embedding.Rerank(negative))
    for field in (
        "inputs[0].prompt",
        "inputs[1].token_ids",
        "inputs[2].token_ids",
        "inputs[3]",
        "pooling.dimensions",
        "pooling.task",
        "request_id",
    ):
        assert f'field: "{field}"' in details
    assert empty.details() == "inputs has 0 entries, must have 1..2048"
    assert too_many.details() == "inputs has 2049 entries, must have 1..2048"
    assert uneven.details() == "queries is 2, must be 1 or as many as documents, 3"
    assert top_n.details() == "top_n is -1, must be at least 0"
    assert not engine.requests


async def test_prompts_that_do_not_fit_are_all_named_before_any_is_sent():
    engine = FakeEngine(pooling(length_vector), supported_tasks=ENGINE_TASKS, max_model_len=8)
    async with serving(engine) as (client, _):
        fits = "a b c d"
        long = "the cat sat on the mat and the dog sat on it"
        request = embedding_pb2.EmbedRequest(inputs=[text(fits), text(long), text(long)])
        error = await error_of(client.embedding.Embed(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(error)
    assert "inputs[1] has" in details
    assert "inputs[2] has" in details
    assert "must have 1..8" in details
    assert not engine.requests


async def test_a_text_of_as_many_of_the_longest_tokens_as_the_model_takes_fits():
    letters = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    engine = FakeEngine(pooling(length_vector), supported_tasks=ENGINE_TASKS)
    engine.files[session_pb2.ARTIFACT_KIND_TOKENIZER] = letters.to_str().encode()
    async with serving(engine) as (client, _):
        request = embedding_pb2.EmbedRequest(inputs=[text("a" * MAX_MODEL_LEN)])
        response = await client.embedding.Embed(request, timeout=WAIT_S)
        request.inputs[0].prompt += "a"
        error = await error_of(client.embedding.Embed(request, timeout=WAIT_S))
    assert response.usage.num_prompt_tokens == MAX_MODEL_LEN
    assert error.details() == (
        f"inputs[0].prompt has {MAX_MODEL_LEN + 1} tokens or more, must have 1..{MAX_MODEL_LEN}"
    )


async def test_a_query_is_kept_and_its_documents_are_scored_in_the_same_engine():
    def result(request: FakeRequest) -> tensor_pb2.Tensor:
        is_score = request.entry.pooling.task == sampling_pb2.POOLING_TASK_SCORE
        return tensor([0.5]) if is_score else tensor([1.0] * len(request.prompt), [len(request.prompt), 1])

    engines = [FakeEngine(pooling(result), dp_rank=rank, supported_tasks=ENGINE_TASKS) for rank in range(3)]
    keys = [f"key {number}" for number in range(6)]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(3)
        for task in (sampling_pb2.POOLING_TASK_TOKEN_EMBED, sampling_pb2.POOLING_TASK_SCORE):
            for key in keys:
                params = sampling_pb2.PoolingParams(task=task, late_interaction_key=key)
                is_score = task == sampling_pb2.POOLING_TASK_SCORE
                inputs = [ids(1, 2), ids(3)] if is_score else [ids(1, 2)]
                request = embedding_pb2.EmbedRequest(inputs=inputs, pooling=params)
                answer = await client.embedding.Embed(request, timeout=WAIT_S)
                assert [list(vector.shape) for vector in answer.embeddings] == (
                    [[1], [1]] if is_score else [[2, 1]]
                )
        wrong = embedding_pb2.EmbedRequest(inputs=[ids(1)], pooling={"late_interaction_key": "k"})
        error = await error_of(client.embedding.Embed(wrong))
    met = {key: set() for key in keys}
    for engine in engines:
        for request in engine.requests:
            met[request.entry.pooling.late_interaction_key].add(engine.dp_rank)
    assert all(len(ranks) == 1 for ranks in met.values())
    assert error.details().startswith("pooling.task is ")
    assert "must be TOKEN_EMBED or SCORE beside late_interaction_key" in error.details()


async def test_one_query_is_kept_under_a_key():
    engine = FakeEngine(pooling(tensor([1.0], [1, 1])), supported_tasks=ENGINE_TASKS)
    params = {"task": sampling_pb2.POOLING_TASK_TOKEN_EMBED, "late_interaction_key": "k"}
    async with serving(engine) as (client, _):
        await client.until_engines_are_ready(1)
        request = embedding_pb2.EmbedRequest(inputs=[ids(1), ids(2)], pooling=params)
        error = await error_of(client.embedding.Embed(request, timeout=WAIT_S))
    assert "inputs is 2, must be 1 with TOKEN_EMBED and a late_interaction_key" in details_of(error)
    assert not engine.requests


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "without a result"),
        (tensor([1.0, 2.0], [3]), r"shape \[3\], type D_TYPE_FP32, 8 bytes"),
        (tensor([1.0, 2.0], [1, 2]), r"shape \[1, 2\]"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT32, shape=[1], inline=b"0000"), "D_TYPE_INT32"),
        (tensor([1.0]), "gave 1 dimensions where 2 were asked for"),
    ],
)
async def test_a_result_that_is_none_is_an_error_of_ours(result, words):
    engine = FakeEngine(pooling(lambda _: result), supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        request = embedding_pb2.EmbedRequest(inputs=[ids(1)], pooling={"dimensions": 2})
        error = await error_of(client.embedding.Embed(request))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert re.search(words, error.details())


async def test_a_cancelled_call_aborts_its_prompts_in_the_engine():
    engine = FakeEngine(supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        call = client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=[ids(1), ids(2)]))
        await engine.wait_for_requests(2)
        call.cancel()
        await engine.wait(lambda: all(one.abort_reason is not None for one in engine.requests))
        with pytest.raises(asyncio.CancelledError):
            await call
    assert {request.abort_reason for request in engine.requests} == {engine_pb2.ABORT_REASON_CLIENT}


async def test_88_an_abort_by_the_engine_ends_the_call_and_the_other_prompts():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        if request.prompt == [2]:
            aborted = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ABORT)
            engine.step({request: []}, finished={request: aborted})

    engine = FakeEngine(script, supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        error = await error_of(client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=[ids(1), ids(2)])))
        await engine.wait(lambda: engine.requests[0].abort_reason is not None)
    assert error.code() is grpc.StatusCode.ABORTED


async def test_the_deadline_of_the_call_reaches_the_engine_and_ends_it():
    engine = FakeEngine(supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        call = client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=[ids(1)]), timeout=1.0)
        (request,) = await engine.wait_for_requests(1)
        error = await error_of(call)
        await engine.wait(lambda: request.abort_reason is not None)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # The library rounds deadlines up by as much as a hundredth.
    assert 0 < request.entry.remaining_ms <= 1010


async def test_a_lost_engine_ends_the_call_with_unavailable():
    engine = FakeEngine(supported_tasks=ENGINE_TASKS)
    async with serving(engine) as (client, _):
        call = client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=[ids(1), ids(EOS_ID)]))
        await engine.wait_for_requests(2)
        await engine.kill()
        error = await error_of(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "RetryInfo" in details_of(error)
