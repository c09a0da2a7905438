"""The first forwards of a model: learn what its layers keep of a token, refuse it if it would run wrongly.

A model that computes attention by itself only logs a warning when it is told to use the interface, and then
runs on wrong numbers. So calls are counted, their arguments checked, logits compared with the model's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import KVShape
from engine_svc.model.transformers_model import AttentionCall, TransformersModel
from triptych_kernels import AttentionBatch

# Two sequences in one forward and one of them in two pieces, as (row, first token, end): a model in which one
# sees the other, or which numbers tokens by their place in the batch, is noticed.
_SAMPLE_LENGTHS = (7, 4)
_STEPS = (((0, 0, 4), (1, 0, 4)), ((0, 4, 7),))
_BLOCK_SIZE = 8
_KNOWN_TENSORS = frozenset({"position_ids"})
# In half precision two right ways to compute differ by a few percent, and a router may pick another expert.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


@torch.inference_mode()
def warm_up(model: TransformersModel) -> tuple[KVShape, ...]:
    """Bind the model's attention to the paged cache. Returns what each attention layer keeps, in order.

    Raises UnsupportedModel, by name and reason, for a model that cannot run over a paged cache.
    """
    config = model.module.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    samples = [
        torch.randint(0, config.vocab_size, (length,), generator=generator) for length in _SAMPLE_LENGTHS
    ]
    expected = [model.module(input_ids=sample[None], use_cache=False).logits[0] for sample in samples]
    model.take_over_attention()
    calls: list[AttentionCall] = []

    def look(call: AttentionCall) -> Tensor:
        _check_call(model.name, call)
        calls.append(call)
        share = call.query.shape[1] // call.key.shape[1]
        keys, values = call.key.repeat_interleave(share, 1), call.value.repeat_interleave(share, 1)
        return F.scaled_dot_product_attention(call.query, keys, values, is_causal=True).transpose(1, 2)

    model.forward_with(look, samples[0])
    if len(calls) != config.num_hidden_layers:
        raise UnsupportedModel(
            f"{model.name} has {config.num_hidden_layers} layers, but called the attention interface "
            f"{len(calls)} times: it computes attention, or a state in its place, in a way of its own"
        )
    _check_windows(model.name, getattr(config, "layer_types", None), calls)
    shapes = tuple(KVShape(call.key.shape[1], call.key.shape[3], call.value.shape[3]) for call in calls)
    _compare_logits(model, shapes, samples, expected)
    return shapes


def _check_call(name: str, call: AttentionCall) -> None:
    if call.mask is not None:
        raise UnsupportedModel(f"{name} adds a mask of its own to attention")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise UnsupportedModel(f"{name} lets tokens see later ones: it is no decoder")
    if call.key.shape[2] != call.query.shape[2]:
        raise UnsupportedModel(
            f"{name} attends to {call.key.shape[2]} keys from {call.query.shape[2]} tokens"
        )
    tensors = {option for option, value in call.others.items() if isinstance(value, Tensor)}
    unknown = sorted(tensors - _KNOWN_TENSORS)
    if unknown:
        raise UnsupportedModel(f"{name} passes {', '.join(unknown)} to attention, which is not known here")


def _check_windows(name: str, layer_types: list[str] | None, calls: list[AttentionCall]) -> None:
    for layer, (kind, call) in enumerate(zip(layer_types or (), calls, strict=False)):
        if kind == "sliding_attention" and call.window is None:
            raise UnsupportedModel(f"{name} does not tell attention the sliding window of layer {layer}")


def _compare_logits(
    model: TransformersModel, shapes: tuple[KVShape, ...], samples: list[Tensor], expected: list[Tensor]
) -> None:
    def cache(num_heads: int, dim: int) -> Tensor:
        return torch.zeros(num_heads, len(samples), _BLOCK_SIZE, dim, dtype=model.module.dtype)

    key_caches = [cache(shape.num_kv_heads, shape.key_dim) for shape in shapes]
    value_caches = [cache(shape.num_kv_heads, shape.value_dim) for shape in shapes]
    differences: list[Tensor] = []
    for chunks in _STEPS:
        row_of_token = torch.cat([torch.full((end - start,), row) for row, start, end in chunks])
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        context = ForwardContext(
            slot_mapping=row_of_token * _BLOCK_SIZE + positions,
            attention=AttentionBatch(
                block_tables=torch.tensor([[row] for row, _, _ in chunks]),
                query_lengths=torch.tensor([end - start for _, start, end in chunks]),
                total_lengths=torch.tensor([end for _, _, end in chunks]),
                block_size=_BLOCK_SIZE,
            ),
            key_caches=key_caches,
            value_caches=value_caches,
        )
        token_ids = torch.cat([samples[row][start:end] for row, start, end in chunks])
        ours = model.forward(token_ids, positions, torch.arange(token_ids.shape[0]), context).float()
        theirs = torch.cat([expected[row][start:end] for row, start, end in chunks]).float()
        differences.append((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6))
    # The median token of the worst step: one that a router sent elsewhere must not condemn the model.
    worst = max(float(difference.median()) for difference in differences)
    if not worst <= _TOLERANCE[expected[0].dtype]:
        raise UnsupportedModel(
            f"{model.name} yields other logits over the paged cache than alone: they differ by {worst:.1%}"
        )
