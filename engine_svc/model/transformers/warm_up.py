"""The first forwards of a model: find out what its layers cache per token, and reject it if it runs wrongly.

A model that computes attention by itself only logs a warning when the attention interface is set, and then
produces wrong numbers. So calls are counted, masks and arguments checked, and logits compared with the
model's own. Windows and chunks are read off the masks, so they are exact at any length. The comparison runs
at most _MAX_SAMPLE tokens, so it does not exercise longer ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from engine_svc.model.context import ForwardContext, HiddenStates, LayerCache
from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import KVShape, StateShape, group_layers
from engine_svc.model.transformers.attention_mask import MaskBook, OddMask, Sight
from engine_svc.model.transformers.model import AttentionCall, TransformersModel
from engine_svc.model.transformers.registry import ATTENTION_KINDS, STATE_KINDS, max_position, stated_kinds
from triptych_kernels import AttentionBatch, StateBatch

_FIRST_SAMPLE = 8
_MIN_SAMPLE, _MAX_SAMPLE = 19, 64
_NUM_SINGLE = 5
_BLOCK_SIZE = 4
_KNOWN_TENSORS = frozenset({"position_ids", "cache_position", "logits_to_keep"})
# In half precision two correct computations differ by a few percent, and a router may pick another expert.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# What a model's code raises when it is not made for being called like this.
_FOREIGN_ERRORS = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, ImportError,
    AssertionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WarmModel:
    """Properties of a model that its first forwards have shown."""

    kv_shapes: tuple[KVShape, ...]  # per attention layer, in order
    state_shapes: tuple[StateShape, ...]  # per layer with a state, in order
    is_batch_invariant: bool  # as the ops are: samples gave the same bits alone, in chunks and together
    state_size: int  # see ModelFacts


@torch.inference_mode()
def warm_up(model: TransformersModel) -> WarmModel:
    """Bind the model's attention to the paged cache.

    Raises UnsupportedModel, with the model's name and the reason, if it cannot run over a paged cache.
    """
    try:
        with model.steep_temperatures():
            return _warm_up(model)
    except UnsupportedModel:
        raise
    except _FOREIGN_ERRORS as error:
        raise UnsupportedModel(
            f"{model.name} cannot run over a paged cache: {type(error).__name__}: {error}"
        ) from error


def _warm_up(model: TransformersModel) -> WarmModel:
    config = model.module.config.get_text_config()
    shapes = _learn_shapes(model, config)
    _check_cache(model.name, config, shapes)
    model.use_eager_attention()
    limit = max_position(config)
    if not limit:
        raise UnsupportedModel(f"{model.name} does not state its maximum sequence length")
    length = _sample_length(shapes, limit)
    samples = [_sample(model, config, length), _sample(model, config, length // 2 + 1)]
    states = HiddenStates(())
    with model.keeping(states):
        expected = [model.logits_alone(sample) for sample in samples]
    state_shapes = _use_states(model, config)
    model.pack_projections(samples[0])
    model.use_paged_attention()
    model.use_shapes(shapes)
    model.use_last_position(limit - 1)
    trial = _Trial(model, shapes, state_shapes, samples)
    difference = _difference(trial, expected, is_exact=model.module.dtype is torch.float32)
    if difference > _TOLERANCE[model.module.dtype]:
        raise UnsupportedModel(
            f"{model.name} computes other logits over the paged cache than alone: "
            f"they differ by {difference:.1%}"
        )
    is_invariant = model.ops.is_batch_invariant and _is_batch_invariant(trial)
    return WarmModel(shapes, state_shapes, is_invariant, _state_size(states.tensors, samples))


def _use_states(model: TransformersModel, config: PreTrainedConfig) -> tuple[StateShape, ...]:
    """Bind the layers with states to those of a step."""
    num_layers = sum(kind in STATE_KINDS for kind in stated_kinds(config))
    if not num_layers:
        return ()
    shapes = model.use_state_slots()
    if len(shapes) != num_layers:
        raise UnsupportedModel(
            f"{model.name} has {num_layers} layers with states, of which {len(shapes)} are known here"
        )
    return shapes


def _state_size(states: Sequence[Tensor], samples: Sequence[Tensor]) -> int:
    """The width of the states that were kept for each token of the samples; 0 where they were not."""
    is_whole = [state.shape[:-1] for state in states] == [sample.shape for sample in samples]
    return states[0].shape[-1] if is_whole else 0


def _sample_length(shapes: Sequence[KVShape], limit: int) -> int:
    """Enough tokens to exceed each window and chunk twice, up to _MAX_SAMPLE."""
    limits = [shape.window or shape.chunk or 0 for shape in shapes]
    wanted = max([_MIN_SAMPLE, *(2 * limit + 6 for limit in limits if limit < _MAX_SAMPLE)])
    return min(wanted, _MAX_SAMPLE, limit)


def _sample(model: TransformersModel, config: PreTrainedConfig, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, config.vocab_size, (length,), generator=generator).to(model.device)


def _learn_shapes(model: TransformersModel, config: PreTrainedConfig) -> tuple[KVShape, ...]:
    """The cache shape of each attention layer, from a forward in which every call is checked."""
    masks = MaskBook()
    shapes: list[KVShape] = []

    def look(call: AttentionCall) -> Tensor:
        _check_call(model, call)
        num_kv_heads, key_dim, value_dim = call.key.shape[1], call.key.shape[3], call.value.shape[3]
        shapes.append(KVShape(num_kv_heads, key_dim, value_dim, *_sight(model.name, masks, call)))
        share = call.query.shape[1] // num_kv_heads
        keys, values = call.key.repeat_interleave(share, 1), call.value.repeat_interleave(share, 1)
        return F.scaled_dot_product_attention(call.query, keys, values, is_causal=True).transpose(1, 2)

    try:
        model.forward_with(look, masks.make_mask, _sample(model, config, _FIRST_SAMPLE))
    except OddMask as odd:
        raise UnsupportedModel(f"{model.name} {odd}") from odd
    kinds = stated_kinds(config)
    num_layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
    if kinds:
        num_layers = sum(kind in ATTENTION_KINDS for kind in kinds)
    # A multiple of the layers: some layers attend more than once.
    if bool(shapes) != bool(num_layers) or (num_layers and len(shapes) % num_layers):
        raise UnsupportedModel(
            f"{model.name} has {num_layers} layers with attention, but called the attention interface "
            f"{len(shapes)} times: it computes attention, or a state instead of it, by itself"
        )
    return tuple(shapes)


def _check_call(model: TransformersModel, call: AttentionCall) -> None:
    name = model.name
    is_causal = getattr(call.module, "is_causal", True) and call.others.get("is_causal") is not False
    # Without a mask, which SDPA allows, transformers reads the layer's attribute. Otherwise the mask decides.
    if not is_causal and (call.mask is None or model.module._supports_sdpa):
        raise UnsupportedModel(f"{name} lets tokens see later ones: it is no decoder")
    if call.key.shape[2] != call.query.shape[2]:
        raise UnsupportedModel(
            f"{name} attends to {call.key.shape[2]} keys from {call.query.shape[2]} tokens"
        )
    tensors = {option for option, value in call.others.items() if isinstance(value, Tensor)}
    unknown = sorted(tensors - _KNOWN_TENSORS)
    if unknown:
        raise UnsupportedModel(f"{name} passes {', '.join(unknown)} to attention, which is not known here")


def _sight(name: str, masks: MaskBook, call: AttentionCall) -> Sight:
    """That of the layer's mask; where the model makes no mask, the window that the layer passes."""
    if call.mask is None:
        return Sight(window=call.window)
    try:
        return masks.sight_of(call.mask)
    except OddMask as odd:
        raise UnsupportedModel(f"{name} {odd}") from odd


