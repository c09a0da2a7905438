"""Quantized weights in each format are the numbers that the tools that write them make of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_svc.build.ranks import joint_kernel_mode
from engine_svc.build.runner import kernel_mode
from engine_svc.build.start_check import check_start
from engine_svc.config import EngineConfig
from engine_svc.features.adapters.checkpoint import module_shapes
from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.formats.sources import FORMATS
from engine_svc.model.loading.loader import (
    LoadedModel,
    LoadOptions,
    expert_builder,
    ignore_progress,
    load_model,
    open_weights,
)
from engine_svc.model.loading.weights import WeightReader
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.layers import MixtureOfExperts
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.engine_svc.model.loading.quantized_weights import (
    Store,
    awq,
    compressed,
    compressed_in_order,
    fp8,
    gptq,
    mxfp4,
    write_folder,
)
from tests.engine_svc.model.native.test_native_decoder import eager_logits, logits_in_chunks, some_tokens
from triptych_kernels import REFERENCE, SUMS_VERSION, QuantizedWeight
from triptych_kit.config import ConfigError

MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = MODULE + ".weight"
SHAPE = (48, 256)
PACKED, FLOATS = "pack-quantized", "float-quantized"


def of_gptq(bits: int = 4, group_size: int = 32, **more: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, **more}


def of_awq(group_size: int = 32, **more: object) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", **more}


def of_fp8(**more: object) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


def of_compressed(layout: str, targets: tuple[str, ...] = ("Linear",), **weights: object) -> dict[str, Any]:
    group = {"targets": [*targets], "weights": {**weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def compressed_variant(layout: str, dtype: torch.dtype = torch.float32, **weights: object) -> Any:
    return of_compressed(layout, **weights), compressed(layout, dtype, **weights)


INTEGERS = {"num_bits": 8, "type": "int"}
BYTES = {"num_bits": 8, "type": "float"}
VARIANTS: dict[str, tuple[Mapping[str, Any], Store]] = {
    **{f"gptq {size}": (of_gptq(4, size), gptq(4, size)) for size in (32, 64, 128, -1)},
    **{f"gptq {bits} bits": (of_gptq(bits), gptq(bits, is_symmetric=False)) for bits in (2, 4, 8)},
    "gptq v2": (
        of_gptq(checkpoint_format="gptq_v2"),
        gptq(version=2, is_symmetric=False),
    ),
    "gptq in order": (of_gptq(desc_act=True), gptq(has_order=True, is_symmetric=False)),
    "gptq in half precision": (of_gptq(), gptq(dtype=np.float16)),
    "gptq by module": (
        of_gptq(2, 128, dynamic={"-:.*down_proj": {}, r"+:.*\.up_proj": {"bits": 8, "group_size": 64}}),
        gptq(8, 64),
    ),
    **{f"awq {size}": (of_awq(size), awq(size)) for size in (32, 64, 128, -1)},
    "awq in half precision": (of_awq(), awq(dtype=np.float16)),
    **{
        f"packed {bits} bits {size} {'symmetric' if symmetric else 'with zeros'}": compressed_variant(
            PACKED, num_bits=bits, type="int", strategy="group", group_size=size, symmetric=symmetric
        )
        for bits, size in ((4, 32), (4, 64), (4, 128), (8, 128), (2, 32))
        for symmetric in (True, False)
    },
    **{
        f"packed {strategy} {'symmetric' if symmetric else 'with zeros'}": compressed_variant(
            PACKED, num_bits=4, type="int", strategy=strategy, symmetric=symmetric
        )
        for strategy in ("channel", "tensor")
        for symmetric in (True, False)
    },
    "packed in half precision": compressed_variant(
        PACKED, torch.bfloat16, num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "packed in order": (
        of_compressed(PACKED, num_bits=4, strategy="group", group_size=32, actorder="group"),
        compressed_in_order(),
    ),
    "int8 channel": compressed_variant("int-quantized", **INTEGERS, strategy="channel"),
    "int8 channel with zeros": compressed_variant(
        "int-quantized", **INTEGERS, strategy="channel", symmetric=False
    ),
    "int8 tensor": compressed_variant("int-quantized", **INTEGERS, strategy="tensor"),
    "float8 channel": compressed_variant(FLOATS, torch.bfloat16, **BYTES, strategy="channel"),
    "float8 tensor": compressed_variant(FLOATS, **BYTES, strategy="tensor"),
    "float8 blocks": compressed_variant(FLOATS, **BYTES, strategy="block", block_structure=[32, 96]),
    "fp8 tensor": (of_fp8(), fp8("tensor")),
    "fp8 channel": (of_fp8(quant_method="fbgemm_fp8"), fp8("channel")),
    "fp8 blocks": (of_fp8(weight_block_size=[128, 128]), fp8(block=128)),
    "fp8 blocks in half precision": (of_fp8(weight_block_size=[16, 16]), fp8(block=16, dtype=torch.bfloat16)),
    "fp8 blocks at an edge": (of_fp8(weight_block_size=[40, 40]), fp8(block=40)),
}


def reader_of(folder: Path, section: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> WeightReader:
    """Of a folder with one quantized weight."""
    save_file(
        {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return open_weights(Checkpoint(folder), ignore_progress, device=torch.device("cpu"))


@pytest.mark.parametrize(("section", "store"), VARIANTS.values(), ids=VARIANTS)
def test_weights_have_the_bits_of_the_tools_that_wrote_them(
    tmp_path: Path, section: Mapping[str, Any], store: Store
) -> None:
    stored = store(SHAPE, 7)
    reader = reader_of(tmp_path, section, stored.tensors)
    assert reader.names == {WEIGHT}
    assert reader.shape(WEIGHT) == SHAPE
    weight = reader.read_weight(WEIGHT)
    assert isinstance(weight, QuantizedWeight)
    assert weight.dequantize().dtype is stored.weight.dtype
    assert torch.equal(weight.dequantize(), stored.weight)
    assert torch.equal(reader.read_stored(WEIGHT), stored.weight)
    assert reader.unread() == []
    for dim, first, end in ((0, 16, 32), (0, 5, 48), (1, 128, 256), (1, 20, 230)):
        part = reader.read_slice(WEIGHT, dim, first, end)
        assert isinstance(part, QuantizedWeight)
        assert torch.equal(part.dequantize(), stored.weight.narrow(dim, first, end - first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_gpt_oss_have_the_bits_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    stored, name = mxfp4((3, 64, 40), 7, (0, 255)), "model.layers.0.mlp.experts.down_proj"
    save_file(
        {name + part: tensor for part, tensor in stored.tensors.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    reader = open_weights(Checkpoint(tmp_path), ignore_progress, device=torch.device("cpu"), dtype=dtype)
    assert reader.names == {name}
    assert reader.shape(name) == (3, 64, 40)
    assert torch.equal(reader.read(name), stored.weight.to(dtype))
    assert torch.equal(reader.read_slice(name, 0, 1, 2), stored.weight[1:2].to(dtype))
    for index in range(3):
        expert = reader.read_expert(name, index)
        assert isinstance(expert, QuantizedWeight)
        assert torch.equal(expert.dequantize(), stored.weight[index].t().to(dtype))
    assert not reader.unread()


def test_symmetric_weights_are_alike_whatever_wrote_them(tmp_path: Path) -> None:
    for section, store in (VARIANTS["gptq 32"], VARIANTS["packed 4 bits 32 symmetric"]):
        weight = reader_of(tmp_path, section, store(SHAPE, 7).tensors).read_weight(WEIGHT)
        assert isinstance(weight, QuantizedWeight)
        assert weight.zeros is None
        assert weight.groups is None
        assert weight.values.tolist() == list(range(-8, 8))


def broken_order(tensors: dict[str, torch.Tensor]) -> None:
    tensors["g_idx"][3] = 8


def negative_order(tensors: dict[str, torch.Tensor]) -> None:
    tensors["g_idx"][3] = -2


def no_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight"].view(torch.uint8)[2, 2] = 0xFF


def another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight_shape"][1] = 255


@pytest.mark.parametrize(
    ("variant", "damage", "words"),
    [
        ("gptq 32", broken_order, f"{MODULE}.g_idx has group 8, there are 8"),
        ("gptq 32", negative_order, f"{MODULE}.g_idx has group -2, there are 8"),
        ("fp8 tensor", no_number, f"{WEIGHT} has values that are not numbers"),
        ("packed channel symmetric", another_shape, r"weight_shape is \(48, 255\), .* has \(48, 256\)"),
    ],
)
def test_what_only_the_content_shows_is_refused_when_it_is_read(
    tmp_path: Path, variant: str, damage: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    section, store = VARIANTS[variant]
    tensors = store(SHAPE, 7).tensors
    damage(tensors)
    with pytest.raises(CheckpointError, match=words):
        reader_of(tmp_path, section, tensors).read(WEIGHT)


# Models


def is_projection(module: str) -> bool:
    return module.endswith(("_proj", ".w1", ".w2", ".w3"))


def of_projections(store: Store) -> Callable[[str, tuple[int, ...], int], Any]:
    return lambda module, shape, seed: store(shape, seed) if is_projection(module) else None


def mixed(module: str, shape: tuple[int, ...], seed: int) -> Any:
    """4 bits in attention, 8 elsewhere but in the first layer's MLP; the head, too."""
    if module.startswith("model.layers.0.mlp"):
        return None
    if ".self_attn." in module:
        return compressed(PACKED, num_bits=4, strategy="group", group_size=16, symmetric=False)(shape, seed)
    if is_projection(module) or module == "lm_head":
        return compressed("int-quantized", **INTEGERS, strategy="channel")(shape, seed)
    return None


MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["re:model.layers.0.mlp.*", "model.embed_tokens"],
    "config_groups": {
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "format": PACKED,
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
        },
        "others": {
            "targets": ["Linear"],
            "format": "int-quantized",
            "weights": {**INTEGERS, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        },
    },
}


def of_gpt_oss(module: str, shape: tuple[int, ...], seed: int) -> Any:
    return mxfp4(shape, seed) if module.endswith(("experts.gate_up_proj", "experts.down_proj")) else None


NATIVE, OTHER = "native", "transformers"
MODELS: dict[str, tuple[str, str, Mapping[str, Any], Any]] = {
    "gptq": ("llama", NATIVE, of_gptq(4, 16, desc_act=True), of_projections(gptq(4, 16, has_order=True))),
    "awq experts": ("qwen3_moe", NATIVE, of_awq(16), of_projections(awq(16))),
    "packed experts": (
        "mixtral",
        NATIVE,
        of_compressed(PACKED, num_bits=4, strategy="group", group_size=16, symmetric=False),
        of_projections(compressed(PACKED, num_bits=4, strategy="group", group_size=16, symmetric=False)),
    ),
    "joined projections": ("phi3", NATIVE, of_fp8(weight_block_size=[16, 16]), of_projections(fp8(block=16))),
    "mixed groups": ("qwen2", NATIVE, MIXED, mixed),
    "gptq by transformers": ("stablelm", OTHER, of_gptq(8, -1), of_projections(gptq(8, -1))),
    "fp8 experts by transformers": ("olmoe", OTHER, of_fp8(), of_projections(fp8("channel"))),
    "mxfp4": (
        "gpt_oss",
        NATIVE,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        of_gpt_oss,
    ),
}


