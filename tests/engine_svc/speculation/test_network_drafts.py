"""Drafts of networks: a model of its own, MTP and EAGLE-3 heads. The same answers, and right predictions."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import LoadOptions, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.runner.sampling.transfer import Ints
from engine_svc.speculation.head_weights import load_eagle_head, load_mtp_head
from engine_svc.speculation.heads import MtpHead
from engine_svc.speculation.network import ModelNetwork, NetworkProposer
from engine_svc.speculation.row_cache import RowCache
from tests.acceptance.rig import draft_checkpoints
from tests.acceptance.rig.draft_checkpoints import make_draft_checkpoints
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.engine_svc.runner.conftest import TinyModel
from tests.engine_svc.speculation.test_drafting import NUM_DRAFTS, OPTIONS, Answers, serve

FAMILIES = ["llama", "gemma3"]
HOW = {
    "one step": {"depth": 1},
    "two steps, preempted": {"depth": 2, "num_blocks": 30, "max_num_batched_tokens": 20},
}
# What does not change the logits that tokens are chosen from.
PLAIN = {name: OPTIONS[name] for name in ("greedy", "drawn", "truncated", "logprobs", "long")}


class Made:
    """A tiny model with checkpoints that propose for it, trained on its answers."""

    def __init__(self, family: str, folder: Path, num_steps: int) -> None:
        make_checkpoint(family, folder / "model")
        loaded = load_model(folder / "model", LoadOptions(num_threads=1, model_impl="native"))
        self.folder = folder
        self.model = TinyModel(AutoModelForCausalLM.from_pretrained(folder / "model"), loaded)
        self.answers = serve(self.model, OPTIONS)
        make_draft_checkpoints(folder / "model", list(self.answers.texts.values()), folder, num_steps)

    def proposer(self, method: str, *, window: int = 256, max_tokens: int = 64) -> NetworkProposer:
        facts = self.model.ours.facts

        def make(target: NativeDecoder, checkpoint: Checkpoint) -> object:
            if method == "mtp":
                return load_mtp_head(Checkpoint(self.folder / "mtp"), target, facts)
            if method == "eagle":
                return load_eagle_head(self.folder / "eagle", target, facts)
            folder = self.folder / ("model" if method == "itself" else "draft")
            draft = load_model(folder, LoadOptions(num_threads=1))
            return ModelNetwork(draft.model, draft.facts)

        return NetworkProposer(
            make,
            self.model.ours.model,
            Checkpoint(self.folder / "model"),
            num_rows=8,
            num_drafts=NUM_DRAFTS,
            vocab_size=facts.vocab_size,
            window=window,
            max_tokens=max_tokens,
            device=torch.device("cpu"),
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    @functools.cache
    def make(family: str, num_steps: int = 40) -> Made:
        return Made(family, tmp_path_factory.mktemp(family), num_steps)

    return make


def assert_equal(found: Answers, expected: Answers) -> None:
    assert found.texts == expected.texts
    assert found.ends() == expected.ends()
    assert found.logprobs == expected.logprobs


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", ["draft", "eagle", "mtp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_networks_change_no_answer_and_are_right_at_times(made, family, method, how):
    model = made(family)
    found = serve(model.model, OPTIONS, model.proposer(method), **HOW[how])
    assert_equal(found, model.answers)
    assert 0 < found.num_accepted < found.num_drafts
    assert (found.num_preemptions > 0) == ("num_blocks" in HOW[how])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("options", [{}, {"window": 128, "max_tokens": 24}], ids=["whole", "in chunks"])
def test_a_draft_model_that_is_the_model_itself_is_always_right(made, how, options):
    model = made("llama")
    expected = serve(model.model, PLAIN)
    found = serve(model.model, PLAIN, model.proposer("itself", **options), **HOW[how])
    assert_equal(found, expected)
    # Drafts behind a request's end do not count.
    assert found.num_accepted > found.num_drafts - NUM_DRAFTS * len(PLAIN)


def test_a_window_keeps_the_first_tokens_and_the_newest(made):
    model = made("llama")
    texts = {"long": {"temperature": 1.0, "max_tokens": 120}}
    expected = serve(model.model, texts)
    found = serve(model.model, texts, model.proposer("itself", window=64))
    assert found.texts == expected.texts
    # Tokens are left out of some texts' middle only, and nothing else is wrong.
    assert found.num_drafts / 4 < found.num_accepted < found.num_drafts


@pytest.mark.parametrize("method", ["eagle", "mtp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_compute_what_they_compute_in_training(made, monkeypatch, family, method):
    model = made(family)
    proposer = model.proposer(method)
    seen: dict[int, Tensor] = {}
    inner = proposer.propose

    def propose(token_ids: Ints, rows: Ints, lengths: Ints, limits: Ints, draw: Callable) -> object:
        def record(logits: Tensor, some: Ints, positions: Ints) -> Tensor:
            if positions.tolist() == lengths.tolist():
                seen[int(positions[0])] = logits[0].clone()
            return draw(logits, some, positions)

        return inner(token_ids, rows, lengths, limits, record)

    monkeypatch.setattr(proposer, "propose", propose)
    text = serve(model.model, {"greedy": {"max_tokens": 40}}, proposer).texts["greedy"]
    expected = (eagle_logits if method == "eagle" else mtp_logits)(model.folder, torch.tensor([text]))
    assert len(seen) > 8
    for position, logits in seen.items():
        torch.testing.assert_close(logits, expected[position - 2], rtol=1e-3, atol=1e-3)


def seen_by(folder: Path, ids: Tensor) -> tuple[PreTrainedModel, Sequence[Tensor], Tensor]:
    """The target as transformers loads it, its hidden states before each layer, and the last ones."""
    target = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with torch.no_grad():
        found = target.model(ids, output_hidden_states=True)
    return target, found.hidden_states, found.last_hidden_state


@torch.no_grad()
def eagle_logits(folder: Path, ids: Tensor) -> Tensor:
    """[T - 1, V], of the token two after each, by the head as it is trained."""
    target, states, _ = seen_by(folder, ids)
    content = json.loads((folder / "eagle" / "config.json").read_text())
    tensors = load_file(folder / "eagle" / "model.safetensors")
    known = tensors.pop("d2t") + torch.arange(content["draft_vocab_size"])
    size, num_heads = content["hidden_size"], content["num_attention_heads"]
    layers = content["eagle_aux_hidden_state_layer_ids"]
    head = draft_checkpoints._EagleHead(size, len(layers), len(known), num_heads, content["rms_norm_eps"])
    head.load_state_dict(tensors)
    hidden = head.fc(torch.cat([states[index] for index in layers], dim=-1)[:, :-1])
    rotate = draft_checkpoints._rotation(ids.shape[1] - 1, content["head_dim"], content["rope_theta"])
    hidden = head.step(target.get_input_embeddings()(ids[:, 1:]), hidden, rotate)
    some = head.lm_head(head.norm(hidden))[0]
    return torch.full((len(some), target.config.vocab_size), float("-inf")).index_copy(1, known, some)


@torch.no_grad()
def mtp_logits(folder: Path, ids: Tensor) -> Tensor:
    target, _, last = seen_by(folder, ids)
    tensors = load_file(folder / "mtp" / "model-2.safetensors")
    prefix = f"model.layers.{target.config.num_hidden_layers}."
    offset = 1.0 if target.config.model_type == "gemma3_text" else 0.0
    head = draft_checkpoints._MtpHead(target.config.hidden_size, target.config.rms_norm_eps)
    head.eh_proj.weight.copy_(tensors[f"{prefix}eh_proj.weight"])
    for norm, name in ((head.enorm, "enorm"), (head.hnorm, "hnorm"), (head.norm, "shared_head.norm")):
        norm.weight.copy_(tensors[f"{prefix}{name}.weight"] + offset)
    return target.get_output_embeddings()(head(target, ids, last))[0]


def test_weights_and_memory_come_back_after_sleep_and_a_reload(made):
    model = made("llama")
    proposer = model.proposer("mtp")
    target, checkpoint = model.model.ours.model, Checkpoint(model.folder / "model")
    proposer.detach()
    proposer.release_cache()
    assert proposer.hidden_layers is None
    proposer.attach(target, checkpoint)
    for _ in range(2):
        proposer.allocate_cache()
    found = serve(model.model, OPTIONS, proposer)
    assert_equal(found, model.answers)
    assert found.num_accepted > 0


def test_without_weights_nothing_is_proposed(made):
    model = made("llama")
    proposer = model.proposer("mtp")
    proposer.detach()
    found = serve(model.model, OPTIONS, proposer)
    assert_equal(found, model.answers)
    assert found.num_drafts == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": "a"}, "config.json cannot be read"),
        ({"num_attention_heads": 0}, "config.json cannot be read"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "config.json cannot be read"),
        ({"rope_theta": None}, "config.json cannot be read"),
        ({"dtype": "zz"}, "config.json cannot be read"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "have to ascend below"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 9]}, "have to ascend below"),
        ({"draft_vocab_size": 3}, "draft_vocab_size is 3"),
        ({"num_hidden_layers": 2}, "has to be a llama with 1"),
    ],
)
def test_a_wrong_eagle_head_is_refused_with_the_reason(tmp_path, made, changes, says):
    model = made("llama")
    for path in (model.folder / "eagle").iterdir():
        (tmp_path / path.name).symlink_to(path.resolve())
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises((CheckpointError, UnsupportedModel), match=says):
        load_eagle_head(tmp_path, model.model.ours.model, model.model.ours.facts)


def test_an_eagle_head_with_too_few_embeddings_is_refused(tmp_path, made):
    model = made("llama")
    content = json.loads((model.folder / "eagle" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": 100}))
    tensors = load_file(model.folder / "eagle" / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.zeros(100, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has 100 tokens, the model 160"):
        load_eagle_head(tmp_path, model.model.ours.model, model.model.ours.facts)


def test_a_mimo_is_a_qwen2_with_a_head_of_another_layout(tmp_path, made):
    plain = made("qwen2", num_steps=1)
    folder = tmp_path / "mimo"
    folder.mkdir()
    config = json.loads((plain.folder / "model" / "config.json").read_text())
    published = {name: config[name] for name in PUBLISHED_OF_MIMO}
    more = {"model_type": "mimo", "use_mrope": False, "num_nextn_predict_layers": 1, "auto_map": {}}
    (folder / "config.json").write_text(json.dumps({**published, **more, "rope_theta": 10000.0}))
    tensors = load_file(plain.folder / "model" / "model.safetensors")
    for name, tensor in load_file(plain.folder / "mtp" / "model-2.safetensors").items():
        part = name.removeprefix("model.layers.2.")
        if part == "eh_proj.weight":
            # The hidden state comes first.
            tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
        tensors["model.mtp_layers.0." + NAMES_OF_MIMO.get(part, part)] = tensor
    save_file(tensors, folder / "model.safetensors")
    loaded = load_model(folder, LoadOptions(num_threads=1))
    assert (loaded.implementation, loaded.facts.architecture) == ("native", "MiMoForCausalLM")
    head = load_mtp_head(Checkpoint(folder), loaded.model, loaded.facts)
    other = load_mtp_head(Checkpoint(plain.folder / "mtp"), loaded.model, loaded.facts)
    ids, positions = torch.arange(3, 10), torch.arange(7)
    hidden = torch.randn(7, head.hidden_size)
    found = [
        each.forward(ids, positions, hidden, positions, cache.context(np.array([0]), np.array([7])))
        for each, cache in ((one, row_cache(one)) for one in (head, other))
    ]
    torch.testing.assert_close(found[0][0], found[1][0])
    # What the next prediction reads is normed in this layout alone.
    assert (found[0][1] - found[1][1]).abs().max() > 0.01


PUBLISHED_OF_MIMO = (
    "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
    "use_sliding_window",
)  # fmt: skip
NAMES_OF_MIMO = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}


def row_cache(head: MtpHead) -> RowCache:
    return RowCache(head.kv_shapes, head.dtype, 1, 64, torch.device("cpu"))


def test_a_checkpoint_without_an_mtp_head_is_refused(made):
    model = made("llama")
    target, facts = model.model.ours.model, model.model.ours.facts
    with pytest.raises(CheckpointError, match="has no MTP head"):
        load_mtp_head(Checkpoint(model.folder / "model"), target, facts)
