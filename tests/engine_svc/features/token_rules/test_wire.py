"""Which tokens an ADD may allow, ban and favour, and what becomes of that."""

from __future__ import annotations

import pytest

from engine_svc.features.token_rules.extras import TokenRules
from tests.engine_svc.fakes import VOCAB_SIZE
from tests.engine_svc.session.service_rig import column, make_entry, read_add
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument

# Of token 4 twice.
BIASES = ((4, 0.5), (7, 100.0), (4, 1.0))


def test_allowed_ids_and_biases_arrive():
    biases = [sampling_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in BIASES]
    request = read_add(make_entry(1, logit_bias=biases, allowed_token_ids=[5, 3, 5]))
    # What is said twice of a token is added twice.
    assert request.extras == {TokenRules: TokenRules(frozenset({3, 5}), ((4, 1.5), (7, 100.0)))}


def test_bad_words_are_sequences_of_ids():
    entry = make_entry(1, prompt=[1])
    entry.bad_words.add(token_ids=column([3, 4]))
    entry.bad_words.add(token_ids=column([5]))
    assert read_add(entry).extras == {TokenRules: TokenRules(bad_words=((3, 4), (5,)))}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([column([])], r"bad_words\[0\] has 0 ids, must have 1\.\.64"),
        ([column([1] * 65)], r"bad_words\[0\] has 65 ids, must have 1\.\.64"),
        ([b"123"], r"bad_words\[0\] has 3 bytes"),
        ([column([VOCAB_SIZE])], rf"bad_words\[0\] is {VOCAB_SIZE}, must be below the vocabulary size"),
        ([column([1])] * 1025, "bad_words has 1025 words, must have at most 1024"),
    ],
)
def test_bad_words_that_cannot_be_are_refused_with_value_and_limit(words, message):
    entry = make_entry(1, prompt=[1])
    for word in words:
        entry.bad_words.add(token_ids=word)
    with pytest.raises(InvalidArgument, match=message):
        read_add(entry)
