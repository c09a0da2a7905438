"""What the runner asks of drafts in a step. Knows no proposer; `engine_svc/speculation` implements it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.model.context import HiddenStates
from engine_svc.runner.input_batch import InputBatch, StepInputs
from engine_svc.runner.running_step import RunningStep
from engine_svc.runner.sampling.transfer import Ints


class StepDrafts:
    """Fills in the drafts of a plan. Its defaults are those of an engine without drafts.

    costs_time: whether proposing takes time on the device, which `rehearse` then takes as well.
    is_idle: whether a step without drafts is to be run as it is planned: only `keep` is called then, and
    `read` where rows are released. Most steps are such, and each call takes a thousandth of a short one.
    """

    costs_time: bool = False
    is_idle: bool = True

    def read(self, plan: StepPlan, *, has_drafts: bool) -> None:
        """Read the tokens that the plan depends on, before its rows are released and entered."""

    def add_row(self, row: int, admitted: AdmittedRequest) -> None: ...

    def remove_row(self, row: int) -> None: ...

    def settle(self, plan: StepPlan, *, has_drafts: bool) -> StepPlan:
        """The plan with the drafts of its rows, which are entered, and with where these begin."""
        return plan

    def wanted_hidden(self) -> HiddenStates | None:
        """The hidden states that are read of the next forward."""
        return None

    def observe(self, inputs: StepInputs, hidden: HiddenStates) -> None:
        """A forward of these inputs was launched. Called before `keep`."""

    def keep(self, inputs: StepInputs, step: RunningStep) -> None:
        """A step was launched in which rows sample."""

    def rehearse(self, num_rows: int) -> None:
        """Propose one draft for each of `num_rows` rows that are not in use."""

    def release_cache(self) -> None:
        """Release the memory of its cache. No row may be in use."""

    def allocate_cache(self) -> None:
        """Allocate the cache again, if it was released."""


# With the rows, and a function that chooses tokens [N] from logits [N, V] for rows at positions.
MakeStepDrafts = Callable[[InputBatch, Callable[[Tensor, Ints, Ints], Tensor]], StepDrafts]


class NoDrafting(StepDrafts):
    """Of an engine without drafts."""

    def __init__(self, batch: InputBatch, draw: Callable[[Tensor, Ints, Ints], Tensor]) -> None: ...

    def read(self, plan: StepPlan, *, has_drafts: bool) -> None:
        if has_drafts:
            raise ValueError(f"step {plan.step_number} has drafts, and nothing here proposes any")
