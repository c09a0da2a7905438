"""Sampling parameters: each limit by field, value and rule, and what an engine gets of them."""

from __future__ import annotations

import math
import random
import sys
from array import array

import pytest
from tokenizers import Tokenizer

from engine_svc.convert.sampling import to_sampling
from engine_svc.core.facts import EngineFacts
from frontend_svc.text.limits import RequestLimits, Violations
from frontend_svc.text.model import GenerationDefaults
from frontend_svc.text.preprocess import bad_word_sequences
from frontend_svc.text.sampling import (
    check_fit,
    check_sampling,
    complete_sampling,
    refuse_unserved,
    stream_interval,
)
from service_kit.errors import InvalidArgument, Unimplemented
from tests.engine_svc.session.service_rig import make_facts
from tests.frontend_svc.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    id_of,
    word_piece_tokenizer,
)
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2

VOCAB_SIZE = 600
LIMITS = RequestLimits()
PLAIN = GenerationDefaults()


def params(**fields: object) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**fields)


def breaches(
    limits: RequestLimits = LIMITS, defaults: GenerationDefaults = PLAIN, **fields: object
) -> dict[str, str]:
    """What is wrong with these parameters: description by field."""
    violations = Violations()
    check_sampling(
        params(**fields), vocab_size=VOCAB_SIZE, limits=limits, violations=violations, defaults=defaults
    )
    try:
        violations.raise_if_any()
    except InvalidArgument as error:
        return dict(error.violations)
    return {}


def completed(
    defaults: GenerationDefaults = PLAIN, max_new_tokens: int = 1000, **fields: object
) -> sampling_pb2.SamplingParams:
    return complete_sampling(params(**fields), defaults, vocab_size=VOCAB_SIZE, max_new_tokens=max_new_tokens)


IN_RANGE = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"top_p": 1.0},
    {"top_p": 1e-6},
    {"top_k": -1},
    {"top_k": 10**12},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
    {"seed": 2**64 - 1},
    {"max_tokens": 1, "min_tokens": 1},
    {"min_tokens": 0},
    {"n": 64, "temperature": 0.5},
    {"n": 1, "temperature": 0.0},
    {"stop": ["x" * 256] * 16},
    {"stop_token_ids": [599]},
    {"ignore_eos": True, "min_tokens": 5},
    {"allowed_token_ids": range(600)},
    {"bad_words": ["x"] * 128},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"logprob_token_ids": range(128)},
    {"logit_bias": [{"token_id": i, "bias": 100.0} for i in range(300)]},
    {"stream_interval": 4096},
    {"thinking_token_budget": -1},
    {"repetition_detection": {"max_pattern_size": 256, "min_pattern_size": 256, "min_count": 64}},
    {"output_kind": sampling_pb2.OUTPUT_KIND_FINAL_ONLY},
]


@pytest.mark.parametrize("fields", IN_RANGE, ids=str)
def test_the_ends_of_each_range_are_taken(fields):
    assert breaches(**fields) == {}


