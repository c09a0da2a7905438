"""That `make bench-gpu` comes to its end, with a tiny decoder. `test_fake_gpu` runs it where a GPU is one."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.scenarios import gpu
from benchmarks.scenarios.gpu import steps
from benchmarks.scenarios.kernels import timing
from tests.benchmarks.test_gpu import tiny_llama

KERNELS = ("linear", "experts", "norm", "kv_write", "attention", "sample", "penalise", "low_rank")


def test_decode_prompts_and_every_kernel_are_measured(monkeypatch):
    shape = replace(
        gpu.GPU_SHAPE,
        hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=500,
        num_experts=4, num_chosen=2, expert_size=32, num_state_heads=2, state_size=8, num_rows=(3,),
        context=20, prompt=8,
    )  # fmt: skip
    monkeypatch.setattr(gpu, "GPU_SHAPE", shape)
    monkeypatch.setattr(gpu, "llama_8b", tiny_llama)
    monkeypatch.setattr(gpu, "_PROMPTS", (6, 9))
    monkeypatch.setattr(gpu, "_PREFILL_REPEATS", 1)
    monkeypatch.setattr(gpu, "_NUM_STEPS", 4)
    monkeypatch.setattr(gpu, "_NUM_LEAD_IN", 1)
    monkeypatch.setattr(gpu, "_SPARE_BYTES", 0)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: timing.copy_bandwidth(device, 1 << 16))
    monkeypatch.setattr(gpu, "matmul_rate", lambda device, dtype: timing.matmul_rate(device, dtype, 64))
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 1 << 10)
    # A build for CPUs has no generators of a GPU, and traces none.
    host_generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: host_generator("cpu"))
    monkeypatch.setattr(steps, "_idle_shares", lambda runner, plans: (None, None))
    parser = argparse.ArgumentParser()
    gpu.add_options(parser)
    arguments = ["--num-layers", "1", "--batches", "1", "3", "--context", "20", "--num-repeats", "1"]
    rows = gpu.run(parser.parse_args(arguments)).rows
    assert [row["batch"] for row in rows if row["part"] == "decode" and row["step_ms"] > 0] == [1, 3]
    assert [row["prompt"] for row in rows if row["part"] == "prefill" and row["prefill_ms"] > 0] == [6, 9]
    measured = " ".join(row["op"] for row in rows if row["part"] == "kernels" and row["ours_us"] is not None)
    assert all(kernel in measured for kernel in KERNELS)
