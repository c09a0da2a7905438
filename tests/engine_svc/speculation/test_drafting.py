"""Requests with drafts: the same answers as without, whatever is proposed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request, RequestOutput
from engine_svc.core.step import AdmittedRequest, StepPlan, TokenLogprobs
from engine_svc.features.thinking_budget.extras import ThinkingBudget
from engine_svc.runner.feature import LogitRows, RunnerFeature
from engine_svc.runner.model_runner import ModelRunner
from engine_svc.runner.running_step import RunningStep
from engine_svc.runner.sampling.transfer import Ints
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.speculation.proposer import ByRow, IntArray, Proposer
from engine_svc.speculation.text_proposers import SuffixProposer
from tests.engine_svc.model.checkpoints import MAX_POSITION
from tests.engine_svc.request_options import split_options
from tests.engine_svc.runner.chains import Chain, ChainRows
from tests.engine_svc.runner.conftest import BLOCK_SIZE, TinyModel
from tests.engine_svc.runner.test_model_runner import prompt_of

NUM_TOKENS = 24
NUM_DRAFTS = 3

# By what a request has to do with drafts; a fresh one for each engine.
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {},
    "drawn": {"temperature": 0.7},
    "truncated": {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "barred words": {"bad_words": tuple((token, other) for token in range(0, 160, 3) for other in (5, 6, 7))},
    "minimum": {"temperature": 1.0, "min_tokens": 13, "stop_token_ids": frozenset(range(3, 60))},
    "stops": {"temperature": 1.0, "stop_token_ids": frozenset(range(3, 13))},
    "thinking": {"thinking": ThinkingBudget(5, (9,), (11, 12)), "temperature": 1.0},
    "chain": {"temperature": 1.0, "chain": Chain(4, blocker="")},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "long": {"temperature": 1.0, "max_tokens": 60},
}


@dataclass
class Scripted:
    """Proposes what follows without drafts, each token right with a probability, else any other."""

    texts: Sequence[Sequence[int]]
    chance: float
    choose: random.Random = field(default_factory=lambda: random.Random(7))

    def add_row(self, row: int, admitted: AdmittedRequest) -> None: ...

    def remove_row(self, row: int, token_ids: IntArray) -> None: ...

    def propose(self, row: int, token_ids: IntArray, limit: int) -> list[int]:
        known = token_ids.tolist()
        # Steps in flight at the end of a text go on behind it, with tokens that do not count.
        text = next((text for text in self.texts if list(text[: len(known)]) == known[: len(text)]), ())
        following = [*text[len(known) :], *[5] * limit][: self.choose.randrange(limit + 1)]
        return [
            token if self.choose.random() < self.chance else self.choose.randrange(160) for token in following
        ]


@dataclass
class Answers:
    """What requests got, by name, and how the engine came to it."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    first_accepted: float = 0.0  # of the first drafts of rows

    def ends(self) -> dict[str, tuple[object, ...]]:
        return {
            name: (outputs[-1].finish_reason, outputs[-1].stop_token_id, outputs[-1].message)
            for name, outputs in self.outputs.items()
        }


def serve(
    model: TinyModel,
    options: dict[str, dict[str, object]],
    proposer: Proposer | None = None,
    *,
    depth: int = 1,
    num_blocks: int = 200,
    max_num_batched_tokens: int = 64,
    features: Sequence[RunnerFeature] = (),
    prepare: Callable[[ModelRunner], object] = lambda runner: None,
) -> Answers:
    """Serve requests with these options, at most eight at a time."""
    config = SchedulerConfig(
        max_model_len=MAX_POSITION,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=depth > 1,
        max_steps_in_flight=depth,
        num_speculative_tokens=0 if proposer is None else NUM_DRAFTS,
        drafts_at_launch=proposer is not None,
    )
    groups = tuple(
        FullAttention(BLOCK_SIZE) if group.window is None else SlidingWindow(BLOCK_SIZE, group.window)
        for group in model.ours.facts.groups
    )
    scheduler = build_core(config, CacheConfig(num_blocks + 10 * (len(groups) - 1), groups)).scheduler
    chains = ChainRows(model.ours.facts.vocab_size)
    runner = model.runner(features=(chains, *features), proposer=proposer, max_steps_in_flight=depth)
    prepare(runner)
    answers, requests = Answers(), {}
    for seed, (name, its_options) in enumerate(options.items()):
        its_options = {"max_tokens": NUM_TOKENS, "seed": seed, "eos_token_id": None} | its_options
        chain = its_options.pop("chain", None)
        sampling, extras = split_options(**its_options)
        if chain is not None:
            extras[Chain] = chain
        prompt = prompt_of(5 + 3 * seed, seed=seed)
        requests[name] = Request(name, prompt, len(prompt), sampling, arrival_at=seed, extras=extras)
        answers.outputs[name] = []
        scheduler.add(requests[name])
    launched: list[tuple[StepPlan, RunningStep]] = []
    while scheduler.has_work or launched:
        while scheduler.has_work and len(launched) < depth:
            plan = scheduler.schedule(0.0)
            if not plan.request_ids:
                break
            launched.append((plan, runner.execute(plan)))
        plan, step = launched.pop(0)
        result = step.result()
        rows = list(plan.request_ids)
        for output in scheduler.update(plan, result, 0.0):
            answers.outputs[output.request_id].append(output)
            found = result.logprobs.get(rows.index(output.request_id))
            if found is not None:
                kept = found.part(0, len(output.new_token_ids))
                if output.request_id in answers.logprobs:
                    answers.logprobs[output.request_id].extend(kept)
                else:
                    answers.logprobs[output.request_id] = kept
    drafts = scheduler.stats().drafts
    answers.num_drafts, answers.num_accepted = drafts.num_draft_tokens, drafts.num_accepted_tokens
    if drafts.num_drafts and drafts.accepted_per_position:
        answers.first_accepted = drafts.accepted_per_position[0] / drafts.num_drafts
    answers.num_preemptions = scheduler.stats().num_preemptions
    answers.texts = {name: list(request.token_ids) for name, request in requests.items()}
    return answers