def written(folder: Path, name: str) -> tuple[Path, Path]:
    """The folder of a model and that of the same weights in full."""
    family, _, section, store = MODELS[name]
    make_checkpoint(family, folder / "source")
    return write_folder(folder / "source", folder, section, store)


def test_experts_in_mxfp4_keep_their_width(tmp_path: Path) -> None:
    models = [loaded(folder, dtype="bfloat16") for folder in written(tmp_path, "mxfp4")]
    if "int8" not in models[0].ops.activations:
        pytest.skip("only the native kernels keep quantized weights")
    narrow, wide = ([mixture.experts.num_bytes for mixture in mixtures_of(model)] for model in models)
    # Four bits, with AVX2 eight; biases in fp32 are a twentieth of so small experts.
    assert all(ours < 0.7 * theirs for ours, theirs in zip(narrow, wide, strict=True))


def mixtures_of(loaded: LoadedModel) -> list[MixtureOfExperts]:
    assert isinstance(loaded.model, NativeDecoder)
    networks = [layer.feed_forward for layer in loaded.model.layers]
    mixtures = [network for network in networks if isinstance(network, MixtureOfExperts)]
    assert len(mixtures) == len(networks)
    return mixtures


def loaded(folder: Path, **options: object) -> LoadedModel:
    return load_model(folder, LoadOptions(num_threads=1, **options))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_logits_of_its_weights_in_full(tmp_path: Path, name: str) -> None:
    quantized, full = written(tmp_path, name)
    ours, plain = loaded(quantized), loaded(full)
    assert ours.implementation == plain.implementation == MODELS[name][1]
    assert ours.facts.num_parameters == plain.facts.num_parameters
    assert ours.facts.dtype == plain.facts.dtype == "float32"
    theirs = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32, attn_implementation="eager")
    for seed in (1, 2, 3):
        token_ids = some_tokens(seed)
        logits = logits_in_chunks(ours, token_ids, [38, 39, len(token_ids)])
        for others in (logits_in_chunks(plain, token_ids, [len(token_ids)]), eager_logits(theirs, token_ids)):
            assert (logits - others).abs().max() < 1e-4
            assert torch.equal(logits.argmax(-1), others.argmax(-1))
    # Engines with equal digests take over each other's requests.
    assert ours.facts.weights_digest != plain.facts.weights_digest


