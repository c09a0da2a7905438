"""Checks of the model folder, the options and the machine before anything is loaded.

Imports no torch, so that `serve` and `LLM` refuse a start without waiting for an engine.
"""

from __future__ import annotations

import runpy
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine_svc.config import PROPOSERS, EngineConfig
from engine_svc.core.artifacts import ArtifactKind, check_content
from engine_svc.model.errors import CheckpointError, ModelError, UnsupportedModel
from engine_svc.model.loading.folder import (
    Header,
    HeaderEntry,
    check_model_path,
    read_headers,
    read_json_object,
    stated_dtype,
    stated_max_position,
    text_config,
    weight_files,
)
from engine_svc.model.loading.formats.sources import quantization_method, weight_sources
from engine_svc.model.loading.gguf.folder import is_from_file
from engine_svc.model.loading.hub import find_model, is_gguf_path, is_hub_id, name_of
from engine_svc.model.loading.progress import Progress
from engine_svc.model.loading.states import check_state_ranks, stated_state_bytes
from engine_svc.runner.memory.host_memory import MIB, cuda_device_bytes, free_host_bytes
from engine_svc.scheduler.policies import POLICIES
from triptych_kit.config import ConfigError
from triptych_kit.plugins import ALL, check_offered
from triptych_kit.plugins import GROUP as PLUGINS

POLICY_ENTRY_POINTS = "triptych.policies"
SCHEDULER_ENTRY_POINTS = "triptych.schedulers"
PROPOSER_ENTRY_POINTS = "triptych.proposers"

_GIB = 1 << 30
_BYTES_OF_DTYPES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
# Endings of a group of each column, and of scales, with the dimension that counts groups.
_GROUP_ENDINGS = ((".weight_g_idx", ".weight_scale", 1), (".g_idx", ".scales", 0))
_GROUP_TYPES = {"I32": "i", "I64": "q"}
_LLAMA4_CHUNK = 8192  # where config.json states none


def with_folders(config: EngineConfig, progress: Progress) -> EngineConfig:
    """The configuration with local folders as its models, still served under the given name.

    Models of the hub are downloaded, see `find_model`. Raises as `check_start`, which it calls for a model
    that was in no folder.
    """
    speculation = config.speculation
    folder = str(find_model(config.model, revision=config.revision, progress=progress))
    if speculation.model is not None:
        try:
            draft_folder = str(find_model(speculation.model, progress=progress))
        except ModelError as error:
            raise ConfigError(f"--speculative-model: {error}") from error
        config = replace(
            config,
            speculative=speculation.method,
            num_speculative_tokens=speculation.num_tokens,
            speculative_model=draft_folder,
            speculative_config=None,
        )
    if folder == config.model:
        return config
    config = replace(
        config, model=folder, served_model_name=config.served_model_name or name_of(config.model)
    )
    check_start(config)
    return config


def check_start(config: EngineConfig, *, num_engines: int = 1) -> None:
    """Raise a ConfigError or ModelError if an engine with these options cannot start here.

    num_engines: equal engines that start on this machine. A model of the hub and a GGUF file are not looked
    at: they are checked once they are in a folder.
    """
    _check_offered(config)
    _check_scheduling(config)
    devices = _checked_devices(config)
    if is_hub_id(config.model) or is_gguf_path(config.model):
        return
    folder = Path(config.model)
    check_model_path(folder)
    content = read_json_object(folder / "config.json")
    if content.get("is_encoder_decoder") is True:
        raise UnsupportedModel(f"{folder} is an encoder-decoder; only decoders can be served")
    _check_ranks(config, text_config(content))
    headers = read_headers(folder)
    entries = [entry for header in headers for entry in header.entries]
    state_bytes = stated_state_bytes(folder, text_config(content), entries)
    if state_bytes:
        check_state_ranks(folder, text_config(content), config.tensor_parallel_size)
        _check_states(config, state_bytes)
    sources = weight_sources(folder, content, entries)
    if sources:
        _check_orders(folder, headers)
    if sources and config.quantization != "none":
        raise ConfigError(
            f"--quantization {config.quantization} quantizes at load, and the weights of {folder} are "
            f"quantized with {quantization_method(content)} already: leave it out"
        )
    _check_chunks(config, text_config(content))
    limit = stated_max_position(content)
    if limit is not None and config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"--max-model-len is {config.max_model_len}, the model takes {limit}")
    for kind in () if is_from_file(folder) else ArtifactKind:
        path = folder / kind.value
        if path.is_file():
            check_content(kind, path.read_bytes())
    parts = {name for source in sources.values() for name in source.tensors}
    num_bytes = _weight_bytes(config, entries, parts, stated_dtype(content))
    _check_memory(config, num_bytes, state_bytes, devices, num_engines)


