"""What is computed before the first request is all that a step may need; nothing of it is kept."""

from __future__ import annotations

import dataclasses

import torch

from engine_svc.runner.warm_up import rows_to_compute, warm_up_sampler
from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, SamplerRig
from triptych_kernels import REFERENCE

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_reads_its_weights_once():
    assert rows_to_compute(2048, 1000, CPU) == [(64, 64)]
    assert rows_to_compute(2048, 10, CPU) == [(10, 10)]
    assert rows_to_compute(16, 1000, CPU) == [(16, 16)]


def test_a_gpu_computes_prompts_of_all_sizes_and_tokens_behind_contexts_of_all_sizes():
    rows = rows_to_compute(8, 40, GPU)
    assert rows == [(8, 8), (1, 1), (2, 2), (4, 4), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32)]


def test_no_row_is_longer_than_a_sequence_may_be():
    assert max(count for count, _ in rows_to_compute(2048, 4096, GPU)) == 2048
    assert rows_to_compute(64, 2, GPU) == [(2, 2), (1, 1), (1, 2)]
    assert max(total for _, total in rows_to_compute(64, 128, GPU)) == 128


def test_the_sampler_uses_every_op_that_rows_may_ask_for():
    used = set()

    def noting(name: str):
        op = getattr(REFERENCE, name)

        def call(*arguments: object) -> object:
            used.add(name)
            return op(*arguments)

        return call

    names = ("greedy", "sample", "penalise")
    ops = dataclasses.replace(REFERENCE, **{name: noting(name) for name in names})
    # As it comes, the memory of the rows holds anything.
    token_ids = torch.full((8, 20), 1 << 30, dtype=torch.int32)
    rig = SamplerRig(ops=ops)
    warm_up_sampler(rig.sampler, rig.features, VOCAB_SIZE, token_ids)
    assert used == set(names)
