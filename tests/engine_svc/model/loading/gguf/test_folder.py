"""The folder of a GGUF file: written once, whole, anew when the file changes, with all that others read."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_svc.build.start_check import check_start
from engine_svc.config import EngineConfig
from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.gguf.config import read_config
from engine_svc.model.loading.gguf.file import forget_model, read_model
from engine_svc.model.loading.gguf.folder import open_as_folder
from engine_svc.model.loading.hub import find_model, is_hub_id, name_of
from tests.engine_svc.model.loading.gguf.gguf_bytes import (
    U32,
    Described,
    GgufBytes,
    f32,
    numbers,
    text,
    texts,
    tiny_llama,
    u32,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triptych" / "gguf"


def read(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text("utf-8"))
    return content


def opened(file: GgufBytes, tmp_path: Path) -> Path:
    return open_as_folder(file.write(tmp_path / "model.gguf"))


def test_a_folder_is_written_once_and_anew_when_the_file_changes(tmp_path: Path, cache: Path) -> None:
    path = tiny_llama().write(tmp_path / "tiny.Q8_0.gguf")
    folder = find_model(str(path), progress=lambda *event: None)
    assert folder.parent == cache
    assert folder.name.startswith("tiny.Q8_0-")
    assert (folder / "model.gguf").resolve() == path
    written_at = (folder / "tokenizer.json").stat().st_mtime_ns
    assert open_as_folder(path) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written_at
    os.utime(path, ns=(1, 1))
    touched = open_as_folder(path)
    tiny_llama().set("llama.context_length", u32(64)).write(path)
    os.utime(path, ns=(1, 1))
    changed = open_as_folder(path)
    assert len({folder, touched, changed}) == 3
    assert read(changed, "config.json")["max_position_embeddings"] == 64


def test_a_header_is_read_once_by_whichever_link_until_it_is_forgotten(tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "model.gguf")
    link = open_as_folder(path) / "model.gguf"
    first, again = read_model([path]), read_model([link])
    assert first.headers[0].content is again.headers[0].content
    assert (first.path, again.path) == (path, link)
    forget_model()
    assert read_model([link]).headers[0].content is not first.headers[0].content


def test_many_openers_at_once_get_one_whole_folder(tmp_path: Path, cache: Path) -> None:
    path = tiny_llama().write(tmp_path / "model.gguf")
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(open_as_folder(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 8
    assert list(cache.iterdir()) == [folders[0]]
    assert set(folders) == {folders[0]}
    assert read(folders[0], "tokenizer.json")["model"]["type"] == "BPE"


def test_what_is_made_of_a_file_is_not_checked_at_each_start(tmp_path: Path) -> None:
    folder = opened(tiny_llama(), tmp_path)
    (folder / "tokenizer.json").write_text("{")
    check_start(EngineConfig(model=str(folder)))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON"):
        check_start(EngineConfig(model=str(other)))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be written .*XDG_CACHE_HOME names another folder"):
        opened(tiny_llama(), tmp_path)


def test_a_gguf_file_is_never_taken_for_a_model_of_the_hub(tmp_path: Path) -> None:
    assert not is_hub_id("models/model.gguf")
    assert is_hub_id("org/name:Q4_K_M")
    assert name_of("/models/Tiny-Q4_K_M-00001-of-00003.gguf") == "Tiny-Q4_K_M"
    assert name_of("org/name:Q4_K_M") == "org/name:Q4_K_M"
    with pytest.raises(CheckpointError, match=r"model\.gguf does not exist, or is not a file"):
        find_model("models/model.gguf", progress=lambda *event: None)


def test_the_config_states_all_that_the_metadata_do(tmp_path: Path) -> None:
    config = read(opened(tiny_llama(), tmp_path), "config.json")
    assert config["rms_norm_eps"] == 1e-6
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert AutoConfig.for_model(**config).rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_half_precision_is_computed_in_bfloat16(tmp_path: Path) -> None:
    file = tiny_llama()
    norm = file.tensor("output_norm.weight")
    norm.kind, norm.content = 1, bytes(64)
    assert read(opened(file, tmp_path), "config.json")["dtype"] == "bfloat16"


def test_the_stretched_rope_of_a_llama_3_is_recognized(tmp_path: Path) -> None:
    theirs = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    head_dim = 64
    config = AutoConfig.for_model(
        "llama", hidden_size=64, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=theirs
    )
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    # Of 1 and of the factor itself files have the exact numbers.
    factors = (plain / stretched.double().numpy()).round(5).astype(np.float32)
    file = tiny_llama().set("llama.rope.freq_base", f32(500000.0))
    for name in ("key_length", "value_length"):
        file.set(f"llama.attention.{name}", u32(head_dim))
    file.tensors.append(Described("rope_freqs.weight", (head_dim // 2,), content=factors.tobytes()))
    path = file.write(tmp_path / "model.gguf")
    rope = read_config(read_model([path]))["rope_parameters"]
    assert rope == theirs


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"type": text("linear"), "factor": f32(8.0)}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"type": text("yarn"), "factor": f32(4.0), "original_context_length": u32(32)},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {"type": text("yarn"), "factor": f32(4.0), "attn_factor": f32(0.5)},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1),
            },
        ),
    ],
    ids=["linear", "yarn", "scaled yarn"],
)
def test_scaled_ropes_are_those_of_transformers(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    file = tiny_llama()
    for name, value in values.items():
        file.set(f"llama.rope.scaling.{name}", value)
    config = read(opened(file, tmp_path), "config.json")
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def test_ends_of_answers_come_from_the_metadata_and_from_known_names(tmp_path: Path) -> None:
    file = tiny_llama()
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|end|>", *(f"t{i}" for i in range(257))]
    types = [2, 3, 3, 3, 1, *[1] * 257]
    file.set("tokenizer.ggml.tokens", texts(tokens)).set("tokenizer.ggml.eot_token_id", u32(7))
    file.set("tokenizer.ggml.token_type", numbers(U32, types))
    config = read(opened(file, tmp_path), "generation_config.json")
    # The main one first; <|end|> is an ordinary token here.
    assert config == {"eos_token_id": [2, 7, 3], "bos_token_id": 1}


def test_advice_on_sampling_is_kept(tmp_path: Path) -> None:
    file = tiny_llama().set("general.sampling.temp", f32(0.6)).set("general.sampling.top_k", u32(20))
    config = read(opened(file, tmp_path), "generation_config.json")
    assert (config["do_sample"], config["temperature"], config["top_k"]) == (True, 0.6, 20)


def test_chat_templates_are_kept_by_name(tmp_path: Path) -> None:
    file = tiny_llama().set("tokenizer.chat_template", text("default one"))
    file.set("tokenizer.chat_templates", texts(["tool_use"]))
    file.set("tokenizer.chat_template.tool_use", text("another"))
    config = read(opened(file, tmp_path), "tokenizer_config.json")
    assert config["chat_template"] == [
        {"name": "default", "template": "default one"},
        {"name": "tool_use", "template": "another"},
    ]
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
