"""The warm-up refuses models whose attention would not be ours, or not be right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import KVShape
from engine_svc.model.transformers.attention_mask import MaskBook, OddMask, Sight
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


@pytest.mark.parametrize("family", ["llama", "bart", "opt"])
def test_the_width_of_the_states_that_the_decoder_returns_is_learnt(tmp_path, family):
    model = TransformersModel(make_checkpoint(family, tmp_path), REFERENCE)
    assert warm_up(model).state_size == 32


def test_a_model_whose_decoder_returns_no_states_has_none(llama):
    # The decoder that returns them is then not found.
    llama.base_model_prefix = ""
    assert warm_up(TransformersModel(llama, REFERENCE)).state_size == 0


@pytest.mark.parametrize("window", [3, 11, 40, 100])
def test_windows_are_learnt_however_much_longer_than_the_sample(llama, window):
    llama.config.sliding_window = window
    llama.config.layer_types = ["sliding_attention"] * 2
    llama.model.forward = _with_mask(llama.model, create_sliding_window_causal_mask)
    assert [shape.window for shape in warmed_up(llama)] == [window, window]


def _with_mask(
    model: nn.Module, make: Callable[..., torch.Tensor | None], **arguments: object
) -> Callable[..., object]:
    """The forward of a Llama with this mask, of which its attention layers say nothing."""
    forward = model.forward

    def masked(input_ids=None, inputs_embeds=None, **options):
        embeddings = model.embed_tokens(input_ids)
        options["attention_mask"] = make(
            config=model.config,
            inputs_embeds=embeddings,
            attention_mask=None,
            past_key_values=None,
            **arguments,
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
    with pytest.raises(
        UnsupportedModel, match=r"LlamaForCausalLM has 2 layers with attention, but called .* 1 times"
    ):
        warmed_up(llama)


def test_a_layer_with_a_state_whose_mixer_is_not_known_is_counted(llama):
    llama.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="has 1 layers with states, of which 0 are known"):
        warmed_up(llama)


def test_a_model_that_ignores_positions_is_noticed_by_its_logits(llama):
    llama.model.rotary_emb = Shifted(llama.model.rotary_emb)
    with pytest.raises(UnsupportedModel, match="computes other logits over the paged cache"):
        warmed_up(llama)


def test_a_model_that_carries_something_from_token_to_token_is_noticed_by_its_logits(llama):
    llama.model.layers[1].mlp = Remembering(llama.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="computes other logits over the paged cache"):
        warmed_up(llama)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_carried_is_noticed_in_half_precision_too(llama, dtype):
    llama.model.layers[1].mlp = Remembering(llama.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="computes other logits over the paged cache"):
        warmed_up(llama.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_router_that_decides_otherwise_in_half_precision_condemns_no_model(tmp_path, dtype):
    assert warmed_up(make_checkpoint("gpt_oss", tmp_path).to(dtype)) == (
        KVShape(2, 8, 8, 9),
        KVShape(2, 8, 8),
    )


def test_logits_of_a_wider_dtype_than_the_weights_are_compared_as_the_weights_allow(tmp_path):
    model = TransformersModel(make_checkpoint("mamba2", tmp_path).to(torch.bfloat16), REFERENCE)
    assert len(warm_up(model).state_shapes) == 2


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


def test_temperatures_that_do_not_follow_positions_are_refused(tmp_path):
    module = make_checkpoint("llama4", tmp_path, floor_scale=8192)
    layer = module.model.layers[1].self_attn
    forward = layer.forward
    # Without a cache a layer counts from the first token of the step.
    layer.forward = lambda *_, **options: forward(**{**options, "past_key_values": None})
    with pytest.raises(UnsupportedModel, match="Llama4ForCausalLM computes other logits"):
        warmed_up(module)
    layer.forward = forward
    assert [shape.chunk for shape in warmed_up(module)] == [12, None]
    assert layer.floor_scale == 8192


def test_a_foreign_error_becomes_a_refusal_with_the_models_name(llama):
    llama.model.layers[0].self_attn = Broken()
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM cannot run .* KeyError: 'past_key_values'"):
        warmed_up(llama)


def test_a_model_that_does_not_say_how_long_sequences_may_be_is_refused(llama):
    llama.config.max_position_embeddings = 0
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM does not state its maximum"):
        warmed_up(llama)


# Windows are read off masks exactly, and a mask that is neither causal nor a window is noticed.

LENGTH = 8


def sight_of(function, **options: object) -> Sight:
    book = MaskBook()
    # A layer gets the one mask out of several, or a slice of it.
    book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=causal_mask_function)
    mask = book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=function, **options)
    book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=sliding_window_causal_mask_function(2))
    return book.sight_of(mask[:, :, :, :LENGTH])


def window_of(function, **options: object) -> int | None:
    window, chunk = sight_of(function, **options)
    assert chunk is None
    return window


def test_a_causal_mask_has_no_window():
    assert window_of(causal_mask_function) is None


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 4096, 131_072])
def test_a_window_is_found_however_much_longer_than_the_sample(window):
    assert window_of(sliding_window_causal_mask_function(window)) == window


def chunks_of(size: int) -> Callable[..., torch.Tensor]:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("chunk", [2, 9, 8191, 8192])
def test_chunks_are_found_however_much_longer_than_the_sample(chunk):
    assert sight_of(chunks_of(chunk)) == (None, chunk)


@pytest.mark.parametrize(
    "function",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(4),
        chunked_causal_mask_function(4, torch.tensor([1])),
        and_masks(chunks_of(8192), sliding_window_causal_mask_function(4096)),
        and_masks(chunks_of(12), lambda batch, head, query, key: query != 12),
        or_masks(causal_mask_function, lambda batch, head, query, key: key < 5),
        or_masks(sliding_window_causal_mask_function(4), lambda batch, head, query, key: key == 0),
    ],
    ids=[
        "both ways",
        "window both ways",
        "late chunks",
        "windows in chunks",
        "a blind token",
        "prefix",
        "anchored window",
    ],
)
def test_what_is_neither_causal_nor_a_window_nor_chunks_is_refused(function):
    with pytest.raises(OddMask, match="see other tokens"):
        sight_of(function)


def test_a_mask_that_was_not_asked_for_here_is_refused():
    book = MaskBook()
    book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=causal_mask_function)
    with pytest.raises(OddMask, match="a mask of its own"):
        book.sight_of(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril())


def looked_up(function, is_image: list[bool]):
    """The function, where a table of the sample's places says more of them."""
    table = torch.tensor(is_image)
    return lambda batch, head, query, key: function(batch, head, query, key) | (table[query] & table[key])


@pytest.mark.parametrize("window", [None, 3, 4096])
def test_a_mask_that_looks_places_up_is_judged_by_the_sample_and_its_named_window(window):
    plain = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    assert window_of(looked_up(plain, [False] * LENGTH), local_size=window) == window


def test_a_mask_that_looks_up_places_that_see_each_other_is_refused():
    with pytest.raises(OddMask, match="see other tokens"):
        window_of(looked_up(causal_mask_function, [True] * LENGTH))


def test_a_mask_that_cannot_be_asked_is_refused():
    with pytest.raises(OddMask, match="cannot be evaluated"):
        window_of(lambda batch, head, query, key: torch.ones(3, 5) @ torch.ones(3, 5))
