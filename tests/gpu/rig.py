"""A tiny model on the GPU, with a runner over real KV tensors and, where asked for, CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.runner.cuda_graphs import CudaRecorder, DecodeGraphs, decode_sizes
from engine_svc.runner.feature import RunnerFeature
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from tests.engine_svc.model.checkpoints import MAX_POSITION
from tests.engine_svc.request_options import make_runner_features
from tests.engine_svc.runner.fakes import PlanDriver

BLOCK_SIZE = 16
NUM_BLOCKS = 256
MAX_NUM_SEQS = 8


def load_on(device: torch.device, folder: Path, model_impl: str, is_deterministic: bool) -> LoadedModel:
    load_options = LoadOptions(
        dtype="float32",
        device=device.type,
        model_impl=model_impl,
        num_threads=1,
        is_deterministic=is_deterministic,
    )
    return load_model(folder, load_options)


@dataclass
class GpuModel:
    """A model as transformers made it, on the CPU, and as we run it on the GPU."""

    theirs: PreTrainedModel
    ours: LoadedModel

    def runner(
        self,
        *,
        has_graphs: bool = False,
        features: Sequence[RunnerFeature] = (),
        takes_embeds: bool = False,
    ) -> ModelRunner:
        kv = KVTensors(self.ours.facts, KVSizing(NUM_BLOCKS, BLOCK_SIZE, 0), self.ours.device)
        # The memory is used as it comes, so the worst that it can hold must reach no result.
        for stack in kv.stacks:
            stack.fill_(float("nan"))
        return ModelRunner(
            self.ours.model,
            self.ours.facts,
            kv,
            RunnerConfig(MAX_NUM_SEQS, MAX_POSITION, BLOCK_SIZE),
            self.ours.ops,
            make_features=lambda context: [
                *make_runner_features(context, takes_embeds=takes_embeds),
                *features,
            ],
            graphs=self._graphs(kv) if has_graphs else None,
        )

    def driver(self, runner: ModelRunner) -> PlanDriver:
        """A stand-in for the scheduler of `runner`."""
        return PlanDriver(
            runner,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_groups=len(self.ours.facts.groups),
        )

    @torch.inference_mode()
    def _graphs(self, kv: KVTensors) -> DecodeGraphs:
        return DecodeGraphs(
            self.ours.model,
            kv.layers,
            sizes=decode_sizes(MAX_NUM_SEQS),
            num_groups=len(self.ours.facts.groups),
            vocab_size=self.ours.facts.vocab_size,
            max_model_len=MAX_POSITION,
            block_size=BLOCK_SIZE,
            device=self.ours.device,
            record=CudaRecorder(),
        )
