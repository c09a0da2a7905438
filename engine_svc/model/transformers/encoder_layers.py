"""The layers of BERT, RoBERTa, XLM-R and DistilBERT as one op, in place of transformers' modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from triptych_kernels import EncoderLayer, FusedEncoder, LayerNorm, Ops


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a layer's modules."""

    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    up: str
    activation: str
    down: str
    output_norm: str


_BERT = _Names(
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "intermediate.intermediate_act_fn", "output.dense",
    "output.LayerNorm",
)  # fmt: skip
_DISTILBERT = _Names(
    "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm",
    "ffn.lin1", "ffn.activation", "ffn.lin2", "output_layer_norm",
)  # fmt: skip
# Of a class of models, the module with the layers, and the names in them.
_PLACES = {
    "BertModel": ("encoder", _BERT),
    "RobertaModel": ("encoder", _BERT),
    "XLMRobertaModel": ("encoder", _BERT),
    "DistilBertModel": ("transformer", _DISTILBERT),
}


class FusedLayers(nn.Module):
    """In place of the module that runs all layers."""

    def __init__(self, layers: FusedEncoder, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._layers = layers
        # The model, whose method it is, has this module.
        self._attend = weakref.WeakMethod(attend)

    def forward(
        self, hidden_states: Tensor, *_: object, **__: object
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """hidden_states: [1, T, hidden], written."""
        attend = self._attend()
        assert attend is not None, "the model of a running module still exists"
        found = self._layers(hidden_states[0].contiguous(), attend)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=found[None])


def fuse_layers(model: nn.Module, ops: Ops, attend: Callable[[Tensor], Tensor]) -> bool:
    """Replace the layers of `model` if its class, and the ops, allow it; returns whether they do.

    attend: a method, see FusedEncoder; it is not kept alive.
    """
    name, names = _PLACES.get(type(model).__name__, ("", _BERT))
    place = getattr(model, name, None)
    if not isinstance(place, nn.Module):
        return False
    modules = list(place.get_submodule("layer").children())
    if not all(type(module.get_submodule(names.activation)) is GELUActivation for module in modules):
        return False
    layers = ops.fuse_encoder(_layer(module, names, ops) for module in modules)
    if layers is not None:
        setattr(model, name, FusedLayers(layers, attend))
    return layers is not None


def _layer(module: nn.Module, names: _Names, ops: Ops) -> EncoderLayer:
    def project(*parts: str) -> tuple[Tensor, Tensor]:
        linears = [module.get_submodule(part) for part in parts]
        weights, biases = (
            [linear.get_parameter(name).detach() for linear in linears] for name in ("weight", "bias")
        )
        return torch.cat(weights), torch.cat(biases)

    def norm(name: str) -> LayerNorm:
        found = module.get_submodule(name)
        assert isinstance(found, nn.LayerNorm), "as in the classes of _PLACES"
        return LayerNorm(found.weight.detach(), found.bias.detach(), found.eps)

    return EncoderLayer(
        qkv=ops.pack_linear(*project(names.query, names.key, names.value)),
        out=ops.pack_linear(*project(names.out)),
        attention_norm=norm(names.attention_norm),
        up=ops.pack_linear(*project(names.up)),
        down=ops.pack_linear(*project(names.down)),
        output_norm=norm(names.output_norm),
    )
