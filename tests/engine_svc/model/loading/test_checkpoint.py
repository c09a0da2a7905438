"""The digest tells models apart, and costs no reading of them."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_svc.model.loading.checkpoint import weight_files, weights_digest
from engine_svc.model.loading.loader import LoadWishes, load_model
from engine_svc.model.loading.safetensors_file import SafetensorsFile
from tests.engine_svc.model.checkpoints import make_checkpoint


def write(folder: Path, tensors: dict[str, torch.Tensor], *, config: str = "{}", shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def digest(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    return weights_digest(folder, [SafetensorsFile(path) for path in weight_files(folder)], dtype)


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.arange(6000.0).reshape(60, 100) * scale for name in ("b", "a", "c")}


@pytest.mark.parametrize("shards", [1, 2])
def test_the_digest_is_of_config_headers_samples_and_dtype(tmp_path, shards):
    write(tmp_path, tensors(), shards=shards)
    wanted = hashlib.sha256(b"{}")
    for path in weight_files(tmp_path):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        wanted.update(f"{path.name} {len(content)}".encode() + content[8 : 8 + length])
    for tensor in tensors().values():
        wanted.update(tensor.numpy().tobytes()[12_000 : 12_000 + 4096])
    wanted.update(b"torch.float32")
    assert digest(tmp_path) == wanted.hexdigest()


def test_the_same_files_elsewhere_have_the_same_digest(tmp_path):
    assert digest(write(tmp_path / "a", tensors())) == digest(write(tmp_path / "b", tensors()))


def test_other_values_config_names_or_dtype_have_another(tmp_path):
    digests = [
        digest(write(tmp_path / "a", tensors())),
        digest(write(tmp_path / "b", tensors(2.0))),
        digest(write(tmp_path / "c", tensors(), config="[]")),
        digest(write(tmp_path / "d", {**tensors(), "d": torch.zeros(1)})),
        digest(write(tmp_path / "a", tensors()), torch.bfloat16),
        digest(write(tmp_path / "e", {name: tensor.T.contiguous() for name, tensor in tensors().items()})),
    ]
    assert len(set(digests)) == len(digests)


def test_a_change_in_the_middle_of_any_one_tensor_is_seen(tmp_path):
    before = digest(write(tmp_path / "a", tensors()))
    for name in tensors():
        changed = tensors()
        changed[name][30, 5] += 1
        assert digest(write(tmp_path / "a", changed)) != before


@pytest.mark.parametrize("max_shard_size", ["50GB", "30KB"])
def test_both_roads_and_every_quantization_see_the_same_model(tmp_path, max_shard_size):
    make_checkpoint("llama", tmp_path, max_shard_size=max_shard_size)
    wishes = (
        LoadWishes(num_threads=1, model_impl="native"),
        LoadWishes(num_threads=1, model_impl="transformers"),
        LoadWishes(num_threads=1, model_impl="native", quantization="int8"),
    )
    digests = {load_model(tmp_path, wish).facts.weights_digest for wish in wishes}
    assert digests == {digest(tmp_path)}
    assert load_model(tmp_path, LoadWishes(num_threads=1, dtype="bfloat16")).facts.weights_digest == digest(
        tmp_path, torch.bfloat16
    )
