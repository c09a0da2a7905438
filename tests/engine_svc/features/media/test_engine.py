"""Prompts with pictures in a whole engine: transformers' ids, and a known picture is not sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from engine_svc.convert.feature import AddContext
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.mailbox import Add
from engine_svc.tensors.source import TensorReceiver
from tests.engine_svc.features.adapters.test_engine import Rig, engine
from tests.engine_svc.features.media.pictures import NUM_OUTPUTS, make_llava, picture, prompt_with
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import FailedPrecondition

NUM_TOKENS = 10
PROMPTS: list[list[int | Tensor]] = [
    [5, 6, 7, 8],
    [picture(1), 9, 10],
    [3, picture(2), 4, picture(3), 5],
    [picture(2), 4, picture(2), 7, 11],
    [20, 21, 22, picture(4)],
    [3, picture(2), 4, picture(1), 5],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("llava")
    make_llava(made)
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    return [generated(model, parts) for parts in PROMPTS]


def generated(model: Any, parts: list[int | Tensor]) -> list[int]:
    token_ids, _ = prompt_with(*parts)
    pictures = [part for part in parts if isinstance(part, Tensor)]
    ids = model.generate(
        input_ids=torch.tensor([token_ids]),
        **({"pixel_values": torch.stack(pictures)} if pictures else {}),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    new_ids: list[int] = ids[0, len(token_ids) :].tolist()
    return new_ids


def entry_of(parts: list[int | Tensor], *, sent: bool) -> tuple[add_pb2.AddEntry, list[int]]:
    token_ids, media = prompt_with(*parts)
    entry = add_pb2.AddEntry()
    for item in media.items:
        made = entry.media.add(
            modality=add_pb2.MEDIA_MODALITY_IMAGE,
            hash=item.content.sha256,
            placeholder_offset=item.start,
            placeholder_length=item.num_tokens,
        )
        for each in item.content.inputs if sent else ():
            value = each.value
            tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=value.shape, inline=value.data)
            made.tensors.add(name=each.name, tensor=tensor)
    return entry, token_ids


def send(rig: Rig, parts: list[int | Tensor], *, sent: bool = True, **options: Any) -> int:
    entry, token_ids = entry_of(parts, sent=sent)
    source = TensorReceiver(is_open=True).source("a frontend", "a session")
    context = AddContext(rig.core.facts, source, token_ids)
    parsed = rig.served.features.parse(entry, context)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, **options)
    name, handle = f"r{rig.num_sent}", rig.num_sent
    request = Request(name, token_ids, len(token_ids), sampling, spans=context.spans, arrival_at=handle)
    request.extras = {type(one.extra): one.extra for one in parsed}
    rig.num_sent += 1
    assert rig.core.refusal(request) is None
    rig.core.prepare(request)
    rig.served.inbox.put(Add(request, rig.frontend.outbox, handle))
    return handle


def answers(rig: Rig, prompts: list[list[int | Tensor]], **options: Any) -> list[list[int]]:
    handles = [send(rig, parts, **options) for parts in prompts]
    rig.frontend.read_until_ended(rig.num_sent)
    return [rig.frontend.tokens[handle] for handle in handles]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "model_impl": "transformers"},
        # Of items one fits at a time, and requests are preempted.
        {
            "max_num_batched_tokens": 24,
            "encoder_cache_tokens": NUM_OUTPUTS,
            "num_kv_blocks": 24,
            "max_model_len": 80,
        },
        {"max_num_batched_tokens": 24, "disable_chunked_mm_input": True, "enable_prefix_caching": False},
        {"speculative": "ngram", "max_num_batched_tokens": 24},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_ids_are_those_of_transformers_alone_and_all_at_once(folder, wanted, options):
    with engine(folder, **options) as rig:
        assert answers(rig, PROMPTS) == wanted
        assert [answers(rig, [parts])[0] for parts in PROMPTS] == wanted


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.chaos)],
    ids=["ranks", "stages"],
)
def test_a_divided_model_answers_the_same(folder, wanted, options):
    with engine(folder, **options) as rig:
        assert answers(rig, PROMPTS) == wanted


def test_a_known_picture_needs_no_tensors_and_an_unknown_one_does(folder, wanted):
    with engine(folder) as rig:
        with pytest.raises(FailedPrecondition, match="not here"):
            send(rig, PROMPTS[2], sent=False)
        assert answers(rig, PROMPTS) == wanted
        assert answers(rig, PROMPTS, sent=False) == wanted


def test_an_image_that_is_computed_whole_has_to_fit_into_a_step(folder):
    with (
        pytest.raises(ValueError, match="at least the 9 positions of an image"),
        engine(folder, max_num_batched_tokens=8, disable_chunked_mm_input=True),
    ):
        pass
