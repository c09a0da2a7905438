"""Vectors with adapters: those of the model with their additions in its weights, beside vectors without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_svc.convert.feature import AddContext
from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.features.pooling.extras import PooledResult
from engine_svc.loop.mailbox import Add
from engine_svc.loop.step_output import StepOutput
from tests.engine_svc.features.adapters.folders import (
    MLP_AND_ATTENTION,
    weights_of,
    write_adapter,
    write_merged,
    write_model,
)
from tests.engine_svc.features.adapters.test_engine import PROMPTS, Rig, engine
from tests.engine_svc.features.pooling.rig import PoolingRig, to_tensor
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2


def keep_vectors(rig: Rig) -> dict[int, Tensor]:
    """Results by handle, as they come."""
    vectors: dict[int, Tensor] = {}

    def keep(step: StepOutput) -> None:
        for handle, extras in (step.extras or {}).items():
            if isinstance(result := extras.get(PooledResult), PooledResult):
                vectors[handle] = to_tensor(result)

    rig.frontend.on_step = keep
    return vectors


def send(rig: Rig, prompt: list[int], adapter: str = "", **pooling: Any) -> int:
    """Send a pooling request, for a vector of the prompt unless `pooling` has another task."""
    handle = rig.num_sent
    rig.num_sent += 1
    params = sampling_pb2.PoolingParams(**{"task": sampling_pb2.POOLING_TASK_EMBED, **pooling})
    context = AddContext(rig.core.facts, None, prompt)
    parsed = rig.served.features.parse(add_pb2.AddEntry(adapter=adapter, pooling=params), context)
    request = Request(
        f"r{handle}",
        prompt.copy(),
        len(prompt),
        SamplingParams(1, skip_reading_prefix_cache=any(each.skips_reading_prefix_cache for each in parsed)),
        samples=False,
        extras={type(each.extra): each.extra for each in parsed},
        extra_keys=context.cache_keys,
    )
    rig.core.prepare(request)
    rig.served.inbox.put(Add(request, rig.frontend.outbox, handle))
    return handle


def remove_head(model: Path) -> Path:
    """The checkpoint as it is saved without its head: names lack the prefix of the body."""
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in weights_of(model).items()
        if name != "lm_head.weight"
    }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_an_adapter_may_be_of_a_model_that_was_saved_without_its_head(
    tmp_path: Path, model_impl: str
) -> None:
    model = remove_head(write_model("qwen3", tmp_path / "model"))
    adapter = write_adapter(
        tmp_path / "a", model, seed=1, rank=4, modules=(*MLP_AND_ATTENTION, "embed_tokens")
    )
    merged = write_merged(tmp_path / "merged", model, adapter)
    (wanted,) = (
        PoolingRig(merged, pooling=PoolingOptions("pooling")).results({"": PROMPTS[0]}, "embed").values()
    )
    options = {"runner": "pooling", "model_impl": model_impl, "enable_lora": True}
    with engine(model, lora_modules=(f"a={adapter}",), **options) as rig:
        vectors = keep_vectors(rig)
        handle = send(rig, PROMPTS[0], "a")
        rig.frontend.read_until_ended(1)
        assert rig.frontend.end_of[handle].reason is FinishReason.STOP
        torch.testing.assert_close(vectors[handle], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"runner": "pooling"}, {"runner": "generate", "convert": "embed"}])
def test_a_batch_mixes_vectors_with_adapters_and_without(tmp_path: Path, options: dict[str, str]) -> None:
    model = write_model("qwen3", tmp_path / "model")
    adapter = write_adapter(tmp_path / "a", model, seed=1, rank=4, modules=MLP_AND_ATTENTION)
    folders = {"": model, "a": write_merged(tmp_path / "merged", model, adapter)}
    prompts = {str(index): prompt for index, prompt in enumerate(PROMPTS)}
    wanted: dict[str, dict[str, Tensor]] = {
        name: PoolingRig(folder, pooling=PoolingOptions("pooling")).results(prompts, "embed")
        for name, folder in folders.items()
    }
    with engine(model, enable_lora=True, lora_modules=(f"a={adapter}",), **options) as rig:
        vectors = keep_vectors(rig)
        handles = {
            (name, index): send(rig, prompt, name) for name in ("", "a") for index, prompt in prompts.items()
        }
        rig.frontend.read_until_ended(rig.num_sent)
        assert {end.reason for end in rig.frontend.end_of.values()} == {FinishReason.STOP}
        for (name, index), handle in handles.items():
            torch.testing.assert_close(vectors[handle], wanted[name][index], atol=1e-5, rtol=0)
    assert (wanted[""]["0"] - wanted["a"]["0"]).abs().max() > 1e-2
