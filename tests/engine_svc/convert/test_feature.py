"""The wire's half of features: what of an ADD reaches which, what none reads, and what goes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from engine_svc.convert import messages
from engine_svc.convert.feature import AddContext, ParametersOfAdd, Parsed, WireFeature, WireFeatures
from engine_svc.core.extras import Extra, Parameters
from engine_svc.core.request import ContentSpan, Request
from engine_svc.loop.step_output import StepOutput
from tests.engine_svc.request_options import make_wire_features
from tests.engine_svc.session.service_rig import make_entry, make_facts
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2, session_pb2, step_pb2
from triptych_kit.config import ConfigError
from triptych_kit.errors import Unimplemented


@dataclass(frozen=True)
class First(Extra):
    value: int


@dataclass(frozen=True)
class Second(Extra):
    value: int


@dataclass
class Reading(WireFeature):
    """Notes what it is given, and makes of each ADD what the test says."""

    parsed: Parsed | None = None
    fields: Sequence[str] = ("handle",)  # which every ADD has
    takes_tensors: bool = False
    writes: type | None = None
    seen: list[tuple[list[int], tuple[ContentSpan, ...]]] = field(default_factory=list)

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        self.seen.append((list(context.token_ids), context.spans))
        return self.parsed

    def write(self, step: step_pb2.Step, row: int, extra: First | Second, now: float) -> None:
        step.extras.add(row=row, prompt_logprobs=step_pb2.PromptLogprobs(first_position=extra.value))

    def announce(self, ready: session_pb2.Ready) -> None:
        ready.supported_tasks.append("reading")


def to_request(entry: add_pb2.AddEntry, *features: WireFeature) -> Request:
    facts = replace(make_facts(), max_logprobs=5)
    return messages.to_request(entry, session_number=1, facts=facts, now=0.0, features=WireFeatures(features))


def refused_field(entry: add_pb2.AddEntry, *features: WireFeature) -> str:
    with pytest.raises(Unimplemented) as caught:
        to_request(entry, *features)
    assert caught.value.reason == "UNIMPLEMENTED_FIELD"
    return caught.value.metadata["field"]


def entry_with(**fields: object) -> add_pb2.AddEntry:
    entry = make_entry(1)
    entry.MergeFrom(add_pb2.AddEntry(**fields))
    return entry


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adapter", "a"),
        ("media", [add_pb2.MediaItem()]),
        ("bad_words", [add_pb2.TokenSequence(token_ids=b"\1\0\0\0")]),
        ("is_token", b"\1"),
    ],
)
def test_a_field_that_no_feature_reads_is_refused_by_name(name: str, value: object):
    entry = entry_with(**{name: value})
    assert refused_field(entry, Reading()) == name
    to_request(entry, Reading(), Reading(fields=[name]))


def test_a_field_with_presence_is_refused_even_if_it_is_empty():
    entry = make_entry(1)
    entry.prompt_embeds.SetInParent()
    assert refused_field(entry) == "prompt_embeds"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("allowed_token_ids", [3]),
        ("prompt_logprobs", 0),
        ("thinking_token_budget", 4),
        ("structured_output", sampling_pb2.StructuredOutput(regex="a")),
    ],
)
def test_a_sampling_parameter_that_no_feature_reads_is_refused_by_name(name: str, value: object):
    entry = make_entry(1, **{name: value})
    assert refused_field(entry, Reading()) == name
    to_request(entry, Reading(fields=[f"sampling.{name}"]))


def test_parameters_of_stages_become_one_extra_of_those_that_are_set():
    reading = ParametersOfAdd(["min_p", "prompt_logprobs", "detokenize"])
    request = to_request(make_entry(1, min_p=0.25, detokenize=False), reading)
    assert request.extras == {Parameters: Parameters((("min_p", 0.25), ("detokenize", 0.0)))}
    assert to_request(make_entry(1), reading).extras == {}


def test_the_features_of_an_engine_read_none_of_the_fields_that_are_still_to_come():
    features = make_wire_features(enable_prompt_embeds=True)
    for name, value in (("adapter", "a"), ("media", [add_pb2.MediaItem()])):
        with pytest.raises(Unimplemented, match=name):
            features.parse(entry_with(**{name: value}), AddContext(make_facts(), None, [1, 2]))


def test_what_features_make_of_an_add_becomes_extras_of_the_request():
    request = to_request(make_entry(1), Reading(Parsed(First(3))), Reading(), Reading(Parsed(Second(4))))
    assert request.extras == {First: First(3), Second: Second(4)}
    assert not request.sampling.skip_reading_prefix_cache


def test_a_feature_is_asked_of_those_adds_alone_that_set_one_of_its_fields():
    of_entry, of_sampling = Reading(fields=["adapter"]), Reading(fields=["adapter_digest", "sampling.min_p"])
    for entry in (make_entry(1), entry_with(adapter="a"), make_entry(1, min_p=0.5)):
        to_request(entry, of_entry, of_sampling)
    assert (len(of_entry.seen), len(of_sampling.seen)) == (1, 1)


def test_a_feature_that_would_never_be_asked_is_refused():
    kind = r"the feature tests\.engine_svc\.convert\.test_feature\.Reading"
    with pytest.raises(ConfigError, match=rf"^{kind} has no `fields`, and its `parse`"):
        WireFeatures([Reading(fields=())])
    for name, message in (
        ("min_p", r"engine\.v1\.AddEntry"),
        ("sampling.minp", r"common\.v1\.SamplingParams"),
    ):
        with pytest.raises(ConfigError, match=rf"reads '{name}', which is no field of triptych\.{message}$"):
            WireFeatures([Reading(fields=[name])])


def test_a_later_feature_reads_the_prompt_as_earlier_ones_changed_it():
    span = ContentSpan(1, 2, "content")
    changing = Reading(Parsed(First(1), token_ids=[7, 0, 0], spans=(span,), cache_keys=("key",)))
    later = Reading()
    request = to_request(make_entry(1, prompt=[7, 8, 9]), changing, later)
    assert later.seen == [([7, 0, 0], (span,))]
    assert (request.token_ids, request.num_prompt_tokens, request.spans) == ([7, 0, 0], 3, (span,))
    assert request.extra_keys == ("key",)


def test_a_feature_may_keep_a_request_from_reading_the_prefix_cache():
    feature = Reading(Parsed(First(1), skips_reading_prefix_cache=True))
    assert to_request(make_entry(1), feature).sampling.skip_reading_prefix_cache


def test_each_extra_of_a_step_is_written_by_its_feature_under_its_row():
    features = WireFeatures([Reading(writes=First), Reading(writes=Second)])
    output = StepOutput(1, [5, 6], [1, 0], [9], extras={6: {Second: Second(4), First: First(3)}})
    step = messages.to_step(output, {}, features, 0.0)
    assert [(extra.row, extra.prompt_logprobs.first_position) for extra in step.extras] == [(1, 4), (1, 3)]


def test_features_announce_themselves_and_any_may_take_tensors():
    ready = session_pb2.Ready()
    features = WireFeatures([Reading(), Reading(takes_tensors=True)])
    features.announce(ready)
    assert list(ready.supported_tasks) == ["reading", "reading"]
    assert features.take_tensors
    assert not WireFeatures([Reading()]).take_tensors
