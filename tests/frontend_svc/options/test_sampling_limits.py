"""How tokens are drawn and what ends an output: limits, defaults, and what an engine gets."""

from __future__ import annotations

import pytest

from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import GenerationDefaults
from tests.frontend_svc.options.asking import breaches, completed, model_of, prepared
from triptych_kit.errors import InvalidArgument


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1, "min_tokens": 1},
        {"n": 64, "temperature": 0.5},
        {"n": 1, "temperature": 0.0},
        {"repetition_detection": {"max_pattern_size": 256, "min_pattern_size": 256, "min_count": 64}},
    ],
    ids=str,
)
def test_parameters_that_fit_each_other_are_taken(fields):
    assert breaches(**fields) == {}


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens",
            "is 5, must be at most 4, the limit of the output",
        ),
        ({"n": 2, "temperature": 0.0}, "n", "is 2, must be 1 where temperature is 0"),
        ({"n": 3, "temperature": 1e-6}, "n", "is 3, must be 1 where temperature is 1e-06"),
        (
            {"stop": ["x"], "detokenize": False},
            "detokenize",
            "is false, must be true where stop strings are given",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}},
            "repetition_detection.min_pattern_size",
            "is 5, must be in 0..4",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_parameters_that_do_not_fit_each_other_are_refused(fields, name, words):
    assert list(found := breaches(**fields)) == [f"sampling.{name}"]
    assert f"sampling.{name} {words}" in found[f"sampling.{name}"]


def test_several_outputs_of_a_greedy_request_are_refused_also_where_the_model_chose_greedy():
    greedy = GenerationDefaults(temperature=0.0)
    assert "sampling.n" in breaches(defaults=greedy, n=2)
    assert breaches(defaults=greedy, n=2, temperature=0.7) == {}
    assert breaches(defaults=GenerationDefaults(temperature=0.7), n=2) == {}


def test_the_limit_of_outputs_is_an_option():
    assert breaches(RequestLimits(max_n=2), n=2) == {}
    assert breaches(RequestLimits(max_n=2), n=3) == {"sampling.n": "sampling.n is 3, must be in 1..2"}


@pytest.mark.parametrize(
    ("asked", "used"), [(0.0, 0.0), (9e-6, 0.0), (2e-5, 0.01), (0.009, 0.01), (0.02, 0.02)]
)
async def test_a_temperature_is_greedy_or_at_least_a_hundredth(asked, used):
    assert (await completed(temperature=asked)).temperature == pytest.approx(used, rel=1e-6)


async def test_a_greedy_request_draws_from_nothing_whatever_else_is_asked_or_the_models_default():
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    greedy = await completed(defaults, temperature=0.0, top_p=0.5, top_k=5, min_p=0.5)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, 0, 0.0)
    assert (await completed(defaults, temperature=0.0)).top_k == 0


async def test_every_default_of_the_model_is_used_where_the_client_set_nothing():
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=64, min_p=0.25)
    unset = await completed(defaults)
    assert (unset.temperature, unset.top_p) == (pytest.approx(0.6), pytest.approx(0.9))
    assert (unset.top_k, unset.max_tokens, unset.min_p) == (20, 64, 0.25)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 100, "min_p": 0.0}
    given = await completed(defaults, **neutral)
    assert {name: getattr(given, name) for name in neutral} == neutral


async def test_unset_max_tokens_is_what_fits_or_the_models_default_if_that_is_less():
    assert (await completed(max_new_tokens=1948)).max_tokens == 1948
    short, long = GenerationDefaults(max_new_tokens=64), GenerationDefaults(max_new_tokens=5000)
    assert (await completed(short, max_new_tokens=1948)).max_tokens == 64
    assert (await completed(long, max_new_tokens=1948)).max_tokens == 1948
    assert (await completed(short, max_new_tokens=1948, max_tokens=100)).max_tokens == 100


async def test_a_default_does_not_end_an_output_before_the_tokens_that_were_asked_for():
    sampling = await completed(GenerationDefaults(max_new_tokens=64), min_tokens=100)
    assert (sampling.min_tokens, sampling.max_tokens) == (100, 100)


async def test_stop_ids_are_sent_once_each_in_their_order():
    assert list((await completed(stop_token_ids=[7, 3, 7])).stop_token_ids) == [7, 3]


async def test_what_concerns_text_alone_is_not_sent():
    sent = await completed(stop=["x"], bad_words=["y"], n=2, include_stop_in_output=True, detokenize=True)
    assert not sent.stop
    assert not sent.bad_words
    assert not sent.HasField("n")
    assert not sent.include_stop_in_output
    assert not sent.HasField("detokenize")


async def test_everything_too_large_for_a_prompt_is_reported_at_once_with_the_numbers():
    model = model_of(max_model_len=2048)
    await prepared(model, 2047, max_tokens=1)
    await prepared(model, 2000, max_tokens=48, min_tokens=48)
    with pytest.raises(InvalidArgument) as caught:
        await prepared(model, 2000, max_tokens=50, min_tokens=49)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert caught.value.metadata == {"num_tokens": "2050", "max_model_len": "2048"}
    described = "sampling.max_tokens is 50, but 2000 prompt tokens leave only 48 of 2048"
    assert caught.value.violations[0] == ("sampling.max_tokens", described)
    assert [field for field, _ in caught.value.violations] == ["sampling.max_tokens", "sampling.min_tokens"]