@pytest.mark.parametrize("name", ["gptq", "packed experts"])
def test_rows_are_rounded_where_that_is_asked_for_and_fingerprints_say_so(tmp_path: Path, name: str) -> None:
    quantized, full = written(tmp_path, name)
    token_ids = some_tokens(1)
    exact, int8, auto, plain = (
        loaded(folder, activations=activations)
        for folder, activations in (
            (quantized, "exact"), (quantized, "int8"), (quantized, "auto"), (full, "int8")
        )
    )  # fmt: skip
    if "int8" not in exact.ops.activations:
        pytest.skip("the native kernels cannot run here")
    logits, rounded, fastest, others = (
        logits_in_chunks(model, token_ids, [len(token_ids)]) for model in (exact, int8, auto, plain)
    )
    assert torch.equal(rounded, fastest)
    assert not torch.equal(rounded, logits)
    assert (rounded - logits).norm() < 0.05 * logits.norm()
    # Without quantized weights there is nothing to be rounded for.
    assert (others - logits).abs().max() < 1e-4
    config = EngineConfig(model=str(quantized))
    modes = [kernel_mode(config, model) for model in (exact, int8, auto, plain)]
    assert modes[0] == modes[3] != modes[1] == modes[2]
    # Of ranks, some may have no quantized weights.
    assert joint_kernel_mode([modes[3], modes[1]]) == joint_kernel_mode([modes[1], modes[3]]) == modes[1]
    # Releases whose kernels add in another order do not continue each other's requests.
    assert modes[0].startswith(f"native-{exact.ops.name}-{SUMS_VERSION}-")


def test_activations_without_kernels_are_refused(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "gptq")
    with pytest.raises(
        UnsupportedModel, match="activations int8 have no kernels here, whose ops are reference"
    ):
        load_model(quantized, LoadOptions(num_threads=1, activations="int8"), ops=REFERENCE)


def test_adapters_find_the_modules_that_are_quantized(tmp_path: Path) -> None:
    quantized, full = written(tmp_path, "gptq")
    assert module_shapes(quantized) == module_shapes(full)


