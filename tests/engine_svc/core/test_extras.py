"""Extras reach a rank and come back as they were, in the form of their fields; others are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.build.features import extra_types
from engine_svc.core.binary_form import form_of
from engine_svc.core.byte_fields import FieldReader, FieldWriter, MessageError
from engine_svc.core.content import Content
from engine_svc.core.extras import Extra, ExtraCodec, Extras, Parameters, UnknownExtra, merge_extras
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult, TokenLogprobs
from engine_svc.features.adapters.extras import Pins
from engine_svc.features.forward_outputs.extras import ForwardOutputs, PositionRun
from engine_svc.features.media.extras import (
    EncoderInput,
    EncoderWork,
    MediaContent,
    MediaItems,
    PromptItem,
    RowItems,
    digest_of,
)
from engine_svc.features.penalties.extras import Penalties
from engine_svc.features.prompt_embeds.extras import PromptEmbeds
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec, PromptRun
from engine_svc.features.structured_output.constraint import (
    Constraint,
    ConstraintKind,
    Spacing,
    Whitespace,
)
from engine_svc.features.structured_output.extras import BACKENDS, StructuredOutput
from engine_svc.features.thinking_budget.extras import ThinkingBudget
from engine_svc.features.token_rules.extras import TokenRules
from engine_svc.ranks.plan_codec import PlanDecoder, PlanEncoder
from engine_svc.ranks.result_codec import decode_result, encode_result
from engine_svc.tensors.host_tensor import ITEM_SIZES, HostTensor
from tests.engine_svc.request_options import split_options

ids = st.integers(0, (1 << 31) - 1)
some_ids = st.lists(ids, max_size=4)
numbers = st.floats(allow_nan=False)
token_logprobs = st.builds(
    TokenLogprobs,
    logprobs=st.lists(numbers, max_size=4),
    ranks=some_ids,
    k=st.integers(0, 20),
    top_token_ids=some_ids,
    top_logprobs=st.lists(numbers, max_size=4),
)


@st.composite
def embeddings(draw: st.DrawFn) -> PromptEmbeds:
    positions = tuple(sorted(draw(st.sets(ids, max_size=4))))
    dtype, width = draw(st.sampled_from(["float32", "float16", "bfloat16"])), draw(st.integers(1, 3))
    num_bytes = len(positions) * width * ITEM_SIZES[dtype]
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    return PromptEmbeds(HostTensor(dtype, (len(positions), width), data), positions)


@st.composite
def media_items(draw: st.DrawFn) -> MediaItems:
    """Equal digests are of equal content."""
    items = []
    for start in draw(st.lists(ids, max_size=3)):
        data = draw(st.binary(max_size=9))
        inputs = (EncoderInput(draw(st.sampled_from(["a", "b"])), HostTensor("uint8", (len(data),), data)),)
        content = MediaContent(digest_of(inputs), inputs)
        items.append(PromptItem(content, start, draw(ids), tuple(draw(some_ids))))
    return MediaItems(tuple(items))


# Of types whose fields have values of other types or limits: any value that a request or a step may have.
LIMITED: dict[type, st.SearchStrategy[Any]] = {
    Parameters: st.builds(Parameters, values=st.lists(st.tuples(st.text(), numbers), max_size=4).map(tuple)),
    TokenRules: st.builds(
        TokenRules,
        allowed=st.none() | st.frozensets(ids, max_size=5),
        bias=st.lists(st.tuples(ids, numbers), max_size=4).map(tuple),
        bad_words=st.lists(some_ids.map(tuple), max_size=4).map(tuple),
    ),
    ThinkingBudget: st.builds(
        ThinkingBudget,
        num_tokens=ids,
        start_token_ids=st.lists(ids, min_size=1, max_size=3).map(tuple),
        end_token_ids=st.lists(ids, min_size=1, max_size=3).map(tuple),
    ),
    PromptEmbeds: embeddings(),
    MediaItems: media_items(),
    EncoderWork: st.builds(
        EncoderWork,
        rows=st.lists(st.builds(RowItems, st.text(), some_ids.map(tuple)), max_size=3).map(tuple),
        evicted=st.lists(st.text(), max_size=3).map(tuple),
    ),
    PromptLogprobSpec: st.builds(
        PromptLogprobSpec, num_top=st.integers(-1, 1 << 30), token_ids=some_ids.map(tuple)
    ),
    StructuredOutput: st.builds(
        StructuredOutput,
        constraint=st.builds(
            Constraint,
            kind=st.sampled_from(ConstraintKind),
            text=st.text(),
            choices=st.lists(st.text(), max_size=3).map(tuple),
            whitespace=st.builds(Whitespace, st.sampled_from(Spacing), pattern=st.text()),
            has_additional_properties=st.booleans(),
            is_lenient=st.booleans(),
        ),
        backends=st.sampled_from([BACKENDS[:1], BACKENDS, BACKENDS[1:]]),
        reasoning_end=some_ids.map(tuple),
        eos_token_ids=some_ids.map(tuple),
    ),
    ForwardOutputs: st.builds(
        ForwardOutputs,
        runs=st.lists(
            st.builds(
                PositionRun,
                first_position=ids,
                num_positions=ids,
                hidden_states=st.binary(),
                routed_experts=st.binary(),
                num_layers=ids,
            ),
            max_size=3,
        ).map(tuple),
    ),
    PromptLogprobs: st.builds(
        PromptLogprobs,
        runs=st.lists(
            st.builds(PromptRun, first_position=st.integers(1, 1 << 30), token_logprobs=token_logprobs),
            max_size=3,
        ).map(tuple),
    ),
}
OF_FIELDS: dict[object, st.SearchStrategy[Any]] = {
    int: ids,
    float: numbers,
    bool: st.booleans(),
    str: st.text(),
    int | None: st.none() | ids,
    bool | None: st.none() | st.booleans(),
    tuple[int, ...]: some_ids.map(tuple),
    bytes: st.binary(),
    Pins: st.builds(Pins, version=ids, digests=st.lists(st.text(), max_size=3).map(tuple)),
}


def plain(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type whose fields are numbers, truth values, texts or bytes."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: OF_FIELDS[hints[field.name]] for field in fields(kind)})


# Of each type that the ranks of an engine know.
VALUES = {kind: LIMITED[kind] if kind in LIMITED else plain(kind) for kind in extra_types()}


def fields_of(extra: Any) -> Any:
    """What two extras are compared by: a tensor is otherwise equal to itself alone."""
    if isinstance(extra, PromptEmbeds):
        tensor = extra.embeds
        return tensor.dtype, tensor.shape, tensor.data, extra.positions
    return astuple(extra)


def assert_same(found: Extras, expected: Extras) -> None:
    assert list(found) == list(expected)
    for kind, extra in expected.items():
        assert type(found[kind]) is kind
        assert fields_of(found[kind]) == fields_of(extra)


def test_the_values_above_are_of_types_that_a_rank_knows():
    assert set(VALUES) >= set(LIMITED)


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_an_extra_is_read_as_it_was_written(kind: type[Extra], data: st.DataObject):
    extra, form = data.draw(VALUES[kind]), form_of(kind)
    assert_same({kind: form.decode(form.encode(extra))}, {kind: extra})


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_damaged_bytes_are_another_extra_or_a_message_error(kind: type[Extra], data: st.DataObject):
    writer, codec = FieldWriter(), ExtraCodec([kind])
    codec.write(writer, {kind: data.draw(VALUES[kind])})
    message = bytearray(writer.message())
    del message[data.draw(st.integers(0, len(message))) :]
    for _ in range(data.draw(st.integers(0, 2))):
        if message:
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MessageError):
        assert set(codec.read(FieldReader(bytes(message)))) <= {kind}


def test_a_malformed_extra_is_named():
    writer, codec = FieldWriter(), ExtraCodec([ThinkingBudget])
    codec.write(writer, {ThinkingBudget: ThinkingBudget(5, (1,), (2,))})
    with pytest.raises(MessageError, match="malformed ThinkingBudget: a message has 39 bytes, at least 40"):
        codec.read(FieldReader(writer.message()[:-1]))
    negative = writer.message().replace(b"\5" + bytes(7), b"\xff" * 8)
    with pytest.raises(MessageError, match="malformed ThinkingBudget: num_tokens is -1, must be at least 0"):
        codec.read(FieldReader(negative))


some_extras = st.fixed_dictionaries({}, optional=VALUES)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(of_request=some_extras, of_plan=some_extras, of_rows=st.lists(some_extras, max_size=3))
def test_a_rank_reads_the_extras_of_requests_plans_and_results(of_request, of_plan, of_rows):
    sizes: dict[str, Any] = {"max_num_seqs": 4, "num_groups": 1, "extras": ExtraCodec(extra_types())}
    sampling, _ = split_options()
    plan = StepPlan(1, admitted=[AdmittedRequest("a", [1, 2], 2, sampling, [[0]], of_request)])
    plan.extras = of_plan
    read = PlanDecoder(**sizes).decode(PlanEncoder(**sizes).encode(plan))
    assert_same(read.admitted[0].extras, of_request)
    assert_same(read.extras, of_plan)
    result = StepResult(1, [[] for _ in of_rows])
    for row, extras in enumerate(of_rows):
        for kind, extra in extras.items():
            result.extras.setdefault(kind, {})[row] = extra
    codec = ExtraCodec(extra_types())
    returned = decode_result(encode_result(result, codec), codec)
    assert list(returned.extras) == list(result.extras)
    for kind, rows in result.extras.items():
        assert list(returned.extras[kind]) == list(rows)
        for row, extra in rows.items():
            assert_same({kind: returned.extras[kind][row]}, {kind: extra})


def test_an_extra_of_an_unknown_type_is_refused_before_anything_is_written():
    encoder = PlanEncoder(max_num_seqs=4, num_groups=1, extras=ExtraCodec([Penalties]))
    sampling, _ = split_options()
    admitted = AdmittedRequest("a", [1, 2], 2, sampling, [[0]], {TokenRules: TokenRules()})
    with pytest.raises(UnknownExtra, match="TokenRules is not registered"):
        encoder.encode(StepPlan(1, admitted=[admitted]))
    with pytest.raises(UnknownExtra, match="TokenRules is not registered"):
        encoder.encode(StepPlan(1, extras={TokenRules: TokenRules()}))
    with pytest.raises(UnknownExtra, match="TokenRules is not registered"):
        encode_result(StepResult(1, [[]], extras={TokenRules: {0: TokenRules()}}), ExtraCodec([Penalties]))
    # Its row was not taken.
    admitted.extras = {Penalties: Penalties(1.0)}
    decoder = PlanDecoder(max_num_seqs=4, num_groups=1, extras=ExtraCodec([Penalties]))
    assert decoder.decode(encoder.encode(StepPlan(1, admitted=[admitted]))).admitted == [admitted]


def test_a_rank_that_knows_fewer_types_refuses_the_message():
    writer = FieldWriter()
    ExtraCodec([Penalties, TokenRules]).write(writer, {TokenRules: TokenRules()})
    with pytest.raises(MessageError, match="has extra 1, this rank knows 1"):
        ExtraCodec([Penalties]).read(FieldReader(writer.message()))


@dataclass(frozen=True)
class Picture(Content):
    """Of which the ranks keep two at most."""

    name: str
    data: bytes
    size_bytes: int = 60 << 20

    @property
    def digest(self) -> str:
        return self.name


@dataclass(frozen=True)
class Album(Extra):
    pictures: tuple[Picture, ...]


def channel_of_albums() -> Callable[[Album], tuple[Album, int]]:
    """Sends an album; returns it as a rank reads it, and the size of the message."""
    ours, theirs = ExtraCodec([Album]), ExtraCodec([Album])

    def send(album: Album) -> tuple[Album, int]:
        writer = FieldWriter()
        ours.write(writer, {Album: album})
        message = writer.message()
        return theirs.read(FieldReader(message))[Album], len(message)

    return send


def test_a_content_reaches_a_rank_once_in_all_messages():
    picture, send = Picture("a" * 64, bytes(5000)), channel_of_albums()
    first, whole = send(Album((picture, picture)))
    again, short = send(Album((Picture("a" * 64, bytes(5000)),)))
    assert first == Album((picture, picture))
    assert again == Album((picture,))
    assert 5000 < whole < 5400
    assert short < 100
    assert first.pictures[0] is first.pictures[1] is again.pictures[0]


def test_both_ends_drop_the_same_contents_whatever_is_sent():
    rng, send, num_short = random.Random(5), channel_of_albums(), 0
    pictures = [Picture(str(index), bytes([index]) * 1000) for index in range(4)]
    for _ in range(300):
        album = Album(tuple(rng.choices(pictures, k=rng.randint(0, 3))))
        read, size = send(album)
        assert read == album
        num_short += len(album.pictures) > 0 and size < 1000
    assert 40 < num_short < 200


def test_a_rank_without_a_content_that_it_should_have_refuses_the_message():
    ours, writer = ExtraCodec([Album]), FieldWriter()
    ours.write(FieldWriter(), {Album: Album((Picture("a", b""),))})
    ours.write(writer, {Album: Album((Picture("a", b""),))})
    with pytest.raises(MessageError, match="malformed Album: content a is not here"):
        ExtraCodec([Album]).read(FieldReader(writer.message()))


def test_extras_of_two_steps_become_those_of_one_and_neither_changes():
    runs = [PromptRun(1, TokenLogprobs([-1.0], [2])), PromptRun(2, TokenLogprobs([-2.0], [1]))]
    earlier, later = ({PromptLogprobs: PromptLogprobs((run,))} for run in runs)
    assert merge_extras(earlier, later) == {PromptLogprobs: PromptLogprobs(tuple(runs))}
    assert merge_extras({}, later) == later
    assert merge_extras(earlier, {}) == earlier
    assert earlier == {PromptLogprobs: PromptLogprobs((runs[0],))}
