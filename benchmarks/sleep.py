"""What an engine that sleeps gives back to its machine, and that it says the same when it is awake again.

    python -m benchmarks.sleep --json sleep.json
    python -m benchmarks.sleep --model FOLDER

Without a model it writes one with random weights in the shape of a SmolLM2 of 135 million parameters. A row
is a state of the engine's process: its resident memory, and whether the tokens after it are those before.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.report import Report, Row, print_table
from engine_svc.build.engine import Core, build_core
from engine_svc.build.runner import RunnerSide, build_runner
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.runner.control import RunnerControl
from engine_svc.runner.memory.parked_memory import return_free_memory
from engine_svc.runner.sleep import WakeTag
from engine_svc.scheduler.config import SchedulerConfig

SMOLLM = CheckpointShape(
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    intermediate_size=1_536,
    vocabulary_size=49_152,
)
_SEED = 11
_MIB = 1 << 20
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine computes before and after it sleeps."""

    num_prompts: int = 12
    prompt_tokens: int = 512
    output_tokens: int = 8

    @property
    def num_kv_blocks(self) -> int:
        """So many that all prompts stay in the cache."""
        return self.num_prompts * -(-(self.prompt_tokens + self.output_tokens) // _BLOCK_SIZE)


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark, print its table and write its report."""
    arguments = _parse(words)
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.model
        if folder is None:
            folder = Path(made)
            make_checkpoint(folder, SMOLLM, dtype=torch.bfloat16, seed=_SEED)
        load = Load(arguments.prompts, arguments.prompt_tokens)
        rows = list(measure(folder, load))
    print_table(rows)
    if arguments.json:
        name = "random SmolLM2-135M" if arguments.model is None else arguments.model.name
        Report("sleep", {"model": name, "prompts": load.num_prompts}, rows).write(arguments.json)


def measure(folder: Path, load: Load) -> Iterator[Row]:
    """The states, one after the other."""
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # What making the checkpoint left behind is not the engine's.
    return_free_memory(torch.device("cpu"))
    before = _resident_bytes()
    engine = SmallEngine(folder, load)
    kv_bytes = engine.kv_bytes
    sizes: dict[str, int] = {"weights_mib": weight_bytes // _MIB, "kv_mib": kv_bytes // _MIB}
    yield {"state": "loaded", **sizes, **_grown(before), "same_tokens": None}
    wanted = engine.generate()
    yield {"state": "used", **sizes, **_grown(before), "same_tokens": None}
    for level in (1, 2):
        engine.sleep(level)
        yield {"state": f"asleep at level {level}", **sizes, **_grown(before), "same_tokens": None}
        engine.control.wake([WakeTag.WEIGHTS])
        yield {"state": "weights awake", **sizes, **_grown(before), "same_tokens": None}
        engine.control.wake([WakeTag.KV_CACHE])
        yield {"state": "awake", **sizes, **_grown(before), "same_tokens": None}
        is_same = engine.generate() == wanted
        yield {"state": "used again", **sizes, **_grown(before), "same_tokens": is_same}
    engine.side.executor.shutdown()


@dataclass
class SmallEngine:
    """Scheduler, cache and runner in one loop, without services."""

    folder: Path
    load: Load
    side: RunnerSide = field(init=False)
    core: Core = field(init=False)
    control: RunnerControl = field(init=False)

    def __post_init__(self) -> None:
        """Load the model."""
        length = self.load.prompt_tokens + self.load.output_tokens
        config = EngineConfig(
            model=str(self.folder),
            device="cpu",
            num_threads=1,
            max_model_len=length,
            max_num_seqs=self.load.num_prompts,
            num_kv_blocks=self.load.num_kv_blocks,
            block_size=_BLOCK_SIZE,
            steps_in_flight=1,
        )
        self.side = build_runner(config, lambda phase, done, total: None)
        self.core = build_core(
            SchedulerConfig(max_model_len=length, max_num_seqs=self.load.num_prompts),
            CacheConfig(self.load.num_kv_blocks + 1, (FullAttention(_BLOCK_SIZE),)),
        )
        self.control = RunnerControl(self.side.executor)

    @property
    def kv_bytes(self) -> int:
        """What the cache takes once all of it has been used."""
        model = self.side.model
        per_token = sum(
            shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.kv_shapes
        ) * (4 if model.dtype == "float32" else 2)
        return self.side.num_kv_blocks * _BLOCK_SIZE * per_token

    def sleep(self, level: int) -> None:
        """Forget what is cached, and give its memory back."""
        if not self.core.scheduler.reset_prefix_cache(0.0, reset_running=True):
            raise RuntimeError("a request holds blocks that nobody can take from it")
        self.control.sleep(level)

    def generate(self) -> list[list[int]]:
        """What each prompt is continued with, greedily."""
        rng, load, scheduler = random.Random(_SEED), self.load, self.core.scheduler
        requests = []
        for index in range(load.num_prompts):
            prompt = [rng.randrange(3, self.side.model.vocab_size) for _ in range(load.prompt_tokens)]
            sampling = SamplingParams(max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True)
            requests.append(Request(f"r{index}", prompt, len(prompt), sampling))
            scheduler.add(requests[-1])
        while scheduler.has_work:
            plan = scheduler.schedule(0.0)
            scheduler.update(plan, self.side.executor.launch(plan).result(), 0.0)
        return [request.token_ids[load.prompt_tokens :] for request in requests]


def _grown(before: int) -> dict[str, int]:
    now = _resident_bytes()
    return {"resident_mib": now // _MIB, "over_start_mib": (now - before) // _MIB}


def _resident_bytes() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: random weights)")
    parser.add_argument("--prompts", type=int, default=12, help="prompts that fill the KV cache")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of each")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
