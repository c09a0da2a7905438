"""Plans reach the ranks as they were, in a few bytes a row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams, ThinkingBudget
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult
from engine_svc.ranks.byte_fields import MessageError
from engine_svc.ranks.plan_codec import (
    ExtraForm,
    PlanDecoder,
    PlanEncoder,
    UnknownExtra,
    sampling_from,
    sampling_text,
)
from engine_svc.scheduler.config import SchedulerConfig

MAX_NUM_SEQS = 12

EVERYTHING = SamplingParams(
    max_tokens=7,
    temperature=0.3,
    top_k=5,
    top_p=0.1 + 0.2,
    seed=(1 << 64) - 3,
    min_tokens=2,
    ignore_eos=True,
    eos_token_id=0,
    stop_token_ids=frozenset({9, 4}),
    skip_reading_prefix_cache=True,
    repetition=RepetitionLimits(8, min_count=3),
    min_p=0.05,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    repetition_penalty=1.1,
    logit_bias=((4, -1.5), (2, float("-inf"))),
    allowed_token_ids=frozenset({1, 2, 3}),
    bad_words=((1, 2), (3,)),
    logprobs=0,
    prompt_logprobs=-1,
    logprob_token_ids=(6, 5),
    thinking=ThinkingBudget(7, (1,), (2, 3)),
)


@dataclass(frozen=True)
class Marks:
    """What a feature could attach to a plan."""

    numbers: tuple[int, ...]


def marks_bytes(marks: object) -> bytes:
    assert isinstance(marks, Marks)
    return bytes(marks.numbers)


MARKS = ExtraForm(Marks, marks_bytes, lambda data: Marks(tuple(data)))


def codec(num_groups: int = 1, max_num_seqs: int = MAX_NUM_SEQS) -> tuple[PlanEncoder, PlanDecoder]:
    sizes = {"max_num_seqs": max_num_seqs, "num_groups": num_groups}
    return PlanEncoder(**sizes, extras=(MARKS,)), PlanDecoder(**sizes, extras=(MARKS,))


def random_plans(rng: random.Random, num_groups: int, num_steps: int) -> Iterator[StepPlan]:
    """Plans that no scheduler would make, but that a codec must carry."""
    living: list[str] = []
    for number in range(num_steps):
        plan = StepPlan(rng.randrange(1 << 63))
        plan.released = rng.sample(living, rng.randint(0, len(living)))
        living = [request_id for request_id in living if request_id not in plan.released]
        plan.preempted = rng.sample(plan.released, rng.randint(0, len(plan.released)))
        if rng.random() < 0.1:
            plan.preempted.append(rng.choice(["", "never admitted \ud800"]))
        for index in range(rng.randint(0, MAX_NUM_SEQS - len(living))):
            request_id = rng.choice([f"{number}-{index}", f"é{number}/{index}" * 9])
            living.append(request_id)
            blocks = [[rng.randrange(1 << 31) for _ in range(rng.randint(0, 3))] for _ in range(num_groups)]
            tokens = [rng.randrange(1 << 31) for _ in range(rng.randint(1, 40))]
            sampling = rng.choice([EVERYTHING, SamplingParams(max_tokens=rng.randint(1, 99))])
            plan.admitted.append(AdmittedRequest(request_id, tokens, rng.randint(1, 40), sampling, blocks))
        plan.request_ids = rng.sample(living, rng.randint(0, len(living)))
        for _ in plan.request_ids:
            plan.num_tokens.append(rng.choice([1, 1, rng.randint(1, 1 << 20)]))
            plan.num_computed_tokens.append(rng.choice([0, 1, rng.randint(0, 1 << 20)]))
            plan.samples.append(rng.random() < 0.7)
            plan.draft_token_ids.append(rng.choice([[], [-1], [5, 1 << 20, 0]]))
            most = rng.choice([0, 1, 3])
            gained = [
                [rng.randrange(1 << 31) for _ in range(rng.randint(0, most))] for _ in range(num_groups)
            ]
            plan.new_block_ids.append(rng.choice([[], gained, [[3]], [[]]]))
        if rng.random() < 0.3:
            plan.extras[Marks] = Marks((1, 2, rng.randrange(256)))
        yield plan


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(rng=st.randoms(use_true_random=False), num_groups=st.integers(1, 9))
def test_every_rank_reads_the_plan_that_was_written(rng: random.Random, num_groups: int) -> None:
    encoder, decoder = codec(num_groups)
    for plan in random_plans(rng, num_groups, num_steps=8):
        assert decoder.decode(encoder.encode(plan)) == plan


def rows_plan(number: int, num_rows: int, *, new_block: bool, num_groups: int = 1) -> StepPlan:
    """A step in which every request decodes one token."""
    gained = [[1000 + group] for group in range(num_groups)]
    return StepPlan(
        number,
        request_ids=[f"request-{row}" for row in range(num_rows)],
        num_tokens=[1] * num_rows,
        num_computed_tokens=[10 + number] * num_rows,
        new_block_ids=[gained if new_block else [] for _ in range(num_rows)],
        draft_token_ids=[[] for _ in range(num_rows)],
        samples=[True] * num_rows,
    )


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 256, 1024])
def test_a_decode_row_takes_at_most_12_bytes(num_rows: int, num_groups: int) -> None:
    encoder, decoder = codec(num_groups, max_num_seqs=1024)
    first = rows_plan(0, num_rows, new_block=False)
    first.admitted = [
        AdmittedRequest(request_id, [1] * 10, 10, EVERYTHING, [[1]] * num_groups)
        for request_id in first.request_ids
    ]
    decoder.decode(encoder.encode(first))
    sizes = {}
    for number, new_block in ((1, False), (2, True)):
        message = encoder.encode(rows_plan(number, num_rows, new_block=new_block, num_groups=num_groups))
        decoder.decode(message)
        sizes["with a new block each" if new_block else "plain"] = len(message)
    print(f"{num_rows} decode rows, {num_groups} groups of layers: {sizes} bytes")
    assert max(sizes.values()) <= 12 * num_rows + 256
    assert sizes["plain"] <= 4 * num_rows + 64


def test_a_request_is_sent_in_full_once() -> None:
    encoder, _ = codec()
    plan = rows_plan(0, 1, new_block=False)
    plan.admitted = [AdmittedRequest("request-0", [7] * 5000, 5000, EVERYTHING, [[1]])]
    assert len(encoder.encode(plan)) > 4 * 5000
    assert len(encoder.encode(rows_plan(1, 1, new_block=False))) < 100


@pytest.mark.parametrize("overlaps", [False, True])
def test_plans_of_a_real_scheduler_survive(overlaps: bool) -> None:
    # A pool so small that requests lose their blocks to others and come back.
    config = SchedulerConfig(
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        async_scheduling=overlaps,
        max_steps_in_flight=1 + overlaps,
    )
    scheduler = build_core(config, CacheConfig(30, (FullAttention(4),))).scheduler
    encoder, decoder = codec(max_num_seqs=6)
    rng = random.Random(3)
    for index in range(12):
        prompt = [rng.randrange(9) for _ in range(rng.randint(3, 40))]
        scheduler.add(Request(f"r{index}", prompt, len(prompt), SamplingParams(max_tokens=40, seed=index)))
    in_flight: list[StepPlan] = []
    num_plans = num_preempted = 0
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule(0.0)
        if plan.request_ids:
            assert decoder.decode(encoder.encode(plan)) == plan
            num_plans, num_preempted = num_plans + 1, num_preempted + len(plan.preempted)
            in_flight.append(plan)
        if len(in_flight) > overlaps or not plan.request_ids:
            oldest = in_flight.pop(0)
            sampled = [[rng.randrange(9)] if samples else [] for samples in oldest.samples]
            scheduler.update(oldest, StepResult(oldest.step_number, sampled), 0.0)
    assert num_plans > 60
    assert num_preempted > 0


def test_every_sampling_parameter_arrives() -> None:
    default = asdict(SamplingParams(max_tokens=1))
    same = [
        field.name
        for field in fields(SamplingParams)
        if asdict(EVERYTHING)[field.name] == default[field.name]
    ]
    assert same == [], "a parameter that the test leaves at its default could get lost"
    assert sampling_from(sampling_text(EVERYTHING)) == EVERYTHING
    for field in fields(SamplingParams):
        alone = replace(SamplingParams(max_tokens=1), **{field.name: getattr(EVERYTHING, field.name)})
        assert sampling_from(sampling_text(alone)) == alone


def test_an_extra_without_a_form_is_refused_and_nothing_is_lost() -> None:
    encoder, decoder = codec()
    plan = rows_plan(0, 1, new_block=False)
    plan.admitted = [AdmittedRequest("request-0", [7], 1, EVERYTHING, [[1]])]
    plan.extras[str] = "a note"
    with pytest.raises(UnknownExtra, match="str"):
        encoder.encode(plan)
    del plan.extras[str]
    assert decoder.decode(encoder.encode(plan)) == plan


@pytest.mark.parametrize(
    "damage", [lambda data: b"\x09" + data[1:], lambda data: data[:-1], lambda data: data + b"1"]
)
def test_bytes_of_another_version_or_length_are_refused(damage) -> None:
    encoder, decoder = codec()
    plan = rows_plan(0, 1, new_block=False)
    plan.admitted = [AdmittedRequest("request-0", [7], 1, EVERYTHING, [[1]])]
    message = encoder.encode(plan)
    with pytest.raises(MessageError):
        decoder.decode(damage(message))
