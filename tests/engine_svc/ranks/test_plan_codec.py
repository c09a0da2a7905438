"""Plans reach the ranks as they were, in a few bytes a row."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.byte_fields import MessageError
from engine_svc.core.extras import Extra, ExtraCodec, UnknownExtra
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult, TokenLogprobs
from engine_svc.ranks.plan_channel import (
    Channel,
    ChannelInterrupted,
    ChannelReader,
    ChannelTimeout,
    ChannelWriter,
    create_channel,
)
from engine_svc.ranks.plan_codec import (
    PlanDecoder,
    PlanEncoder,
    sampling_from,
    sampling_text,
)
from engine_svc.ranks.progress_board import RankHeartbeats, start_heart
from engine_svc.ranks.result_codec import decode_result, encode_result
from engine_svc.scheduler.config import SchedulerConfig
from tests.processes import running, source_environment

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
    logprobs=0,
    logprob_token_ids=(6, 5),
    max_draft_tokens=0,
)


@dataclass(frozen=True)
class Marks(Extra):
    """What a feature could attach to a request, a plan or a result."""

    numbers: tuple[int, ...]


def codec(num_groups: int = 1, max_num_seqs: int = MAX_NUM_SEQS) -> tuple[PlanEncoder, PlanDecoder]:
    sizes = {"max_num_seqs": max_num_seqs, "num_groups": num_groups}
    return (
        PlanEncoder(**sizes, extras=ExtraCodec([Marks])),
        PlanDecoder(**sizes, extras=ExtraCodec([Marks])),
    )


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
            extras = rng.choice([{}, {Marks: Marks((rng.randrange(256),))}])
            salt = rng.choice(("", "salt"))
            plan.admitted.append(
                AdmittedRequest(request_id, tokens, rng.randint(1, 40), sampling, blocks, extras, salt)
            )
        plan.num_common_blocks = rng.choice([[], [rng.randrange(1 << 20) for _ in range(num_groups)]])
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


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
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
    plan.extras[Extra] = Extra()
    with pytest.raises(UnknownExtra, match="Extra"):
        encoder.encode(plan)
    del plan.extras[Extra]
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


# Results reach the engine as they were.

ids = st.integers(0, (1 << 31) - 1)
some_ids = st.lists(ids, max_size=4)
logprobs = st.lists(st.floats(max_value=0.0, allow_nan=False), max_size=4)
token_logprobs = st.builds(
    TokenLogprobs,
    logprobs=logprobs,
    ranks=some_ids,
    k=st.integers(0, 20),
    top_token_ids=some_ids,
    top_logprobs=logprobs,
)
results = st.builds(
    StepResult,
    step_number=st.integers(0, 1 << 62),
    sampled=st.lists(some_ids, max_size=6),
    drafts=st.dictionaries(st.text(max_size=5), some_ids, max_size=3),
    non_finite=some_ids,
    barred=some_ids,
    num_drafts=some_ids,
    logprobs=st.dictionaries(st.integers(0, 9), token_logprobs, max_size=3),
    failed=st.dictionaries(st.integers(0, 9), st.text(max_size=9), max_size=3),
    extras=st.dictionaries(
        st.just(Marks),
        st.dictionaries(
            st.integers(0, 9), st.builds(Marks, st.lists(st.integers(0, 255)).map(tuple)), max_size=3
        ),
    ),
)


@settings(max_examples=70, deadline=None, database=None, derandomize=True)
@given(result=results)
def test_a_result_is_read_as_it_was_written(result: StepResult) -> None:
    extras = ExtraCodec([Marks])
    assert decode_result(encode_result(result, extras), extras) == result


def test_what_was_cut_away_stays_at_minus_infinity() -> None:
    result = StepResult(1, [[3]], logprobs={0: TokenLogprobs([-math.inf], [2])})
    assert decode_result(encode_result(result)).logprobs[0].logprobs == [-math.inf]


def test_256_rows_take_about_8_bytes_each() -> None:
    result = StepResult(9, [[token_id] for token_id in range(256)])
    assert len(encode_result(result)) <= 8 * 256 + 64


def test_bytes_of_another_version_are_refused() -> None:
    with pytest.raises(MessageError, match="version 7"):
        decode_result(b"\x07" + encode_result(StepResult(1, []))[1:])


# Every reader gets every message, whole and in order, and a wait can be interrupted.

CAPACITY = 1 << 12


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = create_channel(num_readers=2, capacity=CAPACITY)
    yield made
    made.close()


@pytest.fixture
def interrupt() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def messages(num: int) -> list[bytes]:
    """From empty ones to some of several buffers."""
    rng = random.Random(7)
    sizes = [0, 1, CAPACITY // 4, CAPACITY, 5 * CAPACITY + 3]
    return [rng.randbytes(rng.choice([*sizes, rng.randrange(300)])) for _ in range(num)]


def receive_all(reader: ChannelReader, num: int) -> list[bytes | None]:
    return [reader.receive(timeout_s=20) for _ in range(num)]


@pytest.mark.parametrize("spin_s", [0.0, 1e-4])
def test_every_reader_gets_every_message_in_order(channel: Channel, spin_s: float) -> None:
    sent = messages(400)
    writer = ChannelWriter(channel.writer)
    with ThreadPoolExecutor() as pool:
        received = [
            pool.submit(receive_all, ChannelReader(end, spin_s=spin_s), len(sent)) for end in channel.readers
        ]
        for message in sent:
            writer.send(message, timeout_s=20)
    assert [future.result() == sent for future in received] == [True, True]


def test_a_reader_without_a_message_gets_nothing(channel: Channel) -> None:
    reader = ChannelReader(channel.readers[0])
    assert reader.receive(timeout_s=0.0) is None
    ChannelWriter(channel.writer).send(b"plan", timeout_s=1)
    assert reader.receive(timeout_s=0.0) == b"plan"
    assert reader.receive(timeout_s=0.001) is None


def test_a_writer_waits_for_the_slowest_reader_and_says_who_it_is(channel: Channel) -> None:
    quick, slow = (ChannelReader(end) for end in channel.readers)
    writer = ChannelWriter(channel.writer)
    half = b"x" * (CAPACITY // 2)
    writer.send(half, timeout_s=1)
    assert quick.receive(timeout_s=1) == half
    with pytest.raises(ChannelTimeout, match="reader 1 made no room"):
        writer.send(half, timeout_s=0.01)
    assert slow.receive(timeout_s=1) == half


def test_a_receive_can_be_interrupted(channel: Channel, interrupt: int) -> None:
    reader = ChannelReader(channel.readers[0], interrupt_fd=interrupt)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.receive)
        os.eventfd_write(interrupt, 1)
        assert isinstance(waiting.exception(timeout=20), ChannelInterrupted)


def test_a_send_waiting_for_room_can_be_interrupted(channel: Channel, interrupt: int) -> None:
    writer = ChannelWriter(channel.writer, interrupt_fd=interrupt)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(writer.send, b"y" * 2 * CAPACITY, timeout_s=60)
        os.eventfd_write(interrupt, 1)
        assert isinstance(waiting.exception(timeout=20), ChannelInterrupted)


READER = """
import sys
from engine_svc.ranks.plan_channel import ChannelReader, reader_end
reader = ChannelReader(reader_end([int(value) for value in sys.argv[1:]]))
while message := reader.receive():
    sys.stdout.buffer.write(message)
    sys.stdout.flush()
