"""Folders that load, and how those that do not are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_svc.model.errors import CheckpointError, ModelError, UnsupportedModel
from engine_svc.model.facts import KVShape
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.model.transformers.packing import PackedProjection
from tests.engine_svc.model.checkpoints import MAX_POSITION, VOCAB_SIZE, make_checkpoint
from triptych_kernels import REFERENCE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def load(folder: Path, *, progress=lambda *event: None, **overrides: object) -> LoadedModel:
    """With the implementation of transformers, unless a test names another."""
    load_options = LoadOptions(**{"num_threads": 1, "model_impl": "transformers", **overrides})
    return load_model(folder, load_options, progress=progress)


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_facts_say_what_the_checkpoint_is(llama):
    facts = load(llama).facts
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.kv_shapes == (KVShape(2, 8, 8), KVShape(2, 8, 8))
    assert facts.num_layers == 2
    assert (facts.vocab_size, facts.max_position) == (VOCAB_SIZE, MAX_POSITION)
    assert facts.dtype == "float32"
    assert facts.eos_token_ids == (2,)
    assert facts.num_parameters == sum(
        tensor.numel() for tensor in load_file(llama / "model.safetensors").values()
    )


def test_progress_counts_the_bytes_of_the_weights(llama):
    seen: list[tuple[str, int, int]] = []
    load(llama, progress=lambda *event: seen.append(event))
    size = (llama / "model.safetensors").stat().st_size
    weights = [event for event in seen if event[0] == "weights"]
    assert weights[0] == ("weights", 0, size)
    assert weights[-1] == ("weights", size, size)
    assert [done for _, done, _ in weights] == sorted(done for _, done, _ in weights)
    assert weights == seen


def test_sharded_weights_load_as_one_file_does(llama, tmp_path):
    make_checkpoint("llama", tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded, single = load(tmp_path), load(llama)
    ids = torch.arange(12)[None]
    assert torch.equal(
        sharded.model.module.model.embed_tokens(ids), single.model.module.model.embed_tokens(ids)
    )
    assert sharded.facts.num_parameters == single.facts.num_parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_requested_dtype_is_used(llama, dtype):
    loaded = load(llama, dtype=dtype)
    assert loaded.facts.dtype == dtype
    assert str(loaded.model.module.dtype) == f"torch.{dtype}"


def test_auto_takes_the_dtype_of_the_weights_where_the_config_is_silent(copy):
    weights = load_file(copy / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    del config["dtype"]
    (copy / "config.json").write_text(json.dumps(config))
    assert load(copy).facts.dtype == "bfloat16"


def test_packing_changes_how_weights_lie_and_not_what_they_compute(llama):
    theirs = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    hidden = []
    for module in (load(llama).model.module, theirs):
        with torch.inference_mode():
            layer = module.model.layers[0]
            hidden.append(layer.mlp(layer.post_attention_layernorm(module.model.embed_tokens(ids))))
        assert (type(layer.mlp.up_proj) is PackedProjection) is (module is not theirs)
    torch.testing.assert_close(hidden[0], hidden[1])


def test_ends_come_from_config_and_generation_config_together(copy):
    change_json(copy / "config.json", eos_token_id=[7, 3])
    change_json(copy / "generation_config.json", eos_token_id=9)
    assert load(copy).facts.eos_token_ids == (3, 7, 9)


def test_end_ids_that_are_no_tokens_are_reported_and_left_out(copy, caplog):
    change_json(copy / "config.json", eos_token_id=[-1, 3, 1_000_000])
    change_json(copy / "generation_config.json", eos_token_id=3)
    assert load(copy).facts.eos_token_ids == (3,)
    assert "eos_token_id is outside the vocabulary" in caplog.text


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "banana", ["float32"]], ids=str)
def test_a_dtype_that_is_none_is_an_error_of_the_config(copy, dtype):
    change_json(copy / "config.json", dtype=dtype)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(copy)


def test_a_rope_without_numbers_is_an_error_of_the_config(copy):
    change_json(copy / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 0.0})
    with pytest.raises(CheckpointError, match="rope cannot be computed"):
        load(copy, model_impl="native")


def test_the_digest_follows_weights_config_and_dtype(copy):
    first = load(copy).facts.weights_digest
    assert load(copy).facts.weights_digest == first
    assert load(copy, dtype="bfloat16").facts.weights_digest != first
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] += 1.0
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    second = load(copy).facts.weights_digest
    assert second != first
    change_json(copy / "config.json", rms_norm_eps=1e-5)
    assert load(copy).facts.weights_digest not in (first, second)


def test_the_warm_up_leaves_no_trace_in_another_model_of_the_process(llama):
    first = load(llama).model
    second = load(llama).model
    names = {first.module.config._attn_implementation, second.module.config._attn_implementation}
    assert len(names) == 2


def test_threads_are_set(llama):
    load(llama, num_threads=2)
    assert torch.get_num_threads() == 2
    load(llama, num_threads=None)
    assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) - 1)
    load(llama)
    assert torch.get_num_threads() == 1


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **options)
    return str(caught.value)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    assert "is not a folder" in refusal(tmp_path / "nothing")


@pytest.mark.parametrize("changes", [{"eos_token_id": "x"}, {"architectures": 3, "unknown": 1}], ids=str)
def test_a_config_that_transformers_refuses_is_refused(copy, changes):
    change_json(copy / "config.json", **changes)
    assert "config.json cannot be read" in refusal(copy, model_impl="auto")


def test_a_folder_without_config_is_refused(copy):
    (copy / "config.json").unlink()
    assert "has no config.json" in refusal(copy)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no-such-model"}'])
def test_a_config_that_cannot_be_read_is_refused(copy, text):
    (copy / "config.json").write_text(text)
    assert "config.json cannot be read" in refusal(copy)


def test_a_config_that_wants_its_own_code_is_refused(copy):
    marker = copy / "was_run"
    (copy / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    change_json(copy / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    assert "config.json cannot be read" in refusal(copy)
    assert not marker.exists()


def test_a_folder_without_weights_is_refused(copy):
    (copy / "model.safetensors").unlink()
    assert "no weights to load" in refusal(copy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "weights.pt"])
def test_pickled_weights_are_refused_unread(copy, name):
    (copy / "model.safetensors").unlink()
    (copy / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = refusal(copy)
    assert name in message
    assert "convert them to safetensors" in message


def test_missing_weights_are_named(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight" in refusal(copy)


def test_weights_of_another_shape_are_named(copy):
    change_json(copy / "config.json", intermediate_size=48)
    message = refusal(copy)
    assert "mlp.up_proj.weight has shape (64, 32), config.json says (48, 32)" in message


def test_a_missing_shard_is_named(tmp_path):
    make_checkpoint("llama", tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "model.bin", 3])
def test_an_index_that_points_elsewhere_is_refused(copy, name):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "model.safetensors.index.json names" in refusal(copy)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(copy, text):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(text)
    assert "is not a weights index" in refusal(copy)


def test_one_file_goes_before_an_index_as_in_transformers(copy):
    digest = load(copy).facts.weights_digest
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    assert load(copy).facts.weights_digest == digest


@pytest.mark.parametrize("values", [{"num_attention_heads": 0}, {"head_dim": -12}], ids=str)
def test_sizes_that_are_none_are_errors_of_the_config(copy, values):
    change_json(copy / "config.json", **values)
    with pytest.raises((CheckpointError, UnsupportedModel)):
        load(copy, model_impl="auto")


def test_a_weight_of_whole_numbers_is_refused_by_name_and_dtype(copy):
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].to(torch.int32)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} has dtype I32"):
        load(copy, model_impl="native")


def test_a_length_that_is_none_is_an_error_of_the_config(copy):
    change_json(copy / "config.json", max_position_embeddings=-1)
    assert "the maximum sequence length is -1" in refusal(copy)


def test_a_truncated_file_is_refused(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors is truncated" in refusal(copy)


def test_a_broken_generation_config_is_refused(copy):
    (copy / "generation_config.json").write_text("{")
    assert "generation_config.json cannot be read" in refusal(copy)


def test_an_unknown_dtype_is_refused(llama):
    assert "choose auto, float32, bfloat16, float16" in refusal(llama, dtype="int3")


@pytest.mark.parametrize(
    ("dtype", "ops"), [("float32", REFERENCE), ("float16", None)], ids=["without kernels", "half precision"]
)
def test_determinism_that_is_asked_for_is_refused_where_it_cannot_be_had(llama, caplog, dtype, ops):
    for is_deterministic in (None, False):
        caplog.clear()
        load_model(llama, LoadOptions(num_threads=1, dtype=dtype, is_deterministic=is_deterministic), ops=ops)
        assert ("may differ by rounding" in caplog.text) is (is_deterministic is None)
    with pytest.raises(UnsupportedModel, match=f"deterministic is on.*{dtype}"):
        load_model(llama, LoadOptions(num_threads=1, dtype=dtype, is_deterministic=True), ops=ops)


def test_quantized_weights_of_a_method_that_is_not_read_are_refused(copy):
    change_json(copy / "config.json", quantization_config={"quant_method": "quark"})
    with pytest.raises(UnsupportedModel, match="weights quantized with quark are not read"):
        load(copy)


def test_a_rope_that_depends_on_the_batch_limits_the_length(copy):
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 96,
    }
    change_json(copy / "config.json", rope_parameters=rope)
    assert load(copy).facts.max_position == 96


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 0.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mixtral", {"head_dim": None, "rope_parameters": _YARN}, "NoneType"),
        ("llama", {"rope_parameters": {**_YARN, "rope_type": "linear", "factor": "x"}}, "'str'"),
        ("llama", {"rope_parameters": _LLAMA3}, "division by zero"),
    ],
)
def test_a_rope_that_cannot_be_computed_is_refused(family, changes, reason, model_impl, tmp_path):
    make_checkpoint(family, tmp_path)
    change_json(tmp_path / "config.json", **changes)
    assert reason in refusal(tmp_path, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_more_positions_than_an_integer_holds_are_refused(copy, model_impl):
    change_json(copy / "config.json", max_position_embeddings=10**25)
    with pytest.raises(ModelError, match="int too big"):
        load(copy, model_impl=model_impl)
