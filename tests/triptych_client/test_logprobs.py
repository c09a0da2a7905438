"""Columns of log probabilities become one record a token."""

from __future__ import annotations

import math

from triptych.common.v1 import output_pb2
from triptych_client.logprobs import TokenLogprob, TopToken, read_logprobs


def test_a_place_without_a_probability_has_none() -> None:
    columns = output_pb2.Logprobs(token_ids=[3, 4], logprobs=[math.nan, -1.0], ranks=[0, 2], texts=["a", ""])
    assert read_logprobs(columns) == (
        TokenLogprob(3, None, None, "a", ()),
        TokenLogprob(4, -1.0, 2, "", ()),
    )


def test_without_detokenizing_there_are_no_texts() -> None:
    top = output_pb2.TopLogprobs(token_ids=[5, 6], logprobs=[-0.5, -2.0])
    columns = output_pb2.Logprobs(token_ids=[6], logprobs=[-2.0], ranks=[2], top=[top])
    assert read_logprobs(columns) == (
        TokenLogprob(6, -2.0, 2, None, (TopToken(5, -0.5, None), TopToken(6, -2.0, None))),
    )