def test_experts_that_move_to_an_engine_are_read_in_the_format(tmp_path: Path) -> None:
    quantized, full = written(tmp_path, "awq experts")
    outputs = []
    for folder in (quantized, full):
        model = loaded(folder)
        builder = expert_builder(
            Checkpoint(folder),
            ops=model.ops,
            device=model.device,
            dtype="float32",
            digest=model.facts.weights_digest,
        )
        chosen = torch.tensor([[1, 2]]).expand(5, 2).contiguous()
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
        outputs.append(builder.read_experts(1, 1, 3)(x, chosen, torch.full((5, 2), 0.5)))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)


def replaced(base: Path, source: Path, *names: str) -> WeightReader:
    """A reader of `base` with these tensors from `source`."""
    checkpoint = Checkpoint(base).replacing(names, source)
    return open_weights(checkpoint, ignore_progress, device=torch.device("cpu"), body="model.")


def changed(folder: Path, copy: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a folder with these tensors of `model.layers.1.mlp.down_proj`."""
    shutil.copytree(folder, copy)
    named = {f"{DOWN}.{part}": tensor for part, tensor in tensors.items()}
    weights = load_file(copy / "model.safetensors") | named
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


DOWN = "model.layers.1.mlp.down_proj"


def test_a_tensor_of_a_weight_can_be_replaced_and_the_weight_in_full_cannot(tmp_path: Path) -> None:
    quantized, full = written(tmp_path, "gptq")
    scales = load_file(quantized / "model.safetensors")[DOWN + ".scales"]
    doubled = changed(quantized, tmp_path / "doubled", scales=2 * scales)
    before = replaced(quantized, quantized, DOWN + ".scales").read(DOWN + ".weight")
    assert torch.equal(replaced(quantized, doubled, DOWN + ".scales").read(DOWN + ".weight"), 2 * before)
    with pytest.raises(CheckpointError, match=f"{DOWN} has both weight and qweight"):
        replaced(quantized, full, DOWN + ".weight")
    narrow = changed(quantized, tmp_path / "narrow", scales=scales[:1].contiguous())
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.scales has shape \(1, 32\), expected \(4, 32\)"):
        replaced(quantized, narrow, DOWN + ".scales")


def test_codes_that_are_replaced_under_the_name_of_the_weight_keep_their_scale(tmp_path: Path) -> None:
    quantized, full = written(tmp_path, "joined projections")
    codes = load_file(quantized / "model.safetensors")[DOWN + ".weight"]
    halved = changed(quantized, tmp_path / "halved", weight=(codes.float() / 2).to(codes.dtype))
    before = replaced(quantized, quantized, DOWN + ".weight").read(DOWN + ".weight")
    after = replaced(quantized, halved, DOWN + ".weight").read(DOWN + ".weight")
    # Halves of small numbers are rounded.
    assert (after - before / 2).abs().max() < 1e-4 * before.abs().max()
    with pytest.raises(CheckpointError, match=f"{DOWN}.weight_scale_inv is of fp8, and belongs to no weight"):
        replaced(quantized, full, DOWN + ".weight")


def test_the_dtype_is_that_of_weights_in_full_where_the_config_states_none(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "joined projections")
    content = json.loads((quantized / "config.json").read_text())
    del content["dtype"]
    (quantized / "config.json").write_text(json.dumps(content))
    assert loaded(quantized).facts.dtype == "float32"


def test_weights_are_not_quantized_twice(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "gptq")
    with pytest.raises(ConfigError, match=r"int8 quantizes at load, .* quantized with gptq already"):
        check_start(EngineConfig(str(quantized), device="cpu", quantization="int8"))
    with pytest.raises(UnsupportedModel, match="quantization int8 is of weights in full"):
        loaded(quantized, quantization="int8")
    check_start(EngineConfig(str(quantized), device="cpu"))


def test_each_format_has_variants_and_a_model_in_the_tests() -> None:
    tested = {section["quant_method"] for section, _ in VARIANTS.values()}
    assert {method for each in FORMATS for method in each.methods} == tested | {"mxfp4"}
    assert {each.name for each in FORMATS} == {
        section["quant_method"] for _, _, section, _ in MODELS.values()
    }
