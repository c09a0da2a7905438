"""A native decoder with random weights, made on the device, and steps of it as a scheduler plans them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.model.facts import ModelFacts
from engine_svc.model.native.build import DecoderBuilder
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.spec import DecoderSpec, read_spec, rotary_table
from engine_svc.model.parallel import Solo
from engine_svc.runner.cuda_graphs import CudaRecorder, DecodeGraphs
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from triptych_kernels import Ops

BLOCK_SIZE = 16
_WEIGHT_SCALE = 0.02
_KV_SCALE = 0.5


class RandomWeights:
    """Stands in for the reader of a checkpoint: every name is there, with noise of the shape it must have."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self._shapes = dict(_weight_shapes(spec))
        self.names = frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read_weight(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        weight = torch.empty(shape, device=self._device, dtype=self._dtype)
        return weight.normal_(0.0, _WEIGHT_SCALE, generator=self._generator)

    def read_slice(self, name: str, dim: int, start: int, end: int) -> Tensor:
        return self.read_weight(name).narrow(dim, start, end - start).contiguous()


def _weight_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, queries = spec.hidden_size, spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    yield "lm_head.weight", (spec.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "mlp.gate_proj.weight", (spec.dense.intermediate_size, hidden)
        yield prefix + "mlp.up_proj.weight", (spec.dense.intermediate_size, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, spec.dense.intermediate_size)


class RandomDecoder:
    """A decoder of a config's shape, and its KV cache, which holds noise."""

    def __init__(
        self,
        config: LlamaConfig,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_model_len: int,
        quantization: str = "",
    ) -> None:
        spec = read_spec(config)
        builder = DecoderBuilder(
            spec=spec,
            weights=RandomWeights(spec, device, dtype),  # type: ignore[arg-type]  # What a reader is asked for.
            ops=ops,
            parallel=Solo(),
            dtype=dtype,
            quantization=quantization,
        )
        self.model: NativeDecoder = builder.build(
            "random", rotary_table(config, max_model_len + 2).to(device)
        )
        self.ops, self.device, self.dtype, self.max_model_len = ops, device, dtype, max_model_len
        self.facts = ModelFacts(
            architecture="random",
            kv_shapes=self.model.kv_shapes,
            vocab_size=spec.vocab_size,
            max_position=max_model_len,
            eos_token_ids=(),
            dtype=str(dtype).removeprefix("torch."),
            num_parameters=self.model.num_parameters,
            weights_digest="",
        )
        embedding = spec.vocab_size * spec.hidden_size
        # A step reads some rows of the embedding, and everything else.
        self.bytes_per_step = self.model.num_bytes - embedding * dtype.itemsize
        self.operations_per_token = 2 * (self.model.num_parameters - embedding)
        self.head_operations = 2 * embedding
        self.attention_operations = 4 * spec.num_layers * spec.num_heads * spec.head_dim
        self.kv_bytes_per_token = sum(
            shape.num_kv_heads * (shape.key_dim + shape.value_dim) * dtype.itemsize
            for shape in self.model.kv_shapes
        )

    @torch.inference_mode()
    def runner(self, *, num_rows: int, num_blocks: int, graph_sizes: list[int]) -> ModelRunner:
        """A runner over a cache of so many blocks; decode steps of `graph_sizes` rows are recorded."""
        kv = KVTensors(self.facts, KVSizing(num_blocks, BLOCK_SIZE, 0), self.device)
        for stack in kv.stacks:
            stack.normal_(0.0, _KV_SCALE)
        graphs = None
        if graph_sizes and self.device.type == "cuda":
            graphs = DecodeGraphs(
                self.model,
                kv.layers,
                sizes=graph_sizes,
                num_groups=len(self.facts.groups),
                vocab_size=self.facts.vocab_size,
                max_model_len=self.max_model_len,
                block_size=BLOCK_SIZE,
                device=self.device,
                record=CudaRecorder(),
            )
        config = RunnerConfig(num_rows, self.max_model_len, BLOCK_SIZE)
        return ModelRunner(self.model, self.facts, kv, config, self.ops, graphs=graphs)


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def decode_plans(*, num_rows: int, context: int, num_steps: int) -> Iterator[StepPlan]:
    """Steps in which rows of `context` tokens, as if taken from the prefix cache, each gain one."""
    blocks = blocks_of(context + num_steps + 1)
    names = [f"row {row}" for row in range(num_rows)]
    for step in range(num_steps):
        plan = StepPlan(step)
        if step == 0:
            plan.admitted = [
                AdmittedRequest(
                    name,
                    [(row + place) % 1000 for place in range(context)],
                    context,
                    SamplingParams(max_tokens=num_steps, temperature=0.0),
                    [list(range(row * blocks, (row + 1) * blocks))],
                )
                for row, name in enumerate(names)
            ]
        plan.request_ids = list(names)
        plan.num_tokens = [1] * num_rows
        plan.num_computed_tokens = [context - 1 + step] * num_rows
        plan.new_block_ids = [[] for _ in names]
        plan.draft_token_ids = [[] for _ in names]
        plan.samples = [True] * num_rows
        yield plan


def prefill_plan(step: int, length: int) -> StepPlan:
    """A step that computes one new prompt; the prompt of the step before is released."""
    name = f"prompt {step}"
    plan = StepPlan(step, released=[f"prompt {step - 1}"] if step else [])
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    tokens = [(7 * place) % 1000 for place in range(length)]
    plan.admitted = [AdmittedRequest(name, tokens, length, sampling, [list(range(blocks_of(length)))])]
    plan.request_ids, plan.num_tokens, plan.num_computed_tokens = [name], [length], [0]
    plan.new_block_ids, plan.draft_token_ids, plan.samples = [[]], [[]], [True]
    return plan
