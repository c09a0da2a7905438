"""Penalties of an ADD, and what becomes of them."""

from __future__ import annotations

from engine_svc.features.penalties.extras import Penalties
from tests.engine_svc.session.service_rig import make_entry, read_add


def test_penalties_arrive_as_they_are_sent():
    entry = make_entry(1, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.5)
    assert read_add(entry).extras == {Penalties: Penalties(-2.0, 2.0, 1.5)}


def test_neutral_penalties_are_none():
    assert read_add(make_entry(1, presence_penalty=0.0, repetition_penalty=1.0)).extras == {}