def find_cuda_devices() -> tuple[Sequence[int], str]:
    """The memory of each CUDA device that torch can use, or none and the reason."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return (), "torch is not installed"
    # Not imported: it takes seconds, and 300 MB.
    version = Path(spec.origin).parent / "version.py"
    if version.is_file() and runpy.run_path(str(version)).get("cuda") is None:
        return (), "the installed torch is a build for CPUs"
    sizes = cuda_device_bytes()
    return sizes, "" if sizes else "no driver, or none that this process may see"


def _check_offered(config: EngineConfig) -> None:
    """Raise ConfigError for a name that neither the engine nor an installed package has."""
    for name in config.plugins:
        check_offered(name, (ALL,), group=PLUGINS, option="--plugins")
    for name, own, group, option in (
        (config.scheduling_policy, tuple(POLICIES), POLICY_ENTRY_POINTS, "--scheduling-policy"),
        (config.scheduler_class, ("default",), SCHEDULER_ENTRY_POINTS, "--scheduler-class"),
        (config.speculation.method, PROPOSERS, PROPOSER_ENTRY_POINTS, "--speculative"),
    ):
        check_offered(name, own, group=group, option=option)


def _check_scheduling(config: EngineConfig) -> None:
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


def _check_ranks(config: EngineConfig, stated: Mapping[str, Any]) -> None:
    """Raise ValueError if the model cannot be divided into as many ranks by its config.json."""
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    if tp_size * pp_size > 1 and config.model_impl == "transformers":
        option = "--tensor-parallel-size" if tp_size > 1 else "--pipeline-parallel-size"
        raise ConfigError(f"{option} needs a native model, and --model-impl is transformers")
    num_heads, num_layers = (stated.get(name) for name in ("num_attention_heads", "num_hidden_layers"))
    if type(num_heads) is int and num_heads % tp_size:
        raise UnsupportedModel(
            f"--tensor-parallel-size {tp_size} does not divide the model's {num_heads} attention heads"
        )
    if type(num_layers) is int and num_layers < pp_size:
        raise UnsupportedModel(f"--pipeline-parallel-size is {pp_size}, the model has {num_layers} layers")


def _check_chunks(config: EngineConfig, stated: Mapping[str, Any]) -> None:
    """Raise ConfigError if the chunks that tokens of a Llama 4 attend within are no whole blocks."""
    if stated.get("model_type") not in ("llama4", "llama4_text"):
        return
    chunk = stated.get("attention_chunk_size", _LLAMA4_CHUNK)
    if _has_chunks(stated) and type(chunk) is int and chunk % config.block_size:
        raise ConfigError(
            f"--block-size is {config.block_size}, it must divide {chunk}: the model attends in chunks of "
            "that length"
        )


def _has_chunks(stated: Mapping[str, Any]) -> bool:
    """Whether a layer of a Llama 4 attends in chunks; where no kinds are stated, those with rope do."""
    kinds, has_rope = stated.get("layer_types"), stated.get("no_rope_layers")
    if kinds:
        return "chunked_attention" in kinds
    if isinstance(has_rope, list) and has_rope:
        # Despite its name, it has a 1 for each layer with rope.
        return any(has_rope)
    return stated.get("no_rope_layer_interval") != 1


def _check_states(config: EngineConfig, state_bytes: int) -> None:
    """Raise ConfigError for options that do not go with a model whose layers keep states."""
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size is {config.pipeline_parallel_size}, a model whose layers keep states "
            "takes 1"
        )
    if config.speculation.method != "off":
        raise ConfigError(
            f"--speculative is {config.speculation.method}, a model whose layers keep states takes off: a "
            "rejected draft would be part of its states"
        )
    memory, num_states = config.state_cache_memory, _num_states(config)
    if memory is not None and memory < num_states * state_bytes:
        raise ConfigError(
            f"--state-cache-memory is {shown_size(memory)}, --max-num-seqs {config.max_num_seqs} needs "
            f"{num_states} states of {shown_size(state_bytes)}, {shown_size(num_states * state_bytes)}"
        )


def _num_states(config: EngineConfig) -> int:
    # A request that goes on from a kept state reads its slot and writes another.
    return config.max_num_seqs + 1


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


def _weight_bytes(
    config: EngineConfig, entries: Sequence[HeaderEntry], quantized: Collection[str], stated: str | None
) -> int:
    """The least memory that the weights take, once loaded.  quantized: tensors that keep their width."""
    size = _BYTES_OF_DTYPES.get(config.dtype) or _BYTES_OF_DTYPES.get(stated or "")
    if config.quantization != "none":
        size = 1
    return sum(
        entry.end - entry.start if size is None or entry.name in quantized else entry.num_elements * size
        for entry in entries
    )


def _check_memory(
    config: EngineConfig, num_bytes: int, state_bytes: int, devices: Sequence[int], num_engines: int
) -> None:
    """num_bytes: of the weights.  state_bytes: of one state of all layers."""
    # Where experts are divided over engines, each holds a part of nearly all weights.
    num_copies = 1 if config.divides_experts or devices else num_engines
    cache = 0 if config.num_kv_blocks is not None else config.kv_cache_memory or 0
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if devices:
        free, whose = min(devices) * num_ranks, f"of {num_ranks} GPUs" if num_ranks > 1 else "of the GPU"
    else:
        free, whose = free_host_bytes()[0], "free here"
    if cache > free:
        raise ConfigError(
            f"--kv-cache-memory is {shown_size(cache)}, more than the {shown_size(free)} {whose}"
        )
    if num_bytes * num_copies > free:
        copies = f", for each of {num_copies} engines" if num_copies > 1 else ""
        raise CheckpointError(
            f"the weights of {config.model} take {shown_size(num_bytes)}{copies}, "
            f"more than the {shown_size(free)} {whose}"
        )
    num_states = _num_states(config)
    if num_bytes + num_states * state_bytes > free:
        raise ConfigError(
            f"--max-num-seqs is {config.max_num_seqs}, which needs {num_states} states of "
            f"{shown_size(state_bytes)}, {shown_size(num_states * state_bytes)}, and beside the weights "
            f"{shown_size(free - num_bytes)} are {whose}"
        )


def shown_size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / MIB:.1f} MiB"


def _check_orders(folder: Path, headers: Sequence[Header]) -> None:
    """Raise CheckpointError for a group that a weight does not have.  headers: of sound quantized weights."""
    shapes = {entry.name: entry.shape for header in headers for entry in header.entries}
    for path, header in zip(weight_files(folder), headers, strict=True):
        for entry in header.entries:
            num_groups = _num_groups(entry.name, shapes)
            if num_groups is None:
                continue
            with path.open("rb") as file:
                file.seek(header.data_offset + entry.start)
                groups = array(_GROUP_TYPES[entry.dtype], file.read(entry.end - entry.start))
            first, last = min(groups), max(groups)
            # All -1: without an order.
            if (first < 0 or last >= num_groups) and (first, last) != (-1, -1):
                wrong = first if first < 0 else last
                raise CheckpointError(f"{folder}: {entry.name} has group {wrong}, there are {num_groups}")


def _num_groups(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """None for another tensor than one of groups."""
    for ending, scales, dimension in _GROUP_ENDINGS:
        if name.endswith(ending):
            return shapes[name.removesuffix(ending) + scales][dimension]
    return None
