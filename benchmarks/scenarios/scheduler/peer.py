"""The same load in vLLM's scheduler. Runs in the peer's own Python and imports nothing from this repository.

Reads one JSON object a line, answers with one. `load` builds a scheduler and adds requests, `lead_in` and
`steps` time steps.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

Shape = dict[str, Any]
_SAMPLED_TOKEN = 7
_VOCABULARY_SIZE = 16_000
# It decides nothing here, but the peer reads its configuration from a model's.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": _VOCABULARY_SIZE,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class PeerLoad:
    """The peer's scheduler with requests, stepped by hand, as `SchedulerLoad` steps ours."""

    def __init__(self, shape: Shape) -> None:
        self._scheduler = _build(shape)
        self._max_in_flight = 2 if shape["overlapped"] else 1
        self._plans: deque[Any] = deque()
        self._num_interrupted = 0
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        hasher = _hasher(shape["block_size"])
        # As the peer's engine does once it is built.
        gc.collect()
        gc.freeze()
        for index in range(shape["num_running"]):
            num_tokens = shape["num_prompt_tokens"] + index % shape["prompt_spread"]
            request = _request(index, num_tokens, shape["max_tokens"], hasher)
            self._num_prompt_tokens[request.request_id] = num_tokens
            self._num_computed[request.request_id] = 0
            self._scheduler.add_request(request)

    def measure(self, num_lead_in: int, num_steps: int) -> dict[str, Any]:
        """Steps that are not counted, then steps that are: seconds of each by verb, and its rows."""
        for _ in range(num_lead_in):
            self._step()
        self._num_interrupted = 0
        steps = [self._step() for _ in range(num_steps)]
        names = ("schedule_s", "update_s", "num_rows")
        columns = dict(zip(names, (list(column) for column in zip(*steps, strict=True)), strict=True))
        return columns | {"num_interrupted": self._num_interrupted}

    def close(self) -> None:
        gc.unfreeze()

    def _step(self) -> tuple[float, float, int]:
        plan, schedule_s = self._time(self._scheduler.schedule)
        num_rows = len(plan.num_scheduled_tokens)
        self._plans.append(plan)
        update_s = 0.0
        if len(self._plans) == self._max_in_flight:
            oldest = self._plans.popleft()
            result = self._result_of(oldest)
            _, update_s = self._time(self._scheduler.update_from_output, oldest, result)
        return schedule_s, update_s, num_rows

    def _time(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        num_switches, processor_time = _num_switches(), time.thread_time()
        began = time.perf_counter()
        returned = call(*arguments)
        elapsed = time.perf_counter() - began
        processor_time = time.thread_time() - processor_time
        if _num_switches() == num_switches:
            return returned, elapsed
        self._num_interrupted += 1
        return returned, processor_time

    def _result_of(self, plan: Any) -> ModelRunnerOutput:
        """A token for every row that reaches the end of its prompt."""
        request_ids = list(plan.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in request_ids:
            self._num_computed[request_id] += plan.num_scheduled_tokens[request_id]
            samples = self._num_computed[request_id] >= self._num_prompt_tokens[request_id]
            sampled.append([_SAMPLED_TOKEN] if samples else [])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )


def main() -> None:
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    load: PeerLoad | None = None
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if "load" in command:
            if load is not None:
                load.close()
            load = PeerLoad(command["load"])
        else:
            assert load is not None, "steps are measured on a load"
            answer = load.measure(command["lead_in"], command["steps"])
        print(json.dumps(answer), file=answers, flush=True)


def _num_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _hasher(block_size: int) -> Any:
    sha256 = get_hash_fn_by_name("sha256")
    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


def _request(index: int, num_tokens: int, max_tokens: int, hasher: Any) -> Request:
    prompt = [(index * 131 + place * 7) % _VOCABULARY_SIZE for place in range(num_tokens)]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(
        request_id=f"cmpl-{index:032x}",
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=hasher,
    )


def _build(shape: Shape) -> Scheduler:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_num_seqs=shape["max_num_seqs"],
            max_num_batched_tokens=shape["max_num_batched_tokens"],
            max_model_len=shape["max_model_len"],
            enable_prefix_caching=True,
            enforce_eager=True,
            block_size=shape["block_size"],
            async_scheduling=shape["overlapped"],
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = shape["num_blocks"]
    layers = FullAttentionSpec(
        block_size=shape["block_size"], num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    cache = KVCacheConfig(
        num_blocks=shape["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)],
    )
    scheduler_class = AsyncScheduler if shape["overlapped"] else Scheduler
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=cache,
        block_size=shape["block_size"],
        hash_block_size=shape["block_size"],
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


if __name__ == "__main__":
    main()
