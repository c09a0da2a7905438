"""What a frontend lets through, an engine takes: the two check the same parameters one after the other."""

from __future__ import annotations

import random
import sys
from array import array

import pytest

from engine_svc.convert.sampling import to_sampling
from engine_svc.core.facts import EngineFacts
from frontend_svc.text.limits import RequestLimits, Violations
from frontend_svc.text.model import GenerationDefaults
from frontend_svc.text.sampling import check_fit, check_sampling, complete_sampling, refuse_unserved
from service_kit.errors import InvalidArgument, Unimplemented
from tests.engine_svc.session.service_rig import make_facts
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2

LIMITS = RequestLimits()
FACTS = make_facts()
NUM_PROMPT_TOKENS = 10
MODEL_DEFAULTS = GenerationDefaults(0.6, 0.9, 20, 64, 0.1, 0.5, -0.5, 1.25)


def accepted(sampling: sampling_pb2.SamplingParams, defaults: GenerationDefaults) -> bool:
    """Whether the frontend sends these parameters at all."""
    violations = Violations()
    check_sampling(
        sampling, vocab_size=FACTS.vocab_size, limits=LIMITS, violations=violations, defaults=defaults
    )
    try:
        violations.raise_if_any()
        refuse_unserved(sampling)
        check_fit(
            sampling,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            max_model_len=FACTS.max_model_len,
            vocab_size=FACTS.vocab_size,
            limits=LIMITS,
        )
    except (InvalidArgument, Unimplemented):
        return False
    return True


def sent(sampling: sampling_pb2.SamplingParams, defaults: GenerationDefaults) -> add_pb2.AddEntry:
    """The part of the ADD that an engine reads sampling from."""
    column = array("I", [1, 2])
    if sys.byteorder == "big":
        column.byteswap()
    completed = complete_sampling(
        sampling,
        defaults,
        vocab_size=FACTS.vocab_size,
        max_new_tokens=FACTS.max_model_len - NUM_PROMPT_TOKENS,
    )
    bad_words = [add_pb2.TokenSequence(token_ids=column.tobytes())] if sampling.bad_words else []
    return add_pb2.AddEntry(sampling=completed, request_seed=7, bad_words=bad_words)


def drawn(rng: random.Random, facts: EngineFacts) -> sampling_pb2.SamplingParams:
    """Parameters of which most are within their ranges, and many at an end of them."""
    ids = [rng.randrange(facts.vocab_size + rng.choice([0, 0, 0, 1])) for _ in range(rng.randint(0, 3))]
    wishes = {
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
    }
    chosen = rng.sample(sorted(wishes), rng.randint(0, len(wishes)))
    return sampling_pb2.SamplingParams(**{name: wishes[name] for name in chosen})


@pytest.mark.parametrize("defaults", [GenerationDefaults(), MODEL_DEFAULTS], ids=["plain", "the model's"])
def test_an_engine_takes_every_request_that_a_frontend_sends(defaults):
    rng = random.Random(1)
    num_sent = 0
    for _ in range(2000):
        sampling = drawn(rng, FACTS)
        if accepted(sampling, defaults):
            taken = to_sampling(sent(sampling, defaults), FACTS, num_prompt_tokens=NUM_PROMPT_TOKENS)
            assert taken.max_tokens >= taken.min_tokens >= sampling.min_tokens
            num_sent += 1
    assert num_sent > 800


def test_96_of_several_end_of_sequence_ids_the_first_is_the_main_one_and_the_others_stop_as_well():
    first, second = FACTS.eos_token_ids
    plain = sampling_pb2.SamplingParams(stop_token_ids=[3])
    taken = to_sampling(sent(plain, GenerationDefaults()), FACTS, num_prompt_tokens=NUM_PROMPT_TOKENS)
    assert (taken.eos_token_id, taken.stop_token_ids) == (first, {3, second})
    going_on = sampling_pb2.SamplingParams(stop_token_ids=[3], ignore_eos=True, min_tokens=4)
    taken = to_sampling(sent(going_on, GenerationDefaults()), FACTS, num_prompt_tokens=NUM_PROMPT_TOKENS)
    assert taken.end_token_ids == {3}
    assert taken.min_tokens == 4
