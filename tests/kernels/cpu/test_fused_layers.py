"""All layers as one op: the bits of the ops one by one, in every shape, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine_svc.runner.memory.parked_memory import ParkedMemory
from tests.kernels.cpu.test_linear import JOINED, weight_of
from triptych_kernels import AttentionBatch, DenseLayer, FusedLayers, LayerLowRank, Linear, LowRank, Ops

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, ROTARY = 72, 104, 3, 1, 24, 16
NUM_BLOCKS, BLOCK_SIZE, MAX_POSITIONS, NUM_LAYERS, NUM_SLOTS = 32, 4, 64, 3, 3
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
    low_rank_slots: Tensor | None = None


class Rig:
    """Layers of random weights; a cache for each."""

    def __init__(
        self,
        ops: Ops,
        dtype: torch.dtype,
        *,
        norms: bool,
        bias: bool,
        quantization: str,
        ffn: int = FFN,
        family: str = "",
    ) -> None:
        """family: "gemma", whose layers have norms in fp32, also of what they add, gates of gelu, tables of
        their own, and as in Granite a scale of what they add; "olmo", whose layers norm only what they add,
        and the queries of all heads together.
        """
        self.ops, self.dtype, self.ffn = ops, dtype, ffn
        self.gemma, self.olmo = family == "gemma", family == "olmo"
        self.random = torch.Generator().manual_seed(3)
        self.tables = [torch.randn(MAX_POSITIONS, ROTARY, generator=self.random) for _ in range(2)]
        self.layers = [
            self._layer(index, norms=norms, bias=bias, quantization=quantization)
            for index in range(NUM_LAYERS)
        ]
        self.final_norm = self.norm(HIDDEN)

    def some(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self.random) / shape[-1] ** 0.5).to(self.dtype)

    def norm(self, size: int) -> Tensor:
        """The weight of a norm: in fp32 of numbers that bf16 has not."""
        weight = self.some(size)
        return weight.float() + 1.0 if self.gemma else weight

    def _layer(self, index: int, *, norms: bool, bias: bool, quantization: str) -> DenseLayer:
        def linear(num_outputs: int, num_inputs: int, pack) -> object:
            vector = self.some(num_outputs) if bias else None
            if quantization == JOINED:
                # Of gates and ups of several kinds there is no plan.
                kind = JOINED if pack is self.ops.pack_linear else "4-bit-minima"
                return pack(weight_of(num_inputs, num_outputs, self.dtype, kind), vector)
            return pack(self.some(num_outputs, num_inputs), vector, quantization=quantization)

        window = 5 if index == 1 else None
        gate = "gelu_tanh" if self.gemma else "silu"
        pack_gated = functools.partial(self.ops.pack_gated_linear, gate=gate)
        num_normed = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM) if self.olmo else (HEAD_DIM, HEAD_DIM)
        return DenseLayer(
            input_norm=None if self.olmo else self.norm(HIDDEN),
            qkv=linear(WIDTH, HIDDEN, self.ops.pack_linear),
            query_norm=self.norm(num_normed[0]) if norms else None,
            key_norm=self.norm(num_normed[1]) if norms else None,
            out=linear(HIDDEN, HEADS * HEAD_DIM, self.ops.pack_linear),
            post_attention_norm=None if self.olmo else self.norm(HIDDEN),
            gate_up=linear(2 * self.ffn, HIDDEN, pack_gated),
            down=linear(HIDDEN, self.ffn, self.ops.pack_linear),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=0.3 if self.gemma else HEAD_DIM**-0.5,
            window=window,
            cos_sin=self.tables[1 if self.gemma and window else 0],
            eps=1e-5,
            attention_out_norm=self.norm(HIDDEN) if self.gemma or self.olmo else None,
            feed_forward_out_norm=self.norm(HIDDEN) if self.gemma or self.olmo else None,
            residual_scale=0.22 if self.gemma else None,
        )

    def add_low_rank(self) -> None:
        """Fill slots 0 and 2 of each layer: the first layer has none for `out`, slot 2 none for keys."""
        for index, layer in enumerate(self.layers):
            parts = {
                "qkv": (HIDDEN, [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]),
                "out": (HEADS * HEAD_DIM, [HIDDEN]),
                "gate_up": (HIDDEN, [self.ffn, self.ffn]),
                "down": (self.ffn, [HIDDEN]),
            }
            low_rank = {name: self._low_rank(*shape) for name, shape in parts.items()}
            if index == 0:
                del low_rank["out"]
            self.layers[index] = replace(layer, low_rank=LayerLowRank(**low_rank))

    def _low_rank(self, num_inputs: int, widths: list[int]) -> LowRank:
        cpu = torch.device("cpu")
        low_rank = self.ops.make_low_rank(num_inputs, widths, NUM_SLOTS, 24, self.dtype, cpu)
        for slot, rank in ((0, 6), (2, 24)):
            low_rank.put(
                slot,
                [
                    None
                    if slot == 2 and index == 1
                    else self.ops.pack_low_rank(self.some(rank, num_inputs), self.some(width, rank), 2.0)
                    for index, width in enumerate(widths)
                ],
            )
        return low_rank

    def fused(self) -> FusedLayers:
        fused = self.ops.fuse_layers(self.layers, self.final_norm)
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
        ops, residual, added = self.ops, step.x.clone(), step.low_rank_slots
        x = residual if self.olmo else ops.rms_norm(residual, self.layers[0].input_norm, 1e-5)
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            low_rank = layer.low_rank or LayerLowRank()
            qkv = project(layer.qkv, x, low_rank.qkv, added)
            norms = {"query_norm": layer.query_norm, "key_norm": layer.key_norm}
            if self.olmo:
                parts = qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], 1)
                for part, norm in zip(parts, norms.values(), strict=False):
                    part.copy_(ops.rms_norm(part, norm, layer.eps))
                norms = {}
            ops.rotary_kv_write(
                qkv, step.positions, layer.cos_sin, step.slots[cache.group], cache.key_cache,
                cache.value_cache, num_heads=HEADS, **norms, eps=layer.eps,
            )  # fmt: skip
            heads = qkv.view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS]
            attended = ops.paged_attention(
                heads, cache.key_cache, cache.value_cache, step.attention[cache.group],
                scale=layer.scale, window=layer.window,
            ).reshape(-1, HEADS * HEAD_DIM)  # fmt: skip
            if index == NUM_LAYERS - 1:
                attended, residual = attended[step.rows], residual[step.rows]
                added = None if added is None else added[step.rows]
            x = project(layer.out, attended, low_rank.out, added)
            x = self._summand(layer, x, layer.attention_out_norm)
            x = self._added(x, residual, layer.post_attention_norm, layer.eps)
            x = project(layer.gate_up, x, low_rank.gate_up, added)
            x = project(layer.down, x, low_rank.down, added)
            x = self._summand(layer, x, layer.feed_forward_out_norm)
            is_last = index == NUM_LAYERS - 1
            following = self.final_norm if is_last else self.layers[index + 1].input_norm
            x = self._added(x, residual, following, layer.eps)
        return x

    def _added(self, x: Tensor, residual: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        return residual.add_(x) if norm is None else self.ops.add_rms_norm(x, residual, norm, eps)

    def _summand(self, layer: DenseLayer, x: Tensor, norm: Tensor | None) -> Tensor:
        x = x if norm is None else self.ops.rms_norm(x, norm, layer.eps)
        return x if layer.residual_scale is None else x.mul_(layer.residual_scale)


def project(linear: Linear, x: Tensor, low_rank: LowRank | None, slots: Tensor | None) -> Tensor:
    return linear(x, None if low_rank is None or slots is None else low_rank(x, slots))


def run(fused: FusedLayers, step: Step, caches: Sequence[Cache]) -> Tensor:
    return fused(
        step.x.clone(), step.positions, step.rows, caches, step.slots, step.attention, step.low_rank_slots
    )


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
    ("norms", "bias", "quantization", "family"),
    [
        (False, False, "", ""),
        (True, True, "", ""),
        (False, True, "int8", ""),
        (False, True, JOINED, ""),
        (True, False, "", "gemma"),
        (True, False, JOINED, "gemma"),
        (True, False, "", "olmo"),
    ],
)
def test_bits_are_those_of_the_ops_one_by_one(
    ops, use_threads, dtype, norms, bias, quantization, family, num_threads
):
    use_threads(num_threads)
    rig = Rig(ops, dtype, norms=norms, bias=bias, quantization=quantization, family=family)
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


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("bias", "quantization", "family"),
    [(False, "", ""), (True, "int8", ""), (True, JOINED, ""), (False, "", "gemma")],
)
def test_additions_have_the_bits_of_the_ops_one_by_one(
    ops, use_threads, dtype, bias, quantization, family, num_threads
):
    use_threads(num_threads)
    rig = Rig(ops, dtype, norms=False, bias=bias, quantization=quantization, family=family)
    base, others = rig.fused(), rig.caches()
    rig.add_low_rank()
    fused, ours, theirs = rig.fused(), rig.caches(), rig.caches()
    for lengths, totals, rows in STEPS:
        step = rig.step(lengths, totals, rows)
        slots = torch.tensor([-1] * lengths[0] + [2, 0, 1, 0, 2, -1, 2, 2, 2][: lengths[1]])
        found = run(fused, replace(step, low_rank_slots=slots), ours)
        assert torch.equal(found, rig.one_by_one(replace(step, low_rank_slots=slots), theirs))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.key_cache, other.key_cache)
            assert torch.equal(one.value_cache, other.value_cache)
        # The first row has no additions: it is as if there were none.
        unchanged = run(base, step, others)
        first = [index for index, row in enumerate(rows) if row < lengths[0]]
        assert torch.equal(found[first], unchanged[first])
        assert len(first) == len(rows) or not torch.equal(found, unchanged)


def test_a_step_without_low_rank_slots_is_that_of_layers_without_additions(ops):
    rig = plain(ops)
    step, caches = rig.step(*STEPS[0]), rig.caches()
    base = run(rig.fused(), step, caches)
    rig.add_low_rank()
    fused = rig.fused()
    assert torch.equal(run(fused, step, caches), base)
    assert not torch.equal(run(fused, replace(step, low_rank_slots=torch.full((16,), 2)), caches), base)
    assert torch.equal(run(fused, replace(step, low_rank_slots=torch.full((16,), -1)), caches), base)


def test_a_slot_is_used_as_it_is_when_a_step_runs(ops):
    rig = plain(ops)
    step, caches = replace(rig.step(*STEPS[0]), low_rank_slots=torch.full((16,), 1)), rig.caches()
    rig.add_low_rank()
    fused = rig.fused()
    empty = run(fused, step, caches)
    low_rank = rig.layers[-1].low_rank
    assert low_rank is not None and low_rank.down is not None
    low_rank.down.put(1, [ops.pack_low_rank(rig.some(3, FFN), rig.some(HIDDEN, 3), 1.0)])
    assert not torch.equal(run(fused, step, caches), empty)
    low_rank.down.clear(1)
    assert torch.equal(run(fused, step, caches), empty)


def plain(ops: Ops, dtype: torch.dtype = torch.bfloat16) -> Rig:
    return Rig(ops, dtype, norms=False, bias=False, quantization="")


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
    rig.add_low_rank()
    added = replace(step, low_rank_slots=torch.full((16,), NUM_SLOTS))
    with pytest.raises(IndexError, match="a low-rank slot is not below 3"):
        run(rig.fused(), added, caches)
    with pytest.raises(ValueError, match="low_rank_slots has 15 numbers for 16 tokens"):
        run(rig.fused(), replace(step, low_rank_slots=torch.zeros(15, dtype=torch.int64)), caches)
    large = [replace(batch, block_size=16) for batch in step.attention]
    with pytest.raises(ValueError, match="the caches have blocks of 4, a batch has others"):
        run(fused, replace(step, attention=large), caches)
    wide = [replace(cache, key_cache=cache.key_cache.float()) for cache in caches]
    with pytest.raises(ValueError, match=r"a cache is torch.float32 \(32, 1, 4, 24\) of group 0"):
        run(fused, step, wide)


def test_layers_that_the_kernels_do_not_serve_are_left_as_they_are(ops):
    rig = plain(ops)
    half = replace(rig.layers[1], down=lambda x: x)  # type: ignore[arg-type]
    assert ops.fuse_layers([rig.layers[0], half], rig.final_norm) is None
    assert ops.fuse_layers(rig.layers, rig.final_norm.half()) is None
    wide = plain(ops, torch.float32)
    assert ops.fuse_layers([rig.layers[0], wide.layers[1]], rig.final_norm) is None
    assert ops.fuse_layers(wide.layers, rig.final_norm) is None
    rig.add_low_rank()
    norm, (layer, *_) = rig.some(HEAD_DIM), rig.layers
    low_rank = layer.low_rank
    assert low_rank is not None
    narrow = ops.make_low_rank(HIDDEN, [WIDTH - 1], 1, 4, torch.bfloat16, torch.device("cpu"))
    wide = ops.make_low_rank(HIDDEN, [WIDTH], 1, 4, torch.float32, torch.device("cpu"))
    for changes in (
        {"low_rank": replace(low_rank, qkv=narrow)},
        {"low_rank": replace(low_rank, qkv=wide)},
        {"low_rank": replace(low_rank, down=low_rank.qkv)},
        {"num_heads": 4, "num_kv_heads": 3},
        {"num_heads": 4},
        {"query_norm": norm},
        {"query_norm": norm[1:], "key_norm": norm},
        {"query_norm": norm, "key_norm": norm.float()},
        {"input_norm": norm},
        {"attention_out_norm": norm},
        {"feed_forward_out_norm": layer.input_norm.half()},
        {"cos_sin": layer.cos_sin.double()},
        {"cos_sin": torch.ones(MAX_POSITIONS, HEAD_DIM + 2)},
        {"cos_sin": layer.cos_sin[:, :15].contiguous()},
        {"cos_sin": layer.cos_sin[:, :14]},
        {"down": layer.out},
    ):
        odd = replace(layer, **changes)
        assert ops.fuse_layers([odd, *rig.layers[1:]], rig.final_norm) is None
