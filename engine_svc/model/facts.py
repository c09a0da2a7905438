"""Facts of a loaded model for the rest of the engine. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_svc.core.facts import GENERATE


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one attention layer's cache, per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
    # A token sees only those of its own chunk of so many, counted from the sequence's first; None: no chunks.
    chunk: int | None = None

    @property
    def of_memory(self) -> KVShape:
        """Without what a token sees, which takes no memory."""
        return replace(self, window=None, chunk=None)


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a recurrent layer keeps of a sequence, in fp32: the shapes of its parts."""

    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables, because they read the same tokens."""

    window: int | None
    layers: tuple[int, ...]
    chunk: int | None = None


def group_layers(shapes: tuple[KVShape, ...]) -> tuple[LayerGroup, ...]:
    """Group the layers by what a token sees, those in which it sees all first.

    A kind with many more layers than the smallest kind is split.
    Groups share one pool of blocks, and a block has room for as many layers as the largest group has. Groups
    of about equal size waste the least memory.
    """
    if not shapes:
        return ()
    layers_of: dict[tuple[int | None, int | None], list[int]] = {}
    for layer, shape in enumerate(shapes):
        layers_of.setdefault((shape.window, shape.chunk), []).append(layer)
    counts = [len(layers) for layers in layers_of.values()]
    # A small difference in size costs less than one more block table.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    kinds = sorted(layers_of.items(), key=lambda item: [limit or 0 for limit in item[0]])
    return tuple(
        LayerGroup(window, tuple(layers[first : first + size]), chunk)
        for (window, chunk), layers in kinds
        for first in range(0, len(layers), size)
    )


def groups_of_stage(shapes: tuple[KVShape, ...], first: int, end: int) -> tuple[LayerGroup, ...]:
    """The groups of the whole model with only the layers from `first` to `end`, numbered from `first`.

    So all stages have the same block tables, even those in which a group has no layer.
    """
    return tuple(
        replace(group, layers=tuple(layer - first for layer in group.layers if first <= layer < end))
        for group in group_layers(shapes)
    )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model in numbers. Layers are attention layers, in the order in which a forward runs them."""

    architecture: str
    kv_shapes: tuple[KVShape, ...]  # () for a model without KV
    vocab_size: int
    max_position: int  # the longest sequence for which the model is correct
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json together, ascending
    dtype: str  # "float32", "bfloat16" or "float16"
    num_parameters: int  # of the whole model, or of this rank's share
    weights_digest: str  # sha256 over config.json, the safetensors headers, the file sizes and the dtype
    reads_common_blocks: bool = False  # attention uses StepPlan.num_common_blocks
    hidden_size: int = 0  # of the input embeddings; 0 where the model takes none
    state_size: int = 0  # of hidden states that logits are computed from; 0 of a forward that returns none
    tasks: tuple[str, ...] = (GENERATE,)
    # Layers that choose experts, and how many they choose for a token; (0, 0) of a forward that does not say
    # which.
    expert_choices: tuple[int, int] = (0, 0)
    state_shapes: tuple[StateShape, ...] = ()  # of recurrent layers, in the order of a forward
    # Only for a pipeline stage: the groups of the whole model, each with the layers of this stage.
    stage_groups: tuple[LayerGroup, ...] | None = None

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers that share block tables."""
        return group_layers(self.kv_shapes) if self.stage_groups is None else self.stage_groups

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.kv_shapes)
