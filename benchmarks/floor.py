"""What a decode step costs at least on this machine: its bytes, or its sums, at the measured rate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

_NUM_BYTES = 1 << 28
_MATRIX = 2048
_REPETITIONS = 7


@dataclass(frozen=True, slots=True)
class Rates:
    """What one thread of the machine does."""

    bytes_per_s: float  # read
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like decoder that decide its floor."""

    active_parameters: int  # of one token, the head included and the embedding not
    all_parameters: int  # that a large batch reads
    kv_values_per_token: int
    attention_values: int  # layers x heads x head_dim


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of one model."""

    shape: Shape
    rates: Rates
    dtype: str

    def step_ms(self, num_rows: int, mean_length: float) -> float:
        """Milliseconds of a decode step of so many rows of so many tokens."""
        width = getattr(torch, self.dtype).itemsize
        parameters = min(self.shape.all_parameters, num_rows * self.shape.active_parameters)
        num_bytes = width * (parameters + num_rows * mean_length * self.shape.kv_values_per_token)
        flops = num_rows * (2 * self.shape.active_parameters + 4 * mean_length * self.shape.attention_values)
        return 1e3 * max(num_bytes / self.rates.bytes_per_s, flops / self.rates.flops_per_s)


def read_shape(model: Path) -> Shape:
    """The sizes of the checkpoint in a folder, from its config.json, by whatever names it has for them."""
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    num_experts, chosen = getattr(config, "num_local_experts", 1), getattr(config, "num_experts_per_tok", 1)
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    # GPT-2 and its kin have no gate, and four times the hidden size where nothing else is said.
    network = 3 * hidden * width if width else 2 * hidden * (getattr(config, "n_inner", None) or 4 * hidden)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    head = hidden * config.vocab_size
    return Shape(
        active_parameters=layers * (attention + chosen * network) + head,
        all_parameters=layers * (attention + num_experts * network) + head,
        kv_values_per_token=2 * layers * kv_heads * head_dim,
        attention_values=layers * heads * head_dim,
    )


def measure_rates(dtype: str) -> Rates:
    """The best of some repetitions, with one thread."""
    torch.set_num_threads(1)
    source = torch.ones(_NUM_BYTES // 4)
    # Such a CPU multiplies bf16 by widening it, which torch does number by number.
    product_dtype = "float32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else dtype
    matrix = torch.randn(_MATRIX, _MATRIX).to(getattr(torch, product_dtype))
    # A product with a vector only reads; a copy reads what it overwrites, too.
    rows = source.view(_MATRIX, -1)
    vector = torch.ones(rows.shape[1])
    read_s = _best(lambda: rows @ vector)
    product_s = _best(lambda: matrix @ matrix)
    return Rates(_NUM_BYTES / read_s, 2 * _MATRIX**3 / product_s)


def _best(work: object) -> float:
    times = []
    for _ in range(_REPETITIONS):
        started_at = time.perf_counter()
        work()  # type: ignore[operator]
        times.append(time.perf_counter() - started_at)
    return min(times)
