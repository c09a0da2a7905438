"""Builds a native decoder from a spec and weights: which tensors make which part, and this rank's share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.facts import KVShape
from engine_svc.model.loading.packed_weights import NothingKept, PackedWeights
from engine_svc.model.loading.weights import WeightReader
from engine_svc.model.low_rank import ProjectionPart
from engine_svc.model.native.decoder import NativeDecoder, TokenEmbedding
from engine_svc.model.native.exchange import ExpertShare, NoExchange
from engine_svc.model.native.layers import (
    Attention,
    DecoderLayer,
    FeedForward,
    GatedFeedForward,
    Mixer,
    MixtureOfExperts,
    Projection,
    SharedExpert,
    SharedMixture,
)
from engine_svc.model.native.recurrence import Convolution, DeltaRule, Recurrence, StateScan
from engine_svc.model.native.spec import DecoderSpec, DeltaSpec, DenseSpec, ExpertsSpec, ScanSpec
from engine_svc.model.parallel import Parallel
from triptych_kernels import (
    ExpertBiases,
    Experts,
    Linear,
    Ops,
    PackLinear,
    QuantizedWeight,
    Weight,
    as_tensor,
    join_rows,
)

_TABLE, _HEAD = "embed_tokens.weight", "lm_head.weight"
# What the names of a decoder begin with where it is a part of the checkpoint's model.
_TEXT_PART = "model.language_model."

# Names of a layer's norms, by where it has them.
_NORMS = {
    "before": {
        "input_norm": "input_layernorm.weight",
        "post_attention_norm": "post_attention_layernorm.weight",
    },
    "around": {
        "input_norm": "input_layernorm.weight",
        "attention_out_norm": "post_attention_layernorm.weight",
        "post_attention_norm": "pre_feedforward_layernorm.weight",
        "feed_forward_out_norm": "post_feedforward_layernorm.weight",
    },
    "behind": {
        "attention_out_norm": "post_attention_layernorm.weight",
        "feed_forward_out_norm": "post_feedforward_layernorm.weight",
    },
}


def expert_range(num_experts: int, rank: int, size: int) -> tuple[int, int]:
    """Half-open range of experts owned by `rank`; shard sizes differ by at most one."""
    return rank * num_experts // size, (rank + 1) * num_experts // size


class NoExperts:
    """The experts of a rank without any, because there are more ranks than experts. They add nothing."""

    num_bytes = 0
    expert_range = (0, 0)

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def take(self, first: int, end: int) -> Experts:
        return self

    def join(self, more: Experts) -> Experts:
        return more


@dataclass(slots=True)
class DecoderBuilder:
    """Reads the tensors that this rank needs, one by one, and lays them out for its device."""

    spec: DecoderSpec
    weights: WeightReader
    ops: Ops
    parallel: Parallel
    dtype: torch.dtype
    quantization: str = ""  # of the layers' projections
    activations: str = "exact"  # of rows that are multiplied with quantized weights
    share: ExpertShare | None = None  # set if the experts are divided over engines
    num_attention_inputs: int | None = None  # of a token; None: the hidden size
    samples: bool = True  # False for a model that only pools, and so needs no logits
    packed: PackedWeights = field(default_factory=NothingKept)
    num_parameters: int = 0
    num_bytes: int = 0
    has_quantized: bool = False  # whether a weight was

    def build(self, name: str, cos_sin: Tensor) -> NativeDecoder:
        """The decoder of this rank. Raises CheckpointError for missing or misshapen weights."""
        self._check_divides()
        spec, parallel = self.spec, self.parallel
        if self.quantization and spec.has_experts:
            raise UnsupportedModel(
                f"quantization {self.quantization} is not supported for mixtures of experts"
            )
        is_first, is_last = parallel.pp_rank == 0, parallel.pp_rank == parallel.pp_size - 1
        first = spec.num_layers * parallel.pp_rank // parallel.pp_size
        end = spec.num_layers * (parallel.pp_rank + 1) // parallel.pp_size
        head = self._head() if is_last and self.samples else None
        embedding = self._embedding(head) if is_first else None
        layers = [
            self.layer(f"{self.body}layers.{index}.", index, self._number_of_kind(first, index))
            for index in range(first, end)
        ]
        final_norm = self.vector(self.body + "norm.weight", spec.hidden_size) if is_last else None
        num_kv_heads = self._num_kv_heads
        return NativeDecoder(
            name=name,
            ops=self.ops,
            parallel=parallel,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=head,
            cos_sin=cos_sin,
            kv_shapes=tuple(
                KVShape(num_kv_heads, spec.head_dim, spec.head_dim, window)
                for window, recurrence in zip(
                    spec.windows[first:end], spec.recurrences[first:end], strict=True
                )
                if recurrence is None
            ),
            state_shapes=tuple(
                layer.mixer.state_shape for layer in layers if isinstance(layer.mixer, Recurrence)
            ),
            hidden_size=spec.hidden_size,
            dtype=self.dtype,
            num_parameters=self.num_parameters,
            num_bytes=self.num_bytes,
            input_scale=spec.input_scale,
            logits_divisor=spec.logits_divisor,
            is_fusible=parallel.tp_size == parallel.pp_size == 1,
            exchange=NoExchange() if self.share is None else self.share.exchange,
        )

    def read_experts(self, layer: int, first: int, end: int) -> Experts:
        """Experts first to end - 1 of a layer that has a mixture, packed."""
        prefix, experts = f"{self.body}layers.{layer}.", self.spec.experts[layer]
        assert experts is not None, f"layer {layer} has no mixture of experts"
        return self._experts(prefix, experts, first, end)

    @property
    def body(self) -> str:
        """What the names of all tensors but the head's begin with."""
        return _TEXT_PART if _TEXT_PART + _TABLE in self.weights.names else "model."

    def _number_of_kind(self, first: int, index: int) -> int:
        """How many layers from `first` on to before `index` have a mixer of the same kind."""
        has_attention = [recurrence is None for recurrence in self.spec.recurrences]
        return has_attention[first:index].count(has_attention[index])

    @property
    def _num_kv_heads(self) -> int:
        return max(1, self.spec.num_kv_heads // self.parallel.tp_size)

    def _check_divides(self) -> None:
        spec, ranks = self.spec, self.parallel.tp_size
        # Experts have an intermediate size of their own.
        has_dense = not all(spec.experts)
        recurrence = next((each for each in spec.recurrences if each is not None), None)
        groups = 1 if recurrence is None else recurrence.num_groups
        shared = next((each.shared for each in spec.experts if each is not None), None)
        for what, number in (
            ("attention heads", spec.num_heads),
            ("heads of recurrences", 0 if recurrence is None else recurrence.num_heads),
            ("intermediate size", spec.dense.intermediate_size if has_dense else 0),
            ("channels of the shared expert", 0 if shared is None else shared.intermediate_size),
            ("vocabulary", spec.vocab_size),
        ):
            if number % ranks:
                raise UnsupportedModel(f"{number} {what} do not divide over {ranks} tensor-parallel ranks")
        if spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
            raise UnsupportedModel(f"{spec.num_kv_heads} KV heads do not divide over {ranks} ranks")
        if groups % ranks and ranks % groups:
            raise UnsupportedModel(f"{groups} groups of recurrences do not divide over {ranks} ranks")
        if self.parallel.pp_size > spec.num_layers:
            raise UnsupportedModel(f"{spec.num_layers} layers do not make {self.parallel.pp_size} stages")

    def _embedding(self, head: Projection | None) -> TokenEmbedding:
        """head: of the same table, if it is this rank's and the model ties them."""
        spec, parallel = self.spec, self.parallel
        share = spec.vocab_size // parallel.tp_size
        first = share * parallel.tp_rank
        shared = None if head is None or self._head_name == _HEAD else self.ops.look_up(head.linear)
        table = self._table(first, share) if shared is None else shared
        self.num_parameters += share * spec.hidden_size
        whole = slice(None)
        part = ProjectionPart(self.body + "embed_tokens", spec.hidden_size, spec.vocab_size, whole, whole)
        scale = spec.embedding_scale
        if scale is not None:
            # As in transformers, rounded to the dtype of the weights.
            scale = torch.tensor(scale, dtype=self.dtype).item()
        return TokenEmbedding(table, share, first, parallel, part, scale)

    def _table(self, first: int, count: int) -> Tensor | Callable[[Tensor], Tensor]:
        """`count` rows of the embedding table from `first` on, or what gives them."""
        shape = self.spec.vocab_size, self.spec.hidden_size

        @functools.cache
        def weight() -> Tensor | QuantizedWeight:
            return self._weight(self.body + _TABLE, shape, 0, first, count)

        if self.packed.has("table") or isinstance(weight(), QuantizedWeight):
            packed = self.packed.get("table", lambda: self.ops.pack_linear(weight()))
            look_up = self.ops.look_up(packed)
            if look_up is not None:
                self.num_bytes += packed.num_bytes
                return look_up
        table = as_tensor(weight())
        self.num_bytes += table.nbytes
        return table

    @property
    def _head_name(self) -> str:
        # As in transformers, a separate head takes precedence, even if the config states tied embeddings.
        is_tied = self.spec.ties_embeddings and _HEAD not in self.weights.names
        return self.body + _TABLE if is_tied else _HEAD

    def _head(self) -> Projection:
        spec, parallel, name = self.spec, self.parallel, self._head_name
        share = spec.vocab_size // parallel.tp_size
        shape = spec.vocab_size, spec.hidden_size

        def pack() -> Linear:
            weight = self._weight(name, shape, 0, share * parallel.tp_rank, share)
            return self.ops.pack_linear(weight, out_dtype=torch.float32, activations=self.activations)

        head = self.packed.get("head", pack)
        is_counted = name != _HEAD and parallel.pp_rank == 0
        self.num_parameters += 0 if is_counted else share * spec.hidden_size
        self.num_bytes += head.num_bytes
        rows = slice(share * parallel.tp_rank, share * (parallel.tp_rank + 1))
        part = ProjectionPart("lm_head", spec.vocab_size, spec.hidden_size, rows, slice(None))
        return Projection(head, (part,))

    def layer(self, prefix: str, index: int, local_index: int) -> DecoderLayer:
        """The layer whose tensors have this prefix, of the kind of layer `index`.

        local_index: among this rank's layers that have attention too, or a recurrence too.
        """
        spec, experts = self.spec, self.spec.experts[index]
        names = _NORMS[spec.norms]
        norms = {part: self.vector(prefix + name, spec.hidden_size) for part, name in names.items()}
        return DecoderLayer(
            ops=self.ops,
            parallel=self.parallel,
            mixer=self._mixer(prefix, index, local_index),
            feed_forward=self._dense(prefix, spec.dense)
            if experts is None
            else self._mixture(prefix, experts, index),
            eps=spec.eps,
            residual_scale=spec.residual_scale,
            shared_expert=None
            if experts is None or experts.shared is None
            else self._shared_expert(prefix, experts, experts.shared),
            **norms,
        )

    def _mixer(self, prefix: str, index: int, local_index: int) -> Mixer:
        recurrence = self.spec.recurrences[index]
        if isinstance(recurrence, DeltaSpec):
            return self._delta_rule(prefix + "linear_attn.", recurrence, local_index)
        if isinstance(recurrence, ScanSpec):
            return self._scan(prefix + "mamba.", recurrence, local_index)
        return self._attention(prefix + "self_attn.", index, local_index)

    def _attention(self, prefix: str, index: int, local_index: int) -> Attention:
        spec, rank, ranks = self.spec, self.parallel.tp_rank, self.parallel.tp_size
        num_heads, num_kv_heads, dim = spec.num_heads // ranks, self._num_kv_heads, spec.head_dim
        # With fewer KV heads than ranks, neighbouring ranks hold the same head.
        first_kv_head = rank * spec.num_kv_heads // ranks
        parts = (
            ("q_proj", spec.num_heads, rank * num_heads, num_heads, 2 * dim if spec.has_gates else dim),
            ("k_proj", spec.num_kv_heads, first_kv_head, num_kv_heads, dim),
            ("v_proj", spec.num_kv_heads, first_kv_head, num_kv_heads, dim),
        )
        rows = [
            (prefix + name, total * width, first * width, count * width)
            for name, total, first, count, width in parts
        ]
        if spec.is_joined:
            rows = _joined(prefix + "qkv_proj", rows)
        return Attention(
            ops=self.ops,
            parallel=self.parallel,
            layer=local_index,
            qkv=self._rows_linear(
                rows,
                self.num_attention_inputs or spec.hidden_size,
                spec.has_qkv_bias,
                self.ops.pack_linear,
            ),
            out=self._columns_linear(
                prefix + "o_proj",
                spec.hidden_size,
                spec.num_heads * dim,
                rank * num_heads * dim,
                num_heads * dim,
                spec.has_out_bias,
            ),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            scale=spec.attention_scale,
            window=spec.windows[index],
            query_norm=self._head_norm(prefix + "q_norm.weight", spec.num_heads),
            key_norm=self._head_norm(prefix + "k_norm.weight", spec.num_kv_heads),
            norms_span_heads=spec.qk_norm_spans_heads,
            has_gates=spec.has_gates,
            sinks=self._numbers(prefix + "sinks", spec.num_heads, rank * num_heads, num_heads)
            if spec.has_sinks
            else None,
            eps=spec.eps,
        )

    def _head_norm(self, name: str, num_heads: int) -> Tensor | None:
        """Of each head, or of those of all ranks together, in their order."""
        spec, ranks = self.spec, self.parallel.tp_size
        if not spec.has_qk_norm:
            return None
        if not spec.qk_norm_spans_heads:
            return self.vector(name, spec.head_dim)
        norm = self.vector(name, num_heads * spec.head_dim)
        # With fewer KV heads than ranks, neighbouring ranks hold the same head.
        num_copies = max(1, ranks // num_heads)
        return norm.view(num_heads, -1).repeat_interleave(num_copies, 0).flatten()

    def _numbers(self, name: str, total: int, first: int, count: int) -> Tensor:
        """[count] fp32, of `total` numbers those from `first` on."""
        numbers = self._read(name, (total,), 0, first, count).float()
        self._count(numbers, numbers.nbytes)
        return numbers

    def _delta_rule(self, prefix: str, delta: DeltaSpec, local_index: int) -> DeltaRule:
        hidden, rank, ranks = self.spec.hidden_size, self.parallel.tp_rank, self.parallel.tp_size
        num_heads, num_groups = delta.num_heads // ranks, max(1, delta.num_groups // ranks)
        head, dim = rank * num_heads, delta.head_dim
        # With fewer key heads than ranks, neighbouring ranks hold the same head.
        keys = _times(delta.key_dim, delta.num_groups, rank * delta.num_groups // ranks, num_groups)
        values, numbers = _times(dim, delta.num_heads, head, num_heads), (delta.num_heads, head, num_heads)
        channels = [(prefix + "conv1d", *part) for part in (keys, keys, values)]
        rows = [
            *_joined(prefix + "in_proj_qkv", channels),
            (prefix + "in_proj_z", *values),
            (prefix + "in_proj_b", *numbers),
            (prefix + "in_proj_a", *numbers),
        ]
        norm = self._read(prefix + "norm.weight", (dim,))
        self._count(norm, norm.nbytes)
        return DeltaRule(
            ops=self.ops,
            layer=local_index,
            inputs=self._rows_linear(rows, hidden, False, self.ops.pack_linear),
            convolution=self._convolution(prefix + "conv1d", channels, delta.conv_width, False),
            out=self._columns_linear(prefix + "out_proj", hidden, *values, False),
            num_groups=num_groups,
            key_dim=delta.key_dim,
            num_heads=num_heads,
            head_dim=dim,
            rates=-self._numbers(prefix + "A_log", *numbers).exp(),
            dt_bias=self._numbers(prefix + "dt_bias", *numbers),
            norm=norm,
            eps=self.spec.eps,
        )

    def _scan(self, prefix: str, scan: ScanSpec, local_index: int) -> StateScan:
        hidden, rank, ranks = self.spec.hidden_size, self.parallel.tp_rank, self.parallel.tp_size
        num_heads, num_groups = scan.num_heads // ranks, max(1, scan.num_groups // ranks)
        head = rank * num_heads
        # With fewer groups than ranks, neighbouring ranks hold the same group.
        groups = _times(scan.state_size, scan.num_groups, rank * scan.num_groups // ranks, num_groups)
        numbers = (scan.num_heads, head, num_heads)
        values = _times(scan.head_dim, *numbers)
        channels = [(prefix, *part) for part in (values, groups, groups)]
        rows = _joined(prefix + "in_proj", [(prefix, *values), *channels, (prefix, *numbers)])
        norm = self._read(prefix + "norm.weight", values[:1], 0, *values[1:])
        self._count(norm, norm.nbytes)
        return StateScan(
            ops=self.ops,
            parallel=self.parallel,
            layer=local_index,
            inputs=self._rows_linear(rows, hidden, scan.has_bias, self.ops.pack_linear),
            convolution=self._convolution(prefix + "conv1d", channels, scan.conv_width, scan.has_conv_bias),
            out=self._columns_linear(prefix + "out_proj", hidden, *values, scan.has_bias),
            num_groups=num_groups,
            state_size=scan.state_size,
            num_heads=num_heads,
            head_dim=scan.head_dim,
            rates=-self._numbers(prefix + "A_log", *numbers).exp(),
            skips=self._numbers(prefix + "D", *numbers),
            dt_bias=self._numbers(prefix + "dt_bias", *numbers),
            dt_limit=scan.dt_limit,
            norm=norm,
            unit=norm.new_ones(values[0] // scan.num_groups, dtype=torch.float32),
            norm_spans_ranks=scan.num_groups < ranks,
            eps=self.spec.eps,
        )

    def _convolution(
        self, name: str, parts: Sequence[tuple[str, int, int, int]], width: int, has_bias: bool
    ) -> Convolution:
        """Of the channels of several parts, each given as for `_rows_linear`."""
        parts = _joined(name, list(parts))
        total = parts[0][1]
        own = torch.cat([torch.arange(first, first + count) for *_, first, count in parts])
        weight = self._read(name + ".weight", (total, 1, width))[own, 0].t().float().contiguous()
        bias = self._read(name + ".bias", (total,))[own].float() if has_bias else None
        for tensor in (weight,) if bias is None else (weight, bias):
            self._count(tensor, tensor.nbytes)
        return Convolution(self.ops, weight, bias)

    def _dense(self, prefix: str, dense: DenseSpec) -> FeedForward:
        hidden, rank, ranks = self.spec.hidden_size, self.parallel.tp_rank, self.parallel.tp_size
        total, share = dense.intermediate_size, dense.intermediate_size // ranks
        rows = [(prefix + name, total, rank * share, share) for name in (dense.gate_name, dense.up_name)]
        if dense.gate_name == dense.up_name:
            rows = _joined(prefix + dense.gate_name, rows)
        down = self._columns_linear(
            prefix + dense.down_name, hidden, total, rank * share, share, dense.has_bias
        )
        pack = functools.partial(self.ops.pack_gated_linear, gate=self.spec.gate)
        return GatedFeedForward(self._rows_linear(rows, hidden, dense.has_bias, pack), down)

    def _mixture(self, prefix: str, experts: ExpertsSpec, index: int) -> FeedForward:
        hidden, parallel = self.spec.hidden_size, self.parallel
        if experts.num_experts % parallel.ep_size:
            raise UnsupportedModel(
                f"{experts.num_experts} experts do not divide over {parallel.ep_size} ranks"
            )
        rank, ranks = parallel.ep_rank, parallel.ep_size
        if self.share is not None:
            rank, ranks = self.share.rank, self.share.size
        packed = self._experts(prefix, experts, *expert_range(experts.num_experts, rank, ranks))
        mixture = MixtureOfExperts(
            router=self.linear(
                prefix + experts.router_name + ".weight",
                experts.num_experts,
                hidden,
                bias_name=prefix + experts.router_name + ".bias" if experts.has_bias else None,
            ),
            experts=packed,
            num_chosen=experts.num_chosen,
            normalizes=experts.normalizes,
        )
        if self.share is None:
            return mixture
        return SharedMixture(mixture, self.share.exchange, is_last_layer=index == self.spec.num_layers - 1)

    def _shared_expert(self, prefix: str, experts: ExpertsSpec, shared: DenseSpec) -> SharedExpert:
        name, hidden = experts.shared_gate_name, self.spec.hidden_size
        gate = None if name is None else self.linear(prefix + name + ".weight", 1, hidden)
        return SharedExpert(self.ops, self._dense(prefix, shared), gate)

    def _experts(self, prefix: str, experts: ExpertsSpec, first: int, end: int) -> Experts:
        if first == end:
            return NoExperts()
        hidden, total, parallel = self.spec.hidden_size, experts.intermediate_size, self.parallel
        # Whole experts by rank, or a share of every expert.
        ranks, rank = (1, 0) if parallel.ep_size > 1 else (parallel.tp_size, parallel.tp_rank)
        if total % ranks:
            raise UnsupportedModel(f"an expert's {total} channels do not divide over {ranks} ranks")
        share = total // ranks

        def pack() -> Experts:
            read = self._read_alternating if experts.is_alternating else self._read_single
            if experts.stacked_names is not None and prefix + experts.stacked_names[0] in self.weights.names:
                read = self._read_stacked
            weights = [read(prefix, experts, expert, rank * share, share) for expert in range(first, end)]
            biases = None
            if experts.has_bias:
                biases = self._expert_biases(prefix, experts, slice(first, end), rank * share, share)
            return self.ops.pack_experts(
                [gate_up for gate_up, _ in weights],
                [down for _, down in weights],
                biases=biases,
                gate=experts.gate,
                first_expert=first,
                activations=self.activations,
            )

        packed = self.packed.get(prefix + "experts", pack)
        num_biases = (2 * share + hidden) * experts.has_bias
        self.num_parameters += (end - first) * (3 * share * hidden + num_biases)
        self.num_bytes += packed.num_bytes
        return packed

    def _read_single(
        self, prefix: str, experts: ExpertsSpec, expert: int, first: int, count: int
    ) -> tuple[Weight, Weight]:
        """gate_up and down of an expert, with `count` of its channels from `first` on."""
        hidden, total = self.spec.hidden_size, experts.intermediate_size
        names = [prefix + name.format(expert) + ".weight" for name in (experts.gate_name, experts.up_name)]
        gate_up = join_rows([self._weight(name, (total, hidden), 0, first, count) for name in names])
        down = self._weight(
            prefix + experts.down_name.format(expert) + ".weight", (hidden, total), 1, first, count
        )
        return gate_up, down

    def _read_stacked(
        self, prefix: str, experts: ExpertsSpec, expert: int, first: int, count: int
    ) -> tuple[Weight, Weight]:
        """The same of weights of all experts, [E, outputs, inputs], gates over ups."""
        num_experts, hidden, total = experts.num_experts, self.spec.hidden_size, experts.intermediate_size
        assert experts.stacked_names is not None, "only such experts are read as this"
        names, shapes = experts.stacked_names, ((2 * total, hidden), (hidden, total))
        gate_up, down = (
            as_tensor(self._weight(prefix + name, (num_experts, *shape), 0, expert, 1))[0]
            for name, shape in zip(names, shapes, strict=True)
        )
        own = slice(first, first + count)
        return torch.cat([gate_up[:total][own], gate_up[total:][own]]), down[:, own]

    def _read_alternating(
        self, prefix: str, experts: ExpertsSpec, expert: int, first: int, count: int
    ) -> tuple[Weight, Weight]:
        """The same of weights of all experts, [E, inputs, outputs], gates alternating with ups."""
        num_experts, hidden, total = experts.num_experts, self.spec.hidden_size, experts.intermediate_size
        gate_up_name, down_name = prefix + experts.gate_name, prefix + experts.down_name
        gate_up = self._expert(gate_up_name, (num_experts, hidden, 2 * total), expert)
        down = self._expert(down_name, (num_experts, total, hidden), expert)
        gates_over_ups = torch.arange(2 * first, 2 * (first + count)).view(count, 2).t().flatten()
        if isinstance(down, Tensor):
            down = down[:, first : first + count]
        elif count < total:
            down = down.columns(first, first + count)
        return (
            gate_up[gates_over_ups] if isinstance(gate_up, Tensor) else gate_up.at_rows(gates_over_ups),
            down,
        )

    def _expert(self, name: str, shape: tuple[int, int, int], expert: int) -> Tensor | QuantizedWeight:
        """[outputs, inputs] of an expert, of a weight [E, inputs, outputs]."""
        self._check_stored(name, shape)
        return self._checked(name, self.weights.read_expert(name, expert))

    def _expert_biases(
        self, prefix: str, experts: ExpertsSpec, some: slice, first: int, count: int
    ) -> ExpertBiases:
        """Of some of the experts, with `count` of their channels from `first` on."""
        num_experts, hidden, total = experts.num_experts, self.spec.hidden_size, experts.intermediate_size
        gate_up = self._read(prefix + experts.gate_name + "_bias", (num_experts, 2 * total))[some]
        gates, ups = gate_up[:, 2 * first : 2 * (first + count)].unflatten(1, (count, 2)).unbind(2)
        down = self._read(prefix + experts.down_name + "_bias", (num_experts, hidden))[some]
        if first:
            # The ranks' shares of an expert add up: one of them adds the bias.
            down = torch.zeros_like(down)
        return ExpertBiases(torch.cat([gates, ups], 1), down)

    def _rows_linear(
        self, parts: list[tuple[str, int, int, int]], num_columns: int, has_bias: bool, pack: PackLinear
    ) -> Projection:
        """One projection of several parts, each given as (name, total rows, first row, rows of this rank)."""

        def pack_parts() -> Linear:
            weight = join_rows(
                [
                    self._weight(name + ".weight", (total, num_columns), 0, first, count)
                    for name, total, first, count in parts
                ]
            )
            bias = None
            if has_bias:
                bias = torch.cat(
                    [
                        self._read(name + ".bias", (total,), 0, first, count)
                        for name, total, first, count in parts
                    ]
                )
            return pack(weight, bias, quantization=self.quantization, activations=self.activations)

        shares = [
            ProjectionPart(name, total, num_columns, slice(first, first + count), slice(None))
            for name, total, first, count in parts
        ]
        num_rows = sum(count for *_, count in parts)
        name = "+".join(name for name, *_ in parts)
        linear = self._projection(name, pack_parts, num_rows * (num_columns + has_bias))
        return Projection(linear, tuple(shares))

    def _columns_linear(
        self, name: str, num_rows: int, total: int, first: int, count: int, has_bias: bool
    ) -> Projection:
        """A projection of which each rank holds a share of the inputs; the ranks' results add up."""

        def pack() -> Linear:
            weight = self._weight(name + ".weight", (num_rows, total), 1, first, count)
            bias = None
            if has_bias:
                bias = self._read(name + ".bias", (num_rows,))
                if self.parallel.tp_rank:
                    # The bias is added by one rank only.
                    bias = torch.zeros_like(bias)
            return self.ops.pack_linear(
                weight, bias, quantization=self.quantization, activations=self.activations
            )

        part = ProjectionPart(name, num_rows, total, slice(None), slice(first, first + count))
        return Projection(self._projection(name, pack, num_rows * (count + has_bias)), (part,))

    def _projection(self, name: str, pack: Callable[[], Linear], num_parameters: int) -> Linear:
        linear = self.packed.get(name, pack)
        self.num_parameters += num_parameters
        self.num_bytes += linear.num_bytes
        return linear

    def vector(self, name: str, size: int) -> Tensor:
        """The weight of a norm."""
        vector = self._read(name, (size,))
        if self.spec.norms_are_offset:
            # In fp32, in which the sum is exact, as the checkpoint's own code computes it.
            vector = vector.float() + 1.0
        self._count(vector, vector.nbytes)
        return vector

    def table(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        """A weight of this shape, whole."""
        weight = self._read(name, (num_rows, num_columns))
        self._count(weight, weight.nbytes)
        return weight

    def linear(
        self,
        name: str,
        num_rows: int,
        num_columns: int,
        out_dtype: torch.dtype | None = None,
        bias_name: str | None = None,
    ) -> Linear:
        """A projection, whole.  out_dtype: None: that of its inputs.  bias_name: None: it has no bias."""

        def pack() -> Linear:
            weight = self._weight(name, (num_rows, num_columns))
            bias = None if bias_name is None else self._read(bias_name, (num_rows,))
            return self.ops.pack_linear(weight, bias, out_dtype=out_dtype, activations=self.activations)

        return self._projection(name, pack, num_rows * (num_columns + (bias_name is not None)))

    def _count(self, tensor: Tensor, num_bytes: int) -> None:
        self.num_parameters += tensor.numel()
        self.num_bytes += num_bytes

    def _read(
        self, name: str, shape: tuple[int, ...], dim: int = 0, first: int = 0, count: int | None = None
    ) -> Tensor:
        return as_tensor(self._weight(name, shape, dim, first, count))

    def _weight(
        self, name: str, shape: tuple[int, ...], dim: int = 0, first: int = 0, count: int | None = None
    ) -> Tensor | QuantizedWeight:
        """The weight or the part of it: of dimension `dim`, `count` indices from `first` on."""
        self._check_stored(name, shape)
        if count is None or count == shape[dim]:
            weight = self.weights.read_weight(name)
        else:
            weight = self.weights.read_slice(name, dim, first, first + count)
        return self._checked(name, weight)

    def _checked(self, name: str, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        self.has_quantized |= isinstance(weight, QuantizedWeight)
        if not weight.dtype.is_floating_point:
            raise CheckpointError(f"{name} is stored as {weight.dtype}, a weight takes floating point")
        return weight

    def _check_stored(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.weights.names:
            raise CheckpointError(f"the checkpoint lacks {name}")
        stored_shape = self.weights.shape(name)
        if stored_shape != shape:
            raise CheckpointError(f"{name} has shape {stored_shape}, config.json says {shape}")


def _times(width: int, total: int, first: int, count: int) -> tuple[int, int, int]:
    return total * width, first * width, count * width


def _joined(name: str, parts: list[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """The same parts, for a checkpoint that has them concatenated by rows in one weight, `name`."""
    totals = [total for _, total, _, _ in parts]
    return [
        (name, sum(totals), sum(totals[:local_index]) + first, count)
        for local_index, (_, _, first, count) in enumerate(parts)
    ]
