"""The warm-up refuses models whose attention would not be ours, or not be right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import KVShape
from engine_svc.model.transformers_model import TransformersModel
from engine_svc.model.warm_up import warm_up
from tests.engine_svc.model.checkpoints import make_checkpoint


@pytest.fixture
def llama(tmp_path) -> PreTrainedModel:
    return make_checkpoint("llama", tmp_path)


def test_shapes_of_every_layer_are_learnt(llama):
    assert warm_up(TransformersModel(llama)) == (KVShape(2, 8, 8), KVShape(2, 8, 8))


def test_keys_and_values_of_different_size_are_learnt(tmp_path):
    model = make_checkpoint("deepseek_v3", tmp_path)
    assert warm_up(TransformersModel(model))[0] == KVShape(4, 16, 8)


class OwnAttention(nn.Module):
    """An attention layer that answers by itself."""

    def forward(self, hidden_states, **_):
        return hidden_states, None


class Shifted(nn.Module):
    """A decoder that numbers tokens by their place in the batch, whatever positions it is given."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x, position_ids):
        return self.rotary(x, torch.arange(x.shape[1])[None])


def test_a_layer_that_does_not_ask_for_attention_is_counted(llama):
    llama.model.layers[1].self_attn = OwnAttention()
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM has 2 layers, but called .* 1 times"):
        warm_up(TransformersModel(llama))


def test_a_model_that_ignores_positions_is_noticed_by_its_logits(llama):
    llama.model.rotary_emb = Shifted(llama.model.rotary_emb)
    with pytest.raises(UnsupportedModel, match="yields other logits over the paged cache"):
        warm_up(TransformersModel(llama))


def test_attention_that_is_not_causal_is_refused(llama):
    llama.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match="lets tokens see later ones"):
        warm_up(TransformersModel(llama))


def test_a_sliding_layer_that_does_not_say_its_window_is_refused(llama):
    llama.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModel, match="sliding window of layer 1"):
        warm_up(TransformersModel(llama))
