"""Embeddings, scores and rerankings over HTTP: the numbers that the engine gives, in others' shapes."""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.frontend_svc.fakes import TOKENIZER, FakeEngine, FakeRequest, Script
from tests.frontend_svc.protocols.test_openai import served
from triptych.common.v1 import sampling_pb2, tensor_pb2

TASKS = ("embed", "token_embed")
# Not exact in binary32, so that a wrong conversion shows.
TENTH = struct.unpack("<f", struct.pack("<f", 0.1))[0]


def num_tokens(*texts: str) -> int:
    return sum(len(TOKENIZER.encode(text).ids) for text in texts)


def pooling_engine(
    *, tasks: Sequence[str] = TASKS, dtype: str = "fp32", chat_template: str = ""
) -> FakeEngine:
    """Gives each prompt its length, a tenth, and its first token."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        values = [float(len(request.prompt)), TENTH, float(request.prompt[0])]
        kind, letter = {"fp32": (tensor_pb2.D_TYPE_FP32, "f"), "fp16": (tensor_pb2.D_TYPE_FP16, "e")}[dtype]
        content = struct.pack(f"<3{letter}", *values)
        engine.pool(request, tensor_pb2.Tensor(dtype=kind, shape=[3], inline=content))

    return FakeEngine(script, supported_tasks=tasks, chat_template=chat_template)


def scoring_engine() -> FakeEngine:
    """Scores a pair with the number of its tokens."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        content = struct.pack("<f", float(len(request.prompt)))
        engine.pool(request, tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1], inline=content))

    scripted: Script = script
    return FakeEngine(scripted, supported_tasks=("score",))


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("the cat", [TOKENIZER.encode("the cat").ids]),
        (["the cat", "the"], [TOKENIZER.encode("the cat").ids, TOKENIZER.encode("the").ids]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_an_input_has_an_embedding_in_its_order(given, prompts):
    engine = pooling_engine()
    async with served(engine) as client:
        body = {"model": "tiny", "input": given, "user": "x"}
        reply = await client.post("/v1/embeddings", body, **{"x-request-id": "mine"})
    assert reply.status == 200, reply.content
    assert reply.body["data"] == [
        {"object": "embedding", "index": index, "embedding": [len(ids), TENTH, ids[0]]}
        for index, ids in enumerate(prompts)
    ]
    count = sum(map(len, prompts))
    assert reply.body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (reply.body["object"], reply.body["model"]) == ("list", "tiny")
    assert reply.headers["x-triptych-ignored-fields"] == "user"
    assert reply.body["id"] == "embd-mine"


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
async def test_base64_is_the_same_numbers_as_binary32(dtype):
    async with served(pooling_engine(dtype=dtype)) as client:
        body = {"input": ["the cat", "the"]}
        floats = (await client.post("/v1/embeddings", body)).body
        packed = (await client.post("/v1/embeddings", {**body, "encoding_format": "base64"})).body
    assert packed["model"] == "tiny"
    for plain, coded in zip(floats["data"], packed["data"], strict=True):
        assert array("f", base64.b64decode(coded["embedding"])).tolist() == plain["embedding"]


async def test_more_embeddings_than_are_written_at_once_are_in_order():
    async with served(pooling_engine()) as client:
        reply = await client.post("/v1/embeddings", {"input": [[index + 1] for index in range(100)]})
    assert [entry["embedding"][2] for entry in reply.body["data"]] == list(range(1, 101))
    assert [entry["index"] for entry in reply.body["data"]] == list(range(100))


async def test_parameters_of_pooling_reach_the_engine():
    engine = pooling_engine()
    async with served(engine) as client:
        body = {"input": "the", "dimensions": 3, "normalize": True, "request_id": "own"}
        reply = await client.post("/v1/embeddings", body)
    (request,) = engine.requests
    assert reply.body["id"] == "embd-own"
    assert (request.entry.pooling.dimensions, request.entry.pooling.normalize) == (3, True)
    assert request.entry.external_request_id == "own"


async def test_an_entry_has_the_account_of_the_caller_and_its_weight(tmp_path: Path):
    key, engine = "a-key-of-the-team", pooling_engine()
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: a, role: client, tenant: team, weight: 3, key: {key}}}\n")
    async with served(engine, api_keys=str(file)) as client:
        reply = await client.post("/v1/embeddings", {"input": "the"}, authorization=f"Bearer {key}")
    assert reply.status == 200, reply.content
    (request,) = engine.requests
    assert (request.entry.account, request.entry.weight) == ("team", 3)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("embeddings", {}, "input", "input is missing"),
        ("embeddings", {"input": ""}, "input", "input has 0 characters, must have 1.."),
        ("embeddings", {"input": []}, "input", "input has 0 entries, must have 1..2048"),
        ("embeddings", {"input": ["the", ""]}, "input[1]", "input[1] has 0 characters, must have 1.."),
        ("embeddings", {"input": ["the", 5]}, "input[1]", "neither a text nor a list of token ids"),
        ("embeddings", {"input": [5, 1 << 40]}, "input", "out of range"),
        (
            "embeddings",
            {"input": [[5], [100_000]]},
            "input[1]",
            "input[1][0] is 100000, must be below the vocabulary size",
        ),
        ("embeddings", {"input": [5] * 600}, "input", "input has 600 ids, must have 1..512"),
        ("embeddings", {"input": "the", "dimensions": 0}, "dimensions", "dimensions is 0, must be in 1.."),
        ("embeddings", {"input": "the", "encoding_format": "hex"}, "encoding_format", "one of base64, float"),
        ("embeddings", {"input": "the", "priority": 1}, "priority", "priority is not served"),
        ("embeddings", {"input": "the", "model": "other"}, "model", "other"),
        ("score", {"text_1": "the"}, "text_1", "give text_1 and text_2"),
        ("score", {"text_1": "the", "documents": "a"}, "text_1", "text_1 and documents given"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 is 2, must be 1 or as many"),
        ("score", {"queries": "a", "documents": [""]}, "documents[0]", "documents[0] has 0 characters"),
        ("rerank", {"query": "", "documents": ["a"]}, "query", "query has 0 characters"),
        ("rerank", {"query": "a", "documents": []}, "documents", "documents has 0 entries"),
        (
            "rerank",
            {"query": "a", "documents": ["a"], "top_n": -1},
            "top_n",
            "top_n is -1, must be at least 0",
        ),
    ],
)
async def test_a_wrong_body_is_an_error_with_its_own_field(path, body, param, says):
    async with served(pooling_engine()) as client:
        reply = await client.post(f"/v1/{path}", body)
    error = reply.body["error"]
    assert says in error["message"]
    assert (reply.status, error["param"]) == (404 if param == "model" else 400, param)
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_one_query_is_scored_with_each_document(path):
    async with served(scoring_engine()) as client:
        one = await client.post(path, {"text_1": "the cat", "text_2": ["the", "on the mat"]})
        pairs = await client.post(path, {"queries": ["the", "a"], "documents": ["the", "on the mat"]})
    scores = [num_tokens("the cat", "the"), num_tokens("the cat", "on the mat")]
    assert one.body["data"] == [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    assert one.body["usage"] == {"prompt_tokens": sum(scores), "total_tokens": sum(scores)}
    assert (one.body["object"], one.body["model"]) == ("list", "tiny")
    scores = [num_tokens("the", "the"), num_tokens("a", "on the mat")]
    assert [entry["score"] for entry in pairs.body["data"]] == scores


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_best_first(path):
    documents = ["the", {"text": "on the mat"}, "the cat"]
    async with served(scoring_engine()) as client:
        body = {"model": "tiny", "query": "a", "documents": documents}
        every = (await client.post(path, body)).body
        best = (await client.post(path, {**body, "top_n": 1, "return_documents": False})).body
    assert [(entry["index"], entry["document"]["text"]) for entry in every["results"]] == [
        (1, "on the mat"), (2, "the cat"), (0, "the"),
    ]  # fmt: skip
    assert best["results"] == [{"index": 1, "relevance_score": num_tokens("a", "on the mat")}]
    count = num_tokens("a", "the", "a", "on the mat", "a", "the cat")
    assert every["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert every["model"] == "tiny"


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [
        ("/v1/embeddings", {"input": "the"}, "embed"),
        ("/score", {"text_1": "a", "text_2": "b"}, "score or embed"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "score or embed"),
    ],
)
async def test_a_model_that_does_not_pool_is_named_with_its_tasks(path, body, task):
    async with served() as client:
        reply = await client.post(path, body)
    error = reply.body["error"]
    assert (reply.status, error["code"]) == (400, "task_not_supported")
    assert error["message"] == f"model 'tiny' does not support {task}; it supports: generate"


async def test_classes_have_their_probabilities_and_the_most_likely_name():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        content = struct.pack("<2f", 0.25, 0.75)
        engine.pool(request, tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[2], inline=content))

    config = {"id2label": {"0": "bad", "1": "good"}}
    engine = FakeEngine(script, supported_tasks=["classify"], config=config)
    async with served(engine) as client:
        answer = await client.post("/classify", {"input": ["the cat"]})
    assert answer.body["data"] == [{"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}]
    assert answer.body["usage"]["prompt_tokens"] == num_tokens("the cat")


async def test_a_long_input_is_cut_on_request():
    engine = pooling_engine()
    async with served(engine) as client:
        await client.post("/v1/embeddings", {"input": [[5, 6, 7], [8]], "truncate_prompt_tokens": 2})
    assert [list(request.prompt) for request in engine.requests] == [[5, 6], [8]]


# By task, and of messages.


def per_token_engine() -> FakeEngine:
    """Gives each token of a prompt its id and a tenth."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        values = [number for token_id in request.prompt for number in (float(token_id), TENTH)]
        content = struct.pack(f"<{len(values)}f", *values)
        shape = [len(request.prompt), 2]
        engine.pool(request, tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=shape, inline=content))

    return FakeEngine(script, supported_tasks=("embed", "token_embed", "classify", "token_classify"))


@pytest.mark.parametrize("task", [None, "token_embed", "token_classify"])
async def test_results_of_tokens_are_lists_of_their_numbers(task):
    engine = per_token_engine()
    async with served(engine) as client:
        reply = await client.post("/pooling", {"input": [[5, 6], [7]], "task": task, "request_id": "own"})
    assert reply.status == 200, reply.content
    assert reply.body["data"] == [
        {"index": 0, "object": "pooling", "data": [[5.0, TENTH], [6.0, TENTH]]},
        {"index": 1, "object": "pooling", "data": [[7.0, TENTH]]},
    ]
    assert (reply.body["id"], reply.body["object"], reply.body["model"]) == ("pool-own", "list", "tiny")
    assert reply.body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    wanted = "POOLING_TASK_" + (task or "token_embed").upper()
    assert {request.entry.pooling.task for request in engine.requests} == {
        sampling_pb2.PoolingTask.Value(wanted)
    }


async def test_results_of_prompts_are_lists_or_base64():
    async with served(pooling_engine(tasks=("embed", "classify"))) as client:
        vector = await client.post("/pooling", {"input": "the cat", "task": "embed"})
        classes = await client.post("/pooling", {"input": "the cat", "task": "classify"})
        packed = await client.post("/pooling", {"input": "the cat", "encoding_format": "base64"})
        refused = await client.post("/pooling", {"input": "the cat", "task": "classify", "dimensions": 2})
    values = vector.body["data"][0]["data"]
    assert values == classes.body["data"][0]["data"]
    assert array("f", base64.b64decode(packed.body["data"][0]["data"])).tolist() == values
    assert (refused.status, refused.body["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize("name", ["use_activation", "activation"])
async def test_classes_and_scores_may_be_logits_by_both_names_of_vllm(name):
    engine = pooling_engine(tasks=("classify", "token_classify"))
    scoring = scoring_engine()
    async with served(engine) as client:
        for path, body in (("/classify", {}), ("/pooling", {"task": "classify"})):
            assert (await client.post(path, {"input": "the", name: False, **body})).status == 200
    async with served(scoring) as client:
        for path, body in (
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ):
            assert (await client.post(path, {**body, name: False})).status == 200
    sent = [request.entry.pooling for request in (*engine.requests, *scoring.requests)]
    assert [(params.HasField("use_activation"), params.use_activation) for params in sent] == [
        (True, False)
    ] * 4


async def test_an_activation_is_refused_with_vectors_and_by_two_names():
    async with served(pooling_engine(tasks=("embed", "classify"))) as client:
        replies = [
            await client.post(path, body)
            for path, body in (
                ("/v1/embeddings", {"input": "the", "use_activation": False}),
                ("/pooling", {"input": "the", "task": "embed", "activation": True}),
                ("/score", {"text_1": "a", "text_2": "b", "activation": False}),
                ("/classify", {"input": "the", "use_activation": False, "activation": True}),
            )
        ]
    errors = [reply.body["error"] for reply in replies]
    assert [reply.status for reply in replies] == [400] * 4
    assert [error["param"] for error in errors] == ["use_activation", *["activation"] * 3]
    assert errors[0]["message"] == "use_activation is given, must be left out with task embed"
    assert errors[3]["message"] == "activation is given beside use_activation, its newer name"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify", "/pooling"])
async def test_messages_make_one_prompt_by_the_template(path):
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}answer{% endif %}"
    )
    engine = pooling_engine(tasks=("embed", "classify"), chat_template=template)
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    async with served(engine) as client:
        replies = [
            await client.post(path, {"messages": messages, "add_generation_prompt": opens})
            for opens in (None, True)
        ]
        both = await client.post(path, {"messages": messages, "input": "the"})
        neither = await client.post(path, {"model": "tiny"})
    assert [reply.status for reply in (*replies, both, neither)] == [200, 200, 400, 400]
    assert [TOKENIZER.decode(request.prompt) for request in engine.requests] == [
        "user the cat assistant sat ",
        "user the cat assistant sat answer",
    ]
    assert both.body["error"]["message"] == "input is given beside messages"
    assert neither.body["error"]["message"] == "input is missing: give it or messages"
