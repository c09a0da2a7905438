"""Folders of adapters: what is read, and what is refused by key, value and limit."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.features.adapters.checkpoint import (
    CONFIG_NAME,
    check_adapter,
    describe_adapter,
    module_shapes,
)
from engine_svc.model.errors import CheckpointError
from tests.engine_svc.features.adapters.folders import (
    MLP_AND_ATTENTION,
    make_text_part,
    rename_modules,
    write_adapter,
    write_model,
)

WEIGHTS = "adapter_model.safetensors"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model("llama", tmp_path_factory.mktemp("model") / "llama")


def read(folder, model, max_rank=64):
    return check_adapter(folder, module_shapes(model), max_rank)


def weights_of(folder, model):
    return describe_adapter(folder, module_shapes(model), 64).weights


def change_config(folder, **changes):
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_scales_follow_rank_alpha_and_patterns(model, tmp_path):
    patterns = {"rank_pattern": {"layers.1.*q_proj": 4}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True}
    plain = write_adapter(tmp_path / "plain", model, seed=1)
    assert {weight.scale for weight in weights_of(plain, model)} == {2.0}
    assert len(weights_of(plain, model)) == 2 * len(MLP_AND_ATTENTION)
    change_config(plain, **{**patterns, "rank_pattern": {}})
    scales = {weight.module: weight.scale for weight in weights_of(plain, model)}
    assert scales["model.layers.0.self_attn.q_proj"] == pytest.approx(16 / math.sqrt(8))
    assert scales["model.layers.0.self_attn.v_proj"] == pytest.approx(3 / math.sqrt(8))
    change_config(plain, **patterns)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\S* has rank 8, \S+ says 4"):
        read(plain, model)


@pytest.mark.parametrize("trained", ["", "model.language_model.", "language_model.model.", "language_model."])
@pytest.mark.parametrize("is_text_part", [False, True])
def test_the_modules_of_a_decoder_are_found_by_their_names_in_each_class(tmp_path, trained, is_text_part):
    model = write_model("llama", tmp_path / "model")
    folder = write_adapter(tmp_path / "a", model, seed=1)
    if is_text_part:
        make_text_part(model)
    modules = [weight.module for weight in weights_of(folder, model)]
    assert len(modules) == 2 * len(MLP_AND_ATTENTION)
    before = load_file(folder / WEIGHTS).keys()
    rename_modules(folder, "model.", trained)
    assert load_file(folder / WEIGHTS).keys().isdisjoint(before)
    assert [weight.module for weight in weights_of(folder, model)] == modules


def test_digests_change_with_one_bit_of_the_weights_and_with_the_config(model, tmp_path):
    folder = write_adapter(tmp_path / "a", model, seed=1)
    first = read(folder, model).digest
    other = write_adapter(tmp_path / "b", model, seed=1)
    assert read(other, model).digest == first
    change_tensors(other, lambda tensors: tensors[f"{Q_PROJ}.lora_A.weight"].view(-1)[:1].mul_(-1))
    assert read(other, model).digest != first
    change_config(folder, lora_alpha=17)
    assert read(folder, model).digest not in (first, read(other, model).digest)


REFUSED_CONFIGS = [
    ({"use_dora": True}, "use_dora is True: DoRA"),
    ({"bias": "all"}, "bias is 'all', served is none"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3', served is LORA"),
    ({"r": 65}, "rank r is 65, it takes 1 to 64"),
    ({"r": 0}, "rank r is 0"),
    ({"rank_pattern": {"q_proj": 4096}}, "rank q_proj is 4096"),
    ({"rank_pattern": {"(": 4}}, "no regular expression"),
    # Alone it would be one.
    ({"alpha_pattern": {"(?i)Q_PROJ": 4}}, "no regular expression"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is {'nblocks': 2}"),
    ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "experts"),
    ({"r": 16}, "has rank 8, adapter_config.json says 16"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS)
def test_what_is_not_served_is_refused_by_name(model, tmp_path, changes, message):
    folder = write_adapter(tmp_path / "a", model, seed=1)
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(folder, model)


REFUSED_TENSORS = [
    (lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.ones(8, 31)}), r"shapes \[32, 8\] and \[8, 31\]"),
    (lambda t: t.update({f"{Q_PROJ}.lora_magnitude_vector": torch.ones(32)}), "lora_magnitude_vector"),
    (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(160, 32)}), "lm_head.weight"),
    (lambda t: t.pop(f"{Q_PROJ}.lora_B.weight"), "q_proj.lora_A.weight without its counterpart"),
    (
        lambda t: t[f"{Q_PROJ}.lora_B.weight"].view(-1)[3:4].fill_(math.nan),
        "q_proj.lora_B.weight has elements",
    ),
    (
        lambda t: t[f"{Q_PROJ}.lora_A.weight"].view(-1)[3:4].fill_(math.inf),
        "q_proj.lora_A.weight has elements",
    ),
    (
        lambda t: t.update(
            {
                "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(8, 32),
                "base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight": torch.ones(32, 8),
            }
        ),
        r"layers.7.self_attn.q_proj, the model has no such module",
    ),
    (lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.ones(8, 32, dtype=torch.int8)}), "is I8"),
    (lambda t: t.clear(), "has no tensors"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(model, tmp_path, change, message):
    folder = write_adapter(tmp_path / "a", model, seed=1)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read(folder, model)


def test_files_that_are_missing_or_broken_are_refused(model, tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        read(tmp_path / "nothing", model)
    folder = write_adapter(tmp_path / "a", model, seed=1)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match="is truncated"):
        read(folder, model)
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(
        CheckpointError, match=r"adapter_model\.bin: files that run code when read are refused"
    ):
        read(folder, model)
