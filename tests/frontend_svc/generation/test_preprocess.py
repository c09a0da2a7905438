"""From a request to an ADD, without any engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from frontend_svc.generation.caller import LOCAL_CALLER
from frontend_svc.generation.preprocess import check_request as check
from frontend_svc.generation.preprocess import child_seed, prepare
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import GenerationDefaults, ServedModel
from frontend_svc.text.prompt import RequestPrompt
from frontend_svc.text.workers.workers import TextWorkers
from tests.frontend_svc.fakes import WAIT_S, make_request
from tests.frontend_svc.tokenizers import byte_level_tokenizer, tokenizer_over
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import InvalidArgument
from triptych_kit.security.identity import Identity, Role, TenantLimits

LIMITS = RequestLimits()


@pytest.fixture
async def model() -> AsyncIterator[ServedModel]:
    # However busy the machine, a text becomes tokens within the limit.
    workers = TextWorkers(1, time_limit_s=WAIT_S)
    yield ServedModel(
        name="tiny",
        text_key="k",
        fingerprint="f",
        tokenizer=tokenizer_over(workers, byte_level_tokenizer()),
        defaults=GenerationDefaults(),
        max_model_len=2048,
        vocab_size=600,
        eos_token_ids=(0,),
    )
    await workers.close()


async def check_request(
    request: generate_pb2.GenerateRequest, model: ServedModel, limits: RequestLimits
) -> None:
    await check(request, RequestPrompt(request), model, limits)


async def entry_of(request: generate_pb2.GenerateRequest, model: ServedModel) -> add_pb2.AddEntry:
    (entry,) = (await prepare(request, RequestPrompt(request), model, LOCAL_CALLER)).entries
    return entry


async def prompt_of(request: generate_pb2.GenerateRequest, model: ServedModel) -> list[int]:
    return (await prepare(request, RequestPrompt(request), model, LOCAL_CALLER)).prompt.token_ids


async def test_104_prompt_and_one_token_must_fit_and_the_error_names_both_numbers(model):
    assert (await entry_of(make_request([5] * 2047), model)).sampling.max_tokens == 1
    with pytest.raises(InvalidArgument, match="2048 tokens, the model takes 2048") as caught:
        await entry_of(make_request([5] * 2048), model)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert caught.value.metadata == {"num_tokens": "2048", "max_model_len": "2048"}


async def test_same_input_gives_the_same_entry_but_for_id_and_seed(model):
    request = make_request([5, 6], temperature=0.5, stop_token_ids=[7, 7])
    first, second = [await entry_of(request, model) for _ in range(2)]
    assert (first.request_id, first.request_seed) != (second.request_id, second.request_seed)
    for entry in (first, second):
        entry.ClearField("request_id")
        entry.ClearField("request_seed")
    assert first == second
    assert list(first.sampling.stop_token_ids) == [7]


async def test_an_entry_has_the_account_of_the_caller_and_its_weight(model):
    identity = Identity("key", frozenset({Role.CLIENT}), "team", TenantLimits(weight=3))
    caller = replace(LOCAL_CALLER, identity=identity)
    request = make_request([5], n=2)
    entries = (await prepare(request, RequestPrompt(request), model, caller)).entries
    assert [(entry.account, entry.weight) for entry in entries] == [("team", 3)] * 2
    entry = await entry_of(make_request([5]), model)
    assert (entry.account, entry.weight) == ("", 0)


@pytest.mark.parametrize("top_k", [-1, 0, 600, 10**9])
async def test_every_way_to_ask_for_all_tokens_is_zero(model, top_k):
    assert (await entry_of(make_request([5], top_k=top_k), model)).sampling.top_k == 0


async def test_truncation_keeps_the_end_of_the_prompt(model):
    request = make_request(list(range(1, 101)), truncate_prompt_tokens=10)
    assert await prompt_of(request, model) == list(range(91, 101))
    request = make_request(range(5000), truncate_prompt_tokens=-1, max_tokens=48)
    assert len(await prompt_of(request, model)) == 2000


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(model):
    with pytest.raises(InvalidArgument, match="at least"):
        await prompt_of(make_request("x" * 10_000_000), model)


async def test_text_that_would_take_seconds_is_refused_even_if_its_tokens_would_be_cut(model):
    with pytest.raises(InvalidArgument, match="prompt has 10000000 characters, must have at most 1048576"):
        await prompt_of(make_request("x" * 10_000_000, truncate_prompt_tokens=5), model)
    long_model = replace(model, max_model_len=100_000)
    assert len(await prompt_of(make_request("x" * 1_600_000, truncate_prompt_tokens=5), long_model)) == 5


async def test_repetition_detection_goes_to_the_engine_complete_and_only_where_it_is_on(model):
    async def detection_of(**fields: int) -> sampling_pb2.RepetitionDetection | None:
        request = make_request([5], repetition_detection=fields)
        await check_request(request, model, LIMITS)
        sampling = (await entry_of(request, model)).sampling
        return sampling.repetition_detection if sampling.HasField("repetition_detection") else None

    expected = sampling_pb2.RepetitionDetection(max_pattern_size=4, min_pattern_size=1, min_count=3)
    assert await detection_of(max_pattern_size=4, min_count=3) == expected
    assert await detection_of(max_pattern_size=4, min_pattern_size=1, min_count=3) == expected
    widest = {"max_pattern_size": 256, "min_pattern_size": 256, "min_count": 64}
    assert await detection_of(**widest) == sampling_pb2.RepetitionDetection(**widest)
    assert await detection_of() is None
    assert await detection_of(min_count=3) is None


async def test_all_violations_are_reported_together(model):
    request = make_request("", temperature=-1.0, top_p=0.0, max_tokens=0, priority=1000)
    with pytest.raises(InvalidArgument) as caught:
        await check_request(request, model, LIMITS)
    assert {field for field, _ in caught.value.violations} == {
        "prompt",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "priority",
    }


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {"repetition_detection": {"max_pattern_size": 257, "min_count": 2}},
            r"sampling\.repetition_detection\.max_pattern_size is 257, must be in 0\.\.256",
        ),
        ({"request_id": "x" * 129}, "request_id has 129"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"data_parallel_rank": -1}, "data_parallel_rank is -1"),
    ],
)
async def test_values_out_of_range_are_refused_with_value_and_limit(model, fields, name):
    with pytest.raises(InvalidArgument, match=name):
        await check_request(make_request("x", **fields), model, LIMITS)


async def test_a_group_has_an_id_an_order_and_noise_of_its_own_for_each_output(model):
    request = make_request([5, 6], n=3, seed=11, temperature=0.5)
    entries = (await prepare(request, RequestPrompt(request), model, LOCAL_CALLER)).entries
    assert [entry.group_index for entry in entries] == [0, 1, 2]
    assert len({entry.group_id for entry in entries}) == 1
    assert len({entry.request_id for entry in entries}) == 3
    assert [entry.request_seed for entry in entries] == [child_seed(11, index) for index in range(3)]
    assert len({child_seed(seed, index) for seed in (11, 12, 13) for index in range(3)}) == 9
    assert not any(entry.sampling.n for entry in entries)
