"""What an ADD may say, what is refused and how, and how a step looks on the wire."""

from __future__ import annotations

import math
from array import array

import grpc
import pytest

from engine_svc.cache.observer import StoredBlocks
from engine_svc.convert import messages
from engine_svc.core.request import NO_STOP_TOKEN, DraftUse, FinishReason, FirstOutput, PrefillStats
from engine_svc.core.sampling_params import RepetitionLimits
from engine_svc.core.step import TokenLogprobs
from engine_svc.loop.mailbox import AllBlocksRemoved, KVEventBatch, RemovedBlocks
from engine_svc.loop.step_output import FinishedRow, LogprobDeltas, StepOutput
from tests.engine_svc.fakes import EOS_TOKEN_ID, MAX_MODEL_LEN, VOCAB_SIZE
from tests.engine_svc.request_options import make_wire_features
from tests.engine_svc.session.service_rig import column, make_entry, make_facts, read_add
from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, kv_pb2, step_pb2
from triptych_kit.errors import InvalidArgument, ServiceError, Unimplemented, from_status

FEATURES = make_wire_features()


def test_every_reason_of_an_abort_has_a_name_of_its_own():
    causes = [messages.to_abort_cause(reason) for reason in engine_pb2.AbortReason.values()]
    assert causes == ["client", "client", "deadline", "stop_string", "slow_consumer", "migrated"]
    assert messages.to_abort_cause(99) == "client"


def test_an_add_becomes_the_request_it_asks_for():
    entry = make_entry(
        7,
        prompt=[1, 2, 3],
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_tokens=2,
        stop_token_ids=[11],
    )
    entry.priority, entry.age_ms, entry.cache_salt = -5, 2500, "salt"
    entry.account, entry.weight = "team", 3
    request = read_add(entry)
    assert (request.token_ids, request.num_prompt_tokens) == ([1, 2, 3], 3)
    assert (request.priority, request.arrival_at, request.timeline.queued_at) == (-5, 97.5, 100.0)
    assert (request.account, request.weight) == ("team", 3)
    assert request.cache_salt == "salt"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.seed) == (9, 2, 40, 7)
    assert (sampling.temperature, sampling.top_p) == pytest.approx((0.5, 0.9))
    assert sampling.eos_token_id == EOS_TOKEN_ID
    assert sampling.stop_token_ids == {11, EOS_TOKEN_ID + 1}


def test_what_is_not_said_takes_the_neutral_value():
    entry = add_pb2.AddEntry(
        handle=1, request_id="r", prompt_token_ids=column([1, 2]), sampling=sampling_pb2.SamplingParams()
    )
    request = read_add(entry)
    assert (request.account, request.weight) == ("", 1)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_tokens) == (1.0, 1.0, 0, 0)
    assert sampling.max_tokens == MAX_MODEL_LEN - 2


def test_ignore_eos_takes_the_models_other_end_ids_off_as_well():
    assert read_add(make_entry(1, ignore_eos=True)).sampling.end_token_ids == frozenset()


def test_a_request_that_continues_counts_its_output_against_max_tokens():
    entry = make_entry(1, prompt=[1, 2, 3], max_tokens=5)
    entry.output_token_ids = column([8, 9])
    request = read_add(entry)
    assert (request.token_ids, request.num_prompt_tokens) == ([1, 2, 3, 8, 9], 3)
    assert request.sampling.max_tokens == 5


def test_ids_differ_by_session_handle_and_attempt():
    entries = [make_entry(1), make_entry(2), make_entry(1, attempt=1)]
    ids = {read_add(entry).request_id for entry in entries}
    other = messages.to_request(entries[0], session_number=4, facts=make_facts(), now=0.0, features=FEATURES)
    ids.add(other.request_id)
    assert len(ids) == 4


