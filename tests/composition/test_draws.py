"""What the seeds draw, without a process: every entry, every pair and every refusal, often enough."""

from __future__ import annotations

import struct

import pytest

from tests.architecture.sources import ROOT
from tests.composition.__main__ import parse_seeds
from tests.composition.answers import Refused, Whole, is_expected
from tests.composition.draws import TinyModel
from tests.composition.generator import Coverage, Drawn, draw_case, possible_pairs, rig_of
from tests.composition.table import ENTRIES, REFUSALS, as_markdown
from triptych.api.v1 import generate_pb2
from triptych_cli.services import embedded_model

NUM_SEEDS = {"all": 2000, "test": 15, "chaos": 30}
LEAST_EACH, LEAST_PAIR = 50, 5


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel.of(embedded_model())


def test_the_lists_have_so_many_distinct_seeds_of_few_rigs():
    seeds = {name: parse_seeds(name) for name in NUM_SEEDS}
    assert {name: len(set(each)) for name, each in seeds.items()} == NUM_SEEDS
    assert {*seeds["test"], *seeds["chaos"]} <= set(seeds["all"])
    assert [len({rig_of(seed) for seed in seeds[name]}) for name in ("test", "chaos")] == [1, 2]


def test_every_entry_and_every_pair_and_every_refusal_is_drawn(model):
    coverage = Coverage.of(draw_case(seed, model) for seed in parse_seeds("all"))
    never_served = {name for refusal in REFUSALS if len(refusal.names) == 1 for name in refusal.names}
    names = {entry.name for entry in ENTRIES} - never_served
    assert len(names) + len(never_served) == len(ENTRIES), "two entries have one name"
    assert {name for name in names if coverage.names[name] < LEAST_EACH} == set()
    assert {refusal for refusal in REFUSALS if coverage.refusals[refusal] < LEAST_EACH} == set()
    assert {pair for pair in possible_pairs() if coverage.pairs[pair] < LEAST_PAIR} == set()


def test_a_seed_is_the_same_case_every_time(model):
    assert draw_case(3, model) == draw_case(3, TinyModel.of(embedded_model()))


def test_the_last_bit_of_a_log_probability_counts():
    drawn = Drawn(generate_pb2.GenerateRequest(), frozenset(), ())
    [next_float] = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", -1.0))[0] + 1))
    one, other = Whole(), Whole()
    for whole, value in ((one, -1.0), (other, next_float)):
        whole.outputs.add(token_ids=[5]).logprobs.logprobs.append(value)
    assert is_expected(drawn, [one], [one])
    assert not is_expected(drawn, [one], [other])


def test_a_refusal_must_name_the_field_of_the_table():
    refusal = REFUSALS[0]
    drawn = Drawn(generate_pb2.GenerateRequest(), refusal.names, (refusal,))
    assert is_expected(drawn, Refused(refusal.status, frozenset({refusal.field}), ""), None)
    assert not is_expected(drawn, Refused(refusal.status, frozenset({refusal.field, "model"}), ""), None)
    assert not is_expected(drawn, Refused(refusal.status, frozenset(), ""), None)
    assert not is_expected(drawn, [Whole()], None)


def test_the_documents_print_the_refusals():
    assert as_markdown() in (ROOT / "docs/api.md").read_text(encoding="utf-8")