OUT_OF_RANGE: list[tuple[dict[str, object], str, str]] = [
    ({"temperature": 2.01}, "temperature", "is 2.01, must be finite and in 0..2"),
    ({"temperature": -0.5}, "temperature", "is -0.5, must be finite and in 0..2"),
    ({"temperature": math.nan}, "temperature", "is nan, must be finite and in 0..2"),
    ({"temperature": math.inf}, "temperature", "is inf, must be finite and in 0..2"),
    ({"top_p": 0.0}, "top_p", "is 0.0, must be above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p", "is 1.5, must be above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "is -2, must be -1, 0 (both: all tokens) or more"),
    ({"min_p": -0.5}, "min_p", "is -0.5, must be in 0..1"),
    ({"min_p": math.nan}, "min_p", "is nan, must be in 0..1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "is 2.5, must be in -2..2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "is -2.5, must be in -2..2"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "is 0.0, must be in 0.001..1000"),
    ({"repetition_penalty": math.inf}, "repetition_penalty", "is inf, must be in 0.001..1000"),
    ({"max_tokens": 0}, "max_tokens", "is 0, must be at least 1"),
    ({"max_tokens": -(2**40)}, "max_tokens", "is -1099511627776, must be at least 1"),
    ({"min_tokens": -1}, "min_tokens", "is -1, must be at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "is 5, must be at most max_tokens, 4"),
    ({"n": 0}, "n", "is 0, must be in 1..64"),
    ({"n": 65}, "n", "is 65, must be in 1..64"),
    ({"n": 2**33}, "n", "is 8589934592, must be in 1..64"),
    ({"n": 2, "temperature": 0.0}, "n", "is 2, must be 1 where temperature is 0"),
    ({"n": 3, "temperature": 1e-6}, "n", "is 3, must be 1 where temperature is 1e-06"),
    ({"stop": ["x"] * 17}, "stop", "has 17 strings, must have at most 16"),
    ({"stop": ["x", ""]}, "stop", "[1] has 0 characters, must have 1..256"),
    ({"stop": ["x" * 257]}, "stop", "[0] has 257 characters, must have 1..256"),
    ({"stop": ["x"], "detokenize": False}, "detokenize", "must be true where stop strings are given"),
    ({"stop_token_ids": [1, 600]}, "stop_token_ids", "[1] is 600, must be below the vocabulary size of 600"),
    ({"stop_token_ids": [0] * 4097}, "stop_token_ids", "has 4097 ids, must have at most 4096"),
    ({"allowed_token_ids": [2**32 - 1]}, "allowed_token_ids", "[0] is 4294967295, must be below the voc"),
    ({"allowed_token_ids": [1] * 601}, "allowed_token_ids", "has 601 ids, must have at most 600"),
    ({"bad_words": ["x"] * 129}, "bad_words", "has 129 words, must have at most 128"),
    ({"bad_words": ["x", ""]}, "bad_words", "[1] has 0 characters, must have 1..1024"),
    ({"bad_words": ["x" * 1025]}, "bad_words", "[0] has 1025 characters, must have 1..1024"),
    ({"logprobs": 21}, "logprobs", "is 21, must be in 0..20"),
    ({"logprobs": -1}, "logprobs", "is -1, must be in 0..20"),
    ({"prompt_logprobs": 2**40}, "prompt_logprobs", "is 1099511627776, must be in 0..20"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids", "has 129 ids, must have at most 128"),
    ({"logprob_token_ids": [600]}, "logprob_token_ids", "[0] is 600, must be below the vocabulary"),
    ({"logit_bias": [{"token_id": 1}] * 301}, "logit_bias", "has 301 entries, must have at most 300"),
    ({"logit_bias": [{"token_id": 600}]}, "logit_bias", "[0] is 600, must be below the vocabulary size"),
    ({"logit_bias": [{"token_id": 1, "bias": 100.5}]}, "logit_bias", "[0] is 100.5, must be in -100..100"),
    ({"logit_bias": [{"token_id": 1, "bias": math.nan}]}, "logit_bias", "[0] is nan, must be in -100..100"),
    ({"stream_interval": 0}, "stream_interval", "is 0, must be in 1..4096"),
    ({"stream_interval": 4097}, "stream_interval", "is 4097, must be in 1..4096"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "is -2, must be -1 (no budget), 0 or more"),
    ({"output_kind": 9}, "output_kind", "is 9, must be one of [0, 1, 2, 3]"),
]


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("stop_token_ids", [600] * 5000, "has 5000 ids, must have at most 4096"),
        ("allowed_token_ids", [600] * 5000, "has 5000 ids, must have at most 600"),
        ("logit_bias", [{"token_id": 600, "bias": math.nan}] * 301, "has 301 entries, must have at most 300"),
    ],
)
def test_of_too_many_entries_none_is_looked_at(name, entries, message):
    violations = Violations()
    check_sampling(params(**{name: entries}), vocab_size=VOCAB_SIZE, limits=LIMITS, violations=violations)
    with pytest.raises(InvalidArgument) as caught:
        violations.raise_if_any()
    assert caught.value.violations == [(f"sampling.{name}", f"sampling.{name} {message}")]


@pytest.mark.parametrize(("fields", "name", "words"), OUT_OF_RANGE, ids=lambda value: str(value)[:40])
def test_a_violation_names_field_value_and_limit(fields, name, words):
    found = breaches(**fields)
    assert list(found) == [f"sampling.{name}"]
    assert f"sampling.{name}" in found[f"sampling.{name}"]
    assert words in found[f"sampling.{name}"]


def test_all_violations_of_a_request_are_reported_at_once():
    wrong = {name: fields for fields, name, _ in OUT_OF_RANGE if len(fields) == 1}
    together = {name: value for fields in wrong.values() for name, value in fields.items()}
    assert set(breaches(**together)) == {f"sampling.{name}" for name in wrong}
    assert len(together) > 15


def test_several_outputs_of_a_greedy_request_are_refused_also_where_the_model_chose_greedy():
    greedy = GenerationDefaults(temperature=0.0)
    assert "sampling.n" in breaches(defaults=greedy, n=2)
    assert breaches(defaults=greedy, n=2, temperature=0.7) == {}
    assert breaches(defaults=GenerationDefaults(temperature=0.7), n=2) == {}


def test_limits_of_outputs_and_logprobs_are_options():
    limits = RequestLimits(max_n=2, max_logprobs=5)
    assert breaches(limits, n=2, logprobs=5, prompt_logprobs=5) == {}
    found = breaches(limits, n=3, logprobs=6, prompt_logprobs=-1)
    assert found["sampling.n"] == "sampling.n is 3, must be in 1..2"
    assert found["sampling.logprobs"] == "sampling.logprobs is 6, must be in 0..5"
    assert found["sampling.prompt_logprobs"] == "sampling.prompt_logprobs is -1, must be in 0..5"


def test_the_whole_vocabulary_is_reported_where_the_option_allows_it():
    limits = RequestLimits(max_logprobs=-1)
    assert breaches(limits, logprobs=-1, prompt_logprobs=600) == {}
    assert completed(logprobs=-1).logprobs == -1
    rule = "sampling.logprobs is 601, must be in -1..600 (-1: the vocabulary)"
    assert breaches(limits, logprobs=601) == {"sampling.logprobs": rule}


def test_what_has_no_feature_yet_is_refused_by_name_and_nothing_else_is():
    with pytest.raises(Unimplemented) as caught:
        refuse_unserved(params(structured_output={"regex": "a"}))
    assert caught.value.metadata == {"fields": "sampling.structured_output"}
    refuse_unserved(
        params(
            n=2,
            logprobs=1,
            prompt_logprobs=1,
            logprob_token_ids=[1],
            bad_words=["x"],
            thinking_token_budget=5,
            skip_special_tokens=False,
            spaces_between_special_tokens=True,
            repetition_detection={"max_pattern_size": 4, "min_count": 2},
        )
    )


@pytest.mark.parametrize(
    ("asked", "used"), [(0.0, 0.0), (9e-6, 0.0), (2e-5, 0.01), (0.009, 0.01), (0.02, 0.02)]
)
def test_a_temperature_is_greedy_or_at_least_a_hundredth(asked, used):
    assert completed(temperature=asked).temperature == pytest.approx(used, rel=1e-6)


def test_a_greedy_request_draws_from_nothing_whatever_else_is_asked_or_the_models_default():
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    greedy = completed(defaults, temperature=0.0, top_p=0.5, top_k=5, min_p=0.5)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, 0, 0.0)
    assert completed(defaults, temperature=0.0).top_k == 0


