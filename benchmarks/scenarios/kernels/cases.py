"""Cases of the ops: the shapes of one decoder, and beside each op its counterpart in torch.

Bytes and operations are those that cannot be avoided: what must be read or written once, and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels import (
    AttentionBatch,
    DenseLayer,
    EncoderLayer,
    LayerNorm,
    Ops,
    Penalised,
    QuantizedWeight,
    StateBatch,
    uniform_noise,
)

_BLOCK_SIZE = 16
_LOW_RANK = 16
_NUM_SLOTS = 4
_CONV_WIDTH = 4
# Of quantized weights: bits, inputs of a group, and whether groups have minima.
_CODES = {
    "4-bit": (4, 32, False),
    "4-bit minima": (4, 32, True),
    "6-bit": (6, 16, False),
    "8-bit": (8, 32, False),
}

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    num_chosen: int
    expert_size: int
    num_state_heads: int  # of layers with states of [state_size, state_size] a head
    state_size: int
    num_rows: tuple[int, ...]  # of decode steps
    context: int
    prompt: int


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One op at one shape. `make` binds it to a table of ops: its own weights are laid out then."""

    op: str
    shape: str
    make: Callable[[Ops], Call]
    torch_call: Call | None
    num_bytes: int
    num_operations: int = 0  # 0 where memory is the only limit


@dataclass(frozen=True, slots=True)
class _Cache:
    group: int
    key_cache: Tensor
    value_cache: Tensor