def _check_cache(name: str, config: PreTrainedConfig, shapes: tuple[KVShape, ...]) -> None:
    """Reject a model whose own cache drops tokens that its attention sees: its results are ambiguous."""
    kept = [
        getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
        for layer in DynamicCache(config=config).layers
        if isinstance(layer, DynamicLayer)
    ]
    limit = max_position(config)
    for layer, (window, shape) in enumerate(zip(kept, shapes, strict=False)):
        seen = shape.window or shape.chunk
        if window is not None and window < min(seen or limit, limit):
            raise UnsupportedModel(
                f"{name} forgets all but {window} tokens when it generates, "
                f"but layer {layer} sees {seen or 'all'} when it computes a prompt"
            )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a sample that is computed in one forward."""

    row: int
    start: int
    end: int


def _chunk_steps(lengths: Sequence[int]) -> list[list[_Chunk]]:
    """The prompts of two sequences in chunks, alone and together.

    Detects a model in which one sequence sees the other, or which numbers tokens by their index in the batch.
    """
    long, short = lengths
    return [
        [_Chunk(0, 0, long // 3), _Chunk(1, 0, short - 1)],
        [_Chunk(1, short - 1, short), _Chunk(0, long // 3, long - _NUM_SINGLE)],
    ]


def _single_steps(lengths: Sequence[int]) -> list[list[_Chunk]]:
    """The last tokens of the longer sequence, one by one.

    Detects a model that carries state from token to token outside of attention.
    """
    return [[_Chunk(0, end - 1, end)] for end in range(lengths[0] - _NUM_SINGLE + 1, lengths[0] + 1)]


class _Trial:
    """Samples over a paged cache and slots of states of their own, computed in steps of chunks."""

    def __init__(
        self,
        model: TransformersModel,
        shapes: tuple[KVShape, ...],
        state_shapes: tuple[StateShape, ...],
        samples: list[Tensor],
    ) -> None:
        self._model, self._samples = model, samples
        self.lengths = [len(sample) for sample in samples]
        # Chunks are whole blocks.
        self._block_size = math.gcd(_BLOCK_SIZE, *(shape.chunk or 0 for shape in shapes))
        self._num_blocks = -(-max(self.lengths) // self._block_size)  # of each row
        self._layers = _make_layers(model, shapes, self._num_blocks * len(samples), self._block_size)
        self._num_groups = len(group_layers(shapes))
        self._state_layers = [
            tuple(torch.zeros(len(samples), *part, device=model.device) for part in shape.parts)
            for shape in state_shapes
        ]

    def run(self, chunks: list[_Chunk], rows: Tensor) -> Tensor:
        """The logits at these indices of the step."""
        device = self._model.device
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks]).to(device)
        token_ids = torch.cat([self._samples[chunk.row][chunk.start : chunk.end] for chunk in chunks])
        return self._model.forward(token_ids, positions, rows.to(device), self._context(chunks))

    def _context(self, chunks: list[_Chunk]) -> ForwardContext:
        """The step of these chunks. Block b of a row is block b * num_rows + row of the cache."""
        num_rows, device, size = len(self._samples), self._model.device, self._block_size
        tables = torch.stack([torch.arange(self._num_blocks) * num_rows + chunk.row for chunk in chunks])
        slots = []
        for chunk, table in zip(chunks, tables, strict=True):
            positions = torch.arange(chunk.start, chunk.end)
            slots.append(table[positions // size] * size + positions % size)
        counts, totals = [chunk.end - chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
        attention = AttentionBatch.of(tables.to(device), counts, totals, size)
        context = ForwardContext(
            self._layers, [torch.cat(slots).to(device)] * self._num_groups, [attention] * self._num_groups
        )
        if self._state_layers:
            # The slot of a row is its number.
            read_slots = [chunk.row if chunk.start else -1 for chunk in chunks]
            last_slots = [chunk.row for chunk in chunks]
            context.states = StateBatch.of(counts, totals, read_slots, last_slots, device=device)
            context.state_layers = self._state_layers
        return context


def _difference(trial: _Trial, expected: list[Tensor], *, is_exact: bool) -> float:
    """Relative distance of the logits over a paged cache from the expected ones; NaN counts as infinite.

    is_exact: the weights have full precision, whatever the dtype of the logits.
    """

    def run(chunks: list[_Chunk]) -> Tensor:
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        # Every other token, as a step needs logits of only some of its tokens.
        rows = torch.arange((num_tokens + 1) % 2, num_tokens, 2)
        ours = trial.run(chunks, rows)
        theirs = torch.cat([expected[chunk.row][chunk.start : chunk.end] for chunk in chunks])
        theirs = theirs[rows.to(theirs.device)].float()
        difference: Tensor = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
        return difference

    parts = [run(chunks) for chunks in _chunk_steps(trial.lengths)]
    parts.append(torch.cat([run(chunks) for chunks in _single_steps(trial.lengths)]))
    # In half precision a router may send a token elsewhere. One such token is no reason to reject the model.
    worst = torch.stack([part.max() if is_exact else part.median() for part in parts]).max()
    return float(worst.nan_to_num(torch.inf))


def _is_batch_invariant(trial: _Trial) -> bool:
    """Whether the samples' logits have the same bits alone and in other batches and chunks."""
    lengths = trial.lengths
    alone = [trial.run([_Chunk(row, 0, length)], torch.arange(length)) for row, length in enumerate(lengths)]
    for chunks in (*_chunk_steps(lengths), *_single_steps(lengths)):
        start = 0
        logits = trial.run(chunks, torch.arange(sum(chunk.end - chunk.start for chunk in chunks)))
        for chunk in chunks:
            end = start + chunk.end - chunk.start
            if not torch.equal(logits[start:end], alone[chunk.row][chunk.start : chunk.end]):
                return False
            start = end
    return True


def _make_layers(
    model: TransformersModel, shapes: tuple[KVShape, ...], num_blocks: int, block_size: int
) -> list[LayerCache]:
    group_of = {layer: index for index, group in enumerate(group_layers(shapes)) for layer in group.layers}

    def cache(num_heads: int, dim: int) -> Tensor:
        size = (num_blocks, num_heads, block_size, dim)
        return torch.zeros(size, dtype=model.module.dtype, device=model.device)

    return [
        LayerCache(
            group_of[layer],
            cache(shape.num_kv_heads, shape.key_dim),
            cache(shape.num_kv_heads, shape.value_dim),
        )
        for layer, shape in enumerate(shapes)
    ]
