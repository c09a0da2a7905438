"""Builds the plan of one step and charges its rows to the budgets. Knows no queues and no blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.core.request import Request
from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.speculation.accounting import UNKNOWN_DRAFT

# Shared by all rows with an empty column: a plan is never changed after it was made.
NOTHING: list[int] = []


class PlanBuilder:
    """Adds requests to the plan and removes them again, and charges the budgets accordingly."""

    def __init__(
        self,
        config: SchedulerConfig,
        budgets: Sequence[Budget],
        prefill_budgets: Sequence[Budget] = (),
        feature_budgets: Sequence[Budget] = (),
    ) -> None:
        """prefill_budgets: those that rows of one token, which most rows are, neither spend nor exceed.

        feature_budgets: those of requests with `num_budgets` alone.
        """
        self._config = config
        self._overlaps = config.async_scheduling
        # A limit grants what is proposed at the launch.
        self._unknown_drafts = (
            [] if config.drafts_at_launch else [UNKNOWN_DRAFT] * config.num_speculative_tokens
        )
        self._has_own_budgets = self._has_budgets = bool(budgets)
        self._own_budgets = (*budgets, *prefill_budgets)
        self._feature_budgets = tuple(feature_budgets)
        self.has_feature_budgets = bool(feature_budgets)  # False: `num_budgets` of rows need not be read
        self._budgets = self._own_budgets
        self.remaining = 0  # tokens of the step that are not spent yet
        self.plan = StepPlan(0)
        self.rows: list[Request] = []  # parallel to the columns of the plan

    def restrict(self, restriction: Budget | None) -> None:
        """Add one further budget, which replaces the last one set here; None: remove it."""
        extra = () if restriction is None else (restriction,)
        self._budgets = (*self._own_budgets, *extra)
        self._has_budgets = self._has_own_budgets or bool(extra)

    @property
    def has_budgets(self) -> bool:
        """Whether there are budgets, besides the tokens of a step, for rows of one token as well."""
        return self._has_budgets

    def begin(self, step_number: int) -> StepPlan:
        self.plan = StepPlan(step_number)
        self.rows = []
        self.remaining = self._config.max_num_batched_tokens
        for budget in (*self._budgets, *self._feature_budgets):
            budget.begin_step()
        return self.plan

    def admits(self, request: Request) -> bool:
        """Whether every budget lets a waiting request enter in this step."""
        return all(budget.admits(request) for budget in self._budgets_of(request))

    def clip(self, request: Request, num_tokens: int) -> int:
        """How many of `num_tokens` all budgets together grant; below 1 means none in this step."""
        num_tokens = min(num_tokens, self.remaining)
        for budget in self._budgets_of(request):
            num_tokens = budget.clip(request, num_tokens)
        return num_tokens

    def _budgets_of(self, request: Request) -> Sequence[Budget]:
        return (*self._budgets, *self._feature_budgets) if request.num_budgets else self._budgets

    def admit(self, request: Request, new_block_ids: Sequence[list[int]]) -> None:
        """Add a request that enters the batch, in full. Its row, with the new blocks, follows."""
        num_new = [len(block_ids) for block_ids in new_block_ids] or [0] * len(request.block_tables)
        kept = [
            table.block_ids[: len(table.block_ids) - num]
            for table, num in zip(request.block_tables, num_new, strict=True)
        ]
        self.plan.admitted.append(
            AdmittedRequest(
                request.request_id,
                request.token_ids.copy(),
                request.num_prompt_tokens,
                request.sampling,
                kept,
                request.extras,
                request.cache_salt,
            )
        )

    def add_row(self, request: Request, num_tokens: int, new_block_ids: list[list[int]]) -> None:
        """Add a row and count its tokens as computed."""
        plan = self.plan
        computed = request.num_computed_tokens
        end = computed + num_tokens
        num_known = len(request.token_ids) + request.num_placeholders
        drafts = NOTHING
        if request.draft_token_ids:
            drafts = request.draft_token_ids[: max(0, end - num_known)]
            request.draft_token_ids = []
        is_whole = end >= num_known
        self.rows.append(request)
        plan.request_ids.append(request.request_id)
        plan.num_tokens.append(num_tokens)
        plan.num_computed_tokens.append(computed)
        plan.new_block_ids.append(new_block_ids)
        plan.draft_token_ids.append(drafts)
        plan.samples.append(is_whole and request.samples)
        request.num_computed_tokens = end
        request.last_row_sampled = is_whole
        self.remaining -= num_tokens
        if num_tokens != 1 or self._has_budgets or (self.has_feature_budgets and request.num_budgets):
            for budget in self._budgets_of(request):
                budget.take(request, num_tokens)
        if not is_whole:
            request.num_chunks += 1
        elif self._overlaps and request.samples:
            request.num_placeholders += 1 + len(drafts)
            request.draft_token_ids = self._unknown_drafts

    def withdraw(self, request: Request) -> int:
        """Remove the row of a request that is preempted; returns its number of tokens, 0 without a row."""
        if request not in self.rows:
            return 0
        row = self.rows.index(request)
        del self.rows[row]
        num_tokens = self.plan.withdraw(row)
        self.remaining += num_tokens
        if num_tokens != 1 or self._has_budgets or (self.has_feature_budgets and request.num_budgets):
            for budget in self._budgets_of(request):
                budget.give_back(request, num_tokens)
        return num_tokens