def test_tenants_share_no_cache_even_with_crafted_salts():
    salts = set()
    for tenant, salt in (("a", "b"), ("ab", ""), ("", "ab"), ("a", ""), ("", "")):
        entry = make_entry(1)
        entry.tenant, entry.cache_salt = tenant, salt
        salts.add(read_add(entry).cache_salt)
    assert len(salts) == 5


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"prompt": [VOCAB_SIZE]}, "prompt_token_ids", ["1000", "below"]),
        ({"prompt": [1] * MAX_MODEL_LEN}, "prompt_token_ids", ["128", "127"]),
        ({"max_tokens": 2**40}, "max_tokens", [str(2**40), "123"]),
        ({"min_tokens": 6}, "min_tokens", ["6", "5"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_value_is_refused_with_field_value_and_limit(changes, field, words):
    with pytest.raises(InvalidArgument) as caught:
        read_add(make_entry(1, **changes))
    assert caught.value.violations[0][0] == field
    assert all(word in caught.value.message for word in words)


def test_every_sampling_option_of_the_core_arrives():
    sampling = read_add(make_entry(1, min_p=0.25, logprobs=20, logprob_token_ids=[9, 0])).sampling
    assert (sampling.min_p, sampling.logprobs, sampling.logprob_token_ids) == (0.25, 20, (9, 0))
    given = [read_add(make_entry(1, max_draft_tokens=most)).sampling.max_draft_tokens for most in (0, 64)]
    assert (given, read_add(make_entry(1)).sampling.max_draft_tokens) == ([0, 64], None)


def test_unset_options_change_nothing():
    request = read_add(make_entry(1))
    assert (request.sampling.min_p, request.sampling.logprobs, request.extras) == (0.0, None, {})


def test_an_engine_reports_as_many_logprobs_as_it_is_configured_to():
    asked = make_entry(1, logprobs=25)
    with pytest.raises(InvalidArgument, match=r"logprobs is 25, must be in 0\.\.20"):
        read_add(asked)
    assert read_add(asked, max_logprobs=25).sampling.logprobs == 25
    assert read_add(make_entry(1, logprobs=-1), max_logprobs=-1).sampling.logprobs == -1
    with pytest.raises(InvalidArgument, match=r"logprobs is -2, must be in -1\.\."):
        read_add(make_entry(1, logprobs=-2), max_logprobs=-1)


@pytest.mark.parametrize(
    ("detection", "limits"),
    [
        ({}, None),
        ({"min_count": 5}, None),
        ({"max_pattern_size": 4, "min_count": 2}, RepetitionLimits(4, 1, 2)),
        ({"max_pattern_size": 256, "min_pattern_size": 256, "min_count": 64}, RepetitionLimits(256, 256, 64)),
    ],
    ids=["off", "off whatever the count", "shortest unset", "all at their limits"],
)
def test_repetition_limits_are_those_asked_for(detection, limits):
    detection = sampling_pb2.RepetitionDetection(**detection)
    assert read_add(make_entry(1, repetition_detection=detection)).sampling.repetition == limits
    assert read_add(make_entry(1)).sampling.repetition is None


@pytest.mark.parametrize(
    ("detection", "name", "limit"),
    [
        ({"max_pattern_size": 257, "min_count": 2}, "max_pattern_size", "is 257, must be in 0..256"),
        (
            {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2},
            "min_pattern_size",
            "is 5, it takes 0 to max_pattern_size, 4",
        ),
        ({"min_pattern_size": 1}, "min_pattern_size", "is 1, it takes 0 to max_pattern_size, 0"),
        ({"max_pattern_size": 4}, "min_count", "is 0, must be in 2..64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_repetition_limits_are_refused_with_field_value_and_limit(detection, name, limit):
    entry = make_entry(1, repetition_detection=sampling_pb2.RepetitionDetection(**detection))
    with pytest.raises(InvalidArgument) as caught:
        read_add(entry)
    assert caught.value.violations[0][0] == f"repetition_detection.{name}"
    assert f"repetition_detection.{name} {limit}" in caught.value.message


def test_a_column_that_is_cut_a_prompt_without_tokens_and_a_wild_priority_are_refused():
    cut, empty, wild = make_entry(1), make_entry(1), make_entry(1)
    cut.prompt_token_ids = b"\x01\x00\x00"
    empty.prompt_token_ids = b""
    wild.priority = 101
    for entry, word in ((cut, "3 bytes"), (empty, "no tokens"), (wild, "101")):
        with pytest.raises(InvalidArgument, match=word):
            read_add(entry)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 2},
        {"bad_words": ["x"]},
        {"stop": ["x"]},
        {"structured_output": sampling_pb2.StructuredOutput(regex="a")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_parameter_that_cannot_be_served_is_refused_by_name(changes):
    with pytest.raises(Unimplemented, match=next(iter(changes))):
        read_add(make_entry(1, **changes))


@pytest.mark.parametrize(
    "entry",
    [
        add_pb2.AddEntry(adapter="a"),
        add_pb2.AddEntry(media=[add_pb2.MediaItem()]),
        add_pb2.AddEntry(prompt_embeds=tensor_pb2.Tensor()),
        add_pb2.AddEntry(pooling=sampling_pb2.PoolingParams()),
    ],
    ids=lambda entry: entry.ListFields()[0][0].name,
)
def test_a_kind_of_request_that_cannot_be_served_is_refused(entry):
    whole = make_entry(1)
    whole.MergeFrom(entry)
    with pytest.raises(Unimplemented):
        read_add(whole)


def test_what_concerns_text_alone_is_the_frontends_and_is_ignored():
    entry = make_entry(
        1,
        include_stop_in_output=True,
        detokenize=False,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=sampling_pb2.OUTPUT_KIND_FINAL_ONLY,
        stream_interval=3,
    )
    assert read_add(entry).sampling == read_add(make_entry(1)).sampling


def test_an_add_without_params_or_request_id_is_refused():
    without_params, without_id = make_entry(1), make_entry(1)
    without_params.ClearField("sampling")
    without_id.request_id = ""
    for entry, word in ((without_params, "params is not set"), (without_id, "request_id has 0 characters")):
        with pytest.raises(InvalidArgument, match=word):
            read_add(entry)


@pytest.mark.parametrize("field", ["request_id", "cache_salt"])
def test_ids_of_an_add_can_be_printed(field):
    entry = make_entry(1)
    setattr(entry, field, "\x1b[31mred")
    with pytest.raises(InvalidArgument, match="characters that can be printed") as caught:
        read_add(entry)
    assert caught.value.message.isprintable()
    assert caught.value.violations[0][0] == field


def test_one_output_of_a_sampling_group_is_accepted():
    read_add(make_entry(1, n=1))


def test_a_deadline_is_on_the_engines_clock():
    entry = make_entry(1)
    assert messages.to_deadline(entry, 10.0) is None
    for remaining_ms, deadline in ((1500, 11.5), (0, 10.0)):
        entry.remaining_ms = remaining_ms
        assert messages.to_deadline(entry, 10.0) == deadline


def test_a_step_becomes_packed_columns():
    output = StepOutput(
        4,
        handles=[9, 300],
        num_tokens=[1, 2],
        token_ids=[70_000, 1, 2],
        finished=[FinishedRow(1, FinishReason.LENGTH)],
        first=[(0, FirstOutput(16))],
    )
    step = messages.to_step(output, {300: frozenset()}, FEATURES, 0.0)
    assert step.step_number == 4
    assert step.handles == b"\x09\x00\x00\x00\x2c\x01\x00\x00"
    assert step.num_tokens == b"\x01\x02"
    assert step.token_ids == (70_000).to_bytes(4, "little") + b"\x01\x00\x00\x00\x02\x00\x00\x00"
    assert [(one.row, one.reason, one.WhichOneof("stop")) for one in step.finished] == [
        (1, output_pb2.FINISH_REASON_LENGTH, None)
    ]
    assert [(one.row, one.num_cached_tokens) for one in step.first] == [(0, 16)]


def test_a_stop_at_no_token_names_none():
    finished = [FinishedRow(0, FinishReason.STOP, NO_STOP_TOKEN), FinishedRow(1, FinishReason.STOP, 11)]
    output = StepOutput(4, [9, 10], [0, 1], [11], finished=finished)
    first, second = messages.to_step(output, {9: frozenset(), 10: frozenset({11})}, FEATURES, 0.0).finished
    assert first.WhichOneof("stop") is None
    assert second.stop_token_id == 11


def test_an_error_has_its_status():
    finished = [
        FinishedRow(0, FinishReason.ERROR, message="no such thing", code="INVALID_ARGUMENT"),
        FinishedRow(1, FinishReason.ERROR, message="no luck"),
    ]
    step = messages.to_step(StepOutput(4, [9, 10], [0, 0], [], finished=finished), {}, FEATURES, 0.0)
    assert [(end.code, end.message) for end in step.finished] == [(3, "no such thing"), (0, "no luck")]


def test_an_error_of_a_field_says_so_with_its_reason():
    refused = FinishedRow(
        0, FinishReason.ERROR, message="no", code="INVALID_ARGUMENT", error_reason="NO", error_field="a.b"
    )
    step = messages.to_step(StepOutput(4, [9], [0], [], finished=[refused]), {}, FEATURES, 0.0)
    (end,) = step.finished
    error = from_status(end.code, end.message, end.details)
    assert isinstance(error, InvalidArgument)
    assert (error.reason, error.violations) == ("NO", [("a.b", "no")])


def test_an_end_has_the_drafts_of_its_request_if_there_were_any():
    use = DraftUse()
    use.add(4, 1)
    use.add(4, 2)
    finished = [FinishedRow(0, FinishReason.LENGTH, drafts=use), FinishedRow(1, FinishReason.LENGTH)]
    step = messages.to_step(StepOutput(4, [9, 10], [1, 1], [5, 5], finished=finished), {}, FEATURES, 0.0)
    assert step.finished[0].drafts == step_pb2.DraftUse(num_proposed=8, num_accepted=3)
    assert not step.finished[1].HasField("drafts")


def test_the_first_record_says_how_the_prompt_was_computed():
    prefill = PrefillStats(num_prompt_tokens=40, num_chunks=3, queue_s=0.25, prefill_s=0.0000015)
    output = StepOutput(4, [9], [1], [5], first=[(0, FirstOutput(16, prefill))])
    (record,) = messages.to_step(output, {}, FEATURES, 0.0).first
    assert record.prefill_stats == step_pb2.PrefillStats(
        num_prompt_tokens=40, num_computed_tokens=24, num_chunks=3, queue_us=250_000, prefill_us=2
    )


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason is not FinishReason.STOP])
def test_every_reason_has_its_own_name_on_the_wire(reason):
    step = messages.to_step(
        StepOutput(1, [9], [1], [5], [FinishedRow(0, reason)]), {9: frozenset()}, FEATURES, 0.0
    )
    assert output_pb2.FinishReason.Name(step.finished[0].reason) == f"FINISH_REASON_{reason.name}"


def test_a_row_of_more_than_255_tokens_takes_the_wide_column():
    step = messages.to_step(StepOutput(1, [1], [256], list(range(256))), {}, FEATURES, 0.0)
    assert (step.num_tokens, step.num_tokens_wide) == (b"", b"\x00\x01\x00\x00")


@pytest.mark.parametrize(
    ("stop_token_id", "asked_for", "kind"),
    [(None, set(), "eos_token_id"), (991, set(), "eos_token_id"), (11, {11}, "stop_token_id")],
    ids=["main eos", "further eos", "stop token"],
)
def test_a_stop_says_whose_token_it_was(stop_token_id, asked_for, kind):
    last = stop_token_id or EOS_TOKEN_ID
    finished = [FinishedRow(1, FinishReason.STOP, stop_token_id)]
    output = StepOutput(1, [5, 6, 7], [1, 2, 1], [1, 2, last, 3], finished)
    record = messages.to_step(output, {6: frozenset(asked_for)}, FEATURES, 0.0).finished[0]
    assert record.WhichOneof("stop") == kind
    assert getattr(record, kind) == last


def test_a_batch_of_the_prefix_cache_keeps_order_groups_and_place():
    run = StoredBlocks([b"a" * 32, b"b" * 32], b"r" * 32, [1, 2, 3, 70_000], 2, 1, "cook")
    batch = KVEventBatch(9, [run, RemovedBlocks([b"c" * 32], 2), AllBlocksRemoved()], 3)
    message = messages.to_kv_batch(batch, 7)
    assert message.cursor == kv_pb2.KvCursor(engine_epoch=7, seq=9)
    stored, removed, cleared = message.batch.events
    assert stored.stored == kv_pb2.KvBlockStored(
        block_hashes=[b"a" * 32, b"b" * 32],
        parent_hash=b"r" * 32,
        token_ids=column([1, 2, 3, 70_000]),
        block_size=2,
        group=1,
        adapter="cook",
    )
    assert removed.removed == kv_pb2.KvBlockRemoved(block_hashes=[b"c" * 32], group=2)
    assert cleared.WhichOneof("event") == "cleared"


def test_the_last_chunk_of_a_snapshot_alone_has_a_place():
    block, end = StoredBlocks([b"a" * 32], b"r" * 32, [1, 2], 2, 0), kv_pb2.KvCursor(engine_epoch=7, seq=3)
    chunk, last = messages.to_kv_snapshot([block], None), messages.to_kv_snapshot([], end)
    assert (len(chunk.snapshot.blocks), chunk.snapshot.is_last, chunk.HasField("cursor")) == (1, False, False)
    assert (len(last.snapshot.blocks), last.snapshot.is_last, last.cursor) == (0, True, end)


def test_an_error_keeps_code_message_and_details():
    error: ServiceError = InvalidArgument("too long", field="prompt")
    status = messages.to_error_status(error)
    assert (status.code, status.message) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "too long")
    assert b"prompt" in status.details


def test_a_prompt_that_is_too_long_is_refused_for_its_length_whatever_it_holds():
    entry = make_entry(1, prompt=[VOCAB_SIZE + 1] * MAX_MODEL_LEN)
    with pytest.raises(InvalidArgument, match=f"{MAX_MODEL_LEN} tokens"):
        read_add(entry)


# behaviour 116 on the wire: columns parallel to the tokens, NaN where not requested.


def floats(column: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in array("f", column)]


def ints(column: bytes) -> list[int]:
    return array("I", column).tolist()


def step_of(output: StepOutput, token_logprobs: LogprobDeltas) -> step_pb2.Step:
    output.add_logprobs(token_logprobs)
    return messages.to_step(output, {}, FEATURES, 0.0)


def test_116_columns_are_empty_unless_requested():
    step = messages.to_step(StepOutput(1, [5], [1], [9]), {}, FEATURES, 0.0)
    assert (step.sampled_logprobs, step.sampled_ranks, step.HasField("top_logprobs")) == (b"", b"", False)
    assert not step.extras


def test_116_rows_that_asked_for_more_or_less_share_the_columns():
    token_logprobs = LogprobDeltas(
        {
            6: TokenLogprobs([-0.5, -1.5], [1, 3], 2, [7, 8, 3, 4], [-0.5, -2.0, -0.25, -1.0]),
            8: TokenLogprobs([-3.0], [9], 1, [2], [-0.125]),
            9: TokenLogprobs([-4.0], [12]),
        }
    )
    step = step_of(StepOutput(1, [5, 6, 8, 9], [2, 2, 1, 1], [1, 2, 7, 4, 5, 6]), token_logprobs)
    assert floats(step.sampled_logprobs) == [None, None, -0.5, -1.5, -3.0, -4.0]
    assert ints(step.sampled_ranks) == [0, 0, 1, 3, 9, 12]
    top = step.top_logprobs
    assert top.k == 2
    assert ints(top.token_ids) == [0] * 4 + [7, 8, 3, 4, 2, 0, 0, 0]
    assert floats(top.logprobs) == [None] * 4 + [-0.5, -2.0, -0.25, -1.0, -0.125, None, None, None]


def test_116_who_asks_for_no_other_token_gets_no_further_columns():
    step = step_of(StepOutput(1, [5], [1], [9]), LogprobDeltas({5: TokenLogprobs([-0.5], [1])}))
    assert floats(step.sampled_logprobs) == [-0.5]
    assert not step.HasField("top_logprobs")
