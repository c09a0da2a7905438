"""Loads a Hugging Face folder into a model that is ready for its first step. Never accesses the network."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_svc.core.encoder_spec import EncoderSpec, read_encoder_spec
from engine_svc.core.facts import GENERATE
from engine_svc.core.pooling_spec import PoolingFilesError, PoolingOptions, PoolingSpec, read_pooling_spec
from engine_svc.model.encoders.encoder import ItemEncoder
from engine_svc.model.errors import CheckpointError, UnsupportedModel, listed
from engine_svc.model.facts import KVShape, ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint, replaced_tensors, weights_digest
from engine_svc.model.loading.folder import read_header, read_json_object, weight_files
from engine_svc.model.loading.formats.sources import weight_sources
from engine_svc.model.loading.model_config import ModelConfig
from engine_svc.model.loading.packed_weights import (
    Collected,
    Kept,
    PackedWeights,
    PackedWeightsOptions,
    Unwritten,
    open_packed_weights,
    packed_name,
)
from engine_svc.model.loading.part_names import decoder_name
from engine_svc.model.loading.progress import Progress
from engine_svc.model.loading.weights import WeightReader
from engine_svc.model.native.build import DecoderBuilder
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.exchange import ExpertShare
from engine_svc.model.native.spec import NotNative, read_spec, rotary_table
from engine_svc.model.native.stated_config import read_stated_config
from engine_svc.model.parallel import Parallel, Solo
from engine_svc.model.pooler import Head, make_pooler, read_score_head, read_token_head
from triptych_kernels import Ops, ops_for, set_num_threads

if TYPE_CHECKING:
    from engine_svc.model.transformers.encoder import EncoderModel
    from engine_svc.model.transformers.model import TransformersModel

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # As vLLM calls them, too.
    "half": torch.float16,
    "float": torch.float32,
}

_BODY = "model."  # What a decoder's names begin with, but for its head's.


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its facts."""

    model: NativeDecoder | TransformersModel | EncoderModel
    facts: ModelFacts
    ops: Ops
    device: torch.device
    activations: str = ""  # how rows are multiplied with quantized weights; "": there are none
    shared_bytes: int = 0  # of its weights, in pages of a file: the system counts them as free

    @property
    def implementation(self) -> str:
        """The implementation that runs the model: "native" or "transformers"."""
        return "native" if isinstance(self.model, NativeDecoder) else "transformers"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model.

    dtype: "auto" is the checkpoint's own.  device: "auto" is a GPU if there is one.
    model_impl: "auto" is the native decoder if there is one for the architecture.
    quantization: "" or "int8" ("fp8" on a GPU), of the projections, at load; native models only.
    num_threads: CPU threads of this process from now on; None is one less than the CPUs it may run on.
    is_deterministic: logits depend only on the weights and the tokens before; None is True on a CPU, if there
        are kernels for it, and False on a GPU.
    cpu_isa: "auto" uses the widest instructions of the CPU; "avx512" and "avx2" do not use wider ones.
    activations: how rows are multiplied with quantized weights, "exact" or rounded to "int8"; "auto" is the
        fastest that the device has.
    pooling: whether and how results are made from hidden states.
    packed_weights: where packed weights of native models are kept on a CPU; None: nowhere.
    """

    dtype: str = "auto"
    device: str = "auto"
    model_impl: str = "auto"
    quantization: str = ""
    num_threads: int | None = None
    is_deterministic: bool | None = None
    cpu_isa: str = "auto"
    activations: str = "exact"
    pooling: PoolingOptions | None = None
    packed_weights: PackedWeightsOptions | None = None


def ignore_progress(phase: str, done: int, total: int) -> None:
    """A progress callback for callers that do not report progress."""


def load_model(
    source: str | Path | Checkpoint,
    options: LoadOptions | None = None,
    *,
    parallel: Parallel | None = None,
    share: ExpertShare | None = None,
    ops: Ops | None = None,
    progress: Progress = ignore_progress,
) -> LoadedModel:
    """Load a folder or checkpoint, or this rank's share of it.

    share: which experts to load, if they are divided over engines; native mixtures of experts only.
    progress is called with ("weights", bytes done, total).
    Raises CheckpointError if files are missing or broken, UnsupportedModel if the kind of model is not
    supported.
    """
    options = options or LoadOptions()
    started_at = time.perf_counter()
    num_threads = options.num_threads or _default_num_threads()
    torch.set_num_threads(num_threads)
    set_num_threads(num_threads)
    device = _choose_device(options.device)
    is_deterministic = device.type == "cpu" if options.is_deterministic is None else options.is_deterministic
    ops = ops or ops_for(device, deterministic=is_deterministic, cpu_isa=options.cpu_isa)
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(Path(source))
    loaded = _load(checkpoint, options, device, ops, parallel or Solo(), share, progress)
    logger.info(
        "model loaded",
        extra={
            "architecture": loaded.facts.architecture,
            "model_impl": loaded.implementation,
            "ops": ops.name,
            "device": str(device),
            "num_parameters": loaded.facts.num_parameters,
            "dtype": loaded.facts.dtype,
            "num_threads": num_threads,
            "duration_s": round(time.perf_counter() - started_at, 3),
        },
    )
    return loaded


def _default_num_threads() -> int:
    # Compute threads wait for each other many times a step. If one shares its CPU with other work, all
    # wait for it: on two busy CPUs steps with two threads took 35 times as long as with one.
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _choose_device(requested: str) -> torch.device:
    if requested not in ("auto", "cpu", "cuda"):
        raise CheckpointError(f"device {requested!r} is unknown; choose auto, cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        raise CheckpointError("device is cuda, but torch finds no CUDA device here")
    if requested == "cpu" or not has_gpu:
        return torch.device("cpu")
    # With its index: GPUs are compared with it, and a device without index equals none with one.
    return torch.device("cuda", torch.cuda.current_device())


def _load(
    checkpoint: Checkpoint,
    options: LoadOptions,
    device: torch.device,
    ops: Ops,
    parallel: Parallel,
    share: ExpertShare | None,
    progress: Progress,
) -> LoadedModel:
    folder = checkpoint.folder
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: the model must be a Hugging Face folder, or org/name of a hub"
        )
    try:
        pooling = read_pooling_spec(folder, options.pooling)
    except PoolingFilesError as error:
        raise CheckpointError(str(error)) from error
    config = read_model_config(folder, options, pooling)
    if config.max_position < 0:
        raise CheckpointError(f"{folder}/config.json: the maximum sequence length is {config.max_position}")
    encoder_spec = _encoder_spec(folder, pooling)
    rename = str if encoder_spec is None else decoder_name
    reader = open_weights(checkpoint, progress, device=device, body=_BODY, rename=rename)
    if reader.quantized and options.quantization:
        raise UnsupportedModel(
            f"quantization {options.quantization} is of weights in full, and {folder} has quantized ones"
        )
    dtype = _choose_dtype(options.dtype, config, reader)
    reader.set_dtype(dtype)
    # On a CPU the reference ops compute half precision.
    has_kernels = not (device.type == "cpu" and dtype is torch.float16)
    is_invariant = ops.is_batch_invariant and has_kernels
    name = str(dtype).removeprefix("torch.")
    if not is_invariant:
        cure = "auto or off" if not ops.is_batch_invariant else "another dtype, auto or off"
        _note_variance(options.is_deterministic, device, ops, f"in {name} on this machine", cure)
    facts = ModelFacts(
        architecture=config.architecture,
        kv_shapes=(),
        vocab_size=config.vocab_size,
        max_position=_max_position(config, pooling),
        eos_token_ids=_eos_token_ids(folder, config),
        dtype=name,
        num_parameters=0,
        weights_digest=weights_digest(folder, reader.files, dtype, reader.replaced),
        reads_common_blocks=ops.reads_common_blocks and has_kernels,
        tasks=(GENERATE,) if pooling is None else pooling.tasks,
    )
    model: NativeDecoder | TransformersModel | EncoderModel
    encoder: ItemEncoder | None = None
    # Only the first stage of a pipeline embeds tokens.
    if encoder_spec is not None and parallel.pp_rank == 0:
        # Imported here: encoders are transformers' modules.
        from engine_svc.model.encoders.load import load_item_encoder

        encoder = load_item_encoder(encoder_spec, reader, folder, dtype, device)
    classify: Head | None = None
    activations, shared_bytes = "", 0
    if pooling is not None and pooling.has_score_head:
        classify = read_score_head(reader, pooling.num_classes, config.config.hidden_size)
    if _is_native(config, options, parallel, share):
        chosen = _choose_activations(options.activations, ops)
        native = _native(checkpoint, config, reader, facts, options, chosen, device, ops, parallel, share)
        model, shared_bytes = native.model, native.shared_bytes
        model.item_encoder = encoder
        activations = chosen if native.is_quantized else ""
        kv_shapes: tuple[KVShape, ...] = model.kv_shapes
        num_parameters = model.num_parameters
        facts = replace(
            facts,
            expert_choices=model.expert_choices,
            state_size=model.hidden_size,
            state_shapes=model.state_shapes,
        )
    elif pooling is not None and pooling.is_encoder:
        from engine_svc.model.transformers.load import load_encoder

        model, num_parameters = load_encoder(config, reader, folder, pooling, dtype, device, ops)
        kv_shapes = ()
        if options.is_deterministic:
            _note_variance(True, device, ops, f"in {facts.architecture}", "auto or off")
    else:
        # Imported here: transformers' model code takes long to import, and native models do not need it.
        from engine_svc.model.transformers.load import load_transformers_model

        model, warm, num_parameters = load_transformers_model(
            config, reader, folder, dtype, device, ops, samples=GENERATE in facts.tasks
        )
        model.item_encoder = encoder
        kv_shapes = warm.kv_shapes
        facts = replace(facts, state_size=warm.state_size, state_shapes=warm.state_shapes)
        if is_invariant and not warm.is_batch_invariant:
            _note_variance(options.is_deterministic, device, ops, f"in {facts.architecture}", "auto or off")
    if pooling is not None and not pooling.is_encoder:
        if not facts.state_size:
            raise UnsupportedModel(f"{facts.architecture} returns no hidden states to pool")
        if pooling.class_tokens:
            classify = read_token_head(pooling, reader, folder)
        model.pooler = make_pooler(pooling, folder, dtype=dtype, device=device, classify=classify)
    facts = replace(
        facts, kv_shapes=kv_shapes, num_parameters=num_parameters, hidden_size=model.embedding_size
    )
    return LoadedModel(model, facts, ops, device, activations, shared_bytes)


def _encoder_spec(folder: Path, pooling: PoolingSpec | None) -> EncoderSpec | None:
    """The encoder of images beside the decoder, if there is one; a model that only pools takes text alone."""
    if pooling is not None and GENERATE not in pooling.tasks:
        return None
    try:
        return read_encoder_spec(folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _choose_activations(requested: str, ops: Ops) -> str:
    if requested == "auto":
        return ops.activations[0]
    if requested not in ops.activations:
        raise UnsupportedModel(
            f"activations {requested} have no kernels here, whose ops are {ops.name}: choose auto or exact"
        )
    return requested


def _note_variance(requested: bool | None, device: torch.device, ops: Ops, where: str, cure: str) -> None:
    """Raise UnsupportedModel if determinism is requested; by default, log a warning on a CPU."""
    differs = "logits may differ by rounding with batch and chunking"
    if requested:
        raise UnsupportedModel(f"deterministic is on, but {differs} {where}: choose {cure}")
    if requested is None and device.type == "cpu":
        logger.warning(differs, extra={"ops": ops.name, "where": where})


def open_weights(
    checkpoint: Checkpoint,
    progress: Progress,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    body: str = "",
    rename: Callable[[str], str] = str,
) -> WeightReader:
    """A reader of the weights, in the format that config.json states. The arguments are those of a reader."""
    folder = checkpoint.folder
    files, content = weight_files(folder), read_json_object(folder / "config.json")
    # The files of other formats say themselves what they have.
    entries = [
        entry for path in files if path.suffix == ".safetensors" for entry in read_header(path).entries
    ]
    # Tensors from elsewhere take the place of those of the same name.
    entries += [
        entry
        for source in set(checkpoint.replaced.values())
        for path in weight_files(source)
        for entry in read_header(path).entries
        if checkpoint.replaced.get(entry.name) == source
    ]
    return WeightReader(
        files,
        progress,
        device=device,
        dtype=dtype,
        replaced=replaced_tensors(checkpoint),
        body=body,
        sources=weight_sources(folder, content, entries),
        rename=rename,
    )


def read_llama_config(folder: Path) -> tuple[dict[str, Any], Any]:
    """The content of a config.json, and the same as transformers completes it for a Llama.

    Raises CheckpointError.
    """
    # Imported here for the reason given in `stated_config`.
    from transformers import LlamaConfig

    from engine_svc.model.transformers.registry import FOREIGN_ERRORS

    try:
        content = json.loads((folder / "config.json").read_text("utf-8"))
        config = LlamaConfig(**content)
        rotary_table(config, 1)
    except (*FOREIGN_ERRORS, RuntimeError) as error:
        raise CheckpointError(f"{folder}/config.json cannot be read: {error}") from error
    return content, config


def _max_position(config: ModelConfig, pooling: PoolingSpec | None) -> int:
    """The longest sequence; a model that only pools takes what its files say."""
    if pooling is None or pooling.max_length is None or GENERATE in pooling.tasks:
        return config.max_position
    return min(config.max_position, pooling.max_length)


def read_model_config(
    folder: Path, options: LoadOptions | None = None, pooling: PoolingSpec | None = None
) -> ModelConfig:
    """The config of the folder; without transformers where that need not be imported."""
    if options is None or options.model_impl != "transformers":
        stated = read_stated_config(folder)
        if stated is not None:
            return stated
    # Imported here for the reason given in `stated_config`.
    from engine_svc.model.transformers.registry import read_config

    return read_config(folder, pooling.head if pooling is not None and pooling.is_encoder else None)


def has_experts(folder: str | Path) -> bool:
    """Whether the model in the folder is a mixture of experts that the native decoder runs."""
    try:
        return read_spec(read_model_config(Path(folder)).config).has_experts
    except NotNative:
        return False


def expert_builder(
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    device: torch.device,
    dtype: str,
    digest: str,
    activations: str = "",
) -> DecoderBuilder:
    """Reads more experts of a model loaded from there. CheckpointError if its weights have changed.

    activations: those of the LoadedModel.
    """
    folder = checkpoint.folder
    reader = open_weights(checkpoint, ignore_progress, device=device, dtype=_DTYPES[dtype], body=_BODY)
    if weights_digest(folder, reader.files, _DTYPES[dtype], reader.replaced) != digest:
        raise CheckpointError(f"{folder} has other weights than when it was loaded")
    return DecoderBuilder(
        spec=read_spec(read_model_config(folder).config),
        weights=reader,
        ops=ops,
        parallel=Solo(),
        dtype=_DTYPES[dtype],
        activations=activations or "exact",
    )


def _is_native(
    config: ModelConfig, options: LoadOptions, parallel: Parallel, share: ExpertShare | None
) -> bool:
    """Whether the native decoder runs this model. UnsupportedModel where it must and cannot."""
    if options.model_impl == "transformers":
        if parallel.tp_size * parallel.pp_size > 1:
            raise UnsupportedModel("several ranks need a native model, and model_impl is transformers")
        if share is not None:
            raise UnsupportedModel(
                "experts divided over engines need a native model, and model_impl is transformers"
            )
        if options.quantization:
            raise UnsupportedModel(
                f"quantization {options.quantization} needs a native model, and model_impl is transformers"
            )
        return False
    try:
        spec = read_spec(config.config)
    except NotNative as reason:
        for what, is_asked in (
            ("model_impl native", options.model_impl == "native"),
            ("tensor or pipeline parallelism", parallel.tp_size * parallel.pp_size > 1),
            (f"quantization {options.quantization}", bool(options.quantization)),
            ("experts divided over engines", share is not None),
        ):
            if is_asked:
                raise UnsupportedModel(f"{what} needs a native model, but {reason}") from None
        return False
    if share is not None and not spec.has_experts:
        raise UnsupportedModel(f"a {spec.model_type} without experts has none to divide over engines")
    return True


@dataclass(frozen=True, slots=True)
class _Native:
    """A native model, whether its checkpoint has any matrices quantized, and bytes that it shares."""

    model: NativeDecoder
    is_quantized: bool
    shared_bytes: int = 0


def _native(
    checkpoint: Checkpoint,
    config: ModelConfig,
    reader: WeightReader,
    facts: ModelFacts,
    options: LoadOptions,
    activations: str,
    device: torch.device,
    ops: Ops,
    parallel: Parallel,
    share: ExpertShare | None,
) -> _Native:
    spec, samples = read_spec(config.config), GENERATE in facts.tasks
    cos_sin = _rotary_table(config, facts).to(device)

    def build(packed: PackedWeights) -> tuple[NativeDecoder, bool]:
        builder = DecoderBuilder(
            spec=spec,
            weights=reader,
            ops=ops,
            parallel=parallel,
            dtype=_DTYPES[facts.dtype],
            quantization=options.quantization,
            activations=activations,
            share=share,
            samples=samples,
            packed=packed,
        )
        try:
            return builder.build(facts.architecture, cos_sin), builder.has_quantized
        except ValueError as error:
            if isinstance(error, CheckpointError | UnsupportedModel):
                raise
            raise UnsupportedModel(f"{facts.architecture}: {error}") from error

    # Those of several folders are seldom loaded twice. Experts that are divided over engines leave the memory
    # as the group changes, and a file's memory is one piece.
    is_savable = device.type == "cpu" and not reader.replaced and share is None
    kept = options.packed_weights if is_savable else None
    if kept is not None and reader.num_bytes < kept.min_bytes:
        # A few weights are packed in no time.
        kept = replace(kept, is_written=False)
    layout = {
        "ops": ops.name,
        "quantization": options.quantization,
        "activations": activations,
        "tp": [parallel.tp_rank, parallel.tp_size],
        "ep": [parallel.ep_rank, parallel.ep_size],
        "pp": [parallel.pp_rank, parallel.pp_size],
        "samples": samples,
    }
    name = packed_name(checkpoint.folder.name, facts.weights_digest, reader.files, layout)
    with open_packed_weights(kept, name, ops) as source:
        packed = Collected(ops, source, name)
        model, is_quantized = build(packed)
        # A model that only pools needs no head for tokens; its checkpoint may have one.
        unread = [name for name in reader.unread() if samples or name != "lm_head.weight"]
        notes: Mapping[str, Any] = {"unread": unread, "is_quantized": is_quantized}
        if isinstance(source, Kept):
            notes = source.notes
        if isinstance(source, Unwritten) and source.write(packed.entries, notes):
            # In the memory that other engines have, too; never in both.
            del model, packed
            source = source.reopened()
            packed = Collected(ops, source, name)
            model, _ = build(packed)
    packed.notes = notes
    model.packed = packed if is_savable else None
    reader.finish()
    if parallel.tp_size * parallel.pp_size == 1 and share is None and notes["unread"]:
        logger.warning(
            "weights of the checkpoint that the model does not use", extra={"names": listed(notes["unread"])}
        )
    return _Native(model, notes["is_quantized"], source.shared_bytes if isinstance(source, Kept) else 0)


def _rotary_table(config: ModelConfig, facts: ModelFacts) -> Tensor:
    try:
        # One position more than the longest sequence: a step may be planned before its end is known.
        table = rotary_table(config.config, facts.max_position + 1)
        # Its angles are the greatest: where these are numbers, all are.
        if not table[..., -1, :].isfinite().all():
            raise ValueError("its angles are no numbers")
        return table
    # What functions of transformers raise for parameters that they were not made for.
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{facts.architecture}: rope cannot be computed as config.json states it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _choose_dtype(requested: str, config: ModelConfig, reader: WeightReader) -> torch.dtype:
    if requested != "auto":
        if requested not in _DTYPES:
            raise CheckpointError(f"dtype {requested!r} is unknown; choose auto, {', '.join(_DTYPES)}")
        return _DTYPES[requested]
    stated = config.dtype or reader.main_dtype() or torch.float32
    if stated not in _DTYPES.values():
        raise CheckpointError(f"the checkpoint is in {stated}, which cannot be computed in; choose a dtype")
    return stated


def _eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    ids = _as_ids(config.eos_token_id)
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            ids |= _as_ids(json.loads(path.read_text("utf-8")).get("eos_token_id"))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    strange = {each for each in ids if not 0 <= each < config.vocab_size}
    if strange:
        # No token has such an id, so no sequence ends with it.
        logger.warning("eos_token_id is outside the vocabulary", extra={"ids": sorted(strange)})
    return tuple(sorted(ids - strange))


def _as_ids(value: object) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in ids):
        raise ValueError(f"eos_token_id is {value!r}, no whole number and no list of them")
    return set(ids)
