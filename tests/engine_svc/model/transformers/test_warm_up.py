"""The warm-up refuses models whose attention would not be ours, or not be right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import KVShape
from engine_svc.model.transformers.model import TransformersModel
from engine_svc.model.transformers.warm_up import warm_up
from tests.engine_svc.model.checkpoints import make_checkpoint
from triptych_kernels import REFERENCE


@pytest.fixture
def llama(tmp_path) -> PreTrainedModel:
    return make_checkpoint("llama", tmp_path)


def warmed_up(module: PreTrainedModel) -> tuple[KVShape, ...]:
    return warm_up(TransformersModel(module, REFERENCE)).kv_shapes


def test_shapes_of_every_layer_are_learnt(llama):
    assert warmed_up(llama) == (KVShape(2, 8, 8), KVShape(2, 8, 8))


def test_keys_and_values_of_different_size_are_learnt(tmp_path):
    assert warmed_up(make_checkpoint("deepseek_v3", tmp_path))[0] == KVShape(4, 16, 8)


@pytest.mark.parametrize("window", [3, 11, 40, 100])
def test_windows_are_learnt_however_much_longer_than_the_sample(llama, window):
    llama.config.sliding_window = window
    llama.config.layer_types = ["sliding_attention"] * 2
    llama.model.forward = _with_mask(llama.model, create_sliding_window_causal_mask)
    assert [shape.window for shape in warmed_up(llama)] == [window, window]


def _with_mask(
    model: nn.Module, make: Callable[..., torch.Tensor | None], **wishes: object
) -> Callable[..., object]:
    """The forward of a Llama with this mask, of which its attention layers say nothing."""
    forward = model.forward

    def masked(input_ids=None, inputs_embeds=None, **options):
        embeddings = model.embed_tokens(input_ids)
        options["attention_mask"] = make(
            config=model.config, inputs_embeds=embeddings, attention_mask=None, past_key_values=None, **wishes
        )
        return forward(inputs_embeds=embeddings, **options)

    return masked


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


class Remembering(nn.Module):
    """A feed-forward network that mixes a token with the one before it in the step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1))


class Broken(nn.Module):
    """A layer that is not made for being called like this."""

    def forward(self, hidden_states, **_):
        raise KeyError("past_key_values")


def test_a_layer_that_does_not_ask_for_attention_is_counted(llama):
    llama.model.layers[1].self_attn = OwnAttention()
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM has 2 layers, but called .* 1 times"):
        warmed_up(llama)


def test_a_model_that_ignores_positions_is_noticed_by_its_logits(llama):
    llama.model.rotary_emb = Shifted(llama.model.rotary_emb)
    with pytest.raises(UnsupportedModel, match="yields other logits over the paged cache"):
        warmed_up(llama)


def test_a_model_that_carries_something_from_token_to_token_is_noticed_by_its_logits(llama):
    llama.model.layers[1].mlp = Remembering(llama.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="yields other logits over the paged cache"):
        warmed_up(llama)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_carried_is_noticed_in_half_precision_too(llama, dtype):
    llama.model.layers[1].mlp = Remembering(llama.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="yields other logits over the paged cache"):
        warmed_up(llama.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_router_that_decides_otherwise_in_half_precision_condemns_no_model(tmp_path, dtype):
    assert warmed_up(make_checkpoint("gpt_oss", tmp_path).to(dtype)) == (
        KVShape(2, 8, 8, 9),
        KVShape(2, 8, 8),
    )


def test_attention_that_is_not_causal_is_refused(llama):
    llama.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match="lets tokens see later ones"):
        warmed_up(llama)


def test_a_mask_that_lets_tokens_see_later_ones_is_refused(llama):
    llama.model.forward = _with_mask(
        llama.model, create_causal_mask, or_mask_function=lambda batch, head, query, key: key < 5
    )
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM lets token 0 see other tokens"):
        warmed_up(llama)


def test_a_model_that_forgets_when_it_generates_what_its_attention_sees_is_refused(llama):
    llama.config.sliding_window = 16
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM forgets all but 16 tokens"):
        warmed_up(llama)


def test_a_foreign_error_becomes_a_refusal_with_the_models_name(llama):
    llama.model.layers[0].self_attn = Broken()
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM cannot run .* KeyError: 'past_key_values'"):
        warmed_up(llama)


def test_a_model_that_does_not_say_how_long_sequences_may_be_is_refused(llama):
    llama.config.max_position_embeddings = 0
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM does not say how long"):
        warmed_up(llama)
