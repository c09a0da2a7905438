"""The runner's logprobs of a real model are those of transformers, however steps are cut."""

from __future__ import annotations

import math
import random
from array import array
from collections import defaultdict

import numpy as np
import pytest
import torch

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.convert import messages
from engine_svc.core.request import Request
from engine_svc.core.step import AdmittedRequest, StepResult, TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptRun
from engine_svc.features.prompt_logprobs.runner import PromptLogprobRows
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Inbox, StatsSnapshot, Stop
from engine_svc.loop.protocols import NoLockstep
from engine_svc.loop.step_output import StepOutput
from engine_svc.runner.executor import InlineExecutor
from engine_svc.runner.input_batch import StepInputs
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.model.checkpoints import MAX_POSITION
from tests.engine_svc.request_options import make_scheduler_features, make_wire_features, split_options
from tests.engine_svc.runner.conftest import BLOCK_SIZE
from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, random_logits
from triptych_kit.clock import FakeClock

PROMPT = [random.Random(4).randrange(3, 160) for _ in range(41)]


def prompt_runs(result: StepResult) -> dict[int, PromptRun]:
    """By row of the plan, what the step computed of its prompt."""
    runs = {}
    for row, extra in result.extras[PromptLogprobs].items():
        (runs[row],) = extra.runs
    return runs


