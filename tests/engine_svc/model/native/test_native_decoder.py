"""A native decoder has the logits of transformers' eager model at every position, however a prompt is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine_svc.model.context import ForwardContext, LayerCache
from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.gguf.folder import open_as_folder
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.spec import NotNative, read_spec, rotary_table
from tests.engine_svc.model.checkpoints import MAX_POSITION, VOCAB_SIZE, make_checkpoint
from tests.engine_svc.model.loading.gguf.gguf_models import write_model
from triptych_kernels import REFERENCE, AttentionBatch, StateBatch, ops_for

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gemma3", "granite", "olmo2", "olmo3",
    "gpt_oss", "qwen3_5", "qwen3_5_moe", "granitemoehybrid",
)  # fmt: skip
NUM_TOKENS = 90
BLOCK_SIZE = 4
NATIVE = LoadOptions(num_threads=1, model_impl="native")


@torch.inference_mode()
def logits_in_chunks(loaded: LoadedModel, token_ids: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Logits [T, V] of one row, its tokens computed up to each of `ends` in turn, over shuffled blocks."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4))
    layers = [
        LayerCache(
            0,
            torch.zeros(num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.key_dim),
            torch.zeros(num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.value_dim),
        )
        for shape in loaded.facts.kv_shapes
    ]
    # A new row reads no state: what was in its slot before must reach no result.
    state_layers = [
        tuple(torch.full((1, *part), float("nan")) for part in shape.parts)
        for shape in loaded.facts.state_shapes
    ]
    parts, start = [], 0
    for end in ends:
        positions = torch.arange(start, end)
        slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch.of(table[None], [end - start], [end], BLOCK_SIZE)
        context = ForwardContext(layers, [slots], [batch])
        if state_layers:
            context.states = StateBatch.of([end - start], [end], [0 if start else -1], [0])
            context.state_layers = state_layers
        parts.append(
            loaded.model.forward(token_ids[start:end], positions, torch.arange(end - start), context)
        )
        start = end
    return torch.cat(parts)


def some_tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=token_ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("ops", [REFERENCE, ops_for(torch.device("cpu"))], ids=lambda ops: ops.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_within_1e_4_of_eager_at_every_place(family, ops, tmp_path):
    theirs = make_checkpoint(family, tmp_path)
    ours = load_model(tmp_path, NATIVE, ops=ops)
    assert ours.implementation == "native"
    token_ids = some_tokens()
    difference = logits_in_chunks(ours, token_ids, [1, 38, 39, 70, NUM_TOKENS]) - eager_logits(
        theirs, token_ids
    )
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_however_the_prompt_is_cut(family, tmp_path):
    make_checkpoint(family, tmp_path)
    ours = load_model(tmp_path, NATIVE)
    if not ours.ops.is_batch_invariant:
        pytest.skip("this machine has no native kernels")
    token_ids = some_tokens()
    whole = logits_in_chunks(ours, token_ids, [NUM_TOKENS])
    sevens = [*range(7, NUM_TOKENS, 7), NUM_TOKENS]
    for ends in ([1, 38, 39, 70, NUM_TOKENS], list(range(1, NUM_TOKENS + 1)), sevens, [64, NUM_TOKENS]):
        assert torch.equal(logits_in_chunks(ours, token_ids, ends), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_as_one_op_have_the_bits_of_their_ops(family, tmp_path):
    make_checkpoint(family, tmp_path)
    ours = load_model(tmp_path, NATIVE)
    if not ours.ops.is_batch_invariant:
        pytest.skip("this machine has no native kernels")
    assert isinstance(ours.model, NativeDecoder)
    is_dense = family not in ("mixtral", "qwen3_moe", "gpt_oss") and not ours.facts.state_shapes
    assert (ours.model.fused is not None) == is_dense
    fused = logits_in_chunks(ours, some_tokens(), [38, 39, NUM_TOKENS])
    ours.model.fused = None
    assert torch.equal(logits_in_chunks(ours, some_tokens(), [38, 39, NUM_TOKENS]), fused)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_computes_what_transformers_does(folder: Path) -> LoadedModel:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ours = load_model(folder, NATIVE)
    token_ids = some_tokens()
    difference = logits_in_chunks(ours, token_ids, [38, 39, NUM_TOKENS]) - eager_logits(theirs, token_ids)
    assert difference.abs().max() < 1e-4
    return ours


_FULL, _MIXED = ["full_attention"] * 2, ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": None}, [None, None]),
        ("mixtral", {"sliding_window": 7}, [7, 7]),
        ("mixtral", {"sliding_window": 7, "layer_types": _FULL}, [7, 7]),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7, "layer_types": _FULL}, [7, 7]),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 7}, [None, None]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "layer_types": _MIXED}, [None, 7]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": _MIXED}, [None, 7]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, [None, 7]),
        ("llama", {"layer_types": _MIXED}, [None, None]),
    ],
)
def test_windows_are_those_that_the_code_of_the_family_applies(family, changes, windows, tmp_path):
    make_checkpoint(family, tmp_path)
    if "max_window_layers" in changes:
        # What is saved states them, and they would go before.
        changes = {**changes, "layer_types": None}
    change_config(tmp_path, **changes)
    ours = assert_computes_what_transformers_does(tmp_path)
    assert [shape.window for shape in ours.facts.kv_shapes] == windows


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


_ROWS = {
    "q_proj": 32,
    "k_proj": 16,
    "v_proj": 16,
    "o_proj": 32,
    "gate_proj": 64,
    "up_proj": 64,
    "down_proj": 32,
}


def add_biases(weights: dict[str, torch.Tensor], names: Iterable[str] = _ROWS) -> None:
    """A bias that is not 0 for each of these projections, in place of one that is there."""
    generator = torch.Generator().manual_seed(6)
    for layer in range(2):
        for name in names:
            part = "self_attn" if name[0] in "qkvo" else "mlp"
            bias = torch.randn(_ROWS[name], generator=generator)
            weights[f"model.layers.{layer}.{part}.{name}.bias"] = bias


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": False, "mlp_bias": False}),
        ("llama", {"attention_bias": True, "mlp_bias": False}),
        ("llama", {"attention_bias": False, "mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"attention_bias": False, "mlp_bias": True}),
        ("qwen3", {"attention_bias": False, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("mixtral", {"attention_bias": True}),
        ("qwen3_moe", {"attention_bias": False}),
        ("qwen3_moe", {"attention_bias": True}),
    ],
)
def test_biases_are_those_that_the_code_of_the_family_adds(family, changes, tmp_path):
    make_checkpoint(family, tmp_path)
    change_config(tmp_path, **changes)
    change_weights(tmp_path, add_biases)
    assert_computes_what_transformers_does(tmp_path)


@pytest.mark.parametrize(
    "missing", [".bias", "layers.1.self_attn.q_proj.bias", "layers.0.self_attn.k_proj.bias"]
)
def test_a_bias_that_is_missing_is_refused_by_name(missing, tmp_path):
    make_checkpoint("qwen2", tmp_path)

    def drop(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.endswith(missing)]:
            del weights[name]

    change_weights(tmp_path, drop)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks model\.layers\..*_proj\.bias"):
        load_model(tmp_path, NATIVE)


@pytest.mark.parametrize(
    ("family", "changes", "missing"),
    [
        ("llama", {"attention_bias": True}, "o_proj"),
        ("llama", {"mlp_bias": True}, "down_proj"),
        ("qwen3", {"attention_bias": True}, "v_proj"),
    ],
)
def test_a_bias_that_the_config_states_must_be_there(family, changes, missing, tmp_path):
    make_checkpoint(family, tmp_path)
    change_config(tmp_path, **changes)
    change_weights(tmp_path, lambda weights: add_biases(weights, _ROWS.keys() - {missing}))
    with pytest.raises(CheckpointError, match=rf"the checkpoint lacks .*{missing}\.bias"):
        load_model(tmp_path, NATIVE)


def test_both_implementations_exist_and_auto_takes_the_native_one(tmp_path):
    make_checkpoint("llama", tmp_path)
    implementations = {
        name: load_model(tmp_path, LoadOptions(num_threads=1, model_impl=name)).implementation
        for name in ("auto", "native", "transformers")
    }
    assert implementations == {"auto": "native", "native": "native", "transformers": "transformers"}


def test_the_native_implementation_is_refused_by_name_where_unsupported(tmp_path):
    make_checkpoint("gpt2", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model_impl native needs a native model, but .* type gpt2"):
        load_model(tmp_path, NATIVE)
    with pytest.raises(UnsupportedModel, match="quantization int8 needs a native model"):
        load_model(tmp_path, LoadOptions(num_threads=1, quantization="int8"))


_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}


@pytest.mark.parametrize(
    ("family", "rope", "changes"),
    [
        ("gemma3", _LINEAR, {"query_pre_attn_scalar": 24}),
        ("gemma3", _YARN, {}),
        ("olmo3", _YARN, {"attention_bias": True}),
    ],
)
def test_each_kind_of_layers_has_a_rope_of_its_own(family, rope, changes, tmp_path):
    make_checkpoint(family, tmp_path, **changes)
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    change_config(tmp_path, rope_parameters=ropes)
    assert_computes_what_transformers_does(tmp_path)


def test_a_gpt_oss_with_yarn_and_all_its_biases(tmp_path):
    make_checkpoint("gpt_oss", tmp_path)
    change_config(tmp_path, rope_parameters={**_YARN, "truncate": False})
    generator = torch.Generator().manual_seed(6)

    def fill_biases(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name.endswith("bias"):
                # Gates and ups beyond their limits, too.
                wide = 4.0 if name.endswith("gate_up_proj_bias") else 0.5
                weights[name] = wide * torch.randn(weight.shape, generator=generator)

    change_weights(tmp_path, fill_biases)
    assert_computes_what_transformers_does(tmp_path)


def test_a_decoder_may_be_the_text_part_of_a_model_with_stacked_experts(tmp_path):
    make_checkpoint("qwen3_5_moe", tmp_path)
    plain = load_model(tmp_path, NATIVE)
    text_config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen3_5_moe", "text_config": text_config}
    (tmp_path / "config.json").write_text(json.dumps(whole))

    def rename(weights: dict[str, torch.Tensor]) -> None:
        body = {name.split("layers.", 1)[-1]: name for name in weights if ".experts." in name}
        for layer in range(3):
            gates, ups, downs = (
                [
                    weights.pop(body[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"])
                    for expert in range(text_config["num_experts"])
                ]
                for part in ("gate", "up", "down")
            )
            prefix = f"model.layers.{layer}.mlp.experts."
            weights[prefix + "gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
            weights[prefix + "down_proj"] = torch.stack(downs)
        for name in [name for name in weights if not name.startswith(("lm_head", "model.language_model"))]:
            weights["model.language_model." + name.removeprefix("model.")] = weights.pop(name)

    change_weights(tmp_path, rename)
    part = load_model(tmp_path, NATIVE)
    token_ids = some_tokens()
    logits = [logits_in_chunks(each, token_ids, [NUM_TOKENS]) for each in (plain, part)]
    assert torch.equal(*logits)
    assert plain.facts.num_parameters == part.facts.num_parameters


def test_embeddings_of_a_text_part_are_tied_where_only_the_whole_config_says_so(tmp_path):
    make_checkpoint("qwen3_5", tmp_path, tie_word_embeddings=True)
    plain = load_model(tmp_path, NATIVE)
    text_config = json.loads((tmp_path / "config.json").read_text())
    del text_config["tie_word_embeddings"]
    whole = {"model_type": "qwen3_5", "text_config": text_config, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    part = load_model(tmp_path, NATIVE)
    assert torch.equal(*(logits_in_chunks(each, some_tokens(), [NUM_TOKENS]) for each in (plain, part)))


@pytest.mark.parametrize("name", ["swiglu_limit", "swiglu_alpha"])
def test_experts_clamped_otherwise_fall_back_to_transformers(name, tmp_path):
    make_checkpoint("gpt_oss", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    setattr(config, name, 5.0)
    with pytest.raises(NotNative, match=f"{name} is 5.0"):
        read_spec(config)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("hidden_activation", "silu", "hidden_act is silu, the native decoder has gelu_pytorch_tanh"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0"),
        ("use_bidirectional_attention", True, "use_bidirectional_attention is True"),
        ("attention_bias", True, "attention_bias is True"),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}},
            "rope_type of full_attention is dynamic, the native decoder has default, linear",
        ),
    ],
)
def test_a_gemma_with_other_settings_falls_back_to_transformers(name, value, reason, tmp_path):
    make_checkpoint("gemma3", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    setattr(config, name, value)
    with pytest.raises(NotNative, match=reason):
        read_spec(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is dynamic",
        ),
        ({"model_type": "gemma"}, "model type gemma"),
        ({"sliding_window": 7}, "sliding_window is 7, which the code of a llama does not apply"),
        ({"is_causal": False}, "is_causal is False"),
    ],
)
def test_unsupported_models_fall_back_to_transformers(changes, reason, tmp_path):
    make_checkpoint("llama", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for name, value in changes.items():
        object.__setattr__(config, name, value) if name == "model_type" else setattr(config, name, value)
    with pytest.raises(NotNative, match=reason):
        read_spec(config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_whose_tokens_see_later_ones_is_refused(family, tmp_path):
    make_checkpoint(family, tmp_path)
    change_config(tmp_path, is_causal=False)
    with pytest.raises(UnsupportedModel, match="lets tokens see later ones"):
        load_model(tmp_path, LoadOptions(num_threads=1))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_every_kind_of_rope_turns_as_in_transformers(rope, tmp_path):
    theirs = make_checkpoint("llama", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "rope_parameters": rope}))
    config = AutoConfig.from_pretrained(tmp_path)
    rotary = type(theirs.model.rotary_emb)(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(MAX_POSITION)[None])
    half = cos.shape[-1] // 2
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    torch.testing.assert_close(rotary_table(config, MAX_POSITION), expected)


def test_a_layer_with_experts_may_stand_beside_one_without(tmp_path):
    theirs = make_checkpoint("qwen3_moe", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.mlp_only_layers = [0]
    spec = read_spec(config)
    assert [experts is None for experts in spec.experts] == [True, False]
    assert theirs.config.num_experts == 4


def test_missing_and_misshapen_weights_are_named(tmp_path):
    make_checkpoint("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    lost = weights.pop("model.layers.1.self_attn.o_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.o_proj\.weight"):
        load_model(tmp_path, NATIVE)
    save_file(
        {**weights, "model.layers.1.self_attn.o_proj.weight": lost[:-1].contiguous()},
        file,
        metadata={"format": "pt"},
    )
    with pytest.raises(
        CheckpointError, match=r"o_proj\.weight has shape \(31, 32\), config\.json says \(32, 32\)"
    ):
        load_model(tmp_path, NATIVE)


def test_parameters_are_those_of_transformers(tmp_path: Path):
    for family in FAMILIES:
        theirs = make_checkpoint(family, tmp_path / family)
        ours = load_model(tmp_path / family, NATIVE)
        assert isinstance(ours.model, NativeDecoder)
        assert ours.facts.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())


def test_a_head_of_its_own_counts_also_where_the_config_says_that_it_is_tied(tmp_path):
    theirs = make_checkpoint("llama", tmp_path)
    assert theirs.config.tie_word_embeddings
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = torch.randn(VOCAB_SIZE, 32, generator=torch.Generator().manual_seed(8))
    save_file({**weights, "lm_head.weight": head}, file, metadata={"format": "pt"})
    untied = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path, NATIVE)
    token_ids = some_tokens()
    difference = logits_in_chunks(ours, token_ids, [NUM_TOKENS]) - eager_logits(untied, token_ids)
    assert difference.abs().max() < 1e-4


def test_a_head_that_is_missing_and_not_tied_is_refused(tmp_path):
    make_checkpoint("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load_model(tmp_path, NATIVE)


def test_quantization_of_experts_is_refused_and_not_left_out(tmp_path):
    make_checkpoint("mixtral", tmp_path)
    with pytest.raises(UnsupportedModel, match="quantization int8 is not supported for mixtures of experts"):
        load_model(tmp_path, LoadOptions(num_threads=1, quantization="int8"))


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_5", {}), ("granitemoehybrid", {"num_local_experts": 0})]
)
def test_int8_at_load_rounds_the_projections_of_layers_with_states_too(family, changes, tmp_path):
    make_checkpoint(family, tmp_path, **changes)
    full = load_model(tmp_path, NATIVE)
    if not full.ops.is_batch_invariant:
        pytest.skip("this machine has no native kernels")
    quantized = load_model(tmp_path, replace(NATIVE, quantization="int8"))

    def round_rows(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if ".layers." in name and weight.ndim == 2:
                scales = weight.abs().amax(dim=1, keepdim=True) / 127
                weights[name] = (weight / scales).round() * scales

    change_weights(tmp_path, round_rows)
    rounded = load_model(tmp_path, NATIVE)
    token_ids = some_tokens()
    expected, found, exact = (
        logits_in_chunks(model, token_ids, [38, 39, NUM_TOKENS]) for model in (rounded, quantized, full)
    )
    assert (found - expected).abs().max() < 1e-3
    assert (exact - expected).abs().max() > 1e-2


def test_a_context_that_yarn_extends_counts_whole(tmp_path):
    make_checkpoint("llama", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_POSITION,
    }
    (tmp_path / "config.json").write_text(json.dumps({**content, "rope_parameters": rope}))
    assert load_model(tmp_path, NATIVE).facts.max_position == 4 * MAX_POSITION


def test_a_quantized_table_is_packed_once_for_a_tied_head(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    token_ids, models = some_tokens(), []
    for is_tied in (True, False):
        source, full = tmp_path / f"{is_tied}", tmp_path / f"{is_tied} in full"
        config = make_checkpoint("llama", source, tie_word_embeddings=is_tied).config
        path = source / "model.gguf"
        write_model(source, config, path, full, lambda name: GGMLQuantizationType.Q8_0)
        ours, plain = (
            load_model(folder, replace(NATIVE, dtype="float32")) for folder in (open_as_folder(path), full)
        )
        assert (ours.model.embed(token_ids) - plain.model.embed(token_ids)).abs().max() < 1e-6
        assert ours.facts.num_parameters == plain.facts.num_parameters
        models.append(ours.model)
    if "int8" not in ours.ops.activations:
        pytest.skip("only the native kernels keep quantized weights")
    tied, untied = models
    width = config.hidden_size
    # Of codes, with a scale of two bytes for 32 of them, in panels of 16 or 32 rows.
    least, most = (num_rows * (width + width // 32 * 2) for num_rows in (VOCAB_SIZE, VOCAB_SIZE + 31))
    assert least <= untied.num_bytes - tied.num_bytes <= most + 256
