"""Lets recorded scheduling cases drive the scheduler: `make(config)` gives an engine that speaks dicts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.block_pool import BlockPool
from engine_svc.cache.kv_cache import KVCache
from engine_svc.request import Request, RequestOutput
from engine_svc.sampling_params import SamplingParams
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.scheduler import Scheduler
from engine_svc.step import StepPlan, StepResult


def make(config: dict[str, Any]) -> ReplayEngine:
    """An engine for one recorded case."""
    return ReplayEngine(config)


class ReplayEngine:
    """A scheduler whose model is the recording."""

    def __init__(self, config: dict[str, Any]) -> None:
        if len(config["kv_groups"]) != 1 or config["kv_groups"][0]["kind"] != "full":
            raise ValueError("only one group of full attention is built")
        self._kv_cache = KVCache(
            BlockPool(config["num_gpu_blocks"], enable_prefix_caching=config["enable_prefix_caching"]),
            BlockHasher(config["block_size"]),
            max_model_len=config["max_model_len"],
            num_lookahead_tokens=config["num_lookahead_tokens"],
            drop_last_matched_block=config["drop_last_matched_block"],
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=config["max_model_len"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                max_num_seqs=config["max_num_seqs"],
                policy=config["policy"],
                enable_chunked_prefill=config["enable_chunked_prefill"],
                long_prefill_token_threshold=config["long_prefill_token_threshold"],
                reserve_full_prompt=config["reserve_full_prompt"],
                num_speculative_tokens=config["num_speculative_tokens"],
                async_scheduling=config["async_scheduling"],
            ),
            self._kv_cache,
        )
        self._plans: list[StepPlan] = []
        self._finished: set[str] = set()
        self._seen: set[str] = set()

    def add(self, request: dict[str, Any]) -> None:
        """A request comes."""
        sampling = SamplingParams(
            max_tokens=request["max_tokens"],
            min_tokens=request["min_tokens"],
            ignore_eos=request["ignore_eos"],
            eos_token_id=request["eos_token_id"],
            stop_token_ids=frozenset(request["stop_token_ids"]),
            skip_reading_prefix_cache=request["skip_prefix_lookup"],
        )
        self._scheduler.add(
            Request(
                request["id"],
                request["prompt"],
                len(request["prompt"]),
                sampling,
                priority=request["priority"],
                arrival_at=request["arrival_time"],
                cache_salt=request["cache_salt"] or "",
            )
        )

    def abort(self, request_ids: list[str]) -> None:
        """Requests are ended from outside."""
        self._note_finished(self._scheduler.abort(request_ids, now=0.0))

    def set_pause(self, state: str) -> None:
        """The engine is paused or resumed."""
        self._scheduler.set_pause(PauseState(state))

    def schedule(self) -> dict[str, Any]:
        """Plan one step and tell what was decided."""
        plan = self._scheduler.schedule(now=0.0)
        self._plans.append(plan)
        admitted = [request.request_id for request in plan.admitted]
        finished, self._finished = self._finished, set()
        decision = {
            "scheduled": list(zip(plan.request_ids, plan.num_tokens, strict=True)),
            "new": [request_id for request_id in admitted if request_id not in self._seen],
            "resumed": [request_id for request_id in admitted if request_id in self._seen],
            "continued": [request_id for request_id in plan.request_ids if request_id not in admitted],
            "preempted": plan.preempted,
            "finished": sorted(finished),
            "computed": dict(zip(plan.request_ids, plan.num_computed_tokens, strict=True)),
            "spec": {
                request_id: drafts
                for request_id, drafts in zip(plan.request_ids, plan.draft_token_ids, strict=True)
                if drafts
            },
            "blocks": self._blocks(plan, set(admitted)),
            "free_blocks": self.free_blocks(),
        }
        self._seen.update(admitted)
        return decision

    def update(self, model: dict[str, Any]) -> dict[str, Any]:
        """Take in what the recorded model sampled in a step."""
        plan = self._plans[model["for_step"]]
        sampled = [model["sampled"].get(request_id, []) for request_id in plan.request_ids]
        result = StepResult(plan.step_number, sampled, model.get("drafts") or {})
        outputs = self._scheduler.update(plan, result, now=0.0)
        freed = self._note_finished(outputs)
        return {"outputs": [_as_recorded(output) for output in outputs], "freed": freed}

    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._kv_cache.num_free_blocks

    def queue_lengths(self) -> dict[str, int]:
        """How many wait and run."""
        return {name: len(ids) for name, ids in self.queue_ids().items()}

    def queue_ids(self) -> dict[str, list[str]]:
        """Who waits and who runs, in order."""
        return {"waiting": self._scheduler.waiting_ids, "running": self._scheduler.running_ids}

    def _note_finished(self, outputs: list[RequestOutput]) -> list[str]:
        finished = [output.request_id for output in outputs if output.finish_reason is not None]
        self._finished.update(finished)
        return finished

    def _blocks(self, plan: StepPlan, admitted: set[str]) -> dict[str, dict[str, list[list[int]]]]:
        blocks = {}
        for request_id, computed, block_ids in zip(
            plan.request_ids, plan.num_computed_tokens, plan.new_block_ids, strict=True
        ):
            num_hit = computed // self._kv_cache.block_size if request_id in admitted else 0
            blocks[request_id] = {"hit": [block_ids[:num_hit]], "new": [block_ids[num_hit:]]}
        return blocks


def _as_recorded(output: RequestOutput) -> dict[str, Any]:
    reason = output.finish_reason
    recorded = {
        "id": output.request_id,
        "tokens": output.new_token_ids,
        "finish": None if reason is None else reason.value,
        "stop_reason": output.stop_token_id,
    }
    if output.num_cached_tokens is not None:
        recorded["cached_tokens"] = output.num_cached_tokens
    return recorded