def expected_logprobs(model, token_ids: list[int]) -> torch.Tensor:
    """[places, V]: what transformers says of the token that follows each place."""
    with torch.inference_mode():
        return model.theirs(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def assert_logprobs(
    token_logprobs: TokenLogprobs, expected: torch.Tensor, token_ids: list[int], num_top: int
) -> None:
    """token_logprobs: of the tokens [P], whose logprobs transformers has in expected [P, V]."""
    own = expected[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    assert token_logprobs.logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert token_logprobs.k == num_top
    best = expected.topk(num_top, dim=-1).values.flatten().tolist()
    assert token_logprobs.top_logprobs == pytest.approx(best, abs=1e-4)
    for rank, row, logprob in zip(token_logprobs.ranks, expected, own, strict=True):
        assert int((row >= logprob + 1e-4).sum()) <= rank <= int((row >= logprob - 1e-4).sum())


@pytest.mark.parametrize("grants", [[41], [1, 40], [16, 16, 9], [40, 1], [5] * 8 + [1]], ids=str)
def test_prompt_logprobs_are_returned_as_their_chunks_are_computed(tiny_model, grants):
    model = tiny_model("llama")
    driver = model.driver()
    driver.add("asks", PROMPT, prompt_logprobs=3)
    driver.add("silent", PROMPT[:7])
    driver.add("samples", PROMPT[:9], logprobs=2, temperature=1.0)
    expected = expected_logprobs(model, PROMPT)
    whole = TokenLogprobs([], [], 3)
    for number, grant in enumerate(grants):
        others = {"silent": 7, "samples": 9} if number == 0 else {"silent": 1, "samples": 1}
        result = driver.step({"silent": others["silent"], "asks": grant, "samples": others["samples"]})
        assert set(result.logprobs) == {2}
        if PromptLogprobs not in result.extras:
            continue
        ((row, places),) = prompt_runs(result).items()
        assert (row, places.first_position) == (1, 1 + len(whole.ranks))
        whole.extend(places.token_logprobs)
    assert_logprobs(whole, expected[:-1], PROMPT[1:], 3)
    # After its prompt nothing more is reported, and its tokens are those of one that never asked.
    request = driver.requests["asks"]
    assert driver.step({"asks": 1}).extras == {}
    assert request.output_token_ids[0] == int(expected[-1].argmax())


def test_sampled_tokens_get_the_models_own_logprobs(tiny_model):
    model = tiny_model("llama")
    driver = model.driver()
    request = driver.add("a", PROMPT, logprobs=4, temperature=1.0, top_k=3, repetition_penalty=1.3, seed=5)
    token_logprobs = TokenLogprobs([], [], 4)
    for _ in range(12):
        token_logprobs.extend(driver.step({"a": request.num_pending_tokens}).logprobs[0])
    expected = expected_logprobs(model, request.token_ids)[len(PROMPT) - 1 : -1]
    assert_logprobs(token_logprobs, expected, request.output_token_ids, 4)


def test_a_prompt_of_one_token_has_empty_prompt_logprobs(tiny_model):
    driver = tiny_model("llama").driver()
    driver.add("a", PROMPT[:1], prompt_logprobs=2)
    result = driver.step({"a": 1})
    places = prompt_runs(result)[0]
    assert (places.first_position, places.token_logprobs.ranks, places.token_logprobs.k) == (1, [], 2)
    assert len(result.sampled[0]) == 1


def test_a_preempted_request_gets_prompt_logprobs_again_but_not_those_of_its_output(tiny_model):
    driver = tiny_model("llama").driver()
    request = driver.add("a", PROMPT, prompt_logprobs=0, logprobs=0)
    first = prompt_runs(driver.step({"a": len(PROMPT)}))[0]
    driver.step({"a": 1})
    driver.preempt("a")
    again = driver.step({"a": request.num_pending_tokens})
    run = prompt_runs(again)[0]
    assert run.first_position == 1
    assert run.token_logprobs.logprobs == pytest.approx(first.token_logprobs.logprobs, abs=1e-5)
    assert len(again.logprobs[0].ranks) == 1


# Where the logits of a prompt come from, and long prompts in parts, without a model.


def inputs_of(rows: list[int], counts: list[int], starts: list[int]) -> StepInputs:
    """The inputs of a step as far as prompt logprobs look at them."""
    none = torch.empty(0, dtype=torch.int64)
    columns = (np.array(column, dtype=np.int64) for column in (rows, counts, starts, [], []))
    return StepInputs(none, none, [], [], none, *columns)


def looked_up(vocab_size, prompt, logits, **options):
    """What a row of this prompt gets from the logits [T - 1, V] of its positions but the last."""
    token_ids = torch.tensor([[0] * len(prompt), prompt], dtype=torch.int32)
    feature = PromptLogprobRows(vocab_size, token_ids)
    sampling, extras = split_options(**options)
    feature.add_row(1, AdmittedRequest("a", prompt, len(prompt), sampling, [[]], extras))
    inputs = inputs_of([0, 1], [3, len(prompt)], [0, 0])
    assert feature.extra_positions(inputs).tolist() == list(range(3, 2 + len(prompt)))
    extra = feature.before_sampling(inputs, logits)()[1]
    (run,) = extra.runs
    assert run.first_position == 1
    return run.token_logprobs


@pytest.mark.parametrize("num_positions", [0, 1, 17])
def test_116_prompt_logprobs_come_from_the_preceding_position(num_positions):
    logits = random_logits(num_positions)
    tokens = torch.arange(num_positions) * 2
    found = looked_up(VOCAB_SIZE, [9, *tokens.tolist()], logits, prompt_logprobs=3, logprob_token_ids=(6,))
    expected = logits.log_softmax(-1)
    own = expected[torch.arange(num_positions), tokens]
    assert found.logprobs == own.tolist()
    assert found.ranks == (expected >= own[:, None]).sum(-1).tolist()
    assert found.k == 4
    for position in range(num_positions):
        ids = found.top_token_ids[4 * position : 4 * position + 4]
        assert ids == [*expected[position].topk(3).indices.tolist(), 6]
        assert found.top_logprobs[4 * position : 4 * position + 4] == expected[position, ids].tolist()


def test_116_a_long_prompt_is_looked_up_in_parts_that_add_up():
    vocab_size = (1 << 24) // 3
    logits = torch.zeros(5, vocab_size)
    logits[torch.arange(5), torch.arange(5) * 100] = torch.arange(5) + 1.0
    found = looked_up(vocab_size, [7, 0, 100, 200, 300, 400], logits, prompt_logprobs=1)
    assert found.ranks == [1] * 5
    assert found.top_token_ids == [0, 100, 200, 300, 400]
    assert found.top_logprobs == found.logprobs == sorted(found.logprobs)


# Loop, scheduler, runner and wire together: what frontends are sent, chunked, crowded and preempted.

NUM_TOKENS = 56
NUM_TOP = 2


class Reader:
    """The session of a frontend, as the loop sees it: reads steps off the wire until all have ended."""

    def __init__(self, inbox: Inbox, num_requests: int) -> None:
        self._inbox = inbox
        self._num_left = num_requests
        self._features = make_wire_features()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.ranks: dict[int, list[int]] = defaultdict(list)
        self.top_logprobs: dict[int, list[float]] = defaultdict(list)
        self.prompt_positions: dict[int, list[int]] = defaultdict(list)
        self.prompt_logprobs: dict[int, list[float]] = defaultdict(list)

    def publish(self, output: StepOutput) -> None:
        step = messages.to_step(output, {}, self._features, 0.0)
        handles, token_ids = array("I", step.handles).tolist(), array("I", step.token_ids).tolist()
        logprobs, ranks = array("f", step.sampled_logprobs).tolist(), array("I", step.sampled_ranks).tolist()
        k, top = step.top_logprobs.k, array("f", step.top_logprobs.logprobs).tolist()
        start = 0
        for handle, num_tokens in zip(handles, step.num_tokens, strict=True):
            end = start + num_tokens
            self.tokens[handle] += token_ids[start:end]
            self.logprobs[handle] += logprobs[start:end]
            self.ranks[handle] += ranks[start:end]
            self.top_logprobs[handle] += top[k * start : k * end]
            start = end
        for extra in step.extras:
            places = extra.prompt_logprobs
            token_logprobs = array("f", places.logprobs).tolist()
            first = places.first_position
            self.prompt_positions[handles[extra.row]] += range(first, first + len(token_logprobs))
            self.prompt_logprobs[handles[extra.row]] += token_logprobs
        self._num_left -= len(step.finished)
        if not self._num_left:
            self._inbox.put(Stop())


def run(model, requests: list[Request], *, num_blocks: int, depth: int) -> Reader:
    """Every request to its end, request number n under handle n."""
    core = build_core(
        SchedulerConfig(
            max_model_len=MAX_POSITION, max_num_seqs=8, max_num_batched_tokens=24,
            async_scheduling=depth > 1, max_steps_in_flight=depth,
        ),
        CacheConfig(num_blocks, (FullAttention(BLOCK_SIZE),)),
        features=make_scheduler_features(),
    )  # fmt: skip
    inbox = Inbox(max_commands=100)
    reader = Reader(inbox, len(requests))
    engine = Engine(
        scheduler=core.scheduler, executor=InlineExecutor(model.runner()), inbox=inbox,
        stats_snapshot=StatsSnapshot(), clock=FakeClock(), lockstep=NoLockstep(), max_in_flight=depth,
    )  # fmt: skip
    for handle, request in enumerate(requests):
        inbox.put(Add(request, reader, handle))
    engine.run()
    return reader


def make_requests() -> list[Request]:
    choose = random.Random(6)
    token_logprobs: dict[str, object] = {
        "logprobs": NUM_TOP,
        "prompt_logprobs": 0,
        "skip_reading_prefix_cache": True,
    }
    penalised = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
    all_options: list[dict[str, object]] = [
        token_logprobs,
        {"temperature": 1.0, "seed": 3, **penalised},
        {**token_logprobs, **penalised, "temperature": 0.8, "seed": 4},
        {"bad_words": ((5, 6), (9,)), "temperature": 2.0, "seed": 5, "min_tokens": 5, "eos_token_id": 7},
        {**token_logprobs, "min_p": 0.05, "temperature": 1.5, "seed": 6},
    ]
    requests = []
    for handle, options in enumerate(all_options):
        length = 40 + 7 * handle
        sampling, extras = split_options(max_tokens=NUM_TOKENS, **options)
        prompt = [choose.randrange(3, 160) for _ in range(length)]
        requests.append(Request(str(handle), prompt, length, sampling, extras=extras))
    return requests


@pytest.mark.parametrize("depth", [1, 2])
def test_each_position_is_reported_once_and_correctly_despite_preemptions(tiny_model, depth):
    model = tiny_model("llama")
    requests = make_requests()
    crowded = run(model, requests, num_blocks=52, depth=depth)
    assert sum(request.num_preemptions for request in requests) >= 2
    roomy = run(model, make_requests(), num_blocks=256, depth=depth)
    assert crowded.tokens == roomy.tokens
    for handle, request in enumerate(requests):
        tokens = crowded.tokens[handle]
        if request.sampling.logprobs is None:
            assert all(math.isnan(logprob) for logprob in crowded.logprobs[handle])
            assert handle not in crowded.prompt_positions
            continue
        num_prompt = request.num_prompt_tokens
        prompt = request.token_ids[:num_prompt]
        expected = expected_logprobs(model, prompt + tokens)
        own = expected[torch.arange(num_prompt - 1, num_prompt - 1 + len(tokens)), torch.tensor(tokens)]
        assert crowded.logprobs[handle] == pytest.approx(own.tolist(), abs=1e-4)
        best = expected[num_prompt - 1 : -1].topk(NUM_TOP).values.flatten().tolist()
        assert crowded.top_logprobs[handle] == pytest.approx(best, abs=1e-4)
        assert crowded.prompt_positions[handle] == list(range(num_prompt))
        own = expected[torch.arange(num_prompt - 1), torch.tensor(prompt[1:])]
        assert math.isnan(crowded.prompt_logprobs[handle][0])
        assert crowded.prompt_logprobs[handle][1:] == pytest.approx(own.tolist(), abs=1e-4)