@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "how",
    [
        {"depth": 1},
        {"depth": 2},
        {"depth": 3},
        {"depth": 2, "num_blocks": 30, "max_num_batched_tokens": 20},
        {"depth": 1, "num_blocks": 30, "max_num_batched_tokens": 20},
    ],
    ids=["one step", "two steps", "three steps", "two steps, preempted", "one step, preempted"],
)
def test_drafts_change_no_answer(tiny_model, chance, how):
    model = tiny_model("llama", "native")
    expected = serve(model, OPTIONS)
    found = serve(model, OPTIONS, ByRow(Scripted(list(expected.texts.values()), chance)), **how)
    assert found.texts == expected.texts
    assert found.ends() == expected.ends()
    assert found.logprobs == expected.logprobs
    assert found.num_drafts > found.num_accepted or chance == 1.0
    assert chance == 0.0 or found.num_accepted > 40
    assert (found.num_preemptions > 0) == ("num_blocks" in how)


@dataclass(frozen=True)
class NanAt(RunnerFeature):
    """Makes the logits of one position invalid, in every row."""

    position: int

    def uses(self, admitted: AdmittedRequest) -> bool:
        return True

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        logits[logit_rows.entries[positions == self.position]] = float("nan")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_without_finite_logits_keeps_the_tokens_before(tiny_model, depth):
    model = tiny_model("llama", "native")
    texts = list(serve(model, OPTIONS).texts.values())
    features = (NanAt(35),)
    expected = serve(model, OPTIONS, features=features)
    found = serve(model, OPTIONS, ByRow(Scripted(texts, 0.9)), depth=depth, features=features)
    assert found.texts == expected.texts
    assert found.ends() == expected.ends()
    assert sum("not finite" in str(end) for end in found.ends().values()) > 4


@pytest.mark.parametrize("period", [3, 40])
def test_steps_between_those_with_drafts_change_no_answer(tiny_model, period):
    """period: of known tokens, in every second of which nothing is proposed."""
    model = tiny_model("llama", "native")
    expected = serve(model, OPTIONS)

    class Pausing(Scripted):
        def propose(self, row: int, token_ids: IntArray, limit: int) -> list[int]:
            return super().propose(row, token_ids, limit) if len(token_ids) // period % 2 else []

    found = serve(model, OPTIONS, ByRow(Pausing(list(expected.texts.values()), 0.7)), depth=2)
    assert found.texts == expected.texts
    assert found.num_accepted > 0


def test_rehearsed_steps_leave_no_rows_and_change_no_answer(tiny_model):
    model = tiny_model("llama", "native")
    expected = serve(model, OPTIONS)

    def rehearse(runner: ModelRunner) -> None:
        runner.step_costs(16)
        assert not runner.batch.row_of

    found = serve(model, OPTIONS, ByRow(SuffixProposer()), prepare=rehearse)
    assert found.texts == expected.texts


def test_a_row_that_was_entered_in_part_can_be_released(tiny_model, monkeypatch):
    runner = tiny_model("llama", "native").runner(proposer=ByRow(SuffixProposer()))
    sampling, _ = split_options()
    admitted = AdmittedRequest("a", [5, 6, 7], 3, sampling, [[0]])
    columns = {"request_ids": ["a"], "num_tokens": [3], "num_computed_tokens": [0], "new_block_ids": [[]]}
    columns |= {"draft_token_ids": [[]], "samples": [True]}

    def fail(row: int, admitted: AdmittedRequest) -> None:
        raise ValueError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(runner.sampler, "enter", fail)
        with pytest.raises(ValueError, match="no luck"):
            runner.execute(StepPlan(1, admitted=[admitted], **columns))
    step = runner.execute(StepPlan(2, released=["a"], admitted=[admitted], **columns))
    assert len(step.result().sampled[0]) == 1
