"""`serve` with what cannot start: its last line is the cause, in the words of the command line, and exit 2.

All that the folder, the flags and the machine alone decide is refused before any process is started.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine_svc.build import start_check
from engine_svc.build.start_check import check_start
from engine_svc.config import EngineConfig
from engine_svc.model.errors import CheckpointError
from tests.triptych_cli.fakes import triptych
from triptych_cli import cli as cli_module
from triptych_cli.cli import app
from triptych_cli.serve import serve as serve_module
from triptych_cli.services import embedded_model
from triptych_kit.config import ConfigError

_EMBEDDED = embedded_model()
Arrange = Callable[[Path], list[str]]
"""Makes what is wrong in a folder; returns the arguments of `serve`."""


def model_folder(folder: Path, *names: str, config: Mapping[str, Any] | None = None) -> Path:
    """A folder with these files of the embedded model, and its config.json with these values beside them."""
    for name in names:
        shutil.copy(_EMBEDDED / name, folder)
    content = json.loads((_EMBEDDED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **(config or {})}))
    return folder


def safetensors_bytes(name: str, shape: tuple[int, ...], dtype: str = "F32", size: int = 4) -> bytes:
    """The length and the header of a file with one tensor."""
    num_bytes = size
    for length in shape:
        num_bytes *= length
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header


def only_pickles(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    return [str(folder)]


def only_gguf(folder: Path) -> list[str]:
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    return [str(folder)]


def gguf_beside_a_config(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    return only_gguf(folder)


def a_gguf_file(folder: Path) -> list[str]:
    only_gguf(folder)
    return [str(folder / "model.Q4_K_M.gguf")]


def an_adapter(folder: Path) -> list[str]:
    (folder / "adapter_config.json").write_text("{}")
    return [str(folder)]


def truncated(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json", "model.safetensors")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return [str(folder)]


def garbage(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    (folder / "model.safetensors").write_bytes(b"<html>404 Not Found</html>")
    return [str(folder)]


def a_missing_shard(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    shutil.copy(_EMBEDDED / "model.safetensors", folder / shards["a"])
    return [str(folder)]


def stating(config: Mapping[str, Any]) -> Arrange:
    def arrange(folder: Path) -> list[str]:
        return [str(model_folder(folder, "tokenizer.json", "model.safetensors", config=config))]

    return arrange


def quantized_by_its_tensors(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    name = "model.layers.0.mlp.down_proj.qweight"
    (folder / "model.safetensors").write_bytes(safetensors_bytes(name, (2,), "I32") + bytes(8))
    return [str(folder)]


def larger_than_memory(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_bytes("model.embed_tokens.weight", (1 << 38,)))
    # Takes no room on the disk.
    os.truncate(path, path.stat().st_size + (1 << 40))
    return [str(folder)]


def no_config(folder: Path) -> list[str]:
    shutil.copy(_EMBEDDED / "model.safetensors", folder)
    return [str(folder)]


def no_tokenizer(folder: Path) -> list[str]:
    return [str(model_folder(folder, "model.safetensors"))]


def broken(name: str, content: str) -> Arrange:
    """A whole folder but for this file."""

    def arrange(folder: Path) -> list[str]:
        model_folder(folder, "tokenizer.json", "model.safetensors")
        (folder / name).write_text(content)
        return [str(folder)]

    return arrange


def another_tokenizer(content: str | None) -> Arrange:
    def arrange(folder: Path) -> list[str]:
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        return [f"--tokenizer={folder}"]

    return arrange


def broken_keys(content: str) -> Arrange:
    def arrange(folder: Path) -> list[str]:
        (folder / "keys.yaml").write_text(content)
        return [f"--api-keys={folder / 'keys.yaml'}"]

    return arrange


def a_broken_template(folder: Path) -> list[str]:
    (folder / "chat.jinja").write_text("{% for %}")
    return [f"--chat-template={folder / 'chat.jinja'}"]


def flags(*given: str) -> Arrange:
    """The embedded model with flags that do not go with it, or with the machine."""
    return lambda folder: list(given)


FAILED_STARTS: dict[str, tuple[Arrange, tuple[str, ...]]] = {
    "pickles": (only_pickles, ("pytorch_model.bin", "convert them to safetensors with python -c")),
    "gguf": (only_gguf, ("has model.Q4_K_M.gguf: name the file itself to serve it",)),
    "gguf beside a config": (gguf_beside_a_config, ("name the file itself to serve it",)),
    "gguf file": (a_gguf_file, ("model.Q4_K_M.gguf is damaged: the version ends at byte 8, the file at 4",)),
    "no gguf file": (flags("models/no.gguf"), ("models/no.gguf does not exist, or is not a file",)),
    "adapter": (an_adapter, ("a LoRA adapter is not read",)),
    "truncated": (truncated, ("model.safetensors", "is truncated")),
    "no safetensors": (garbage, ("model.safetensors is not a safetensors file",)),
    "missing shard": (a_missing_shard, ("lacks 1 of 2 weight files: model-00002-of-00002.safetensors",)),
    "gptq": (
        stating({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("gptq, which is not read", "--quantization int8"),
    ),
    "awq in the text part": (
        stating({"text_config": {"quantization_config": {"quant_method": "awq"}}}),
        ("awq, which is not read",),
    ),
    "mlx": (stating({"quantization": {"bits": 4}}), ("does not name, which is not read",)),
    "quantized tensors": (quantized_by_its_tensors, ("gptq or awq, which is not read",)),
    "max-model-len": (
        flags("--max-model-len", "99999999"),
        ("--max-model-len is 99999999, the model takes 2048",),
    ),
    "cuda": (flags("--device", "cuda"), ("--device cuda: there is no CUDA device here",)),
    "fp8": (flags("--quantization=fp8"), ("--quantization fp8 needs a GPU",)),
    "kv-cache-memory": (flags("--kv-cache-memory=900TiB"), ("--kv-cache-memory is 921600.0 GiB, more than",)),
    "memory": (larger_than_memory, ("take 1024.0 GiB, more than the", "GiB free here")),
    "no config": (no_config, ("is not a model folder: it has no config.json",)),
    "no folder": (flags("./no-such-folder"), ("no-such-folder is not a folder",)),
    "config": (broken("config.json", "{"), ("config.json cannot be read",)),
    "no tokenizer": (no_tokenizer, ("has no tokenizer.json: name one with --tokenizer",)),
    "tokenizer.json": (broken("tokenizer.json", "{}"), ("tokenizer.json is not a tokenizer",)),
    "unknown tokenizer": (
        broken("tokenizer.json", '{"model": {}}'),
        ("the tokenizer.json of", "cannot be read: "),
    ),
    "tokenizer_config.json": (
        broken("tokenizer_config.json", "[]"),
        ("tokenizer_config.json is not a JSON object",),
    ),
    "generation_config.json": (
        broken("generation_config.json", "{"),
        ("generation_config.json is not JSON",),
    ),
    "unknown --tokenizer": (another_tokenizer("{}"), ("--tokenizer ", "cannot be read: ")),
    "empty --tokenizer": (another_tokenizer(None), ("--tokenizer ", "has no tokenizer.json")),
    "tokenizer": (flags("--tokenizer=/nowhere"), ("--tokenizer /nowhere does not exist",)),
    "no template": (flags("--chat-template=/nowhere"), ("--chat-template /nowhere cannot be read: No such",)),
    "template": (a_broken_template, ("--chat-template", "the chat template cannot be used")),
    "policy": (flags("--scheduling-policy=slowest"), ("--scheduling-policy is 'slowest'",)),
    "scheduler": (flags("--scheduler-class=mine"), ("--scheduler-class is 'mine'",)),
    "proposer": (flags("--speculative=mine"), ("--speculative is 'mine'",)),
    "plugin": (flags("--plugins=mine"), ("--plugins is 'mine', it has to be one of all",)),
    "heads": (flags("-tp", "3"), ("--tensor-parallel-size 3 does not divide the model's 4 attention heads",)),
    "stages": (flags("-pp", "9"), ("--pipeline-parallel-size is 9, the model has 4 layers",)),
    "ranks": (flags("-pp", "2", "--model-impl=transformers"), ("needs a native model, and --model-impl is",)),
    "encoder-decoder": (stating({"is_encoder_decoder": True}), ("is an encoder-decoder",)),
    "prefill-first": (
        flags("--scheduling-policy=prefill-first", "--no-enable-chunked-prefill"),
        ("--scheduling-policy prefill-first needs --enable-chunked-prefill",),
    ),
    "whole prompts": (
        flags("--no-enable-chunked-prefill", "--max-num-batched-tokens=64", "--max-model-len=65"),
        ("--max-num-batched-tokens is 64", "at least --max-model-len, 65"),
    ),
    "sched-trace": (
        flags("--sched-trace-path=/nowhere/a.jsonl"),
        ("--sched-trace-path is /nowhere/a.jsonl", "a file in a folder that exists"),
    ),
    "former flag": (flags("--record-decisions=a.json.gz"), ("it is --sched-trace-path, whose file",)),
    "short key": (
        broken_keys("- {name: a, role: client, key: short}"),
        ("keys.yaml: entry 1 (a): key has 5 characters", "an entry with its sha256"),
    ),
    "no keys": (flags("--api-keys=/nowhere"), ("api_keys /nowhere cannot be read",)),
    "certificate": (
        flags("--ssl-certfile=/nowhere", "--ssl-keyfile=/nowhere"),
        ("/nowhere",),
    ),
    "peer key": (flags("--peer-api-key-file=/nowhere"), ("/nowhere",)),
    "revision": (flags("--revision=main"), ("revision is main, but",)),
}


@pytest.fixture
def no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **options: object) -> None:
        raise AssertionError(f"a process was started: {given}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(start_check, "find_cuda_devices", lambda: ((), "no driver"))


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize(("arrange", "words"), FAILED_STARTS.values(), ids=FAILED_STARTS)
def test_a_failed_start_is_its_cause_in_one_line_and_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrange: Arrange, words: tuple[str, ...]
) -> None:
    assert app(["serve", "--port=0", *arrange(tmp_path)], standalone_mode=False) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("triptych serve: ")
    assert all(word in line for word in words), line


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize("arguments", [("serve", "--port=0"), ("frontend", "--engine=127.0.0.1:1")])
def test_a_key_of_vllm_without_credentials_is_no_open_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cli_module, "_ENVIRONMENT", {"VLLM_API_KEY": "secret", "VLLM_LOGGING_LEVEL": "INFO"})
    assert app(arguments, standalone_mode=False) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"triptych {arguments[0]}: VLLM_API_KEY is set, which is not read here")
    assert "Set TRIPTYCH_API_KEY, or a file of keys with --api-keys" in line


@pytest.mark.usefixtures("no_process_starts")
def test_variables_of_vllm_are_a_warning_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"VLLM_API_KEY": "secret", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NEW": "1", "VLLM_EMPTY": ""}
    monkeypatch.setattr(cli_module, "_ENVIRONMENT", variables)
    monkeypatch.setenv("TRIPTYCH_API_KEY", "triptych-0123456789abcdef")
    assert app(["serve", "--port=0", "./no-such-folder"], standalone_mode=False) == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "triptych serve: variables of vLLM have no effect here: VLLM_API_KEY (TRIPTYCH_API_KEY),"
        " VLLM_LOGGING_LEVEL (--log-level), VLLM_NEW"
    )


@pytest.mark.usefixtures("no_process_starts")
def test_a_port_that_is_taken_is_refused_before_any_process(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert app(["serve", f"--port={port}"], standalone_mode=False) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"port {port} is in use by pid {os.getpid()}" in line


@pytest.mark.usefixtures("no_process_starts")
def test_a_model_that_the_disk_has_no_room_for_is_refused_before_any_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = "org/name needs 90.0 GiB in /cache, which has 1.0 GiB free"

    def find_model(name: str, **options: object) -> Path:
        raise CheckpointError(cause)

    monkeypatch.setattr(serve_module, "find_model", find_model)
    assert app(["serve", "org/name"], standalone_mode=False) == 2
    assert capsys.readouterr().err == f"triptych serve: {cause}\n"


@pytest.mark.parametrize("length", [1 << 30, 1 << 63])
def test_a_damaged_gguf_file_is_refused_with_little_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length))
    limited = ("sh", "-c", f'ulimit -d {400 * 1024}; exec "$@"', "sh")
    command = (sys.executable, "-m", "triptych_cli.cli", "serve", "--port=0", str(path))
    finished = subprocess.run((*limited, *command), capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    [line] = finished.stderr.splitlines()
    assert line.startswith(f"triptych serve: {path} is damaged: a key of metadata has {length} bytes")


async def test_an_engine_refuses_the_same_in_its_first_line(tmp_path: Path) -> None:
    outcome = await triptych("engine", *only_pickles(tmp_path))
    assert outcome.exit_code == 2
    [line] = outcome.err.splitlines()
    assert line.startswith(f"triptych engine: {tmp_path} has weights only as pytorch_model.bin")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"text_config": {"max_position_embeddings": 50}}, 50),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 400),
        (
            {
                "max_position_embeddings": 400,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 100,
                },
            },
            400,
        ),
    ],
)
def test_a_length_is_refused_beyond_what_the_config_states(
    tmp_path: Path, config: dict[str, Any], limit: int
) -> None:
    model_folder(tmp_path, "tokenizer.json", "model.safetensors", config=config)
    check_start(EngineConfig(str(tmp_path), max_model_len=limit, device="cpu"))
    with pytest.raises(ValueError, match=f"--max-model-len is {limit + 1}, the model takes {limit}$"):
        check_start(EngineConfig(str(tmp_path), max_model_len=limit + 1, device="cpu"))


def test_each_engine_on_a_cpu_needs_room_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stored in half the width that they are loaded in.
    num_bytes = 2 * (_EMBEDDED / "model.safetensors").stat().st_size
    monkeypatch.setattr(start_check, "free_host_bytes", lambda: (2 * num_bytes, "free"))
    config = EngineConfig(str(_EMBEDDED), device="cpu")
    check_start(config, num_engines=2)
    with pytest.raises(CheckpointError, match="for each of 3 engines, more than"):
        check_start(config, num_engines=3)


def test_ranks_divide_the_weights_over_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stored in half the width that they are loaded in.
    num_bytes = 2 * (_EMBEDDED / "model.safetensors").stat().st_size
    monkeypatch.setattr(start_check, "find_cuda_devices", lambda: ((num_bytes // 2 + 1,) * 2, ""))
    check_start(EngineConfig(str(_EMBEDDED), tensor_parallel_size=2))
    with pytest.raises(CheckpointError, match=r"MiB of the GPU$"):
        check_start(EngineConfig(str(_EMBEDDED)))
    with pytest.raises(ConfigError, match="need 4 GPUs, and there are 2"):
        check_start(EngineConfig(str(_EMBEDDED), tensor_parallel_size=2, pipeline_parallel_size=2))
