"""All layers as one op: the bits of the ops one by one, in every shape, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine_svc.runner.memory.parked_memory import ParkedMemory
from triptych_kernels import AttentionBatch, DenseLayer, FusedLayers, Ops

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, ROTARY = 72, 104, 3, 1, 24, 16
NUM_BLOCKS, BLOCK_SIZE, MAX_POSITIONS, NUM_LAYERS = 32, 4, 64, 3
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM


@dataclass(frozen=True)
class Cache:
    """Of a layer."""

    group: int
    key_cache: Tensor
    value_cache: Tensor


@dataclass
class Step:
    """Tokens of two rows, in two groups of layers: each row has block tables of its own in each."""

    x: Tensor
    positions: Tensor
    rows: Tensor
    slots: list[Tensor]
    attention: list[AttentionBatch]


class Rig:
    """Layers of random weights; a cache for each."""

    def __init__(
        self, ops: Ops, dtype: torch.dtype, *, norms: bool, bias: bool, quantization: str, ffn: int = FFN
    ) -> None:
        self.ops, self.dtype, self.ffn = ops, dtype, ffn
        self.random = torch.Generator().manual_seed(3)
        self.layers = [
            self._layer(index, norms=norms, bias=bias, quantization=quantization)
            for index in range(NUM_LAYERS)
        ]
        self.final_norm = self.some(HIDDEN)
        self.cos_sin = torch.randn(MAX_POSITIONS, ROTARY, generator=self.random)

    def some(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self.random) / shape[-1] ** 0.5).to(self.dtype)

    def _layer(self, index: int, *, norms: bool, bias: bool, quantization: str) -> DenseLayer:
        def linear(num_outputs: int, num_inputs: int, pack) -> object:
            vector = self.some(num_outputs) if bias else None
            return pack(self.some(num_outputs, num_inputs), vector, quantization=quantization)

        return DenseLayer(
            input_norm=self.some(HIDDEN),
            qkv=linear(WIDTH, HIDDEN, self.ops.pack_linear),
            query_norm=self.some(HEAD_DIM) if norms else None,
            key_norm=self.some(HEAD_DIM) if norms else None,
            out=linear(HIDDEN, HEADS * HEAD_DIM, self.ops.pack_linear),
            post_attention_norm=self.some(HIDDEN),
            gate_up=linear(2 * self.ffn, HIDDEN, self.ops.pack_gated_linear),
            down=linear(HIDDEN, self.ffn, self.ops.pack_linear),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            window=5 if index == 1 else None,
            eps=1e-5,
        )

    def fused(self) -> FusedLayers:
        fused = self.ops.fuse_layers(self.layers, self.final_norm, self.cos_sin)
        assert fused is not None
        return fused

    def caches(self) -> list[Cache]:
        shape = (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        return [
            Cache(int(layer.window is not None), *(torch.zeros(shape, dtype=self.dtype) for _ in range(2)))
            for layer in self.layers
        ]

    def step(self, lengths: Sequence[int], totals: Sequence[int], rows: Sequence[int]) -> Step:
        slots, attention = [], []
        positions = torch.cat(
            [torch.arange(total - length, total) for length, total in zip(lengths, totals, strict=True)]
        )
        for seed in (1, 2):
            tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).view(2, -1)
            row_of = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
            slots.append(tables[row_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
            attention.append(AttentionBatch.of(tables, lengths, totals, BLOCK_SIZE))
        x = self.some(sum(lengths), HIDDEN)
        return Step(x, positions, torch.tensor(rows, dtype=torch.int64), slots, attention)

    def one_by_one(self, step: Step, caches: Sequence[Cache]) -> Tensor:
        ops, residual = self.ops, step.x.clone()
        x = ops.rms_norm(residual, self.layers[0].input_norm, 1e-5)
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            qkv = layer.qkv(x)
            ops.rotary_kv_write(
                qkv, step.positions, self.cos_sin, step.slots[cache.group], cache.key_cache,
                cache.value_cache, num_heads=HEADS, query_norm=layer.query_norm, key_norm=layer.key_norm,
                eps=layer.eps,
            )  # fmt: skip
            heads = qkv.view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS]
            attended = ops.paged_attention(
                heads, cache.key_cache, cache.value_cache, step.attention[cache.group],
                scale=HEAD_DIM**-0.5, window=layer.window,
            ).reshape(-1, HEADS * HEAD_DIM)  # fmt: skip
            if index == NUM_LAYERS - 1:
                attended, residual = attended[step.rows], residual[step.rows]
            x = ops.add_rms_norm(layer.out(attended), residual, layer.post_attention_norm, layer.eps)
            x = layer.down(layer.gate_up(x))
            is_last = index == NUM_LAYERS - 1
            following = self.final_norm if is_last else self.layers[index + 1].input_norm
            x = ops.add_rms_norm(x, residual, following, layer.eps)
        return x


def run(fused: FusedLayers, step: Step, caches: Sequence[Cache]) -> Tensor:
    return fused(step.x.clone(), step.positions, step.rows, caches, step.slots, step.attention)


STEPS: tuple[tuple[list[int], list[int], list[int]], ...] = (
    ([7, 9], [7, 9], [15, 6]),  # two prompts
    ([1, 1], [8, 10], [0, 1]),
    ([1, 6], [9, 16], []),  # a chunk without a row that is read
    ([6, 1], [15, 17], [6, 0, 5]),
    ([1, 1], [16, 18], [1, 0, 1, 0, 1, 1, 0]),  # more rows than tokens
)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("norms", "bias", "quantization"), [(False, False, ""), (True, True, ""), (False, True, "int8")]
)
def test_bits_are_those_of_the_ops_one_by_one(
    ops, use_threads, dtype, norms, bias, quantization, num_threads
):
    use_threads(num_threads)
    rig = Rig(ops, dtype, norms=norms, bias=bias, quantization=quantization)
    fused, ours, theirs = rig.fused(), rig.caches(), rig.caches()
    for lengths, totals, rows in STEPS:
        step = rig.step(lengths, totals, rows)
        found = run(fused, step, ours)
        assert torch.equal(found, rig.one_by_one(step, theirs))
        assert found.shape == (len(rows), HIDDEN)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.key_cache, other.key_cache)
            assert torch.equal(one.value_cache, other.value_cache)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_the_caches_do_not_keep_are_taken_in_turns(ops, use_threads, dtype, num_threads):
    use_threads(num_threads)
    rig = Rig(ops, dtype, norms=True, bias=True, quantization="", ffn=16384)
    fused, ours, theirs = rig.fused(), rig.caches(), rig.caches()
    at_once = rig.layers[0].down.rows_at_once
    assert at_once < min(rig.layers[0].qkv.rows_at_once, 129)
    for lengths, totals, rows in (
        ([60, 64], [60, 64], [*range(0, 124, 2), *range(124)]),
        ([3, 1], [63, 64], [3, 0] * at_once),  # few tokens of which many rows are read
    ):
        step = rig.step(lengths, totals, rows)
        assert torch.equal(run(fused, step, ours), rig.one_by_one(step, theirs))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.key_cache, other.key_cache)
            assert torch.equal(one.value_cache, other.value_cache)


def plain(ops: Ops) -> Rig:
    return Rig(ops, torch.bfloat16, norms=False, bias=False, quantization="")


def test_caches_that_slept_are_written_where_they_woke(ops):
    rig = plain(ops)
    fused, caches, others = rig.fused(), rig.caches(), rig.caches()
    step = rig.step(*STEPS[0])
    run(fused, step, caches)
    parked = ParkedMemory(
        [tensor for cache in caches for tensor in (cache.key_cache, cache.value_cache)], keep=True
    )
    # Others get the memory that they left.
    held = [torch.zeros_like(others[0].key_cache) for _ in range(64)]
    parked.restore()
    assert torch.equal(run(fused, step, caches), run(fused, step, others))
    assert torch.equal(caches[-1].value_cache, others[-1].value_cache)
    assert not any(tensor.any() for tensor in held)


def test_what_does_not_fit_is_refused_in_words(ops):
    rig = plain(ops)
    fused, caches = rig.fused(), rig.caches()
    step = rig.step(*STEPS[0])
    with pytest.raises(IndexError, match="a position is not below 64"):
        run(fused, replace(step, positions=step.positions + MAX_POSITIONS), caches)
    with pytest.raises(IndexError, match="a row to take is not below 16"):
        run(fused, replace(step, rows=torch.tensor([16])), caches)
    with pytest.raises(ValueError, match="positions has 15 numbers for 16 tokens"):
        run(fused, replace(step, positions=step.positions[1:]), caches)
    with pytest.raises(ValueError, match=r"x is torch.float32 \(16, 72\): expected torch.bfloat16 \[T, 72\]"):
        run(fused, replace(step, x=step.x.float()), caches)
    with pytest.raises(ValueError, match="there are 2 caches for 3 layers"):
        run(fused, step, caches[:2])
    with pytest.raises(ValueError, match=r"of group 1, not torch.bfloat16 \(32, 1, 4, 24\) of 1 groups"):
        run(fused, replace(step, slots=step.slots[:1], attention=step.attention[:1]), rig.caches())
    large = [replace(batch, block_size=16) for batch in step.attention]
    with pytest.raises(ValueError, match="the caches have blocks of 4, a batch has others"):
        run(fused, replace(step, attention=large), caches)
    wide = [replace(cache, key_cache=cache.key_cache.float()) for cache in caches]
    with pytest.raises(ValueError, match=r"a cache is torch.float32 \(32, 1, 4, 24\) of group 0"):
        run(fused, step, wide)


def test_layers_that_the_kernels_do_not_serve_are_left_as_they_are(ops):
    rig = plain(ops)
    half = replace(rig.layers[1], down=lambda x: x)  # type: ignore[arg-type]
    assert ops.fuse_layers([rig.layers[0], half], rig.final_norm, rig.cos_sin) is None
    assert ops.fuse_layers(rig.layers, rig.final_norm.half(), rig.cos_sin) is None
    assert ops.fuse_layers(rig.layers, rig.final_norm.float(), rig.cos_sin) is None
    assert ops.fuse_layers(rig.layers, rig.final_norm, rig.cos_sin.double()) is None
    assert ops.fuse_layers(rig.layers, rig.final_norm, torch.ones(MAX_POSITIONS, HEAD_DIM + 2)) is None
    assert ops.fuse_layers(rig.layers, rig.final_norm, rig.cos_sin[:, :15].contiguous()) is None
    norm = rig.some(HEAD_DIM)
    for changes in (
        {"num_heads": 4, "num_kv_heads": 3},
        {"num_heads": 4},
        {"query_norm": norm},
        {"query_norm": norm[1:], "key_norm": norm},
        {"input_norm": norm},
        {"down": rig.layers[0].out},
    ):
        odd = replace(rig.layers[0], **changes)
        assert ops.fuse_layers([odd, *rig.layers[1:]], rig.final_norm, rig.cos_sin) is None
