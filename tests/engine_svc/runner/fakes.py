"""A scheduler's stand-in: makes the plans a test asks for, over block tables in no order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine_svc.core.extras import Extras
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult
from engine_svc.runner.feature import LogitRows, RunnerFeature
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.model_runner import ModelRunner
from engine_svc.runner.sampling.transfer import Ints
from tests.engine_svc.request_options import split_options


def apply(batch: InputBatch, plan: StepPlan) -> list[int]:
    """Release, enter and extend rows as a plan says; returns the blocks that came without KV."""
    batch.release(plan.released)
    for admitted in plan.admitted:
        batch.enter(admitted)
    return batch.extend(plan)


class LogitsOfAllRows(RunnerFeature):
    """A feature that every row uses: `change` may write the logits [N, V] of the rows [N]."""

    def __init__(self, change: Callable[[Tensor, Ints], object]) -> None:
        self._change = change

    def uses(self, admitted: AdmittedRequest) -> bool:
        return True

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        self._change(logits, logit_rows.rows)


@dataclass
class DrivenRequest:
    """A request as its driver sees it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[list[int]] = field(default_factory=list)  # per group of layers
    num_computed_tokens: int = 0
    is_admitted: bool = False
    extras: Extras = field(default_factory=dict)

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class PlanDriver:
    """Holds requests and a pool of shuffled blocks; `step` plans the given grants and runs them.

    Groups of layers share the pool; here no window gives back what it has passed.
    """

    def __init__(self, runner: ModelRunner, *, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self._runner = runner
        self._num_groups = num_groups
        self._block_size = block_size
        self.free_blocks = list(range(num_blocks))
        random.Random(1).shuffle(self.free_blocks)
        self.requests: dict[str, DrivenRequest] = {}
        self._released: list[str] = []
        self.num_steps = 0

    def add(self, request_id: str, prompt: list[int], **options: object) -> DrivenRequest:
        sampling, extras = split_options(**{"max_tokens": 64, **options})
        request = DrivenRequest(request_id, list(prompt), len(prompt), sampling, extras=extras)
        self.requests[request_id] = request
        return request

    def step(
        self,
        grants: dict[str, int],
        num_common_blocks: Sequence[int] = (),
        parts: Extras | None = None,
    ) -> StepResult:
        """parts: of the plan, that features' scheduler halves attached."""
        plan = StepPlan(
            self.num_steps,
            released=self._released,
            num_common_blocks=list(num_common_blocks),
            extras=parts or {},
        )
        self._released = []
        self.num_steps += 1
        for request_id, num_tokens in grants.items():
            self._plan_row(plan, self.requests[request_id], num_tokens)
        result = self._runner.execute(plan).result()
        for index, (request_id, num_tokens) in enumerate(grants.items()):
            request = self.requests[request_id]
            request.num_computed_tokens += num_tokens
            request.token_ids += result.sampled[index]
        return result

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        for table in request.block_ids:
            self.free_blocks += table
        request.block_ids, request.num_computed_tokens, request.is_admitted = [], 0, False
        self._released.append(request_id)

    def finish(self, request_id: str) -> DrivenRequest:
        self.preempt(request_id)
        return self.requests.pop(request_id)

    def _plan_row(self, plan: StepPlan, request: DrivenRequest, num_tokens: int) -> None:
        total = request.num_computed_tokens + num_tokens
        request.block_ids = request.block_ids or [[] for _ in range(self._num_groups)]
        num_new = -(-total // self._block_size) - len(request.block_ids[0])
        new_blocks = [[self.free_blocks.pop(0) for _ in range(num_new)] for _ in request.block_ids]
        plan.new_block_ids.append(new_blocks if num_new else [])
        if not request.is_admitted:
            request.is_admitted = True
            plan.admitted.append(
                AdmittedRequest(
                    request.request_id,
                    list(request.token_ids),
                    request.num_prompt_tokens,
                    request.sampling,
                    [list(table) for table in request.block_ids],
                    request.extras,
                )
            )
        for table, gained in zip(request.block_ids, new_blocks, strict=True):
            table += gained
        plan.request_ids.append(request.request_id)
        plan.num_tokens.append(num_tokens)
        plan.num_computed_tokens.append(request.num_computed_tokens)
        plan.draft_token_ids.append([])
        plan.samples.append(total == len(request.token_ids))
