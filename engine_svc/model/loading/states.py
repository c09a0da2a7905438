"""The states that a model's layers keep, by its config.json and the headers of its weights. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.folder import HeaderEntry

_KINDS_OF_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_KINDS_WITHOUT_MEMORY = frozenset({"mlp", "moe"})
_KINDS_OF_STATES = frozenset({"linear_attention", "mamba", "hybrid"})
_CONV = ".conv1d.weight"
_BYTES = 4  # States are kept in fp32.

# The name of a number in config.json, with the value that transformers takes where the file omits it.
_Field = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Fields:
    """Where a family's config.json has the numbers of a layer with a state.

    A head's state has `size` times `head_dim` values; heads of a group share its inputs of width `size`.
    width: tokens that a channel's convolution reads.  expand: whether `expand` times the model's width is
    divided into the heads.
    """

    num_heads: _Field
    head_dim: _Field
    num_groups: _Field
    size: _Field
    width: _Field
    expand: _Field | None = None


_MAMBA = _Fields(
    ("mamba_n_heads", 128),
    ("mamba_d_head", 0),  # "auto", too
    ("mamba_n_groups", 1),
    ("mamba_d_state", 256),
    ("mamba_d_conv", 4),
    ("mamba_expand", 2),
)
_DELTA = _Fields(
    ("linear_num_value_heads", 32),
    ("linear_value_head_dim", 128),
    ("linear_num_key_heads", 16),
    ("linear_key_head_dim", 128),
    ("linear_conv_kernel_dim", 4),
)
# By model type, of those whose layers with states are served.
_FAMILIES: Mapping[str, _Fields] = {
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "mamba2": _Fields(
        ("num_heads", 128),
        ("head_dim", 64),
        ("n_groups", 8),
        ("state_size", 128),
        ("conv_kernel", 4),
        ("expand", 2),
    ),
    "nemotron_h": _Fields(
        ("mamba_num_heads", 128),
        ("mamba_head_dim", 64),
        ("n_groups", 8),
        ("ssm_state_size", 128),
        ("conv_kernel", 4),
    ),
    "qwen3_5": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
}

# Other types with states, whose config.json may list no kinds of layers.
_NOT_SERVED = frozenset(
    {
        "falcon_mamba", "jamba", "kimi_linear", "mamba", "minimax", "olmo_hybrid", "recurrent_gemma", "rwkv",
        "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip

# Those whose heads tensor-parallel ranks divide.
_DIVIDED = frozenset({"granitemoehybrid", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})


def check_state_ranks(folder: Path, stated: Mapping[str, Any], num_ranks: int) -> None:
    """Raise UnsupportedModel if tensor-parallel ranks cannot divide the layers with states.

    stated: of a model that has such layers.
    """
    model_type = stated["model_type"]
    if num_ranks == 1:
        return
    if model_type not in _DIVIDED:
        raise UnsupportedModel(
            f"--tensor-parallel-size is {num_ranks}, a {model_type}, whose layers keep states, takes 1"
        )
    fields, read = _FAMILIES[model_type], _Reader(folder, stated)
    num_heads, num_groups = read(fields.num_heads), read(fields.num_groups)
    if num_heads % num_ranks:
        raise UnsupportedModel(
            f"--tensor-parallel-size {num_ranks} does not divide {fields.num_heads[0]}, {num_heads}"
        )
    if num_groups % num_ranks and num_ranks % num_groups:
        raise UnsupportedModel(
            f"--tensor-parallel-size {num_ranks} neither divides {fields.num_groups[0]}, {num_groups}, nor "
            "is a multiple of it"
        )


def stated_state_bytes(folder: Path, stated: Mapping[str, Any], entries: Iterable[HeaderEntry]) -> int:
    """The size of one state of all layers; 0 for a model whose layers keep none.

    stated: see `text_config`.  entries: of all weights.
    Raises UnsupportedModel for kinds of layers that are not served, CheckpointError for numbers that
    contradict each other or the weights.
    """
    model_type = stated.get("model_type")
    fields = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    _check_kinds(folder, stated, has_states=fields is not None)
    convolutions = [entry for entry in entries if entry.name.endswith(_CONV)]
    # Some of these families have checkpoints whose layers all have attention.
    if fields is None or not convolutions:
        return 0
    read = _Reader(folder, stated)
    num_heads, num_groups = read(fields.num_heads), read(fields.num_groups)
    size, width = read(fields.size), read(fields.width)
    head_dim = read(fields.head_dim, _widest(read, fields, num_heads))
    if num_heads % num_groups:
        raise CheckpointError(
            f"{folder}/config.json: {fields.num_groups[0]} is {num_groups}, which does not divide "
            f"{fields.num_heads[0]}, {num_heads}"
        )
    num_channels = num_heads * head_dim + 2 * num_groups * size
    for entry in convolutions:
        if entry.shape != (num_channels, 1, width):
            raise CheckpointError(
                f"{folder}: {entry.name} has shape {entry.shape}, by config.json {(num_channels, 1, width)}"
            )
    return len(convolutions) * _BYTES * ((width - 1) * num_channels + num_heads * size * head_dim)


def _check_kinds(folder: Path, stated: Mapping[str, Any], *, has_states: bool) -> None:
    name = next((name for name in ("layer_types", "layers_block_type") if stated.get(name)), None)
    kinds = stated[name] if name is not None else []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"{folder}/config.json: {name} is {kinds!r:.80}, expected a list of kinds")
    num_layers = stated.get("num_hidden_layers")
    if kinds and type(num_layers) is int and num_layers != len(kinds):
        raise CheckpointError(
            f"{folder}/config.json: {name} has {len(kinds)} kinds, num_hidden_layers is {num_layers}"
        )
    # DeepSeek V3.2 states the choice of tokens instead of a kind.
    unknown = {"indexed_attention"} if "index_topk" in stated else set()
    unknown |= set(kinds) - _KINDS_OF_ATTENTION - _KINDS_OF_STATES - _KINDS_WITHOUT_MEMORY
    if unknown:
        raise UnsupportedModel(
            f"{folder} has layers of kind {', '.join(sorted(unknown))}, which are not served"
        )
    states = sorted(_KINDS_OF_STATES.intersection(kinds))
    if states and not has_states:
        raise UnsupportedModel(
            f"{folder} has layers of kind {', '.join(states)}, whose states are not served for model type "
            f"{stated.get('model_type')}"
        )
    if stated.get("model_type") in _NOT_SERVED:
        raise UnsupportedModel(f"{folder} is a {stated['model_type']}, whose states are not served")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads numbers of a config.json."""

    folder: Path
    stated: Mapping[str, Any]

    def __call__(self, field: _Field, auto: int | None = None) -> int:
        """A number of at least 1.  auto: the value for "auto"."""
        name, default = field
        value = self.stated.get(name, default or "auto")
        if value == "auto" and auto is not None:
            return auto
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.folder}/config.json: {name} is {value!r:.80}, expected at least 1")
        return value


def _widest(read: _Reader, fields: _Fields, num_heads: int) -> int | None:
    """The width of a head where the heads divide a width that is stated apart; None where none is."""
    if fields.expand is None:
        return None
    is_falcon = read.stated.get("model_type") == "falcon_h1"
    if is_falcon and read.stated.get("mamba_d_ssm", 0) is not None:
        name, inner = "mamba_d_ssm", read(("mamba_d_ssm", 1024))
    else:
        expand = read(fields.expand)
        name, inner = f"{fields.expand[0]} times hidden_size", expand * read(("hidden_size", 4096))
    head_dim = read(fields.head_dim, inner // num_heads)
    if num_heads * head_dim != inner:
        raise CheckpointError(
            f"{read.folder}/config.json: {fields.num_heads[0]} is {num_heads}, times heads of {head_dim} it "
            f"is not {name}, {inner}"
        )
    return head_dim
