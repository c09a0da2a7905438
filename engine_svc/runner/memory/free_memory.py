"""What a device has free for the KV cache once the model is there and a step has had what it needs."""

from __future__ import annotations

from pathlib import Path

import torch

from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.facts import ModelFacts
from engine_svc.runner.memory.kv_sizing import FreeMemory
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from triptych_kernels import AttentionBatch

# Of the memory that the machine has free: other engines and the operating system live there too.
_HOST_SHARE = 0.25
_MIB = 1 << 20
# Logits in fp32, their probabilities, and what top-k and top-p sort of them.
_COPIES_OF_LOGITS = 4
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_host_memory(control_group: Path = _CONTROL_GROUP) -> FreeMemory:
    """A share of what the machine has free, or the container, as it sees its limits in `control_group`."""
    # Here and not above: a GPU needs none of it.
    import psutil

    free = psutil.virtual_memory().available
    left = _left_of_container(control_group)
    if left is not None and left < free:
        how = f"{_HOST_SHARE:.0%} of {left // _MIB} MiB that the container has left"
        return FreeMemory(int(left * _HOST_SHARE), how)
    return FreeMemory(int(free * _HOST_SHARE), f"{_HOST_SHARE:.0%} of {free // _MIB} MiB free memory")


def num_bytes_in_use() -> int:
    """Memory that tensors of this process have on its GPU; of a process without one, all that is resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    import psutil

    return int(psutil.Process().memory_info().rss)


def _left_of_container(control_group: Path) -> int | None:
    """What the limit of the container, as it sees itself, leaves; None where there is none."""
    try:
        limit = (control_group / "memory.max").read_text(encoding="ascii").strip()
        used = (control_group / "memory.current").read_text(encoding="ascii")
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None


def present_device_memory() -> FreeMemory:
    """What nobody holds of the GPU's memory now, whatever a step may need of it."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return FreeMemory(free, f"{free // _MIB} MiB free of {total // _MIB} MiB")


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
    """What is left of `utilization` of the GPU's memory beside the largest step, which is run to see.

    utilization: share of the whole memory that this process may use.
    """
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _run_largest_step(model, facts, max_num_seqs, max_num_batched_tokens, device)
    peak = torch.cuda.max_memory_allocated() - before
    # Who asks for logprobs of a prompt has logits at all its places, in the model's dtype and in fp32.
    num_positions = max((_COPIES_OF_LOGITS - 1) * max_num_seqs, 2 * max_num_batched_tokens)
    peak += num_positions * facts.vocab_size * torch.float32.itemsize
    # Rows of tokens, and block tables and logits, once for the rows and once for recorded steps.
    num_entries = max_model_len * (1 + len(facts.groups))
    peak += max_num_seqs * torch.int32.itemsize * (num_entries + facts.vocab_size)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # What others hold counts against the share as well: it is not there to be taken.
    left = int(total * utilization) - (total - free) - peak
    how = (
        f"{utilization:.0%} of {total // _MIB} MiB, less {(total - free) // _MIB} in use "
        f"and {peak // _MIB} for a step,"
    )
    return FreeMemory(left, how)


def _run_largest_step(
    model: Model, facts: ModelFacts, max_num_seqs: int, max_num_tokens: int, device: torch.device
) -> None:
    num_rows = min(max_num_seqs, max_num_tokens)
    length = min(max_num_tokens // num_rows, facts.max_position)
    num_tokens = num_rows * length
    kv = KVTensors(facts, KVSizing(num_blocks=1, block_size=16, bytes_per_block=0), device)
    # Nothing is stored, and everything is read from one block.
    tables = torch.zeros(num_rows, -(-length // 16), dtype=torch.int32, device=device)
    groups = range(len(facts.groups))
    context = ForwardContext(
        kv.layers,
        [torch.full((num_tokens,), -1, device=device) for _ in groups],
        [AttentionBatch.of(tables, [length] * num_rows, [length] * num_rows, 16) for _ in groups],
    )
    positions = torch.arange(length, device=device).repeat(num_rows)
    last = torch.arange(1, num_rows + 1, device=device) * length - 1
    model.forward(torch.zeros_like(positions), positions, last, context)
    torch.cuda.synchronize()
