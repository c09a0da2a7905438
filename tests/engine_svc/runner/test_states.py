"""A small recurrent model through scheduler and runner: its ids are those of each request alone."""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_svc.build.engine import Core, build_core
from engine_svc.cache.attention import AttentionKind, FullAttention, KeptState
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.model.context import ForwardContext
from engine_svc.model.facts import KVShape, ModelFacts, StateShape
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.runner.running_step import RunningStep
from engine_svc.scheduler.config import SchedulerConfig
from triptych_kernels import ops_for

VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE = 97, 96, 4
TREE = f"{Path(__file__).resolve().parents[3]}/"
PRODUCT = tuple(f"{TREE}{name}/" for name in ("engine_svc", "kernels"))
# Some of what a model with states calls.
OF_STATES = {
    "engine_svc/cache/groups.py:KeptStates.extend",
    "engine_svc/runner/input_batch.py:InputBatch._state_batch",
    "engine_svc/runner/state_rows.py:StateRows.gather",
}


def advance(state: int, token: int) -> int:
    """The state after a token; exact in fp32."""
    return (state * 31 + token + 1) % 8191


class Recurrent:
    """A model whose next token is its state, a digest of all tokens so far."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        batch = context.states
        assert batch is not None
        ((states,),) = context.state_layers
        starts, writes = batch.query_starts.tolist(), batch.write_slots.tolist()
        after = []
        for row, slot in enumerate(batch.read_slots.tolist()):
            state = int(states[slot, 0]) if slot >= 0 else 0
            for token in range(starts[row], starts[row + 1]):
                state = advance(state, int(token_ids[token]))
                after.append(state)
                if writes[token] >= 0:
                    states[writes[token], 0] = state
        logits = torch.zeros(len(logit_rows), VOCAB_SIZE)
        for index, token in enumerate(logit_rows.tolist()):
            logits[index, after[token] % VOCAB_SIZE] = 1.0
        return logits


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that follow a prompt."""
    state = 0
    for token in prompt:
        state = advance(state, token)
    tokens = []
    for _ in range(num_tokens):
        tokens.append(state % VOCAB_SIZE)
        state = advance(state, tokens[-1])
    return tokens


class LastToken:
    """A model without states, whose next token is a function of the last one."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        assert context.states is None
        logits = torch.zeros(len(logit_rows), VOCAB_SIZE)
        logits[torch.arange(len(logit_rows)), (31 * token_ids[logit_rows].long() + 7) % VOCAB_SIZE] = 1.0
        return logits


@dataclass(frozen=True)
class Rig:
    """A model behind a scheduler, in which prompts share their beginnings."""

    steps_in_flight: int = 2
    num_slots: int = 30
    num_blocks: int = 400
    num_batched_tokens: int = 64
    has_attention: bool = True
    has_states: bool = True

    def build(self) -> tuple[Core, ModelRunner]:
        facts = ModelFacts(
            architecture="Recurrent",
            kv_shapes=(KVShape(1, 8, 8),) if self.has_attention else (),
            vocab_size=VOCAB_SIZE,
            max_position=MAX_MODEL_LEN,
            eos_token_ids=(),
            dtype="float32",
            num_parameters=0,
            weights_digest="",
            state_shapes=(StateShape(((1,),)),) if self.has_states else (),
        )
        num_slots = self.num_slots if self.has_states else 0
        kinds: list[AttentionKind] = [FullAttention(BLOCK_SIZE)] if self.has_attention else []
        if self.has_states:
            kinds.append(KeptState(BLOCK_SIZE, 8))
        core = build_core(
            SchedulerConfig(
                MAX_MODEL_LEN,
                self.num_batched_tokens,
                max_num_seqs=6,
                async_scheduling=self.steps_in_flight > 1,
                max_steps_in_flight=self.steps_in_flight,
                reserve_full_prompt=False,
            ),
            CacheConfig(self.num_blocks, tuple(kinds), num_state_slots=num_slots),
        )
        kv = KVTensors(facts, KVSizing(self.num_blocks, BLOCK_SIZE, 0, num_slots))
        for tensor in kv.states.stacks:
            tensor.fill_(float("nan"))
        config = RunnerConfig(max_num_seqs=6, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
        model = Recurrent() if self.has_states else LastToken()
        return core, ModelRunner(model, facts, kv, config, ops_for(torch.device("cpu")))

    def prompts(self) -> dict[str, list[int]]:
        rng = random.Random(self.num_slots + self.steps_in_flight)
        heads = [rng.choices(range(VOCAB_SIZE), k=length) for length in (12, 33, 50)]
        return {
            f"r{index}": rng.choice(heads)[: rng.choice((12, 30, 50))] + rng.choices(range(VOCAB_SIZE), k=5)
            for index in range(24)
        }


def answers_of(
    rig: Rig, core: Core, runner: ModelRunner, prompts: dict[str, list[int]]
) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        core.scheduler.add(Request(name, list(prompt), len(prompt), SamplingParams(20, temperature=0.0)))
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    in_flight: deque[tuple[StepPlan, RunningStep]] = deque()
    while core.scheduler.has_work or in_flight:
        plan = core.scheduler.schedule(0.0)
        if plan.request_ids:
            in_flight.append((plan, runner.execute(plan)))
        if in_flight and (len(in_flight) == rig.steps_in_flight or not plan.request_ids):
            oldest, step = in_flight.popleft()
            for output in core.scheduler.update(oldest, step.result(), 0.0):
                answers[output.request_id] += output.new_token_ids
    return answers


@pytest.mark.parametrize("has_attention", [True, False], ids=["hybrid", "recurrent"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("num_slots", "num_blocks", "num_batched_tokens"), [(30, 400, 64), (7, 60, 7), (7, 60, 40)]
)
def test_every_request_is_answered_as_if_it_were_alone(
    num_slots: int, num_blocks: int, num_batched_tokens: int, steps_in_flight: int, has_attention: bool
):
    rig = Rig(steps_in_flight, num_slots, num_blocks, num_batched_tokens, has_attention)
    core, runner = rig.build()
    prompts = rig.prompts()
    assert answers_of(rig, core, runner, prompts) == {
        name: answer(prompt, 20) for name, prompt in prompts.items()
    }
    stats = core.scheduler.stats()
    assert stats.prefix_hits > 0
    assert (stats.num_preemptions > 0) == (has_attention and num_batched_tokens == 40)


@pytest.mark.parametrize("has_states", [True, False])
def test_a_model_without_states_calls_no_function_of_states(has_states: bool):
    """Counted by their names, on prefix hits, in chunks and preempted."""
    rig = Rig(num_blocks=60, num_batched_tokens=40, has_states=has_states)
    core, runner = rig.build()
    prompts = rig.prompts()
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PRODUCT):
            calls[f"{code.co_filename.removeprefix(TREE)}:{code.co_qualname}"] += 1

    sys.setprofile(profile)
    try:
        answers = answers_of(rig, core, runner, prompts)
    finally:
        sys.setprofile(None)
    stats = core.scheduler.stats()
    assert all(len(tokens) == 20 for tokens in answers.values())
    assert stats.prefix_hits > 0
    assert stats.num_preemptions > 0
    assert calls["engine_svc/runner/input_batch.py:InputBatch.gather"] > 50
    of_states = {name: count for name, count in calls.items() if "state" in name.lower()}
    assert set(of_states) >= OF_STATES if has_states else not of_states
