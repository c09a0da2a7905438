"""Pooling parameters of an ADD, and results in steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine_svc.config import EngineConfig
from engine_svc.convert import messages
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.pooling_spec import PoolingSpec
from engine_svc.core.request import Request
from engine_svc.features.pooling.extras import MAX_QUERY_BYTES, PooledResult, PoolingRequest
from engine_svc.features.pooling.wire import PoolingOfAdd, make
from engine_svc.loop.step_output import StepOutput, split
from tests.engine_svc.session.service_rig import column, make_entry, make_facts
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.config import ConfigError
from triptych_kit.errors import InvalidArgument, Unimplemented

MAX_MODEL_LEN = make_facts().max_model_len
EMBED = sampling_pb2.POOLING_TASK_EMBED
SPEC = PoolingSpec(("embed", "token_embed"), "embed", True, "mean", 32, dimensions=(8, 16))


def read(
    num_tokens: int = 5,
    spec: PoolingSpec = SPEC,
    second: int | None = None,
    tenant: str = "",
    **pooling: object,
) -> Request:
    entry = add_pb2.AddEntry(
        handle=1,
        request_id="1" * 32,
        prompt_token_ids=column([7] * num_tokens),
        second_text_start=second,
        tenant=tenant,
        pooling=sampling_pb2.PoolingParams(**{"task": EMBED, **pooling}),
    )
    facts = replace(make_facts(), supported_tasks=spec.tasks)
    features = WireFeatures([PoolingOfAdd(spec)])
    return messages.to_request(entry, session_number=1, facts=facts, now=1.0, features=features)


def test_a_request_has_what_is_asked_for_and_samples_no_token():
    request = read(dimensions=8, normalize=False)
    assert request.extras == {PoolingRequest: PoolingRequest("embed", 8, False)}
    assert not request.samples


def test_a_second_text_begins_within_the_prompt():
    assert read(second=5).extras[PoolingRequest].second_text_start == 5
    with pytest.raises(InvalidArgument, match=r"second_text_start is 6, it takes at most 5, the tokens"):
        read(second=6)


def test_only_pooling_has_a_second_text():
    entry = make_entry(1)
    entry.second_text_start = 2
    features = WireFeatures([PoolingOfAdd(SPEC)])
    with pytest.raises(InvalidArgument, match="second_text_start is 2, must be left out without pooling"):
        messages.to_request(entry, session_number=1, facts=make_facts(), now=1.0, features=features)


def test_a_key_comes_with_vectors_that_are_kept_or_with_a_score():
    for task, name in (
        (sampling_pb2.POOLING_TASK_TOKEN_EMBED, "token_embed"),
        (sampling_pb2.POOLING_TASK_SCORE, "score"),
    ):
        request = read(task=task, late_interaction_key="k")
        wanted = request.extras[PoolingRequest]
        assert (wanted.task, wanted.late_key) == (name, "k")
        assert request.sampling.skip_reading_prefix_cache
        assert request.extras[PoolingRequest].blocker == ("late_query" if name == "score" else "")


def test_a_key_is_of_a_tenant_and_of_vectors_that_are_normalized_alike():
    def scope(**options: object) -> str:
        request = read(task=sampling_pb2.POOLING_TASK_SCORE, late_interaction_key="k", **options)
        return request.extras[PoolingRequest].late_scope

    assert scope() == scope(normalize=SPEC.normalizes)
    assert len({scope(), scope(normalize=not SPEC.normalizes), scope(tenant="a"), scope(tenant="b")}) == 4
    assert read().extras[PoolingRequest].late_scope == ""


def test_a_query_with_more_vectors_than_are_kept_is_refused():
    spec = replace(SPEC, num_dimensions=MAX_QUERY_BYTES // 16, dimensions=())
    options = {"task": sampling_pb2.POOLING_TASK_TOKEN_EMBED, "late_interaction_key": "k"}
    assert read(4, spec, **options).num_prompt_tokens == 4
    assert read(5, spec, dimensions=8, **options).num_prompt_tokens == 5
    assert read(5, spec, **{**options, "task": sampling_pb2.POOLING_TASK_SCORE}).num_prompt_tokens == 5
    words = "prompt_token_ids has 5 tokens, a late_interaction_key takes 4 at most: their vectors have 64 MiB"
    with pytest.raises(InvalidArgument, match=words):
        read(5, spec, **options)


def test_classes_may_be_asked_for_as_logits():
    spec = PoolingSpec(("classify",), "classify", True, "cls", 32, num_classes=2)
    task = sampling_pb2.POOLING_TASK_CLASSIFY
    for activates in (True, False):
        request = read(spec=spec, task=task, use_activation=activates)
        assert request.extras == {PoolingRequest: PoolingRequest("classify", activates=activates)}


def test_its_prompt_may_have_all_positions():
    assert read(MAX_MODEL_LEN).num_prompt_tokens == MAX_MODEL_LEN
    with pytest.raises(InvalidArgument, match=f"{MAX_MODEL_LEN + 1} tokens, the model takes {MAX_MODEL_LEN}"):
        read(MAX_MODEL_LEN + 1)


def test_cached_prefixes_are_read_where_the_last_token_makes_the_result():
    assert read().sampling.skip_reading_prefix_cache
    last = replace(SPEC, method="last")
    assert not read(spec=last).sampling.skip_reading_prefix_cache
    per_token = sampling_pb2.POOLING_TASK_TOKEN_EMBED
    assert read(spec=last, task=per_token).sampling.skip_reading_prefix_cache


@pytest.mark.parametrize(
    ("pooling", "error", "message"),
    [
        ({"task": 0}, InvalidArgument, "pooling.task is 0, must be one of embed, "),
        ({"task": 99}, InvalidArgument, "pooling.task is 99, must be one of embed, "),
        (
            {"task": sampling_pb2.POOLING_TASK_CLASSIFY},
            Unimplemented,
            "pooling.task is classify, this model supports embed, token_embed",
        ),
        ({"dimensions": 0}, InvalidArgument, "pooling.dimensions is 0, must be "),
        ({"dimensions": 9}, InvalidArgument, "pooling.dimensions is 9, must be one of 8, 16"),
        ({"dimensions": 33}, InvalidArgument, "pooling.dimensions is 33, must be at most 32"),
        (
            {"late_interaction_key": "k"},
            InvalidArgument,
            "pooling.late_interaction_key is 'k', must be left out with task embed",
        ),
        (
            {"use_activation": False},
            InvalidArgument,
            "pooling.use_activation is false, must be left out with task embed",
        ),
        (
            {
                "use_activation": True,
                "task": sampling_pb2.POOLING_TASK_SCORE,
                "late_interaction_key": "k",
            },
            InvalidArgument,
            "pooling.use_activation is true, must be left out beside late_interaction_key",
        ),
        ({"late_interaction_key": "k" * 129}, InvalidArgument, "pooling.late_interaction_key has 129 char"),
    ],
)
def test_what_the_model_does_not_serve_is_refused(pooling, error, message):
    with pytest.raises(error, match=message):
        read(**pooling)


def test_options_that_do_not_fit_the_files_end_the_start_with_the_reason(tmp_path: Path):
    content = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="convert is classify, but BertModel has no such head"):
        make(EngineConfig(str(tmp_path), convert="classify"))


def test_dimensions_are_refused_where_the_model_cannot_be_cut():
    with pytest.raises(InvalidArgument, match=r"pooling.dimensions is 8, must be left out"):
        read(spec=replace(SPEC, dimensions=None), dimensions=8)


def test_a_model_that_only_pools_samples_no_tokens():
    facts = replace(make_facts(), supported_tasks=SPEC.tasks)
    features = WireFeatures([PoolingOfAdd(SPEC)])
    with pytest.raises(Unimplemented, match="samples no tokens, it supports embed, token_embed"):
        messages.to_request(make_entry(1), session_number=1, facts=facts, now=1.0, features=features)


def test_a_large_result_goes_in_parts_of_whole_tokens():
    result = PooledResult((3, 2), bytes(range(24)))
    output = StepOutput(1, [7], [0], extras={7: {PooledResult: result}})
    pieces = split(output, max_bytes=128 + 64 + 16)
    parts = [piece.extras[7][PooledResult] for piece in pieces]
    assert [part.shape for part in parts] == [(2, 2), (1, 2)]
    assert parts[0].merged(parts[1]) == result
    step = messages.to_step(pieces[0], {7: frozenset()}, WireFeatures([PoolingOfAdd(SPEC)]), 0.0)
    expected = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[2, 2], inline=bytes(range(16)))
    assert step.extras[0].pooling_output == expected
