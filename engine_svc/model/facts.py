"""What the rest of the engine must know about a loaded model. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model in numbers. Layers are attention layers, in the order in which a forward runs them."""

    architecture: str
    kv_shapes: tuple[KVShape, ...]
    vocab_size: int
    max_position: int  # the longest sequence the model is right for
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json together, ascending
    dtype: str  # "float32", "bfloat16" or "float16"
    num_parameters: int
    weights_digest: str  # sha256 over config.json, the safetensors headers, the file sizes and the dtype

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.kv_shapes)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the first layer."""
        return self.kv_shapes[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Key dimension of the first layer."""
        return self.kv_shapes[0].key_dim
