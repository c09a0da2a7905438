"""All options together: which fields they have, and that an engine takes what they let through."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import re

import pytest

from engine_svc.convert.messages import to_request
from engine_svc.core.facts import EngineFacts
from engine_svc.core.sampling_params import SamplingParams
from frontend_svc.generation.caller import LOCAL_CALLER
from frontend_svc.generation.preprocess import CORE_FIELDS, check_request, prepare
from frontend_svc.options import OPTIONS
from frontend_svc.text.chat.prompt import ChatPrompt
from frontend_svc.text.model import GenerationDefaults
from frontend_svc.text.prompt import RequestPrompt
from tests.engine_svc.request_options import make_wire_features
from tests.engine_svc.session.service_rig import make_facts
from tests.frontend_svc.fakes import make_request
from tests.frontend_svc.options.asking import LIMITS, VOCAB_SIZE, breaches, model_of
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_conformance.invalid_values import invalid_messages
from triptych_kit.errors import InvalidArgument, Unimplemented
from triptych_kit.rules import MODEL_LENGTH, VOCABULARY

WIRE_FEATURES = make_wire_features()
FIELDS = [name for option in OPTIONS for name in option.fields]


def test_each_field_is_of_one_option_and_each_parameter_of_some():
    assert len(FIELDS) == len(set(FIELDS))
    parameters = {f"sampling.{name}" for name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    assert parameters <= set(FIELDS)


def test_each_field_of_a_request_is_the_cores_or_of_an_option_but_for_the_unserved():
    messages = (generate_pb2.GenerateRequest, chat_message_pb2.ChatRequest)
    asked = {name for message in messages for name in message.DESCRIPTOR.fields_by_name}
    assert asked >= CORE_FIELDS
    assert CORE_FIELDS.isdisjoint(FIELDS)
    assert asked - CORE_FIELDS - set(FIELDS) == {"media"}


def test_a_field_that_neither_the_core_nor_an_option_has_is_refused_by_name():
    request = make_request([5], media=[generate_pb2.Media(mime_type="image/png")])
    with pytest.raises(Unimplemented, match="not served yet: media") as caught:
        asyncio.run(check_request(request, RequestPrompt(request), model_of(), LIMITS))
    assert caught.value.metadata == {"fields": "media"}


@pytest.mark.parametrize("kind", [generate_pb2.GenerateRequest, chat_message_pb2.ChatRequest])
def test_a_value_that_breaks_a_rule_of_the_contract_is_refused_by_its_field(kind):
    ready = session_pb2.Ready(structured_output_backends=["guidance"], takes_prompt_embeds=True)
    model = model_of(ready=ready)
    for path, invalid in invalid_messages(kind, {VOCABULARY: VOCAB_SIZE, MODEL_LENGTH: model.max_model_len}):
        name, _, inner = path.partition(".")
        user = {"role": chat_message_pb2.CHAT_ROLE_USER, "parts": [{"text": "x"}]}
        is_chat = kind is chat_message_pb2.ChatRequest
        request = kind(messages=[user]) if is_chat else kind(prompt="x")
        if name == "messages" or not inner:
            request.ClearField(name)
        request.MergeFrom(invalid)
        prompt = ChatPrompt(request, model, takes_templates=True) if is_chat else RequestPrompt(request)
        with pytest.raises(InvalidArgument) as caught:
            asyncio.run(check_request(request, prompt, model, LIMITS))
        fields = [re.sub(r"\[\d+\]", "", field) for field, _ in caught.value.violations]
        assert any(path.startswith(field) for field in fields), (path, fields)


def test_all_violations_of_a_request_are_reported_at_once():
    wrong = {
        "temperature": math.nan, "top_p": 0.0, "top_k": -2, "min_p": -0.5, "presence_penalty": 2.5,
        "repetition_penalty": 0.0, "max_tokens": 0, "n": 65, "stop": [""], "stop_token_ids": [600],
        "allowed_token_ids": [600], "bad_words": [""], "logprobs": 21, "prompt_logprobs": 21,
        "logprob_token_ids": [600], "logit_bias": [{"token_id": 600}], "stream_interval": 0,
        "thinking_token_budget": -2, "output_kind": 9,
    }  # fmt: skip
    assert set(breaches(**wrong)) == {f"sampling.{name}" for name in wrong}


@pytest.mark.parametrize(("is_token", "is_taken"), [(b"\1", True), (b"\0", False)])
def test_prompt_logprobs_need_a_token_at_every_position(is_token, is_taken):
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1, 1], inline=bytes(4))
    embeds = generate_pb2.PromptEmbeds(embeds=tensor, token_ids=[5], is_token=is_token)
    request = generate_pb2.GenerateRequest(embeds=embeds, sampling={"prompt_logprobs": 0})
    model = model_of(ready=session_pb2.Ready(hidden_size=1, takes_prompt_embeds=True))
    refused = contextlib.nullcontext() if is_taken else pytest.raises(InvalidArgument, match="must be unset")
    with refused:
        asyncio.run(check_request(request, RequestPrompt(request), model, LIMITS))


# What a frontend lets through, an engine takes: the two check the same parameters one after the other.

FACTS = make_facts()
NUM_PROMPT_TOKENS = 10
MODEL_DEFAULTS = GenerationDefaults(0.6, 0.9, 20, 64, 0.1, 0.5, -0.5, 1.25)


async def sent(
    sampling: sampling_pb2.SamplingParams, defaults: GenerationDefaults
) -> add_pb2.AddEntry | None:
    """The ADD of the first output; None if the frontend refuses these parameters."""
    request = make_request([5] * NUM_PROMPT_TOKENS)
    request.sampling.CopyFrom(sampling)
    model = dataclasses.replace(model_of(defaults, FACTS.max_model_len), vocab_size=FACTS.vocab_size)
    try:
        await check_request(request, RequestPrompt(request), model, LIMITS)
        return (await prepare(request, RequestPrompt(request), model, LOCAL_CALLER)).entries[0]
    except InvalidArgument:
        return None


def drawn(rng: random.Random, facts: EngineFacts) -> sampling_pb2.SamplingParams:
    """Parameters of which most are within their ranges, and many at an end of them."""
    ids = [rng.randrange(facts.vocab_size + rng.choice([0, 0, 0, 1])) for _ in range(rng.randint(0, 3))]
    options = {
        "temperature": rng.choice([0.0, 1e-6, 0.005, 0.7, 2.0]),
        "top_p": rng.choice([1e-6, 0.5, 1.0]),
        "top_k": rng.choice([-1, 0, 1, facts.vocab_size, 10**12]),
        "min_p": rng.choice([0.0, 0.5, 1.0]),
        "presence_penalty": rng.choice([-2.0, 0.0, 2.0]),
        "frequency_penalty": rng.choice([-2.0, 0.0, 2.0]),
        "repetition_penalty": rng.choice([0.001, 1.0, 1000.0]),
        "seed": rng.choice([0, 2**64 - 1]),
        "max_tokens": rng.choice([1, 5, facts.max_model_len - NUM_PROMPT_TOKENS]),
        "min_tokens": rng.choice([0, 1, 5]),
        "n": rng.choice([1, 1, 64]),
        "stop": ["x"],
        "stop_token_ids": ids,
        "ignore_eos": True,
        "allowed_token_ids": ids,
        "bad_words": ["x"],
        "logprobs": rng.choice([0, 1, 20]),
        "prompt_logprobs": rng.choice([0, 1, 20]),
        "logprob_token_ids": ids,
        "logit_bias": [sampling_pb2.LogitBias(token_id=i, bias=rng.choice([-100.0, 100.0])) for i in ids],
        "stream_interval": rng.choice([1, 4096]),
        "repetition_detection": sampling_pb2.RepetitionDetection(
            max_pattern_size=rng.choice([0, 1, 256]), min_count=rng.choice([2, 64])
        ),
        "skip_reading_prefix_cache": rng.random() < 0.5,
        "max_draft_tokens": rng.choice([0, 1, 64]),
    }
    chosen = rng.sample(sorted(options), rng.randint(0, len(options)))
    return sampling_pb2.SamplingParams(**{name: options[name] for name in chosen})


def taken_by_an_engine(entry: add_pb2.AddEntry) -> SamplingParams:
    """What an engine makes of the sampling parameters; its features read theirs, too."""
    return to_request(entry, session_number=1, facts=FACTS, now=0.0, features=WIRE_FEATURES).sampling


@pytest.mark.parametrize("defaults", [GenerationDefaults(), MODEL_DEFAULTS], ids=["plain", "the model's"])
async def test_an_engine_takes_every_request_that_a_frontend_sends(defaults):
    rng = random.Random(1)
    num_sent = 0
    for _ in range(2000):
        sampling = drawn(rng, FACTS)
        entry = await sent(sampling, defaults)
        if entry is not None:
            taken = taken_by_an_engine(entry)
            assert taken.max_tokens >= taken.min_tokens >= sampling.min_tokens
            num_sent += 1
    assert num_sent > 800


async def test_96_of_several_end_of_sequence_ids_the_first_is_the_main_one_and_the_others_stop_as_well():
    first, second = FACTS.eos_token_ids
    plain = sampling_pb2.SamplingParams(stop_token_ids=[3])
    taken = taken_by_an_engine(await sent(plain, GenerationDefaults()))
    assert (taken.eos_token_id, taken.stop_token_ids) == (first, {3, second})
    going_on = sampling_pb2.SamplingParams(stop_token_ids=[3], ignore_eos=True, min_tokens=4)
    taken = taken_by_an_engine(await sent(going_on, GenerationDefaults()))
    assert taken.end_token_ids == {3}
    assert taken.min_tokens == 4