class CaseMaker:
    def __init__(self, shape: DecoderShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def all_cases(self) -> Iterator[KernelCase]:
        """Every op, one after the other, so that only one case's tensors are alive."""
        shape = self._shape
        for num_rows in shape.num_rows:
            yield from self._linears(num_rows)
            yield self._gated_linear(num_rows)
            yield self._experts(num_rows)
            yield from self._elementwise(num_rows)
            yield self._decode(num_rows)
            yield from self._states([1] * num_rows)
            yield self._decoder_layer(num_rows)
            yield self._encoder_layer(num_rows)
            yield from self._head(num_rows)
            yield from self._sampling(num_rows)
            yield from self._low_rank(num_rows)
        yield from self._linears(shape.prompt)
        yield self._gated_linear(shape.prompt)
        yield self._experts(shape.prompt)
        yield from self._elementwise(shape.prompt)
        yield self._prefill(shape.prompt)
        yield from self._states([shape.prompt])
        yield from self._low_rank(shape.prompt)

    def _noise(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*size, generator=self._generator, device=self._device, dtype=dtype or self._dtype)

    def _linears(self, num_rows: int) -> Iterator[KernelCase]:
        shape = self._shape
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        sizes = [
            ("qkv", shape.hidden_size, qkv),
            ("gate_up", shape.hidden_size, 2 * shape.intermediate_size),
            ("down", shape.intermediate_size, shape.hidden_size),
        ]
        for name, num_inputs, num_outputs in sizes:
            x, weight = self._noise(num_rows, num_inputs), self._noise(num_outputs, num_inputs)
            for quantization in ("", "int8"):
                weight_bytes = weight.numel() if quantization else weight.nbytes
                yield KernelCase(
                    op="pack_linear" + (f" {quantization}" if quantization else ""),
                    shape=f"{name} {num_rows} x {num_inputs} -> {num_outputs}",
                    make=_linear_maker(x, weight, quantization),
                    torch_call=_bound(F.linear, x, weight),
                    num_bytes=x.nbytes + weight_bytes + num_rows * num_outputs * x.itemsize,
                    num_operations=2 * num_rows * weight.numel(),
                )
            if self._device.type == "cpu":
                yield from self._quantized_linears(
                    f"{name} {num_rows} x {num_inputs} -> {num_outputs}", x, weight
                )

    def _quantized_linears(self, label: str, x: Tensor, like: Tensor) -> Iterator[KernelCase]:
        """like: a weight of the same shape."""
        for name, (bits, group_size, has_minima) in _CODES.items():
            weight = self._codes(like.shape, bits, group_size, has_minima)
            num_bytes = like.numel() * bits // 8 + weight.scales.numel() * (4 if has_minima else 2)
            for activations in ("exact", "int8"):
                yield KernelCase(
                    op=f"pack_linear {name} {activations}",
                    shape=label,
                    make=_linear_maker(x, weight, activations=activations),
                    torch_call=_bound(F.linear, x, like),
                    num_bytes=x.nbytes + num_bytes + x.shape[0] * like.shape[0] * x.itemsize,
                    num_operations=2 * x.shape[0] * like.numel(),
                )

    def _codes(self, shape: torch.Size, bits: int, group_size: int, has_minima: bool) -> QuantizedWeight:
        num_rows, num_columns = shape
        codes = torch.randint(1, 1 << bits, shape, generator=self._generator, dtype=torch.uint8)
        scales = torch.rand(num_rows, -(-num_columns // group_size), generator=self._generator).half().float()
        values = torch.arange(1 << bits).float() - (0 if has_minima else 1 << (bits - 1))
        minima = scales * 8 if has_minima else None
        return QuantizedWeight(codes, bits, values, scales, group_size, self._dtype, minima=minima)

    def _gated_linear(self, num_rows: int) -> KernelCase:
        hidden, features = self._shape.hidden_size, self._shape.intermediate_size
        x, weight = self._noise(num_rows, hidden), self._noise(2 * features, hidden)

        def by_torch() -> Tensor:
            gate, up = F.linear(x, weight).chunk(2, dim=-1)
            return F.silu(gate) * up

        return KernelCase(
            op="pack_gated_linear",
            shape=f"{num_rows} x {hidden} -> {features}",
            make=lambda ops: _bound(ops.pack_gated_linear(weight), x),
            torch_call=by_torch,
            num_bytes=x.nbytes + weight.nbytes + num_rows * features * x.itemsize,
            num_operations=2 * num_rows * weight.numel(),
        )

    def _experts(self, num_rows: int) -> KernelCase:
        shape = self._shape
        x = self._noise(num_rows, shape.hidden_size)
        gate_up = self._noise(shape.num_experts, 2 * shape.expert_size, shape.hidden_size)
        down = self._noise(shape.num_experts, shape.hidden_size, shape.expert_size)
        scores = torch.rand(num_rows, shape.num_experts, generator=self._generator, device=self._device)
        weights, ids = scores.topk(shape.num_chosen)
        num_used = min(shape.num_experts, num_rows * shape.num_chosen)
        expert_bytes = (gate_up[0].numel() + down[0].numel()) * x.itemsize

        def make(ops: Ops) -> Call:
            return _bound(ops.pack_experts(gate_up, down), x, ids, weights)

        return KernelCase(
            op="pack_experts",
            shape=f"{num_rows} x {shape.num_chosen} of {shape.num_experts}",
            make=make,
            torch_call=None,
            num_bytes=2 * x.nbytes + num_used * expert_bytes,
            num_operations=2 * num_rows * shape.num_chosen * 3 * shape.expert_size * shape.hidden_size,
        )

    def _elementwise(self, num_rows: int) -> Iterator[KernelCase]:
        shape = self._shape
        x, residual = self._noise(num_rows, shape.hidden_size), self._noise(num_rows, shape.hidden_size)
        weight = self._noise(shape.hidden_size)
        label = f"{num_rows} x {shape.hidden_size}"
        plain = _bound(F.rms_norm, x, (shape.hidden_size,), weight, 1e-5)
        yield KernelCase(
            "rms_norm", label, lambda ops: _bound(ops.rms_norm, x, weight, 1e-5), plain, 2 * x.nbytes
        )
        yield KernelCase(
            "add_rms_norm",
            label,
            lambda ops: _bound(ops.add_rms_norm, x, residual, weight, 1e-5),
            lambda: F.rms_norm(residual.add_(x), (shape.hidden_size,), weight, 1e-5),
            4 * x.nbytes,
        )
        gated = self._noise(num_rows, 2 * shape.intermediate_size)
        gate, up = gated.chunk(2, dim=-1)
        label, num_bytes = f"{num_rows} x {shape.intermediate_size}", gated.nbytes + gated.nbytes // 2
        yield KernelCase(
            "silu_and_mul",
            label,
            lambda ops: _bound(ops.silu_and_mul, gated),
            lambda: F.silu(gate) * up,
            num_bytes,
        )
        yield KernelCase(
            "gelu_tanh_and_mul",
            label,
            lambda ops: _bound(ops.gelu_tanh_and_mul, gated),
            lambda: F.gelu(gate, approximate="tanh") * up,
            num_bytes,
        )
        yield KernelCase(
            "sigmoid_and_mul",
            label,
            lambda ops: _bound(ops.sigmoid_and_mul, gated),
            lambda: gate.sigmoid() * up,
            num_bytes,
        )
        yield from self._cache_writes(num_rows)

    def _cache_writes(self, num_rows: int) -> Iterator[KernelCase]:
        shape, dim, heads = self._shape, self._shape.head_dim, self._shape.num_kv_heads
        num_blocks = 2 * -(-num_rows // _BLOCK_SIZE)
        keys, values = (self._noise(num_blocks, heads, _BLOCK_SIZE, dim) for _ in range(2))
        slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=self._device, generator=self._generator)
        slots = slots[:num_rows]
        qkv = self._noise(num_rows, (shape.num_heads + 2 * heads) * dim)
        rows = qkv.view(num_rows, shape.num_heads + 2 * heads, dim)
        new_keys, new_values = rows[:, -2 * heads : -heads], rows[:, -heads:]
        stored = 2 * num_rows * heads * dim * qkv.itemsize
        yield KernelCase(
            "kv_write",
            f"{num_rows} x {heads} x {dim}",
            lambda ops: _bound(ops.kv_write, new_keys, new_values, keys, values, slots),
            None,
            2 * stored,
        )
        positions = torch.arange(num_rows, device=self._device)
        table = self._noise(num_rows, dim, dtype=torch.float32)

        def make(ops: Ops) -> Call:
            return lambda: ops.rotary_kv_write(
                qkv, positions, table, slots, keys, values, num_heads=shape.num_heads
            )

        queries = num_rows * shape.num_heads * dim * qkv.itemsize
        yield KernelCase(
            "rotary_kv_write", f"{num_rows} tokens", make, None, 2 * (queries + stored) + table.nbytes
        )

    def _decode(self, num_rows: int) -> KernelCase:
        shape, context = self._shape, self._shape.context
        query, keys, values, batch = self._paged([1] * num_rows, [context] * num_rows)
        # For torch every row's KV lies together, as it likes it best.
        dense = (num_rows, shape.num_kv_heads, context, shape.head_dim)
        dense_keys, dense_values = self._noise(*dense), self._noise(*dense)
        kv_bytes = 2 * num_rows * context * shape.num_kv_heads * shape.head_dim * query.itemsize
        return KernelCase(
            "paged_attention",
            f"decode {num_rows} x {context}",
            _attention_maker(query, keys, values, batch, shape.head_dim**-0.5),
            lambda: F.scaled_dot_product_attention(
                query[:, :, None], dense_keys, dense_values, enable_gqa=True
            ),
            kv_bytes + 2 * query.nbytes,
        )

    def _decoder_layer(self, num_rows: int) -> KernelCase:
        shape, context = self._shape, self._shape.context
        hidden, dim = shape.hidden_size, shape.head_dim
        width = (shape.num_heads + 2 * shape.num_kv_heads) * dim
        sizes = ((width, hidden), (hidden, shape.num_heads * dim))
        network = ((2 * shape.intermediate_size, hidden), (hidden, shape.intermediate_size))
        qkv, out, gate_up, down = (self._noise(*size) / size[1] ** 0.5 for size in (*sizes, *network))
        norm, x = self._noise(hidden), self._noise(num_rows, hidden)
        _, keys, values, batch = self._paged([1] * num_rows, [context] * num_rows)
        table = batch.block_tables[:, (context - 1) // _BLOCK_SIZE].long()
        slots = table * _BLOCK_SIZE + (context - 1) % _BLOCK_SIZE
        positions = torch.full((num_rows,), context - 1, device=self._device)
        turns = self._noise(context, dim, dtype=torch.float32)
        rows = torch.arange(num_rows, device=self._device)

        def make(ops: Ops) -> Call:
            layer = DenseLayer(
                norm, ops.pack_linear(qkv), None, None, ops.pack_linear(out), norm,
                ops.pack_gated_linear(gate_up), ops.pack_linear(down),
                shape.num_heads, shape.num_kv_heads, dim, dim**-0.5, None, turns, 1e-5
            )  # fmt: skip
            fused = ops.fuse_layers([layer], norm)
            if fused is None:
                raise ValueError("this table takes layers op by op")
            caches = [_Cache(0, keys, values)]
            return lambda: fused(x.clone(), positions, rows, caches, [slots], [batch])

        weights = sum(weight.nbytes for weight in (qkv, out, gate_up, down))
        kv_bytes = 2 * num_rows * context * shape.num_kv_heads * dim * keys.itemsize
        return KernelCase("fuse_layers", f"decode {num_rows} x {context}", make, None, weights + kv_bytes)

    def _encoder_layer(self, num_rows: int) -> KernelCase:
        """Without attention, in whose place a token gets its own values."""
        hidden, inner = self._shape.hidden_size, self._shape.intermediate_size
        sizes = ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner))
        qkv, out, up, down = (self._noise(*size) / size[1] ** 0.5 for size in sizes)
        norm, x = LayerNorm(self._noise(hidden), self._noise(hidden), 1e-5), self._noise(num_rows, hidden)

        def make(ops: Ops) -> Call:
            pack = ops.pack_linear
            layer = EncoderLayer(pack(qkv), pack(out), norm, pack(up), pack(down), norm)
            fused = ops.fuse_encoder([layer])
            if fused is None:
                raise ValueError("this table takes layers op by op")
            return lambda: fused(x.clone(), lambda parts: parts[:, 2 * hidden :].contiguous())

        weights = sum(weight.nbytes for weight in (qkv, out, up, down))
        return KernelCase("fuse_encoder", f"{num_rows} tokens", make, None, weights + 2 * x.nbytes)

    def _prefill(self, length: int) -> KernelCase:
        shape = self._shape
        query, keys, values, batch = self._paged([length], [length])
        dense = (1, shape.num_kv_heads, length, shape.head_dim)
        dense_keys, dense_values = self._noise(*dense), self._noise(*dense)
        return KernelCase(
            "paged_attention",
            f"prefill {length}",
            _attention_maker(query, keys, values, batch, shape.head_dim**-0.5),
            lambda: F.scaled_dot_product_attention(
                query.transpose(0, 1)[None], dense_keys, dense_values, is_causal=True, enable_gqa=True
            ),
            2 * query.nbytes + 2 * length * shape.num_kv_heads * shape.head_dim * query.itemsize,
            2 * shape.num_heads * shape.head_dim * length * (length + 1),
        )

    def _paged(
        self, query_lengths: list[int], total_lengths: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
        shape, num_rows = self._shape, len(total_lengths)
        blocks_per_row = -(-max(total_lengths) // _BLOCK_SIZE)
        order = torch.randperm(num_rows * blocks_per_row, device=self._device, generator=self._generator)
        size = (num_rows * blocks_per_row, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
        batch = AttentionBatch.of(order.view(num_rows, -1).int(), query_lengths, total_lengths, _BLOCK_SIZE)
        query = self._noise(sum(query_lengths), shape.num_heads, shape.head_dim)
        return query, self._noise(*size), self._noise(*size), batch

    def _states(self, lengths: list[int]) -> Iterator[KernelCase]:
        """Rows that go on from states in slots of their own."""
        heads, size = self._shape.num_state_heads, self._shape.state_size
        num_rows, num_tokens = len(lengths), sum(lengths)
        slots = list(range(num_rows))
        totals = [length + self._shape.context for length in lengths]
        batch = StateBatch.of(lengths, totals, slots, slots, device=self._device)
        label = f"{num_rows} rows" if num_tokens == num_rows else f"prefill {num_tokens}"
        channels = 3 * heads * size
        x, weight = self._noise(num_tokens, channels), self._wide(_CONV_WIDTH, channels)
        kept = self._wide(num_rows, _CONV_WIDTH - 1, channels)
        yield KernelCase(
            "causal_conv",
            f"{label} x {channels}",
            lambda ops: lambda: ops.causal_conv(x, weight, None, kept, batch, silu=True),
            None,
            2 * (x.nbytes + kept.nbytes) + weight.nbytes,
        )
        states = self._wide(num_rows, heads, size, size)
        rates, biases = -self._wide(heads).abs(), self._wide(heads)
        values, (steps, betas) = self._noise(num_tokens, heads, size), self._noise(2, num_tokens, heads)
        keys, queries = (self._noise(num_tokens, max(1, heads // 2), size) for _ in range(2))
        inputs = 2 * values.nbytes + keys.nbytes + queries.nbytes
        # Products and sums of each number of a state: decay, addition, and what keys and queries find.
        operations = 0 if num_tokens == num_rows else num_tokens * heads * size * size
        yield KernelCase(
            "ssd_scan",
            f"{label} x {heads} x {size} x {size}",
            lambda ops: (
                lambda: ops.ssd_scan(
                    values, steps, keys, queries, states, batch, A=rates, D=None, dt_bias=biases
                )
            ),
            None,
            2 * states.nbytes + inputs,
            5 * operations,
        )
        yield KernelCase(
            "gated_delta_rule",
            f"{label} x {heads} x {size} x {size}",
            lambda ops: (
                lambda: ops.gated_delta_rule(
                    queries, keys, values, steps, betas, states, batch, A=rates, dt_bias=biases
                )
            ),
            None,
            2 * states.nbytes + inputs,
            7 * operations,
        )

    def _wide(self, *size: int) -> Tensor:
        return self._noise(*size, dtype=torch.float32)

    def _sampling(self, num_rows: int) -> Iterator[KernelCase]:
        vocab_size, device = self._shape.vocab_size, self._device
        logits = self._noise(num_rows, vocab_size, dtype=torch.float32) * 3
        label = f"{num_rows} x {vocab_size}"
        yield KernelCase(
            "greedy",
            label,
            lambda ops: _bound(ops.greedy, logits),
            _bound(torch.argmax, logits, -1),
            logits.nbytes,
        )
        seeds = torch.arange(num_rows, device=device)
        columns = (
            torch.full((num_rows,), 0.8, device=device),
            torch.full((num_rows,), 50, device=device),
            torch.full((num_rows,), 0.9, device=device),
            torch.zeros(num_rows, device=device),
            uniform_noise(seeds, seeds, 0),
        )
        yield KernelCase(
            "sample",
            f"{label} top-k 50, top-p 0.9",
            lambda ops: _bound(ops.sample, logits, *columns),
            None,
            logits.nbytes,
        )
        words = -(-vocab_size // 32)
        mask = torch.full((num_rows, words), -1, dtype=torch.int32, device=device)
        yield KernelCase(
            "apply_token_mask",
            label,
            lambda ops: _bound(ops.apply_token_mask, logits, mask),
            None,
            mask.nbytes,
        )
        length = self._shape.context
        token_ids = torch.arange(num_rows * length, device=device).view(num_rows, -1).int() % vocab_size
        rows, lengths = torch.arange(num_rows, device=device), torch.full((num_rows,), length, device=device)
        amounts = torch.full((3, num_rows), 1.1, device=device)
        penalised = Penalised(rows, rows, lengths // 2, amounts)
        yield KernelCase(
            "penalise",
            f"{label}, {length} seen",
            lambda ops: _bound(ops.penalise, logits, token_ids, penalised, lengths),
            None,
            token_ids.nbytes + 2 * num_rows * length * logits.itemsize,
        )

    def _head(self, num_rows: int) -> Iterator[KernelCase]:
        hidden, vocab_size = self._shape.hidden_size, self._shape.vocab_size
        weight, x = self._noise(vocab_size, hidden), self._noise(num_rows, hidden)
        kept = torch.arange(0, device=self._device)
        yield KernelCase(
            "greedy_linear",
            f"{num_rows} x {hidden} x {vocab_size}",
            lambda ops: _bound(ops.greedy_linear, ops.pack_linear(weight, out_dtype=torch.float32), x, kept),
            lambda: F.linear(x, weight).argmax(-1),
            weight.nbytes + x.nbytes,
            2 * num_rows * hidden * vocab_size,
        )

    def _low_rank(self, num_rows: int) -> Iterator[KernelCase]:
        hidden = self._shape.hidden_size
        x = self._noise(num_rows, hidden)
        down, up = self._noise(_LOW_RANK, hidden), self._noise(hidden, _LOW_RANK)
        slots = torch.arange(num_rows, device=self._device) * _NUM_SLOTS // num_rows

        def make(ops: Ops) -> Call:
            low_rank = ops.make_low_rank(hidden, [hidden], _NUM_SLOTS, _LOW_RANK, self._dtype, self._device)
            for slot in range(_NUM_SLOTS):
                low_rank.put(slot, [ops.pack_low_rank(down, up, 1.0)])
            return _bound(low_rank, x, slots)

        slot_bytes = down.nbytes + up.nbytes
        yield KernelCase(
            "make_low_rank",
            f"{num_rows} x {hidden}, rank {_LOW_RANK}",
            make,
            None,
            x.nbytes + 4 * num_rows * hidden + min(num_rows, _NUM_SLOTS) * slot_bytes,
        )
        yield KernelCase(
            "pack_low_rank",
            f"{hidden}, rank {_LOW_RANK}",
            lambda ops: _bound(ops.pack_low_rank, down, up, 1.0),
            None,
            2 * slot_bytes,
        )


def _bound(function: Callable[..., object], *arguments: object) -> Call:
    return lambda: function(*arguments)


def _linear_maker(
    x: Tensor, weight: Tensor | QuantizedWeight, quantization: str = "", activations: str = "exact"
) -> Callable[[Ops], Call]:
    return lambda ops: _bound(ops.pack_linear(weight, quantization=quantization, activations=activations), x)


def _attention_maker(
    query: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, scale: float
) -> Callable[[Ops], Call]:
    return lambda ops: lambda: ops.paged_attention(query, keys, values, batch, scale=scale)