def test_every_default_of_the_model_is_used_where_the_client_set_nothing():
    defaults = GenerationDefaults(
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        max_new_tokens=64,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
    )
    unset = completed(defaults)
    assert (unset.temperature, unset.top_p) == (pytest.approx(0.6), pytest.approx(0.9))
    assert (unset.top_k, unset.max_tokens, unset.min_p) == (20, 64, 0.25)
    assert (unset.presence_penalty, unset.frequency_penalty, unset.repetition_penalty) == (0.5, -0.5, 1.25)
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 100,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    given = completed(defaults, **neutral)
    assert {name: getattr(given, name) for name in neutral} == neutral


def test_unset_max_tokens_is_what_fits_or_the_models_default_if_that_is_less():
    assert completed(max_new_tokens=1948).max_tokens == 1948
    short, long = GenerationDefaults(max_new_tokens=64), GenerationDefaults(max_new_tokens=5000)
    assert completed(short, max_new_tokens=1948).max_tokens == 64
    assert completed(long, max_new_tokens=1948).max_tokens == 1948
    assert completed(short, max_new_tokens=1948, max_tokens=100).max_tokens == 100


def test_a_default_does_not_end_an_output_before_the_tokens_that_were_asked_for():
    sampling = completed(GenerationDefaults(max_new_tokens=64), min_tokens=100)
    assert (sampling.min_tokens, sampling.max_tokens) == (100, 100)


