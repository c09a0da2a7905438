"""Log probabilities of sampled tokens: their limit as an option, and what an engine gets."""

from __future__ import annotations

import asyncio

from frontend_svc.text.limits import RequestLimits
from tests.frontend_svc.options.asking import breaches, completed


async def test_they_are_sent_only_where_asked_for_and_none_is_not_nought():
    assert not (await completed()).HasField("logprobs")
    asked = await completed(logprobs=0, logprob_token_ids=[4, 4])
    assert (asked.HasField("logprobs"), asked.logprobs) == (True, 0)
    assert list(asked.logprob_token_ids) == [4, 4]
    assert not (await completed(logprobs=1)).skip_reading_prefix_cache


def test_their_limit_is_an_option_and_may_be_the_vocabulary():
    rule = "sampling.logprobs is 6, must be in 0..5"
    assert breaches(RequestLimits(max_logprobs=5), logprobs=6) == {"sampling.logprobs": rule}
    limits = RequestLimits(max_logprobs=-1)
    assert breaches(limits, logprobs=-1) == {}
    assert asyncio.run(completed(logprobs=-1)).logprobs == -1
    rule = "sampling.logprobs is 601, must be in -1..600 (-1: the vocabulary)"
    assert breaches(limits, logprobs=601) == {"sampling.logprobs": rule}
