"""What the facade sends and how it reads the answers, against a frontend of fakes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from launcher.llm import LLM, SamplingParams
from service_kit.errors import InvalidArgument
from tests.launcher.offline.llm_rig import VOCAB_SIZE, fake_frontend


def test_the_models_defaults_are_told() -> None:
    with fake_frontend() as (_, address), LLM("", engine="remote", address=address) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
        assert llm.model == "only"


def test_parameters_adapters_and_priorities_go_with_their_prompt() -> None:
    with fake_frontend() as (frontend, address), LLM("mine", engine="remote", address=address) as llm:
        llm.generate(
            [[1], [2], [3]],
            [SamplingParams(max_tokens=number) for number in (4, 5, 6)],
            adapters=["a", None, "c"],
            priorities=[-1, 0, 1],
            progress=False,
        )
    asked = sorted(frontend.requests, key=lambda request: request.token_ids.ids[0])
    assert [request.sampling.max_tokens for request in asked] == [4, 5, 6]
    assert [request.adapter for request in asked] == ["a", "", "c"]
    assert [request.priority for request in asked] == [-1, 0, 1]
    assert {request.model for request in asked} == {"mine"}
    assert len({request.request_id for request in asked}) == 3


@pytest.mark.parametrize("field", ["sampling_params", "adapters", "priorities"])
def test_lists_of_another_length_than_the_prompts_are_refused(field: str) -> None:
    one = {"sampling_params": SamplingParams(), "adapters": "a", "priorities": 1}[field]
    with (
        fake_frontend() as (frontend, address),
        LLM("", engine="remote", address=address) as llm,
        pytest.raises(InvalidArgument, match=f"{field} has 3 entries for 2 prompts"),
    ):
        llm.generate([[1], [2]], **{field: [one] * 3}, progress=False)
    assert frontend.requests == []


@pytest.mark.parametrize(
    "bad",
    ["", [], [1, VOCAB_SIZE], [-1], [1.5], "x" * 40, {"prompt": "a", "prompt_token_ids": [1]}, None, [True]],
)
def test_nothing_is_sent_where_one_prompt_is_wrong(bad: object) -> None:
    with (
        fake_frontend() as (frontend, address),
        LLM("", engine="remote", address=address) as llm,
        pytest.raises(InvalidArgument, match=r"prompts\[2\]"),
    ):
        llm.generate(["ab", [1], bad, "cd"], progress=False)
    assert frontend.requests == []


def test_a_full_server_is_asked_again() -> None:
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        frontend.num_refusals = 20
        results = llm.generate([[number] for number in range(1, 9)], progress=False)
    assert [result.outputs[0].token_ids for result in results] == [(number,) for number in range(1, 9)]


def test_the_first_refusal_ends_the_others() -> None:
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        frontend.hangs_on = 1
        params = [SamplingParams(), SamplingParams(temperature=3.0)]
        with pytest.raises(InvalidArgument, match=r"prompts\[1\]: temperature is 3"):
            llm.generate([[1], [2]], params, progress=False)
        assert frontend.was_cancelled.wait(10)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """With Python's own answer to SIGINT, which a shell's background jobs are started without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_aborts_what_runs_and_the_facade_goes_on() -> None:
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        frontend.hangs_on = 1
        frontend.on_hang = lambda: os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], progress=False)
        assert frontend.was_cancelled.wait(10)
        assert llm.generate([[3]], progress=False)[0].outputs[0].token_ids == (3,)


def test_one_conversation_or_several_become_chat_requests() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        one = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        single = llm.chat(one, tools=tools, tool_choice="required", progress=False)
        several = llm.chat([one, parts], template_arguments={"depth": 2}, progress=False)
    assert [result.text for result in single] == ["be brief hello"]
    assert [result.text for result in several] == ["be brief hello", "a b"]
    output = single[0].outputs[0]
    assert (output.reasoning, output.finish_reason) == ("because", "stop")
    assert [(call.id, call.name, call.arguments) for call in output.tool_calls] == [("1", "look", "{}")]
    assert frontend.requests[0].tools[0].parameters_json_schema == '{"type": "object"}'
    assert frontend.requests[1].template_options.arguments_json == '{"depth": 2}'


@pytest.mark.parametrize(
    ("conversations", "place"),
    [
        ([[{"role": "user", "content": "a"}], []], r"conversations\[1\]"),
        ([[{"role": "king", "content": "a"}]], r"conversations\[0\]\[0\]\.role"),
        ([[{"role": "user", "content": 5}]], r"conversations\[0\]\[0\]\.content"),
        ([[{"role": "user", "content": [{"type": "image_url"}]}]], r"content\[0\]"),
        ([[{"role": "user", "contents": "a"}]], "contents"),
    ],
)
def test_a_conversation_that_is_none_is_named(conversations: list, place: str) -> None:
    with (
        fake_frontend() as (frontend, address),
        LLM("", engine="remote", address=address) as llm,
        pytest.raises(InvalidArgument, match=place),
    ):
        llm.chat(conversations, progress=False)
    assert frontend.requests == []


def test_pooling_goes_to_the_embedding_service_where_the_model_can() -> None:
    tasks = ("embed", "token_embed", "classify", "score")
    with fake_frontend(*tasks) as (frontend, address), LLM("", engine="remote", address=address) as llm:
        assert [result.values for result in llm.embed(["ab", "abc"], dimensions=2)] == [
            [2.0, 0.5],
            [3.0, 0.5],
        ]
        assert [result.values for result in llm.encode("ab")] == [[[1.0, 2.0], [3.0, 4.0]]]
        (classes,) = llm.classify("ab")
        assert (classes.values, classes.labels) == ([0.25, 0.75], ("no", "yes"))
        assert [result.score for result in llm.score("q", ["d", "dd"])] == [1.0, 2.0]
        with pytest.raises(InvalidArgument, match="queries has 2 entries"):
            llm.score(["q", "r"], ["d"])
    assert frontend.requests[0].pooling.dimensions == 2