"""


def test_two_that_write_more_than_a_ring_to_each_other_both_arrive() -> None:
    """A writer that waits for room reads what the other one writes, and finds it later."""
    there, back = (create_channel(num_readers=1, capacity=CAPACITY) for _ in range(2))
    replies = ChannelReader(back.readers[0])
    writer = ChannelWriter(there.writer, replies=replies)
    plan, small, large = b"p" * 3 * CAPACITY, b"s", b"r" * 3 * CAPACITY

    def answer_before_reading() -> bytes | None:
        answers = ChannelWriter(back.writer)
        for reply in (small, small, large):
            answers.send(reply, timeout_s=5)
        return ChannelReader(there.readers[0]).receive(timeout_s=5)

    with ThreadPoolExecutor() as pool:
        received = pool.submit(answer_before_reading)
        assert replies.receive(timeout_s=5) == small
        writer.send(plan, timeout_s=5)
        assert received.result() == plan
    assert [replies.receive(timeout_s=0) for _ in range(3)] == [small, large, None]
    there.close()
    back.close()


def reading_process(channel: Channel, index: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
    end = channel.readers[index]
    numbers = [str(number) for number in (*end.fds, end.capacity)]
    return running(
        *(sys.executable, "-c", READER, *numbers),
        pass_fds=end.fds,
        stdout=subprocess.PIPE,
        env=source_environment(),
    )


def test_a_process_reads_what_another_writes_and_nothing_is_left_when_it_is_killed() -> None:
    channel = create_channel(num_readers=1, capacity=CAPACITY)
    with reading_process(channel, 0) as process:
        assert process.stdout is not None
        writer = ChannelWriter(channel.writer)
        sent = b"".join(message or b"." for message in messages(50))
        for start in range(0, len(sent), 9000):
            writer.send(sent[start : start + 9000], timeout_s=20)
            assert process.stdout.read(len(sent[start : start + 9000])) == sent[start : start + 9000]
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=20) == -signal.SIGKILL
    channel.close()
    # Memory with a name would stay behind.
    assert "memfd:triptych" in mapped
    assert "/dev/shm/" not in mapped


def test_signs_of_life_are_seen_on_every_board_of_the_same_memory() -> None:
    heartbeats = RankHeartbeats.create(num_ranks=2)
    seen = RankHeartbeats(heartbeats.fd, num_ranks=2)
    heartbeats.finish_step(1)
    start_heart(heartbeats, rank=0, interval_s=0.001)
    deadline = threading.Event()
    while seen.beats(0) < 3:
        assert not deadline.wait(0.001)
    assert [(seen.steps(rank), seen.beats(1)) for rank in range(2)] == [(0, 0), (1, 0)]
