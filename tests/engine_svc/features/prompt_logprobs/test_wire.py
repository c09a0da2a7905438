"""Which logprobs of a prompt an ADD may ask for, and how they look in a step."""

from __future__ import annotations

import math
from array import array

import pytest

from engine_svc.convert import messages
from engine_svc.core.step import TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec, PromptRun
from engine_svc.loop.step_output import StepOutput
from tests.engine_svc.request_options import make_wire_features
from tests.engine_svc.session.service_rig import make_entry, read_add
from triptych_kit.errors import InvalidArgument


def floats(column: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in array("f", column)]


def ints(column: bytes) -> list[int]:
    return array("I", column).tolist()


def test_what_is_asked_for_arrives_with_the_further_ids():
    entry = make_entry(1, prompt_logprobs=0, logprob_token_ids=[9, 0])
    assert read_add(entry).extras == {PromptLogprobSpec: PromptLogprobSpec(0, (9, 0))}


def test_47_a_request_with_prompt_logprobs_reads_no_cached_prefix():
    assert read_add(make_entry(1, prompt_logprobs=0)).sampling.skip_reading_prefix_cache
    assert not read_add(make_entry(1, logprobs=0)).sampling.skip_reading_prefix_cache


def test_an_engine_reports_as_many_logprobs_as_it_is_configured_to():
    asked = make_entry(1, prompt_logprobs=25)
    with pytest.raises(InvalidArgument, match=r"prompt_logprobs is 25, must be in 0\.\.20"):
        read_add(asked)
    assert read_add(asked, max_logprobs=25).extras[PromptLogprobSpec].num_top == 25
    everything = make_entry(1, prompt_logprobs=-1)
    assert read_add(everything, max_logprobs=-1).extras[PromptLogprobSpec].num_top == -1
    with pytest.raises(InvalidArgument, match=r"prompt_logprobs is -2, must be in -1\.\."):
        read_add(make_entry(1, prompt_logprobs=-2), max_logprobs=-1)


def test_prompt_logprobs_have_a_limit_for_the_whole_prompt():
    def ask(num_tokens: int, **options: object) -> None:
        read_add(make_entry(1, prompt=[1] * num_tokens, **options), max_model_len=20_000)

    ask(10_000, prompt_logprobs=20)
    ask(10_000, prompt_logprobs=19, logprob_token_ids=[5])
    for options in ({"prompt_logprobs": 20, "logprob_token_ids": [5]}, {"prompt_logprobs": 20}):
        with pytest.raises(
            InvalidArgument, match=r"prompt_logprobs is 2\d+, it takes at most 200000 entries"
        ):
            ask(10_001, **options)


def test_116_the_first_prompt_entry_is_none():
    runs = (
        PromptRun(1, TokenLogprobs([-0.5, -1.0], [1, 2], 1, [3, 4], [-0.25, -0.75])),
        PromptRun(3, TokenLogprobs([-2.0], [5], 1, [6], [-0.5])),
    )
    output = StepOutput(1, [5, 6], [1, 1], [8, 9], extras={6: {PromptLogprobs: PromptLogprobs(runs)}})
    step = messages.to_step(output, {}, make_wire_features(), 0.0)
    assert [extra.row for extra in step.extras] == [1, 1]
    first, second = (extra.prompt_logprobs for extra in step.extras)
    assert (first.first_position, second.first_position) == (0, 3)
    assert (floats(first.logprobs), ints(first.ranks)) == ([None, -0.5, -1.0], [0, 1, 2])
    assert (ints(first.top.token_ids), floats(first.top.logprobs)) == ([0, 3, 4], [None, -0.25, -0.75])
    assert (floats(second.logprobs), ints(second.ranks), second.top.k) == ([-2.0], [5], 1)


def test_116_a_prompt_of_one_token_has_its_first_entry_alone():
    empty = PromptLogprobs((PromptRun(1, TokenLogprobs([], [])),))
    step = messages.to_step(
        StepOutput(1, [9], [0], extras={9: {PromptLogprobs: empty}}), {}, make_wire_features(), 0.0
    )
    (extra,) = step.extras
    assert (extra.row, floats(extra.prompt_logprobs.logprobs)) == (0, [None])
    assert not extra.prompt_logprobs.HasField("top")
