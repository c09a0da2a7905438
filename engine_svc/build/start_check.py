"""What the model folder, the options and the machine alone decide, checked before anything is loaded.

Imports no torch, so that `serve` and `LLM` refuse a start without waiting for an engine.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from engine_svc.config import EngineConfig
from engine_svc.core.artifacts import check_tokenizer_json
from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.folder import (
    Header,
    check_model_path,
    check_quantization,
    read_config_json,
    read_header,
    stated_dtype,
    stated_max_position,
    weight_files,
)
from engine_svc.model.loading.hub import is_hub_id
from engine_svc.runner.memory.host_memory import MIB, cuda_device_bytes, free_host_bytes
from engine_svc.scheduler.policies import POLICIES
from service_kit.config import ConfigError
from service_kit.plugins import check_offered

POLICY_ENTRY_POINTS = "triptych.policies"
SCHEDULER_ENTRY_POINTS = "triptych.schedulers"

_GIB = 1 << 30
_BYTES_OF_DTYPES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


def check_start(config: EngineConfig, *, num_engines: int = 1) -> None:
    """Raise a ConfigError or ModelError if an engine with these options cannot start here.

    num_engines: equal engines that start on this machine. A model of the hub is not looked at: it is checked
    once it is in a folder.
    """
    _check_scheduling(config)
    devices = _checked_devices(config)
    if is_hub_id(config.model):
        return
    folder = Path(config.model)
    check_model_path(folder)
    content = read_config_json(folder)
    check_quantization(folder, content, ())
    if content.get("is_encoder_decoder") is True:
        raise UnsupportedModel(f"{folder} is an encoder-decoder; only decoders can be served")
    headers = [read_header(path) for path in weight_files(folder)]
    check_quantization(folder, content, headers)
    limit = stated_max_position(content)
    if limit is not None and config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"--max-model-len is {config.max_model_len}, the model takes {limit}")
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        check_tokenizer_json(tokenizer.read_bytes())
    num_bytes = _weight_bytes(config, headers, stated_dtype(content))
    _check_memory(config, num_bytes, devices, num_engines)


def find_cuda_devices() -> tuple[Sequence[int], str]:
    """The memory of each CUDA device that torch can use, or none and the reason."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return (), "torch is not installed"
    # Not imported: it takes seconds, and 300 MB.
    version = Path(spec.origin).parent / "version.py"
    if version.is_file() and runpy.run_path(str(version)).get("cuda") is None:
        return (), "the installed torch is a build for CPUs"
    found = cuda_device_bytes()
    return found, "" if found else "no driver, or none that this process may see"


def _check_scheduling(config: EngineConfig) -> None:
    for name, own, group, option in (
        (config.scheduling_policy, tuple(POLICIES), POLICY_ENTRY_POINTS, "--scheduling-policy"),
        (config.scheduler_class, ("default",), SCHEDULER_ENTRY_POINTS, "--scheduler-class"),
    ):
        check_offered(name, own, group=group, option=option)
    if config.enable_chunked_prefill:
        return
    if config.scheduling_policy == "prefill-first":
        raise ConfigError("--scheduling-policy prefill-first needs --enable-chunked-prefill")
    length = config.max_model_len
    if length is not None and config.max_num_batched_tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, without --enable-chunked-prefill "
            f"it has to be at least --max-model-len, {length}"
        )


def _checked_devices(config: EngineConfig) -> Sequence[int]:
    """The memory of the CUDA devices that the engine would use; empty for a CPU."""
    if config.device == "cpu":
        return ()
    devices, reason = find_cuda_devices()
    if config.device == "cuda" and not devices:
        raise ConfigError(f"--device cuda: there is no CUDA device here ({reason}); choose --device cpu")
    if config.quantization == "fp8" and not devices:
        raise ConfigError("--quantization fp8 needs a GPU, and there is no CUDA device here; choose int8")
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if 0 < len(devices) < num_ranks:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} times --pipeline-parallel-size "
            f"{config.pipeline_parallel_size} need {num_ranks} GPUs, and there are {len(devices)}; lower "
            "them, or choose --device cpu"
        )
    return devices


def _weight_bytes(config: EngineConfig, headers: Sequence[Header], stated: str | None) -> int:
    """The least memory that the weights take, once loaded."""
    size = _BYTES_OF_DTYPES.get(config.dtype) or _BYTES_OF_DTYPES.get(stated or "")
    if config.quantization != "none":
        size = 1
    entries = [entry for header in headers for entry in header.entries]
    if size is None:
        return sum(entry.end - entry.start for entry in entries)
    return sum(entry.num_elements * size for entry in entries)


def _check_memory(config: EngineConfig, num_bytes: int, devices: Sequence[int], num_engines: int) -> None:
    # Where experts are divided over engines, each holds a part of nearly all weights.
    num_copies = 1 if config.divides_experts or devices else num_engines
    cache = 0 if config.num_kv_blocks is not None else config.kv_cache_memory or 0
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if devices:
        free, whose = min(devices) * num_ranks, f"of {num_ranks} GPUs" if num_ranks > 1 else "of the GPU"
    else:
        free, whose = free_host_bytes()[0], "free here"
    if cache > free:
        raise ConfigError(f"--kv-cache-memory is {_shown(cache)}, more than the {_shown(free)} {whose}")
    if num_bytes * num_copies > free:
        copies = f", for each of {num_copies} engines" if num_copies > 1 else ""
        raise CheckpointError(
            f"the weights of {config.model} take {_shown(num_bytes)}{copies}, "
            f"more than the {_shown(free)} {whose}"
        )


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / MIB:.1f} MiB"
