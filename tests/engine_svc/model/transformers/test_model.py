"""A transformers model over a paged cache, seen from the runner: what it takes and what it gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_svc.model.context import ForwardContext, LayerCache
from engine_svc.model.transformers.model import TransformersModel
from engine_svc.model.transformers.warm_up import warm_up
from tests.engine_svc.model.checkpoints import MAX_POSITION, VOCAB_SIZE, make_checkpoint
from triptych_kernels import REFERENCE, AttentionBatch, Ops

BLOCK_SIZE = 4
NUM_BLOCKS = -(-MAX_POSITION // BLOCK_SIZE) + 1
# What Python does to know a number of a tensor.
_LOOKS = (torch.ops.aten.is_nonzero.default, torch.ops.aten.item.default)


class OneRow:
    """A model, and the cache of one sequence, in blocks from the last to the first."""

    def __init__(self, family: str, folder, dtype: torch.dtype = torch.float32, ops: Ops = REFERENCE) -> None:
        self.theirs = make_checkpoint(family, folder).to(dtype)
        self.model = TransformersModel(self.theirs, ops)
        self.layers = [
            LayerCache(
                0,
                torch.zeros(NUM_BLOCKS, shape.num_kv_heads, BLOCK_SIZE, shape.key_dim, dtype=dtype),
                torch.zeros(NUM_BLOCKS, shape.num_kv_heads, BLOCK_SIZE, shape.value_dim, dtype=dtype),
            )
            for shape in warm_up(self.model).kv_shapes
        ]
        self.table = torch.arange(NUM_BLOCKS - 1, -1, -1)

    @torch.inference_mode()
    def forward(self, token_ids: list[int], start: int, logit_rows: list[int]) -> torch.Tensor:
        end = start + len(token_ids)
        positions = torch.arange(start, end)
        slots = self.table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch.of(self.table[None], [end - start], [end], BLOCK_SIZE)
        context = ForwardContext(self.layers, [slots], [batch])
        rows = torch.tensor(logit_rows, dtype=torch.int64)
        return self.model.forward(torch.tensor(token_ids), positions, rows, context)


class Waits(TorchDispatchMode):
    """Counts how often a GPU would be waited for: when Python looks at numbers, ops left aside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self._is_op = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _LOOKS and not self._is_op:
            self.num_waits += 1
        return func(*args, **(kwargs or {}))

    def passing_over(self, op):
        def call(*arguments, **options):
            self._is_op = True
            try:
                return op(*arguments, **options)
            finally:
                self._is_op = False

        return call


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "phi3", "opt"])
def test_a_step_looks_at_no_number_that_a_device_computes(tmp_path, family):
    waits = Waits()
    ops = dataclasses.replace(
        REFERENCE,
        kv_write=waits.passing_over(REFERENCE.kv_write),
        paged_attention=waits.passing_over(REFERENCE.paged_attention),
    )
    row = OneRow(family, tmp_path, ops=ops)
    with waits:
        row.forward([5, 6, 7], 0, [2])
        row.forward([8], 3, [0])
    assert waits.num_waits == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_come_in_fp32_whatever_is_computed_in(tmp_path, dtype):
    logits = OneRow("llama", tmp_path, dtype).forward([5, 6, 7], 0, [2])
    assert (logits.dtype, logits.shape) == (torch.float32, (1, VOCAB_SIZE))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "ctrl"])
def test_only_the_rows_asked_for_are_yielded_in_their_order(tmp_path, family):
    row = OneRow(family, tmp_path)
    whole = row.forward([5, 6, 7, 8, 9], 0, [0, 1, 2, 3, 4])
    assert torch.equal(row.forward([5, 6, 7, 8, 9], 0, [4, 1]), whole[[4, 1]])
    assert row.forward([5, 6, 7, 8, 9], 0, []).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bart"])
def test_a_token_planned_behind_the_longest_sequence_is_computed_all_the_same(tmp_path, family):
    row = OneRow(family, tmp_path)
    row.forward([5] * MAX_POSITION, 0, [])
    assert row.forward([6], MAX_POSITION, [0]).isfinite().all()


def test_two_models_of_a_process_keep_their_steps_apart(tmp_path):
    first, second = OneRow("llama", tmp_path / "a"), OneRow("qwen2", tmp_path / "b")
    alone = first.forward([5, 6, 7], 0, [2])
    second.forward([9, 9, 9, 9], 0, [3])
    assert torch.equal(first.forward([5, 6, 7], 0, [2]), alone)
    names = {row.theirs.config._attn_implementation for row in (first, second)}
    assert len(names) == 2
