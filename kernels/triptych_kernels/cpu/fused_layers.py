"""A decoder's layers as one program of native kernels: one call per step instead of eight per layer.

Runs the same kernels with the same arguments as the layers' ops one by one, so results have the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych_kernels.attention_batch import AttentionBatch
from triptych_kernels.cpu.attention import batch_numbers
from triptych_kernels.cpu.elementwise import MAX_HEAD_DIM, one_a_token
from triptych_kernels.cpu.linear import NativeLinear
from triptych_kernels.cpu.loader import Isa, native_module
from triptych_kernels.cpu.low_rank import NativeLowRank
from triptych_kernels.cpu.program import Program, Register
from triptych_kernels.ops import DenseLayer, FusedLayers, LayerCache, LayerLowRank, LowRank

_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 64
# In this order: buffers of all tokens, of those that the head reads, and of the current rows.
_OF_TOKENS, _OF_KEPT, _AT_HAND = (
    ("qkv", "attended"),
    ("kept_attended", "kept_residual"),
    ("normed", "projected", "gated"),
)
_BUFFERS = (*_OF_TOKENS, *_OF_KEPT, *_AT_HAND)
_ARRAYS = ("x", "positions", "rows", "out")
_LOW_RANK_SLOTS = ("low_rank_slots", "kept_low_rank_slots")  # of the tokens, of those that the head reads
_COUNTS = ("num_tokens", "num_rows", "rows_at_once", "num_blocks", "block_size", "num_slots")
_NUMBER_BYTES = 8  # of a position, or of a slot
_OF_GROUP = (
    "slots", "tables", "starts", "totals", "num_table_rows", "num_columns", "table_stride",
    "num_common_blocks",
)  # fmt: skip
_OF_LAYER = ("keys", "values")


def fuse_layers(isa: Isa, layers: Sequence[DenseLayer], final_norm: Tensor) -> FusedLayers | None:
    """See ops.Ops.fuse_layers.  isa: the instruction set of the kernels."""
    # Unsupported cases are left to the ops, which serve them or raise an error.
    for dtype in _DTYPES:
        if all(_is_served(layer, final_norm, dtype) for layer in layers):
            return _NativeLayers(isa, tuple(layers), final_norm, dtype)
    return None


def _is_served(layer: DenseLayer, final_norm: Tensor, dtype: torch.dtype) -> bool:
    """dtype: of the rows."""
    (hidden,), dim, cos_sin = final_norm.shape, layer.head_dim, layer.cos_sin
    num_heads, num_kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.gate_up.out_features
    of_heads = [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    of_rows = (layer.input_norm, layer.post_attention_norm, final_norm)
    of_summands = (layer.attention_out_norm, layer.feed_forward_out_norm)
    norms = [(norm, hidden) for norm in (*of_rows, *of_summands) if norm is not None]
    widths = (num_heads * dim, num_kv_heads * dim) if _spans_heads(layer) else (dim, dim)
    norms += list(zip(of_heads, widths, strict=False))
    linears = (
        (layer.qkv, hidden, (num_heads + 2 * num_kv_heads) * dim),
        (layer.out, num_heads * dim, hidden),
        (layer.gate_up, hidden, width),
        (layer.down, width, hidden),
    )
    return (
        num_heads % num_kv_heads == 0
        and dim <= MAX_HEAD_DIM
        and cos_sin.dtype is torch.float32
        and cos_sin.is_contiguous()
        and cos_sin.shape[1] <= dim
        and cos_sin.shape[1] % 2 == 0
        and (layer.query_norm is None) == (layer.key_norm is None)
        and len({norm.dtype for norm in of_heads}) <= 1
        and all(
            norm.dtype in (dtype, torch.float32) and norm.is_contiguous() and norm.shape == (n,)
            for norm, n in norms
        )
        and all(
            isinstance(linear, NativeLinear)
            and linear.keeps(dtype)
            and (linear.in_features, linear.out_features) == (num_inputs, num_outputs)
            for linear, num_inputs, num_outputs in linears
        )
        and all(
            low_rank is None
            or (
                isinstance(low_rank, NativeLowRank)
                and low_rank.keeps(dtype)
                and (low_rank.in_features, low_rank.out_features) == (num_inputs, num_columns)
            )
            for low_rank, num_inputs, num_columns in _additions(layer)
        )
    )


def _spans_heads(layer: DenseLayer) -> bool:
    """Whether the norms of queries and keys are of all heads together."""
    return layer.query_norm is not None and layer.query_norm.numel() != layer.head_dim


def _additions(layer: DenseLayer) -> list[tuple[LowRank | None, int, int]]:
    """The additions to each projection, with its numbers of inputs and of outputs before the activation."""
    added = layer.low_rank or LayerLowRank()
    return [
        (added.qkv, layer.qkv.in_features, layer.qkv.out_features),
        (added.out, layer.out.in_features, layer.out.out_features),
        (added.gate_up, layer.gate_up.in_features, 2 * layer.gate_up.out_features),
        (added.down, layer.down.in_features, layer.down.out_features),
    ]


class _NativeLayers:
    """See ops.FusedLayers."""

    def __init__(
        self, isa: Isa, layers: tuple[DenseLayer, ...], final_norm: Tensor, dtype: torch.dtype
    ) -> None:
        self._isa, self._layers, self._final_norm = isa, layers, final_norm
        self._dtype, self._hidden = dtype, final_norm.shape[0]
        # Per row in each buffer, that of the widest layer.
        self._widths = {
            "normed": self._hidden,
            "qkv": max(layer.qkv.out_features for layer in layers),
            "attended": max(layer.out.in_features for layer in layers),
            "projected": self._hidden,
            "gated": max(layer.gate_up.out_features for layer in layers),
            "kept_attended": layers[-1].out.in_features,
            "kept_residual": self._hidden,
        }
        linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self._most_at_once = min(_native(linear).rows_at_once for linear in linears)
        self._has_low_rank = any(each is not None for layer in layers for each, *_ in _additions(layer))
        self._caches: Sequence[LayerCache] | None = None
        # For steps without low-rank slots, and for those with.
        self._programs: dict[bool, Program] = {}

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        rows: Tensor,
        caches: Sequence[LayerCache],
        slot_mappings: Sequence[Tensor],
        attention: Sequence[AttentionBatch],
        low_rank_slots: Tensor | None = None,
    ) -> Tensor:
        """See ops.FusedLayers."""
        num_tokens, num_rows = x.shape[0], rows.shape[0]
        if x.shape[1] != self._hidden or x.dtype is not self._dtype or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}: expected {self._dtype} [T, {self._hidden}], contiguous"
            )
        if caches is not self._caches:
            self._programs, self._caches = {}, caches
        with_low_rank = self._has_low_rank and low_rank_slots is not None
        if with_low_rank not in self._programs:
            self._programs[with_low_rank] = self._made_for(caches, len(attention), with_low_rank)
        positions = one_a_token(positions, num_tokens, "positions")
        rows = one_a_token(rows, num_rows, "rows")
        slots = [one_a_token(mapping, num_tokens, "slot_mapping") for mapping in slot_mappings]
        out = torch.empty((num_rows, self._hidden), dtype=self._dtype)
        # Each thread adds to what the caches hold.
        at_once = min(max(num_tokens, num_rows), self._most_at_once * native_module().num_threads())
        num_bytes, offsets = self._scratch_layout(num_tokens, num_rows, at_once)
        num_slot_bytes = num_rows * _NUMBER_BYTES if with_low_rank else 0
        room = torch.empty(num_bytes + num_slot_bytes + _ALIGNMENT, dtype=torch.uint8)
        room_start = room.data_ptr() + -room.data_ptr() % _ALIGNMENT
        low_rank: tuple[int, ...] = ()
        if with_low_rank and low_rank_slots is not None:
            low_rank_slots = one_a_token(low_rank_slots, num_tokens, "low_rank_slots")
            low_rank = low_rank_slots.data_ptr(), room_start + num_bytes
        num_blocks, _, block_size, _ = caches[0].key_cache.shape
        if any(batch.block_size != block_size for batch in attention):
            raise ValueError(f"the caches have blocks of {block_size}, a batch has others")
        groups = itertools.chain.from_iterable(
            (mapping.data_ptr(), *batch_numbers(batch))
            for mapping, batch in zip(slots, attention, strict=True)
        )
        # Read for each run: a cache that slept has another address when it wakes.
        memory = itertools.chain.from_iterable(
            (cache.key_cache.data_ptr(), cache.value_cache.data_ptr()) for cache in caches
        )
        self._programs[with_low_rank].run(
            *(room_start + offset for offset in offsets),
            *(x.data_ptr(), positions.data_ptr(), rows.data_ptr(), out.data_ptr()),
            *(num_tokens, num_rows, at_once, num_blocks, block_size, num_blocks * block_size),
            *groups,
            *memory,
            *low_rank,
        )
        return out

    def _scratch_layout(self, num_tokens: int, num_rows: int, at_once: int) -> tuple[int, list[int]]:
        """The number of bytes of the buffers, and the offset of each, in their order."""
        counts = dict.fromkeys(_OF_TOKENS, num_tokens) | dict.fromkeys(_OF_KEPT, num_rows)
        counts |= dict.fromkeys(_AT_HAND, at_once)
        sizes = (counts[name] * self._widths[name] * self._dtype.itemsize for name in _BUFFERS)
        *offsets, end = itertools.accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0)
        return end, offsets

    def _made_for(self, caches: Sequence[LayerCache], num_groups: int, with_low_rank: bool) -> Program:
        """The program for caches of these groups. ValueError if they do not fit the layers."""
        if len(caches) != len(self._layers):
            raise ValueError(f"there are {len(caches)} caches for {len(self._layers)} layers")
        num_blocks, _, block_size, _ = caches[0].key_cache.shape
        for cache, layer in zip(caches, self._layers, strict=True):
            wanted = (num_blocks, layer.num_kv_heads, block_size, layer.head_dim)
            for tensor in (cache.key_cache, cache.value_cache):
                if (
                    tensor.shape != wanted
                    or tensor.dtype is not self._dtype
                    or not tensor.is_contiguous()
                    or cache.group >= num_groups
                ):
                    raise ValueError(
                        f"a cache is {tensor.dtype} {tuple(tensor.shape)} of group {cache.group}, not "
                        f"{self._dtype} {wanted} of {num_groups} groups"
                    )
        names = [*_BUFFERS, *_ARRAYS, *_COUNTS]
        names += [f"{name} {group}" for group in range(num_groups) for name in _OF_GROUP]
        names += [f"{name} of {layer}" for layer in range(len(self._layers)) for name in _OF_LAYER]
        names += _LOW_RANK_SLOTS if with_low_rank else ()
        program = Program(self._isa, names)
        self._write(program, caches, with_low_rank)
        program.finish()
        return program

    def _write(self, program: Program, caches: Sequence[LayerCache], with_low_rank: bool) -> None:
        """All layers, from the first norm to the last.

        Between two layers' attention, kernels take few rows at a time, so intermediate results stay in the
        caches.
        """
        named, groups = program.register, [cache.group for cache in caches]
        x, at_once, normed = named("x").by_row(self._row_bytes), named("rows_at_once"), named("normed")
        added, kept_added = (
            named(name).by_row(_NUMBER_BYTES) if with_low_rank else None for name in _LOW_RANK_SLOTS
        )
        with program.over_rows(named("num_tokens"), at_once):
            first, rows = self._layers[0], x
            if first.input_norm is not None:
                self._add_norm(program, x, 0, first.input_norm, normed, named("num_tokens"), first.eps)
                rows = normed
            self._add_qkv(program, 0, groups[0], rows, added)
        for index, layer in enumerate(self._layers[:-1]):
            following = self._layers[index + 1]
            self._add_attention(program, index, groups[index])
            attended = named("attended").by_row(layer.out.in_features * self._dtype.itemsize)
            with program.over_rows(named("num_tokens"), at_once):
                summand = self._add_mlp(program, layer, attended, x, named("num_tokens"), added)
                rows = self._add_to_residual(
                    program, summand, x, following.input_norm, named("num_tokens"), following.eps
                )
                self._add_qkv(program, index + 1, groups[index + 1], rows, added)
        last = self._layers[-1]
        self._add_attention(program, len(self._layers) - 1, groups[-1])
        # The last layer's results for other tokens are not needed.
        attended = self._add_rows(program, named("attended"), last.out.in_features, named("kept_attended"))
        x = self._add_rows(program, named("x"), self._hidden, named("kept_residual"))
        if added is not None and kept_added is not None:
            program.add(
                "take_rows", named("low_rank_slots"), named("num_tokens"), _NUMBER_BYTES, named("rows"),
                named("num_rows"), named("kept_low_rank_slots"),
            )  # fmt: skip
        with program.over_rows(named("num_rows"), at_once):
            summand = self._add_mlp(program, last, attended, x, named("num_rows"), kept_added)
            out = named("out").by_row(self._row_bytes)
            self._add_norm(program, summand, x, self._final_norm, out, named("num_rows"), last.eps)

    def _add_rows(self, program: Program, x: Register, width: int, out: Register) -> Register:
        """Selects from [T, width] the rows that the head reads."""
        named, num_bytes = program.register, width * self._dtype.itemsize
        program.add("take_rows", x, named("num_tokens"), num_bytes, named("rows"), named("num_rows"), out)
        return out.by_row(num_bytes)

    def _add_norm(
        self,
        program: Program,
        x: Register,
        residual: Register | int,
        weight: Tensor,
        out: Register,
        count: Register,
        eps: float,
    ) -> None:
        width = self._hidden
        program.add(
            "rms_norm", x, residual, weight.data_ptr(), out, 1, count, 0, width, width, width,
            self._is_bf16, weight.dtype is torch.float32, eps,
        )  # fmt: skip

    def _add_to_residual(
        self,
        program: Program,
        summand: Register,
        residual: Register,
        norm: Tensor | None,
        count: Register,
        eps: float,
    ) -> Register:
        """Returns the residual's norm, or where there is none the residual."""
        if norm is None:
            program.add("add_rows", residual, summand, count, self._hidden, self._is_bf16)
            return residual
        normed = program.register("normed")
        self._add_norm(program, summand, residual, norm, normed, count, eps)
        return normed

    def _add_qkv(
        self, program: Program, index: int, group: int, rows: Register, added: Register | None
    ) -> None:
        """Compute qkv of all tokens from what attention reads, rotate it and write it to the cache."""
        named, layer, width = program.register, self._layers[index], self._layers[index].qkv.out_features
        qkv, tokens = named("qkv").by_row(width * self._dtype.itemsize), named("num_tokens")
        positions, slots = (named(name).by_row(_NUMBER_BYTES) for name in ("positions", f"slots {group}"))
        low_rank, (max_positions, rotary_dim) = layer.low_rank or LayerLowRank(), layer.cos_sin.shape
        norms_are_fp32 = layer.query_norm is not None and layer.query_norm.dtype is torch.float32
        _add_linear(program, layer.qkv, rows, qkv, tokens, low_rank.qkv, added)
        query_norm, key_norm = _address(layer.query_norm), _address(layer.key_norm)
        if _spans_heads(layer):
            num_queries, num_keys = (n * layer.head_dim for n in (layer.num_heads, layer.num_kv_heads))
            for first, count, norm in ((0, num_queries, query_norm), (num_queries, num_keys, key_norm)):
                program.add(
                    "norm_columns", qkv, tokens, width, first, count, norm, self._is_bf16, norms_are_fp32,
                    layer.eps,
                )  # fmt: skip
            query_norm = key_norm = 0
        program.add(
            "rotary_kv_write", qkv, positions, layer.cos_sin.data_ptr(), slots, named(f"keys of {index}"),
            named(f"values of {index}"), query_norm, key_norm, width,
            tokens, layer.num_heads, layer.num_kv_heads, layer.head_dim, rotary_dim, named("num_slots"),
            named("block_size"), max_positions, self._is_bf16, norms_are_fp32, layer.eps,
        )  # fmt: skip

    def _add_attention(self, program: Program, index: int, group: int) -> None:
        named, layer = program.register, self._layers[index]
        program.add(
            "paged_attention", named("qkv"), named(f"keys of {index}"), named(f"values of {index}"),
            named("attended"), 0, layer.qkv.out_features, layer.head_dim, named("num_tokens"),
            layer.num_heads, layer.num_kv_heads, named("num_blocks"), named("block_size"), layer.head_dim,
            layer.head_dim, self._is_bf16, self._isa.with_amx, layer.window or 0,
            *(named(f"{name} {group}") for name in _OF_GROUP[1:]), layer.scale, 0.0,
        )  # fmt: skip

    def _add_mlp(
        self,
        program: Program,
        layer: DenseLayer,
        attended: Register,
        residual: Register,
        count: Register,
        added: Register | None,
    ) -> Register:
        """Project attention's results, add the residual and compute the feed-forward network.

        Returns what is to be added to the residual.
        """
        _, projected, gated = map(program.register, _AT_HAND)
        low_rank = layer.low_rank or LayerLowRank()
        _add_linear(program, layer.out, attended, projected, count, low_rank.out, added)
        summand = self._add_summand(program, layer, layer.attention_out_norm, count)
        rows = self._add_to_residual(program, summand, residual, layer.post_attention_norm, count, layer.eps)
        _add_linear(program, layer.gate_up, rows, gated, count, low_rank.gate_up, added)
        _add_linear(program, layer.down, gated, projected, count, low_rank.down, added)
        return self._add_summand(program, layer, layer.feed_forward_out_norm, count)

    def _add_summand(
        self, program: Program, layer: DenseLayer, norm: Tensor | None, count: Register
    ) -> Register:
        """Norm and scale what is projected, as far as the layer does. Returns what is to be added."""
        summand = program.register("projected")
        if norm is not None:
            normed = program.register("normed")
            self._add_norm(program, summand, 0, norm, normed, count, layer.eps)
            summand = normed
        if layer.residual_scale is not None:
            program.add("scale_rows", summand, count, self._hidden, self._is_bf16, layer.residual_scale)
        return summand

    @property
    def _row_bytes(self) -> int:
        return self._hidden * self._dtype.itemsize

    @property
    def _is_bf16(self) -> bool:
        return self._dtype is torch.bfloat16


def _add_linear(
    program: Program,
    linear: object,
    x: Register,
    out: Register,
    count: Register,
    low_rank: LowRank | None,
    slots: Register | None,
) -> None:
    """slots: of the rows, None for a program without additions."""
    native = _native(linear)
    if slots is None or low_rank is None:
        program.add("linear", native.plan, x, native.in_features, out, count, 0)
        return
    assert isinstance(low_rank, NativeLowRank), "fuse_layers accepts only these"
    program.add("linear_low_rank", native.plan, x, native.in_features, out, count, low_rank.table, slots)


def _native(linear: object) -> NativeLinear:
    assert isinstance(linear, NativeLinear), "fuse_layers accepts only these"
    return linear


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
