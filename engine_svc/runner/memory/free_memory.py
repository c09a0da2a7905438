"""Measures how much memory a device has free for the KV cache besides the model and a step's needs."""

from __future__ import annotations

from pathlib import Path

import torch

from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.facts import ModelFacts
from engine_svc.runner.memory.host_memory import CONTROL_GROUP, MIB, free_host_bytes
from engine_svc.runner.memory.kv_sizing import FreeMemory
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.memory.state_tensors import unused_states
from triptych_kernels import AttentionBatch

# Share of the machine's free memory: other engines and the operating system need memory too.
_HOST_SHARE = 0.25
# Logits in fp32, their probabilities, and the sorted copies of top-k and top-p.
_COPIES_OF_LOGITS = 4


def free_host_memory(control_group: Path = CONTROL_GROUP) -> FreeMemory:
    """A share of the free memory of the machine, or of the container, whose limits are in `control_group`."""
    free, how = free_host_bytes(control_group)
    return FreeMemory(int(free * _HOST_SHARE), f"{_HOST_SHARE:.0%} of {how}")


def num_bytes_in_use() -> int:
    """Memory of this process's tensors on its GPU; without a GPU, the resident memory of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    import psutil

    return int(psutil.Process().memory_info().rss)


def present_device_memory() -> FreeMemory:
    """The free memory of the GPU now, without regard to what a step needs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return FreeMemory(free, f"{free // MIB} MiB free of {total // MIB} MiB")


@torch.inference_mode()
def free_device_memory(
    model: Model,
    facts: ModelFacts,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    utilization: float,
) -> FreeMemory:
    """The rest of `utilization` of the GPU's memory after the largest step, which is run to measure it.

    utilization: the share of the total memory that this process may use.
    """
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _run_largest_step(model, facts, max_num_seqs, max_num_batched_tokens, device)
    peak = torch.cuda.max_memory_allocated() - before
    # A request for prompt logprobs needs logits at all its positions, in the model's dtype and in fp32.
    num_positions = max((_COPIES_OF_LOGITS - 1) * max_num_seqs, 2 * max_num_batched_tokens)
    peak += num_positions * facts.vocab_size * torch.float32.itemsize
    # Rows of tokens; block tables and logits, both for the rows and for recorded steps.
    num_entries = max_model_len * (1 + len(facts.groups))
    peak += max_num_seqs * torch.int32.itemsize * (num_entries + facts.vocab_size)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # Memory used by other processes counts against the share as well, as it is not available.
    left = int(total * utilization) - (total - free) - peak
    how = (
        f"{utilization:.0%} of {total // MIB} MiB, less {(total - free) // MIB} in use "
        f"and {peak // MIB} for a step,"
    )
    return FreeMemory(left, how)


def _run_largest_step(
    model: Model, facts: ModelFacts, max_num_seqs: int, max_num_tokens: int, device: torch.device
) -> None:
    num_rows = min(max_num_seqs, max_num_tokens)
    length = min(max_num_tokens // num_rows, facts.max_position)
    num_tokens = num_rows * length
    kv = KVTensors(facts, KVSizing(1, 16, bytes_per_block=0, num_state_slots=1), device)
    # Nothing is stored, and everything is read from one block.
    tables = torch.zeros(num_rows, -(-length // 16), dtype=torch.int32, device=device)
    groups = range(len(facts.groups))
    batch = AttentionBatch.of(tables, [length] * num_rows, [length] * num_rows, 16)
    context = ForwardContext(
        kv.layers,
        [torch.full((num_tokens,), -1, device=device) for _ in groups],
        [batch for _ in groups] or [batch],
        unused_states(facts, [length] * num_rows, [length] * num_rows, device),
        kv.states.layers,
    )
    positions = torch.arange(length, device=device).repeat(num_rows)
    last = torch.arange(1, num_rows + 1, device=device) * length - 1
    model.forward(torch.zeros_like(positions), positions, last, context)
    torch.cuda.synchronize()
