"""Bad words on the wire: sequences of ids, refused with value and limit where they cannot be."""

from __future__ import annotations

import pytest

from service_kit.errors import InvalidArgument
from tests.engine_svc.convert.test_messages import to_request
from tests.engine_svc.fakes import VOCAB_SIZE
from tests.engine_svc.session.service_rig import column, make_entry


def test_bad_words_are_sequences_of_ids():
    entry = make_entry(1, prompt=[1])
    entry.bad_words.add(token_ids=column([3, 4]))
    entry.bad_words.add(token_ids=column([5]))
    assert to_request(entry).sampling.bad_words == ((3, 4), (5,))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([column([])], "bad_words is 0, it takes 1 to 64 ids a word"),
        ([column([1] * 65)], "bad_words is 65, it takes 1 to 64 ids a word"),
        ([b"123"], "bad_words has 3 bytes"),
        ([column([VOCAB_SIZE])], f"bad_words is {VOCAB_SIZE}, it takes below the vocabulary's size"),
        ([column([1])] * 1025, "bad_words is 1025, it takes at most 1024 words"),
    ],
)
def test_bad_words_that_cannot_be_are_refused_with_value_and_limit(words, message):
    entry = make_entry(1, prompt=[1])
    for word in words:
        entry.bad_words.add(token_ids=word)
    with pytest.raises(InvalidArgument, match=message):
        to_request(entry)
