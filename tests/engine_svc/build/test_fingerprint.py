"""Which engines are interchangeable, and what a model folder says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rig.quantized_folder import awq, fp8, gptq, int4, int8, write_quantized
from engine_svc.build.fingerprint import (
    declares_experts,
    main_eos_first,
    make_fingerprint,
    read_sampling_defaults,
)
from engine_svc.core.artifacts import read_artifacts
from engine_svc.core.facts import SamplingDefaults
from engine_svc.core.pooling_spec import PoolingOptions, describe_results
from engine_svc.model.loading.loader import LoadOptions, load_model
from tests.engine_svc.model.checkpoints import make_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 10000.0, "eos_token_id": 7}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w" * 300_000)
    return tmp_path


def digest(folder: Path, **changes: object) -> str:
    facts = {
        "weights_digest": "ab",
        "dtype": "float32",
        "vocab_size": 9,
        "kernel_mode": "k",
        "max_model_len": 8,
        "results": "",
    }
    return make_fingerprint(folder, read_artifacts(folder), **{**facts, **changes}).digest


def test_equal_folders_and_settings_have_equal_fingerprints(folder):
    assert digest(folder) == digest(folder)
    assert len(digest(folder)) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_digest": "ac"},
        {"dtype": "bfloat16"},
        {"vocab_size": 10},
        {"kernel_mode": "l"},
        {"max_model_len": 9},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_setting_counts(folder, changes):
    assert digest(folder, **changes) != digest(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_every_file_counts(folder, name):
    before = digest(folder)
    content = (folder / name).read_bytes()
    # The values of the weights count as well: two fine-tunes of one model have equal names and shapes.
    (folder / name).write_bytes(
        content.replace(b"10000", b"20000") if name == "config.json" else b"x" + content[1:]
    )
    assert digest(folder) != before


def test_every_option_of_pooling_counts(folder):
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    options = [
        PoolingOptions(),
        PoolingOptions("pooling"),
        PoolingOptions("generate", "embed"),
        PoolingOptions("pooling", pooler_config='{"pooling_type": "MEAN"}'),
        PoolingOptions("pooling", pooler_config='{"normalize": false}'),
        PoolingOptions("pooling", hf_overrides='{"is_matryoshka": true}'),
    ]
    digests = {digest(folder, results=describe_results(folder, each)) for each in options}
    assert len(digests) == len(options)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_every_file_of_a_projection_counts(folder, name):
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "hidden_size": 8}))
    modules = [{"type": "Transformer", "path": ""}, {"type": "Dense", "path": "2_Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text('{"out_features": 4}')
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"w")
    before = digest(folder, results=describe_results(folder, PoolingOptions()))
    (folder / "2_Dense" / name).write_text('{"out_features": 4, "bias": true}')
    assert digest(folder, results=describe_results(folder, PoolingOptions())) != before


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, SamplingDefaults(temperature=0.6, top_k=20)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults()),
        ({}, SamplingDefaults()),
    ],
    ids=["sampling", "greedy", "silent"],
)
def test_sampling_defaults_are_the_authors_own(folder, config, expected):
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert read_sampling_defaults(folder) == expected


def test_the_id_that_the_configuration_names_first_is_the_main_end(folder):
    assert main_eos_first(folder, (3, 7, 9)) == (7, 3, 9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert main_eos_first(folder, (3, 7, 9)) == (9, 3, 7)
    assert main_eos_first(folder, ()) == ()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"model_type": "llama"}', False),
        ('{"model_type": "mixtral", "num_local_experts": 8}', True),
        ('{"model_type": "mixtral"}', True),
        ('{"model_type": "qwen2_moe", "num_experts": 0}', False),
        ("{", False),
    ],
    ids=["dense", "counted", "by default", "none", "broken"],
)
def test_a_mixture_of_experts_is_known_before_it_is_loaded(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(config)
    assert declares_experts(tmp_path) is expected


def test_the_formats_of_one_model_have_fingerprints_of_their_own(tmp_path):
    make_checkpoint("llama", tmp_path / "full")
    roundings = (int4(16), int8(), gptq(16), gptq(32), awq(16), awq(32), fp8(16))
    copies = [
        write_quantized(tmp_path / "full", tmp_path / str(number), rounding)
        for number, rounding in enumerate(roundings)
    ]
    digests = {
        digest(folder, weights_digest=load_model(folder, LoadOptions(num_threads=1)).facts.weights_digest)
        for folder in (tmp_path / "full", *copies)
    }
    assert len(digests) == 1 + len(roundings)
