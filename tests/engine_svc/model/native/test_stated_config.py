"""A config that states all that counts is read as transformers reads it; any other is left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.model.native.spec import read_spec, rotary_table
from engine_svc.model.native.stated_config import read_stated_config
from engine_svc.model.transformers.registry import read_config
from tests.engine_svc.model.checkpoints import make_checkpoint, make_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
# As published checkpoints have them, from before transformers 5.
_OF_ALL = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "vocab_size": 300,
}
_WINDOWS = {"max_window_layers": 2, "sliding_window": 128, "use_sliding_window": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None},
    "mistral": {"sliding_window": 4096},
    "qwen2": {**_WINDOWS, "eos_token_id": [7, 9], "tie_word_embeddings": True},
    "qwen3": {**_WINDOWS, "attention_bias": False, "head_dim": 32, "rope_scaling": None},
    "mixtral": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "qwen3_moe": {
        **_WINDOWS,
        "decoder_sparse_step": 2,
        "head_dim": 32,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
}


_OF_DELTA_RULE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "full_attention_interval": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    # Which the number of heads does not divide.
    "hidden_size": 70,
    "initializer_range": 0.02,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 300,
}  # fmt: skip
# The parts that describe decoders with states.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**_OF_DELTA_RULE, "intermediate_size": 96, "model_type": "qwen3_5_text"},
    "qwen3_5_moe": {
        **_OF_DELTA_RULE,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20,
    },
    "granitemoehybrid": {
        **_OF_ALL,
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "layer_types": ["mamba", "attention", "mamba"],
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "mamba_proj_bias": False,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.0,
        "shared_intermediate_size": 40,
    },
}
_OF_IMAGES = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 4,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0",
    "video_token_id": 5,
    "vision_config": {"depth": 2},
    "vision_end_token_id": 6,
    "vision_start_token_id": 3,
}


def hybrid(family: str, **changes: Any) -> dict[str, Any]:
    """As published: the decoder of Qwen3.5 is a part of a model."""
    part = {**HYBRIDS[family], **changes}
    return part if family == "granitemoehybrid" else {"model_type": family, "text_config": part, **_OF_IMAGES}


def write(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def published(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **_OF_ALL, **PUBLISHED[family], **changes}


def assert_read_alike(folder: Path) -> None:
    stated, theirs = read_stated_config(folder), read_config(folder)
    assert stated is not None
    for name in ("architecture", "vocab_size", "max_position", "eos_token_id", "dtype"):
        assert getattr(stated, name) == getattr(theirs, name), name
    assert read_spec(stated.config) == read_spec(theirs.config)
    assert torch.equal(rotary_table(stated.config, 40), rotary_table(theirs.config, 40))


@pytest.mark.parametrize("family", [*FAMILIES, "phi3", "gemma3", *HYBRIDS])
def test_what_transformers_saves_is_read_alike(family, tmp_path):
    config = make_config(family)
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        config.use_sliding_window, config.sliding_window = False, None
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert_read_alike(write(tmp_path, {**content, "dtype": "bfloat16"}))


@pytest.mark.parametrize(
    ("kind", "rope", "is_read"),
    [
        ("full_attention", {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, True),
        ("full_attention", {"rope_type": "linear", "rope_theta": 1e6, "factor": 0.5}, False),
        ("full_attention", {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0}, False),
        ("sliding_attention", {"rope_type": "default"}, False),
        ("chunked_attention", {"rope_type": "default", "rope_theta": 1e6}, False),
    ],
)
def test_each_kind_of_layer_of_a_gemma_states_its_rope(kind, rope, is_read, tmp_path):
    make_config("gemma3").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["rope_parameters"][kind] = rope
    write(tmp_path, content)
    if is_read:
        assert_read_alike(tmp_path)
    else:
        assert read_stated_config(tmp_path) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_published_before_transformers_5_is_read_alike(family, tmp_path):
    assert_read_alike(write(tmp_path, published(family)))


@pytest.mark.parametrize("family", HYBRIDS)
def test_each_value_of_a_hybrid_is_read_alike_or_left_to_transformers(family, tmp_path):
    assert_read_alike(write(tmp_path, hybrid(family)))
    passed_over = {
        "attention_bias", "attention_dropout", "attn_output_gate", "bos_token_id", "dtype",
        "full_attention_interval", "initializer_range", "mamba_chunk_size", "mamba_ssm_dtype",
        "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "normalization_function",
        "output_router_logits", "position_embedding_type", "rope_scaling", "router_aux_loss_coef",
        "torch_dtype", "transformers_version", "use_cache",
    }  # fmt: skip
    for name in HYBRIDS[family]:
        content = hybrid(family)
        del content.get("text_config", content)[name]
        write(tmp_path, content)
        if name in passed_over:
            assert_read_alike(tmp_path)
        else:
            assert read_stated_config(tmp_path) is None, name


def test_a_decoder_of_text_alone_is_that_of_a_model_of_images(tmp_path):
    part = HYBRIDS["qwen3_5"]
    for content in (
        {**part, "tie_word_embeddings": True},
        {**hybrid("qwen3_5"), "tie_word_embeddings": False},
        hybrid("qwen3_5", tie_word_embeddings=False),
        {**hybrid("qwen3_5", dtype=None), "torch_dtype": "float16"},
        {**hybrid("qwen3_5"), "dtype": "float16"},
    ):
        assert_read_alike(write(tmp_path, content))


@pytest.mark.parametrize("limits", [[0.001, 0.5], [0.0, {"__float__": "Infinity"}]])
def test_limits_of_steps_are_read_alike(limits, tmp_path):
    assert_read_alike(write(tmp_path, hybrid("granitemoehybrid", time_step_limit=limits)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}),
        ("qwen3_5", {"layer_types": ["linear_attention", "full_attention"]}),
        ("qwen3_5", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("qwen3_5", {"rope_parameters": _OF_DELTA_RULE["rope_parameters"] | {"rope_type": "yarn"}}),
        ("qwen3_5", {"rope_parameters": _OF_DELTA_RULE["rope_parameters"] | {"partial_rotary_factor": 0.2}}),
        ("qwen3_5", {"model_type": "qwen3_5_moe_text"}),
        ("qwen3_5_moe", {"a_name_of_tomorrow": 1}),
        ("granitemoehybrid", {"layer_types": ["mamba", "hybrid", "attention"]}),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}),
        ("granitemoehybrid", {"mamba_d_head": "auto"}),
        ("granitemoehybrid", {"mamba_n_heads": 4}),
        ("granitemoehybrid", {"time_step_limit": None}),
    ],
)
def test_hybrids_out_of_the_common_are_left_to_transformers(family, changes, tmp_path):
    assert read_stated_config(write(tmp_path, hybrid(family, **changes))) is None


@pytest.mark.parametrize("changes", [{"a_name_of_tomorrow": 1}, {"text_config": []}])
def test_a_model_of_images_with_other_parts_is_left_to_transformers(changes, tmp_path):
    assert read_stated_config(write(tmp_path, {**hybrid("qwen3_5"), **changes})) is None


def test_quantized_weights_have_the_same_config(tmp_path):
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert_read_alike(write(tmp_path, published("llama", quantization_config=section)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_leaves_out_what_counts_is_left_to_transformers(family, tmp_path):
    passed_over = {
        "attention_bias", "attention_dropout", "bos_token_id", "initializer_range", "max_window_layers",
        "mlp_bias", "output_router_logits", "pretraining_tp", "rope_scaling", "router_aux_loss_coef",
        "torch_dtype", "transformers_version", "use_cache",
    }  # fmt: skip
    if family != "qwen3":
        passed_over.add("head_dim")
    if "use_sliding_window" in PUBLISHED[family]:
        passed_over.add("sliding_window")
    content = published(family)
    for name in content:
        write(tmp_path, {key: value for key, value in content.items() if key != name})
        if name in passed_over:
            assert_read_alike(tmp_path)
        else:
            assert read_stated_config(tmp_path) is None, name


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"hidden_size": 66},
        {"hidden_size": "64"},
        {"num_hidden_layers": True},
        {"num_key_value_heads": None},
        {"head_dim": 0},
        {"rms_norm_eps": "1e-5"},
        {"eos_token_id": "2"},
        {"torch_dtype": "float8_e4m3fn"},
        {"torch_dtype": ["bfloat16"]},
        {"dtype": "float32"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_theta": "1e4"},
        {"is_encoder_decoder": True},
        {"num_hidden_layers": 10**25, "layer_types": ["full_attention"]},
        {"a_name_of_tomorrow": 1},
        {"model_type": "gemma"},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_what_is_out_of_the_common_is_left_to_transformers(changes, tmp_path):
    assert read_stated_config(write(tmp_path, published("llama", **changes))) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_biases_are_read_alike(family, name, tmp_path):
    assert_read_alike(write(tmp_path, published(family, **{name: True})))
    assert read_stated_config(write(tmp_path, published(family, **{name: 1}))) is None


@pytest.mark.parametrize(
    "changes", [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_layers_with_windows_of_their_own_are_left_to_transformers(changes, tmp_path):
    assert read_stated_config(write(tmp_path, published("qwen2", **changes))) is None


@pytest.mark.parametrize("content", ["{", "[]", '"llama"', "null", '{"model_type": ["llama"]}'])
def test_what_is_no_config_is_left_to_transformers(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert read_stated_config(tmp_path) is None


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_that_is_not_in_utf_8_is_left_to_transformers(encoding, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published("llama")), encoding)
    assert read_stated_config(tmp_path) is None


def test_a_folder_without_a_config_is_left_to_transformers(tmp_path):
    assert read_stated_config(tmp_path) is None


_LOAD = """
import sys
from engine_svc.build.runner import build_runner
from engine_svc.model.loading.loader import LoadOptions, load_model
assert load_model(sys.argv[1], LoadOptions(num_threads=1)).implementation == "native"
print(sorted(name for name in ("transformers", "torch._dynamo", "sympy") if name in sys.modules))
"""


def test_a_native_model_loads_without_what_takes_long_to_import(tmp_path):
    make_checkpoint("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr
