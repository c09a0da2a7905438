"""A model over several processes, driven by a real scheduler as the engine's loop drives it."""

from __future__ import annotations

import os
import random
import re
import select
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)

from engine_svc.build.engine import build_core, layer_kinds
from engine_svc.build.ranks import RankedSide, build_ranks
from engine_svc.build.runner import RunnerSide
from engine_svc.cache.config import CacheConfig
from engine_svc.config import EngineConfig
from engine_svc.core.extras import Extra
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.step import StepPlan
from engine_svc.loop.steps import PendingStep
from engine_svc.ranks.process_group import GroupLimits
from engine_svc.ranks.watch import RankLost
from engine_svc.runner.preparer import OnPrepared
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.request_options import split_options

VOCAB_SIZE = 320
MAX_NUM_SEQS = 8
MAX_NUM_TOKENS = 48
BLOCK_SIZE = 4
END_LIMIT_S = 20.0

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": torch.float32,
}
_EXPERTS = {"num_experts_per_tok": 2}
_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    # Layers that see everything, then layers with a window: of two stages each has one kind.
    "qwen2": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "mixtral": lambda: MixtralConfig(**_SHAPE, **_EXPERTS, num_local_experts=4, sliding_window=None),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_SHAPE,
        **_EXPERTS,
        num_local_experts=4,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "olmo3": lambda: Olmo3Config(
        **_SHAPE, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    # One group of heads, which both ranks have, and whose norm spans them.
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **_SHAPE,
        **_EXPERTS,
        num_local_experts=4,
        shared_intermediate_size=128,
        layer_types=["linear_attention", "full_attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **_SHAPE,
        **_EXPERTS,
        num_experts=8,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
    ),
    "phi3": lambda: Phi3Config(**_SHAPE, pad_token_id=0),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, num_experts=8, moe_intermediate_size=64),
}


def make_checkpoint(family: str, folder: Path) -> Path:
    """Write an fp32 checkpoint whose streams vary and most of which can be divided; returns the folder."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(_CONFIGS[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1 if "embed" in name or "lm_head" in name else 0.3)
            elif family in ("gemma3", "olmo3"):
                # Norms bound what its layers add, and with equal weights streams soon repeat.
                parameter.normal_(0.0, 1.5)
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path, **changes: object) -> EngineConfig:
    """An engine on the CPU whose cache is too small for all requests at once."""
    values = {
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_TOKENS,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": 130,
        "log_level": "error",
        **changes,
    }
    return EngineConfig(str(folder), **values)


@contextmanager
def ranks_of(
    config: EngineConfig,
    limits: GroupLimits | None = None,
    on_lost: Callable[[RankLost], object] = lambda lost: None,
    on_prepared: OnPrepared = lambda number, failure: None,
) -> Iterator[RankedSide]:
    """Ranks that are shut down in the end; afterwards nothing is left of them."""
    files = open_files()
    ranked = build_ranks(
        config, lambda phase, done, total: None, limits=limits, on_lost=on_lost, on_prepared=on_prepared
    )
    process_ids = ranked.group.process_ids
    segments = named_segments(process_ids)
    try:
        yield ranked
    finally:
        ranked.group.shutdown()
    assert [process_id for process_id in process_ids if is_there(process_id)] == []
    assert [segment for segment in segments if segment.exists()] == []
    assert open_files() - files == set()


def named_segments(process_ids: list[int]) -> set[Path]:
    """The shared memory with a name, which would outlive them, that these processes have mapped."""
    maps = [Path(f"/proc/{process_id}/maps").read_text() for process_id in process_ids]
    assert all("memfd:triptych" in text for text in maps), "shared memory is not found where it is looked for"
    return {Path(path) for text in maps for path in re.findall(r"/dev/shm/\S+", text)}


def open_files() -> set[tuple[str, str]]:
    """This process's descriptors, and what each is of."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def is_there(process_id: int) -> bool:
    """Whether a process, or what is left of it until its parent looks, has this id."""
    return Path(f"/proc/{process_id}").exists()


def wait_for_end(process_ids: list[int]) -> list[int]:
    """Wait until these processes, which need not be children, have ended; returns those that have not."""
    left = []
    for process_id in process_ids:
        try:
            pidfd = os.pidfd_open(process_id)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(END_LIMIT_S * 1000):
            left.append(process_id)
        os.close(pidfd)
    return left


@dataclass
class Driver:
    """The loop of an engine without its neighbours: schedule, launch, update."""

    side: RunnerSide
    seed: int = 1
    outputs: dict[str, list[int]] = field(default_factory=dict)
    extras: dict[str, list[Extra]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    num_steps: int = 0
    num_preempted: int = 0
    on_launch: Callable[[StepPlan, Callable[[], None]], None] = lambda plan, launch: launch()

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        config = SchedulerConfig(
            max_model_len=self.side.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_TOKENS,
            async_scheduling=self.side.steps_in_flight > 1,
            max_steps_in_flight=self.side.steps_in_flight,
        )
        num_slots = self.side.num_state_slots
        groups = layer_kinds(config_of(Path()), self.side.model.groups, num_slots)
        cache = CacheConfig(self.side.num_kv_blocks + 1, groups, num_state_slots=num_slots)
        self._scheduler = build_core(config, cache).scheduler
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step can be launched or finished."""
        return self._scheduler.has_work or bool(self._in_flight)

    def add(self, request_id: str, options: Mapping[str, object], *further: Extra) -> None:
        """Add a request with a prompt of its own. further: extras besides those of its options."""
        prompt = [self._rng.randrange(VOCAB_SIZE) for _ in range(self._rng.randint(3, 70))]
        self.add_prompt(request_id, prompt, options, *further)

    def add_prompt(
        self,
        request_id: str,
        prompt: list[int],
        options: Mapping[str, object],
        *further: Extra,
        samples: bool = True,
    ) -> None:
        """samples: False for a request that ends when its prompt is computed."""
        sampling, extras = split_options(**options)
        extras |= {type(extra): extra for extra in further}
        self._scheduler.add(
            Request(request_id, list(prompt), len(prompt), sampling, samples=samples, extras=extras)
        )

    def step(self) -> None:
        """Launch a step if there is one, and finish the oldest when there are enough of them."""
        plan = self._scheduler.schedule(0.0)
        if plan.request_ids:
            self.on_launch(plan, lambda: self._in_flight.append((plan, self.side.executor.launch(plan))))
            self.num_steps += 1
            self.num_preempted += len(plan.preempted)
        if self._in_flight and (len(self._in_flight) == self.side.steps_in_flight or not plan.request_ids):
            oldest, pending = self._in_flight.popleft()
            for output in self._scheduler.update(oldest, pending.result(), 0.0):
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                self.extras.setdefault(output.request_id, []).extend((output.extras or {}).values())
                if output.finish_reason is FinishReason.ERROR:
                    self.errors[output.request_id] = output.message

    def run(self) -> dict[str, list[int]]:
        """Until nothing is left to do; the tokens of each request."""
        while self.has_work:
            self.step()
        return self.outputs


def greedy(max_tokens: int = 64) -> dict[str, object]:
    return {"max_tokens": max_tokens, "ignore_eos": True}


def mixed_sampling(index: int, max_tokens: int) -> dict[str, object]:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logit_bias": ((5, 2.0), (9, -3.0)), "bad_words": ((7,), (3, 4))},
        {"temperature": 1.0, "allowed_token_ids": frozenset(range(50, 150)), "logprobs": 2},
    ]
    return {**greedy(max_tokens), "seed": index, **kinds[index % len(kinds)]}