def test_stop_and_allowed_ids_are_sent_once_each_in_their_order():
    sent = completed(stop_token_ids=[7, 3, 7], allowed_token_ids=[5, 3, 5], logprob_token_ids=[4, 4])
    assert (list(sent.stop_token_ids), list(sent.allowed_token_ids)) == ([7, 3], [5, 3])
    assert list(sent.logprob_token_ids) == [4, 4]


def test_logprobs_are_sent_only_where_asked_for_and_none_is_not_nought():
    assert not completed().HasField("logprobs")
    assert not completed().HasField("prompt_logprobs")
    asked = completed(logprobs=0, prompt_logprobs=0)
    assert (asked.HasField("logprobs"), asked.HasField("prompt_logprobs")) == (True, True)
    assert (asked.logprobs, asked.prompt_logprobs) == (0, 0)


def test_prompt_logprobs_compute_the_whole_prompt_unless_the_client_says_otherwise():
    assert completed(prompt_logprobs=1).skip_reading_prefix_cache
    assert not completed(prompt_logprobs=1, skip_reading_prefix_cache=False).skip_reading_prefix_cache
    assert not completed(logprobs=1).skip_reading_prefix_cache


def test_what_concerns_text_alone_is_not_sent():
    sent = completed(stop=["x"], bad_words=["y"], n=2, include_stop_in_output=True, detokenize=True)
    assert not sent.stop
    assert not sent.bad_words
    assert not sent.HasField("n")
    assert not sent.include_stop_in_output
    assert not sent.HasField("detokenize")


@pytest.mark.parametrize(
    ("floor", "asked", "effective"), [(5, 1, 5), (5, 10, 10), (1, None, 1), (5, None, 5)]
)
def test_the_stream_interval_is_the_larger_of_the_services_and_the_requests(floor, asked, effective):
    sampling = params() if asked is None else params(stream_interval=asked)
    assert stream_interval(sampling, RequestLimits(stream_interval=floor)) == effective


def test_everything_too_large_for_a_prompt_is_reported_at_once_with_the_numbers():
    def check(num_prompt_tokens: int, **fields: object) -> None:
        check_fit(
            params(**fields),
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=2048,
            vocab_size=600,
            limits=LIMITS,
        )

    check(2047, max_tokens=1)
    check(2000, max_tokens=48, min_tokens=48)
    with pytest.raises(InvalidArgument) as caught:
        check(2000, max_tokens=50, min_tokens=49)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert caught.value.metadata == {"num_tokens": "2050", "max_model_len": "2048"}
    described = "sampling.max_tokens is 50, but 2000 prompt tokens leave only 48 of 2048"
    assert caught.value.violations[0] == ("sampling.max_tokens", described)
    assert [field for field, _ in caught.value.violations] == ["sampling.max_tokens", "sampling.min_tokens"]


