"""Five hundred drawn messages: each answered with a status of its kind, the streams beside them unchanged."""

from __future__ import annotations

import random

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.campaign import METHODS, run_campaign
from tests.fuzz.grammar import Mood, draw

NUM_MESSAGES = 500


async def test_drawn_messages_are_answered_and_streams_beside_them_unchanged():
    report = await run_campaign(0, NUM_MESSAGES)
    assert report.faults == []
    assert report.num_messages == NUM_MESSAGES
    # The three kinds do what they are for.
    assert report.moods["valid"]["OK"] > 0.3 * report.moods["valid"].total()
    assert report.moods["hostile"]["INVALID_ARGUMENT"] > 0.3 * report.moods["hostile"].total()
    assert report.num_hidden > 20
    assert set(report.statuses) == {method.name for method in METHODS}


def test_what_is_drawn_can_be_parsed_unless_it_was_broken_on_purpose():
    rng = random.Random(1)
    for _ in range(2000):
        method = rng.choice(METHODS)
        drawn = draw(rng, method.input_type, rng.choice(list(Mood)))
        try:
            GetMessageClass(method.input_type).FromString(drawn.content)
        except DecodeError:
            assert not drawn.is_parsed
