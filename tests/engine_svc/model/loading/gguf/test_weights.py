"""A model from a GGUF file has the weights, and the tokens, of the same checkpoint dequantized."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_svc.model.loading.checkpoint import Checkpoint, replaced_tensors
from engine_svc.model.loading.folder import read_headers, weight_files
from engine_svc.model.loading.gguf.folder import open_as_folder
from engine_svc.model.loading.loader import LoadOptions, load_model
from engine_svc.model.loading.weights import WeightReader
from engine_svc.model.native.stated_config import read_stated_config
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.engine_svc.model.loading.gguf.gguf_models import types_in_turn, write_model
from tests.engine_svc.model.transformers.core_rig import CoreDriver
from tests.engine_svc.model.transformers.test_architectures import generated, some_prompts
from triptych_kernels import QuantizedWeight

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "phi3", "gpt_oss")
# What files do not state, as all published models of the family have it.
_FIXED = {"gemma3": {"query_pre_attn_scalar": 8}, "qwen3_moe": {"norm_topk_prob": True}}
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _always(kind: Kind, name: str) -> Kind:
    return kind


def make_gguf(family: str, tmp_path: Path, **changes: object) -> tuple[Path, Path]:
    """The folder of a GGUF file, and that of the same weights dequantized."""
    source, dequantized = tmp_path / "source", tmp_path / "dequantized"
    config = make_checkpoint(family, source, **_FIXED.get(family, {}), **changes).config
    write_model(source, config, tmp_path / "model.gguf", dequantized, types_in_turn(family))
    return open_as_folder(tmp_path / "model.gguf"), dequantized


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_tokens_are_those_of_the_dequantized_checkpoint(family: str, tmp_path: Path) -> None:
    folder, dequantized = make_gguf(family, tmp_path)
    expected = load_file(dequantized / "model.safetensors")
    reader = WeightReader(weight_files(folder), lambda *event: None, dtype=torch.float32)
    assert reader.names == expected.keys()
    assert {entry.name: entry.shape for header in read_headers(folder) for entry in header.entries} == {
        name: tuple(weight.shape) for name, weight in expected.items()
    }
    for name, weight in expected.items():
        assert reader.shape(name) == weight.shape
        assert torch.equal(reader.read(name), weight), name
    assert not reader.unread()

    # Transformers, which takes seconds to import, is needed for what it runs alone.
    assert (read_stated_config(folder) is None) is (family == "gpt_oss")
    theirs = AutoModelForCausalLM.from_pretrained(
        dequantized, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = some_prompts(4, 30, seed=1)
    streams = [stream[: 30 + NUM_TOKENS] for stream in generated(theirs, prompts)]
    assert all(len(set(stream[30:])) > 4 for stream in streams)
    loaded = load_model(folder, LoadOptions(num_threads=1, dtype="float32"))
    assert loaded.implementation == "native"
    outputs = CoreDriver(loaded).generate({str(i): prompt for i, prompt in enumerate(prompts)}, NUM_TOKENS)
    assert [prompt + outputs[str(i)] for i, prompt in enumerate(prompts)] == streams


def test_quantized_matrices_stay_quantized_until_they_are_packed(tmp_path: Path) -> None:
    folder, _ = make_gguf("llama", tmp_path)
    reader = WeightReader(weight_files(folder), lambda *event: None, dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = reader.read_weight(name)
    assert isinstance(weight, QuantizedWeight)
    assert weight.dtype is torch.bfloat16
    part = reader.read_slice(name, 0, 8, 24)
    assert isinstance(part, QuantizedWeight)
    assert torch.equal(part.dequantize(), weight.dequantize()[8:24])


def test_a_tensor_from_elsewhere_takes_the_place_of_one_of_the_file(tmp_path: Path) -> None:
    folder, _ = make_gguf("llama", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: torch.ones(32, 32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(folder).replacing([name], tmp_path)
    reader = WeightReader(
        weight_files(folder), lambda *event: None, dtype=torch.float32, replaced=replaced_tensors(checkpoint)
    )
    assert torch.equal(reader.read(name), torch.ones(32, 32))
    assert not torch.equal(reader.read(name.replace("q_proj", "o_proj")), torch.ones(32, 32))


def test_a_llama_with_biases_and_a_head_of_its_own_is_read(tmp_path: Path) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    folder, dequantized = make_gguf("llama", tmp_path, **changes)
    reader = WeightReader(weight_files(folder), lambda *event: None, dtype=torch.float32)
    expected = load_file(dequantized / "model.safetensors")
    assert reader.names == expected.keys()
    assert all(torch.equal(reader.read(name), weight) for name, weight in expected.items())


def test_the_fingerprint_tells_types_apart(tmp_path: Path) -> None:
    source = tmp_path / "source"
    config = make_checkpoint("llama", source).config
    digests = []
    for kind in (Kind.F32, Kind.F16, Kind.Q8_0):
        folder = tmp_path / kind.name
        folder.mkdir()
        write_model(source, config, folder / "model.gguf", folder, partial(_always, kind))
        opened = open_as_folder(folder / "model.gguf")
        digests.append(load_model(opened, LoadOptions(num_threads=1, dtype="float32")).facts.weights_digest)
    digests.append(load_model(source, LoadOptions(num_threads=1)).facts.weights_digest)
    assert len(set(digests)) == len(digests)