def test_prompt_logprobs_of_a_long_prompt_have_a_limit_of_entries():
    def check(num_prompt_tokens: int, **fields: object) -> None:
        check_fit(
            params(**fields),
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=100_000,
            vocab_size=600,
            limits=LIMITS,
        )

    check(10_000, prompt_logprobs=20)
    check(50_000, prompt_logprobs=0)
    with pytest.raises(InvalidArgument, match="210000 entries for 10000 prompt tokens, must have at most"):
        check(10_000, prompt_logprobs=20, logprob_token_ids=[1])
    with pytest.raises(InvalidArgument, match="600000 entries for 1000 prompt tokens"):
        check(1000, prompt_logprobs=-1)
    check(10_000, logprobs=20, logprob_token_ids=[1])


# What a frontend lets through, an engine takes: the two check the same parameters one after the other.

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
    }
    chosen = rng.sample(sorted(options), rng.randint(0, len(options)))
    return sampling_pb2.SamplingParams(**{name: options[name] for name in chosen})


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


# Breaches of limits: reported together, and no more of them than a status carries.


def test_a_count_within_its_range_is_fine_and_another_is_noted():
    violations = Violations()
    assert violations.need_count("n", 2, "ids", 0, 2)
    assert not violations.need_count("n", 3, "ids", 0, 2)
    with pytest.raises(InvalidArgument) as caught:
        violations.raise_if_any()
    assert caught.value.violations == [("n", "n has 3 ids, must have at most 2")]


def test_of_very_many_breaches_the_first_are_kept():
    violations = Violations()
    for index in range(100_000):
        violations.add("a", index, "must be something else")
        violations.need(False, "b", index, "must be something else")
        violations.need_count("c", index + 1, "ids", 0, 0)
    with pytest.raises(InvalidArgument) as caught:
        violations.raise_if_any()
    assert len(caught.value.violations) == 64
    assert caught.value.violations[0] == ("a", "a is 0, must be something else")
    assert len(caught.value.message) < 10_000


# Words that may not appear, with real tokens.


class Encoder:
    """Tokenizes at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


BYTE_LEVEL = byte_level_tokenizer()


async def test_a_word_is_forbidden_with_and_without_a_space_before_it():
    sequences = await bad_word_sequences(["cat"], Encoder(BYTE_LEVEL))
    assert [BYTE_LEVEL.decode(ids) for ids in sequences] == ["cat", " cat"]
    assert sequences[1] == [id_of(BYTE_LEVEL, "Ġcat")]


async def test_spaces_before_a_word_mean_neither_form():
    encoder = Encoder(BYTE_LEVEL)
    assert await bad_word_sequences(["  cat"], encoder) == await bad_word_sequences(["cat"], encoder)


async def test_a_form_that_another_forbids_already_is_left_out():
    # Without a token of its own for a word with a space, the space stands before the same tokens.
    tokenizer = word_piece_tokenizer()
    (only,) = await bad_word_sequences(["student"], Encoder(tokenizer))
    assert tokenizer.decode(only) == "student"


async def test_each_sequence_is_sent_once_in_the_order_of_the_words():
    sequences = await bad_word_sequences(["dog", "cat", " dog"], Encoder(BYTE_LEVEL))
    assert [BYTE_LEVEL.decode(ids) for ids in sequences] == ["dog", " dog", "cat", " cat"]


async def test_a_word_of_rare_characters_is_a_sequence_of_bytes():
    tokenizer = byte_fallback_tokenizer()
    sequences = await bad_word_sequences(["本"], Encoder(tokenizer))
    assert [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "本".encode()] == sequences[0][-3:]


async def test_words_without_tokens_and_with_too_many_are_all_reported():
    words = ["cat", " ", "q" * 300]
    with pytest.raises(InvalidArgument) as caught:
        await bad_word_sequences(words, Encoder(BYTE_LEVEL))
    assert [description for _, description in caught.value.violations] == [
        "sampling.bad_words[1] has 0 tokens, must have 1..64",
        "sampling.bad_words[2] has 300 tokens, must have 1..64",
    ]


async def test_no_words_are_no_sequences():
    assert await bad_word_sequences([], Encoder(BYTE_LEVEL)) == []
