"""An 8B-shaped decoder with random weights on one GPU, against what its memory and its units allow.

    make bench-gpu
    python -m benchmarks gpu --json gpu.json

Decode steps run through the real runner: recorded graphs, sampling, two steps in flight. Their floor is the
time to read the weights or to multiply by them, whichever is longer, and to read the KV, at the rates of a
large copy and a large product measured in the same run. Prompts run through the same runner, one at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
from transformers import LlamaConfig

from benchmarks.report import Report, Row, Value
from benchmarks.scenarios.gpu.model import BLOCK_SIZE, RandomDecoder, blocks_of, decode_plans
from benchmarks.scenarios.gpu.steps import time_decode, time_prefill
from benchmarks.scenarios.kernels import GPU_SHAPE, measure_all
from benchmarks.scenarios.kernels.timing import copy_bandwidth, matmul_rate
from triptych_kernels import ops_for

_LAYERS_OF_8B = 32
_NUM_STEPS = 90
_NUM_LEAD_IN = 10
_PROMPTS = (1_024, 8_192)
_PREFILL_REPEATS = 5
_LOGITS_BYTES = 4
# Activations, logits and the recordings' own memory.
_SPARE_BYTES = 6 << 30


def llama_8b(num_layers: int, max_model_len: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position_embeddings=max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
    )


def decode_floor_ms(
    decoder: RandomDecoder, *, num_rows: int, context: int, bandwidth: float, rate: float
) -> float:
    """The time that a decode step cannot go below."""
    read = decoder.bytes_per_step / bandwidth
    multiplied = num_rows * decoder.operations_per_token / rate
    kv = num_rows * context * decoder.kv_bytes_per_token / bandwidth
    return 1e3 * (max(read, multiplied) + kv)


def prefill_floor_ms(decoder: RandomDecoder, length: int, rate: float) -> float:
    """The time that a prompt's products take: the head's for one token, attention's below the diagonal."""
    layers = length * (decoder.operations_per_token - decoder.head_operations) + decoder.head_operations
    attention = decoder.attention_operations * length * (length + 1) / 2
    return 1e3 * (layers + attention) / rate


def measure_decode(
    decoder: RandomDecoder, batches: Sequence[int], context: int, bandwidth: float, rate: float
) -> Iterator[Row]:
    """A row a batch size; without times where the KV of the batch does not fit."""
    for num_rows in batches:
        num_blocks = num_rows * blocks_of(context + _NUM_STEPS + 1)
        floor = decode_floor_ms(decoder, num_rows=num_rows, context=context, bandwidth=bandwidth, rate=rate)
        row: dict[str, Value] = {"batch": num_rows, "context": context, "floor_ms": floor}
        needed = num_blocks * BLOCK_SIZE * decoder.kv_bytes_per_token
        needed += num_rows * decoder.facts.vocab_size * _LOGITS_BYTES
        if needed + _SPARE_BYTES > torch.cuda.mem_get_info()[0]:
            yield row | dict.fromkeys(
                ("step_ms", "over_floor", "tokens_per_s", "idle_percent", "gap_percent")
            )
            continue
        runner = decoder.runner(num_rows=num_rows, num_blocks=num_blocks, graph_sizes=[num_rows])
        plans = list(decode_plans(num_rows=num_rows, context=context, num_steps=_NUM_STEPS))
        times = time_decode(runner, plans, num_lead_in=_NUM_LEAD_IN, is_traced=True)
        yield row | {
            "step_ms": times.step_ms,
            "over_floor": times.step_ms / floor,
            "tokens_per_s": 1e3 * num_rows / times.step_ms,
            "idle_percent": times.idle_percent,
            "gap_percent": times.gap_percent,
        }
        del runner
        torch.cuda.empty_cache()


def measure_prefill(decoder: RandomDecoder, lengths: Sequence[int], rate: float) -> Iterator[Row]:
    for length in lengths:
        # One a length: the last prompt of the length before would still hold its row.
        runner = decoder.runner(num_rows=1, num_blocks=blocks_of(length), graph_sizes=[])
        taken = time_prefill(runner, length, num_repeats=_PREFILL_REPEATS)
        floor = prefill_floor_ms(decoder, length, rate)
        yield {
            "prompt": length,
            "prefill_ms": taken,
            "floor_ms": floor,
            "over_floor": taken / floor,
            "tokens_per_s": 1e3 * length / taken,
        }
        del runner
        torch.cuda.empty_cache()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-layers", type=int, default=_LAYERS_OF_8B)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=1_024)
    parser.add_argument("--deterministic", action="store_true", help="the ops of deterministic mode")
    parser.add_argument("--quantization", choices=("", "int8", "fp8"), default="")
    parser.add_argument("--num-repeats", type=int, default=30, help="of a kernel; 0 measures none")


def run(options: argparse.Namespace) -> Report:
    if not torch.cuda.is_available():
        print("bench-gpu needs a CUDA device, and torch finds none: nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    device, dtype = torch.device("cuda"), torch.bfloat16
    bandwidth, rate = copy_bandwidth(device), matmul_rate(device, dtype)
    ops = ops_for(device, deterministic=options.deterministic)
    max_model_len = max(options.context + _NUM_STEPS, *_PROMPTS) + 16
    decoder = RandomDecoder(
        llama_8b(options.num_layers, max_model_len), ops, device, dtype,
        max_model_len=max_model_len, quantization=options.quantization
    )  # fmt: skip
    settings: dict[str, Value] = {
        "gpu": torch.cuda.get_device_name(),
        "ops": ops.name,
        "dtype": "bfloat16",
        "copy_gb_per_s": bandwidth / 1e9,
        "matmul_tflop_per_s": rate / 1e12,
        "weight_gb": decoder.bytes_per_step / 1e9,
    }
    settings |= {name: getattr(options, name) for name in ("num_layers", "deterministic", "quantization")}
    parts: dict[str, list[Row]] = {
        "decode": list(measure_decode(decoder, options.batches, options.context, bandwidth, rate)),
        "prefill": list(measure_prefill(decoder, _PROMPTS, rate)),
    }
    del decoder
    torch.cuda.empty_cache()
    if options.num_repeats:
        parts["kernels"] = list(measure_all(GPU_SHAPE, ops, device, dtype, num_repeats=options.num_repeats))
    return Report("gpu", settings, [{"part": part, **row} for part, rows in parts.items() for row in rows])
