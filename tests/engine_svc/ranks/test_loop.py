"""A rank deals with messages in order; a stage that does not sample waits for the tokens it needs alone."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import cast

import pytest

from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra, ExtraCodec, UnknownExtra
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult, TokenLogprobs
from engine_svc.ranks import process_group
from engine_svc.ranks import watch as rank_watch
from engine_svc.ranks.control_pipe import RankMessage, read_prepared, write_prepared
from engine_svc.ranks.loop import EarlyStage, RankLoop, Reporter, Silent, UnknownCall
from engine_svc.ranks.plan_channel import Channel, ChannelReader, ChannelWriter, create_channel
from engine_svc.ranks.plan_codec import (
    CALL,
    DROP,
    PLAN,
    PREPARE,
    STOP,
    PlanDecoder,
    PlanEncoder,
    decode_preparation,
    encode_preparation,
)
from engine_svc.ranks.process_group import GroupLimits, ProcessGroup
from engine_svc.ranks.progress_board import RankHeartbeats
from engine_svc.ranks.result_codec import decode_result, encode_result
from engine_svc.ranks.watch import RankLost, RankStart, RankWatch, WatchLimits
from engine_svc.runner.feature import RunnerFeature
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.preparer import Preparer
from tests.engine_svc.runner.fakes import apply
from tests.engine_svc.session.unread import exit_code_unread
from triptych_kit.process import stacks

SIZES = {"max_num_seqs": 4, "num_groups": 1}


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = create_channel(num_readers=1)
    yield made
    made.close()


def batch_of() -> InputBatch:
    return InputBatch(max_num_seqs=4, max_model_len=32, block_size=4)


def plan_of(number: int, *request_ids: str, computed: int = 3, admits: bool = False) -> StepPlan:
    """A step in which each of the requests computes one token and samples one."""
    admitted = [
        AdmittedRequest(request_id, [1, 2, 3, 4], 4, SamplingParams(max_tokens=9), [[1]])
        for request_id in request_ids
    ]
    num_rows = len(request_ids)
    return StepPlan(
        number,
        admitted=admitted if admits else [],
        request_ids=list(request_ids),
        num_tokens=[1] * num_rows,
        num_computed_tokens=[computed] * num_rows,
        new_block_ids=[[] for _ in request_ids],
        draft_token_ids=[[] for _ in request_ids],
        samples=[True] * num_rows,
    )


@dataclass
class FakeStep:
    """A step whose result is known."""

    known: StepResult

    def result(self) -> StepResult:
        return self.known


@dataclass
class FakeRunner:
    """Enters and releases rows, and returns the number of the step as the token of each row."""

    batch: InputBatch = field(default_factory=batch_of)
    plans: list[StepPlan] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> FakeStep:
        apply(self.batch, plan)
        self.plans.append(plan)
        return FakeStep(StepResult(plan.step_number, [[plan.step_number] for _ in plan.request_ids]))


class Stage:
    """An early stage, and the last one's end of the channel of results."""

    def __init__(self, channel: Channel) -> None:
        self.runner = FakeRunner()
        self.results = ChannelWriter(channel.writer)
        self.part = EarlyStage(ChannelReader(channel.readers[0]), self.runner.batch)

    def run(self, plan: StepPlan) -> None:
        self.part.before(plan)
        self.part.after(plan, self.runner.execute(plan))

    def send_result(self, number: int, *sampled: list[int]) -> None:
        self.results.send(encode_result(StepResult(number, list(sampled))), timeout_s=1)

    def token(self, request_id: str, position: int) -> int:
        batch = self.runner.batch
        return int(batch.token_ids[batch.row_of[request_id], position])


def test_a_stage_waits_for_the_tokens_that_a_step_needs(channel: Channel) -> None:
    stage = Stage(channel)
    stage.run(plan_of(1, "a", admits=True))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(stage.part.before, plan_of(2, "a", computed=4))
        stage.send_result(1, [77])
        waiting.result(timeout=20)
    assert stage.token("a", 4) == 77


def test_a_stage_does_not_wait_for_tokens_of_other_rows(channel: Channel) -> None:
    stage = Stage(channel)
    stage.run(plan_of(1, "a", admits=True))
    # The results of step 1 were not sent: this would wait for ever if it waited for them.
    stage.run(plan_of(2, "b", admits=True))
    stage.send_result(1, [77])
    stage.send_result(2, [88])
    stage.part.settle()
    assert (stage.token("a", 4), stage.token("b", 4)) == (77, 88)


def test_tokens_of_a_removed_request_are_dropped(channel: Channel) -> None:
    stage = Stage(channel)
    stage.run(plan_of(1, "a", admits=True))
    newcomer = plan_of(2, "b", admits=True)
    newcomer.released = ["a"]
    newcomer.admitted[0].token_ids = [5, 6, 7, 8, 9]
    newcomer.samples = [False]
    row = stage.runner.batch.row_of["a"]
    stage.run(newcomer)
    stage.send_result(1, [77])
    stage.send_result(2, [])
    stage.part.settle()
    # It has the row of the one that left, and a token of its own where that one's would have gone.
    assert stage.runner.batch.row_of == {"b": row}
    assert stage.token("b", 4) == 9


def test_a_row_without_a_token_gets_one_that_every_model_has(channel: Channel) -> None:
    stage = Stage(channel)
    stage.runner.batch.token_ids.fill_(-9)
    stage.run(plan_of(1, "a", admits=True))
    stage.send_result(1, [])
    stage.part.settle()
    assert stage.token("a", 4) == 0


@pytest.mark.parametrize("end_rank", [None, print])
def test_results_are_reported_in_the_order_of_the_steps(end_rank, channel):
    reader = ChannelReader(channel.readers[0])
    reporter = Reporter(ChannelWriter(channel.writer), None, end_rank=end_rank)
    for number in range(1, 4):
        reporter.after(StepPlan(number), FakeStep(StepResult(number, [[number]])))
    reporter.settle()
    messages = [reader.receive(timeout_s=0.0) for _ in range(3)]
    assert [decode_result(message or b"").step_number for message in messages] == [1, 2, 3]


def test_a_device_that_works_by_itself_is_not_waited_for(channel: Channel) -> None:
    gate, asked = threading.Event(), threading.Event()

    class SlowStep:
        def result(self) -> StepResult:
            asked.set()
            assert gate.wait(20)
            return StepResult(1, [[7]])

    reader = ChannelReader(channel.readers[0])
    reporter = Reporter(ChannelWriter(channel.writer), None, end_rank=print)
    reporter.after(StepPlan(1), SlowStep())
    assert asked.wait(20)
    assert reader.receive(timeout_s=0.0) is None
    gate.set()
    assert decode_result(reader.receive(timeout_s=20) or b"").sampled == [[7]]


def test_a_step_error_reported_from_a_thread_ends_the_rank(channel: Channel) -> None:
    ended: SimpleQueue[Exception] = SimpleQueue()

    class BrokenStep:
        def result(self) -> StepResult:
            raise RuntimeError("the device is gone")

    reporter = Reporter(ChannelWriter(channel.writer), None, end_rank=ended.put)
    reporter.after(StepPlan(1), BrokenStep())
    assert str(ended.get(timeout=20)) == "the device is gone"


def test_stages_receive_only_the_tokens(channel: Channel) -> None:
    tokens = create_channel(num_readers=1)
    reporter = Reporter(ChannelWriter(channel.writer), ChannelWriter(tokens.writer), end_rank=None)
    full = StepResult(1, [[7]], logprobs={0: TokenLogprobs([-0.5], [1])})
    reporter.after(StepPlan(1), FakeStep(full))
    received = [ChannelReader(one.readers[0]).receive(timeout_s=0.0) or b"" for one in (channel, tokens)]
    tokens.close()
    assert [decode_result(message) for message in received] == [full, StepResult(1, [[7]])]


def test_a_rank_runs_plans_and_answers_calls_in_their_order(channel: Channel) -> None:
    runner = FakeRunner()
    answers: list[object] = []
    dealt: list[int] = []
    writer, encoder = ChannelWriter(channel.writer), PlanEncoder(**SIZES)
    for message in (
        PLAN + encoder.encode(plan_of(1, "a", admits=True)),
        CALL + b'{"name": "count", "arguments": {"from": 10}}',
        PLAN + encoder.encode(plan_of(2, "a", computed=4)),
        STOP,
    ):
        writer.send(message, timeout_s=1)
    RankLoop(
        ChannelReader(channel.readers[0]),
        PlanDecoder(**SIZES),
        runner,
        Silent(),
        calls={"count": lambda arguments: {"from": arguments["from"], "count": len(runner.plans)}},
        answer=answers.append,
        has_dealt=lambda: dealt.append(len(runner.plans)),
    ).run()
    assert [plan.step_number for plan in runner.plans] == [1, 2]
    assert answers == [{"from": 10, "count": 1}]
    assert dealt == [1, 1, 2]


def test_a_call_that_no_rank_knows_is_an_error(channel: Channel) -> None:
    ChannelWriter(channel.writer).send(CALL + b'{"name": "fly", "arguments": {}}', timeout_s=1)
    loop = RankLoop(
        ChannelReader(channel.readers[0]),
        PlanDecoder(**SIZES),
        FakeRunner(),
        Silent(),
        calls={"count": lambda arguments: {}},
        answer=lambda answer: None,
        has_dealt=lambda: None,
    )
    with pytest.raises(UnknownCall, match="'fly' is not among count"):
        loop.run()


# Whatever becomes of a rank, it is reported, and nothing is waited for any more.

PATIENCE_S = 60.0


def start_of(spec: Mapping[str, object]) -> RankStart:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return RankStart("tests.engine_svc.ranks.doomed_rank", spec, (), environment)


def lost_after(spec: Mapping[str, object]) -> RankLost:
    """What is reported of a rank that does what `spec` says."""
    messages: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    heartbeats = RankHeartbeats.create(1)
    watch = RankWatch([start_of(spec)], heartbeats, limits=WatchLimits(), on_lost=messages.put)
    try:
        lost = messages.get(timeout=PATIENCE_S)
        assert select.select([watch.lost_fd], [], [], 0)[0] == [watch.lost_fd]
        with pytest.raises(RankLost, match=re.escape(lost.why)):
            watch.next_message(0.0)
    finally:
        watch.stop(grace_s=0.0)
        heartbeats.close()
    return lost


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
    ids=["SIGKILL", "a-real-time-signal"],
)
def test_a_rank_that_any_signal_ends_is_lost(number: int, name: str) -> None:
    assert str(lost_after({"signal": int(number)})) == f"rank 0 was killed by {name}"


def test_a_watch_that_fails_has_lost_its_ranks() -> None:
    assert "can no longer be watched (JSONDecodeError)" in str(lost_after({"says": "no message\n"}))


def test_ranks_that_are_given_up_write_down_where_they_stand(monkeypatch, capfd) -> None:
    monkeypatch.setattr(stacks, "_WAIT_S", 2.0)
    monkeypatch.setattr(stacks, "_MAX_WAIT_S", 4.0)
    monkeypatch.setattr(rank_watch, "_WRITE_S", 30.0)
    heartbeats = RankHeartbeats.create(2)
    starts = [start_of({"says": '{"ready": {}}\n'}) for _ in range(2)]
    watch = RankWatch(starts, heartbeats, limits=WatchLimits())
    try:
        for _ in starts:
            watch.next_message(PATIENCE_S)
        process_ids = watch.process_ids
        assert str(watch.blame(1, "did not finish a step")) == "rank 1 did not finish a step"
    finally:
        watch.stop(grace_s=0.0)
        heartbeats.close()
    written = capfd.readouterr().err
    first, second = (written.index(f"Rank {rank} (process {process_ids[rank]}):") for rank in range(2))
    for text in (written[first:second], written[second:]):
        assert re.search(r'File ".*doomed_rank\.py", line \d+ in main', text), text


ASKING = """
from triptych_kit.process.stacks import write_beside, write_stacks_of
write_beside(lambda: write_stacks_of([1 << 22]), 0.05)
os._exit(7)
"""


def test_a_stack_dump_that_is_not_read_does_not_block() -> None:
    assert exit_code_unread(ASKING) == 7


# For how long ranks are waited for.

STEP_S = 3.0


class BlamingWatch:
    """A watch over two ranks that live."""

    lost_fd = None
    lost = None
    process_ids = (1, 2)

    def blame(self, rank: int, why: str) -> RankLost:
        return RankLost(rank, why)

    def stop(self) -> None:
        """There are no ranks."""


class Results:
    """Returns nothing for `num_waits` waits, then a result."""

    def __init__(self, num_waits: float) -> None:
        self.num_waits = num_waits
        self.waited_s: list[float] = []
        self.written_fd = os.eventfd(0)  # nothing is written there

    def receive(self, *, timeout_s: float) -> bytes | None:
        self.waited_s.append(timeout_s)
        is_there = len(self.waited_s) > self.num_waits
        return encode_result(StepResult(1, [[7]])) if is_there else None

    def close(self) -> None:
        os.close(self.written_fd)


@pytest.fixture
def group_with(monkeypatch):
    """Makes a group whose results are those given."""
    made = []

    def make(results: Results) -> ProcessGroup:
        monkeypatch.setattr(process_group, "ChannelReader", lambda *arguments, **options: results)
        group = ProcessGroup(
            cast(RankWatch, BlamingWatch()),
            RankHeartbeats.create(2),
            create_channel(2),
            create_channel(1),
            PlanEncoder(max_num_seqs=4, num_groups=1),
            GroupLimits(step_s=STEP_S),
        )
        made.append(group)
        return group

    yield make
    for group in made:
        group.shutdown()


def test_a_wait_that_was_over_because_all_stood_still_is_not_the_ranks_fault(group_with):
    # The clock went on while neither they nor we did: the first wait ended at once, whatever it was for.
    assert group_with(Results(num_waits=1)).launch(StepPlan(1)).result().sampled == [[7]]


def test_a_step_is_waited_for_as_long_as_it_may_take(group_with):
    results = Results(num_waits=float("inf"))
    pending = group_with(results).launch(StepPlan(1))
    with pytest.raises(RankLost, match="rank 0 did not finish a step in 3 s"):
        pending.result()
    assert sum(results.waited_s) == pytest.approx(STEP_S)


# What is asked of ranks beside steps, and for how long they may be silent then.


class FakeWatch:
    """Two ranks that answer a call, after the messages that were sent before, unless one is lost."""

    def __init__(self) -> None:
        self.lost_fd = os.eventfd(0)
        self.lost: RankLost | None = None
        self.process_ids = [11, 12]
        self.may_be_busy = False
        self.was_busy: list[bool] = []  # at each answer
        self.sent: list[RankMessage] = []
        self._num_answers = 0

    def next_message(self, timeout_s: float) -> tuple[int, RankMessage]:
        self.was_busy.append(self.may_be_busy)
        if self.lost is not None:
            raise self.lost
        if self.sent:
            return 1, self.sent.pop(0)
        self._num_answers += 1
        return self._num_answers - 1, {"answer": {"number": self._num_answers}}

    def stop(self) -> None:
        os.close(self.lost_fd)


@pytest.fixture
def watch() -> FakeWatch:
    return FakeWatch()


@pytest.fixture
def results() -> Channel:
    return create_channel(1)


@pytest.fixture
def heartbeats() -> RankHeartbeats:
    return RankHeartbeats.create(2)


@pytest.fixture
def group(watch: FakeWatch, results: Channel, heartbeats: RankHeartbeats) -> Iterator[ProcessGroup]:
    made = ProcessGroup(
        cast(RankWatch, watch),
        heartbeats,
        create_channel(2),
        results,
        PlanEncoder(max_num_seqs=1, num_groups=1),
        GroupLimits(),
    )
    yield made
    made.shutdown()


def test_ranks_may_be_as_silent_as_at_their_start_while_they_do_what_they_are_called_for(watch, group):
    assert group.call("stop_profile") == [{"number": 1}, {"number": 2}]
    assert watch.was_busy == [True, True]
    assert not watch.may_be_busy


def test_a_rank_lost_during_a_call_is_reported(watch: FakeWatch, group: ProcessGroup) -> None:
    watch.lost = RankLost(1, "was killed by SIGKILL")
    with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
        group.call("stop_profile")
    assert not watch.may_be_busy


# Rows for which a feature raised in a rank that reports no results.


def test_rows_that_failed_in_another_rank_end_with_the_result_of_their_step(
    watch: FakeWatch, group: ProcessGroup, results: Channel, heartbeats: RankHeartbeats
) -> None:
    writer = ChannelWriter(results.writer)
    failed: RankMessage = {"failed_rows": [2, [[0, "theirs"], [2, "both"]]]}
    watch.sent.append(failed)
    heartbeats.count_failure(1)
    # The rank has begun step 2. That a call takes the message makes no difference.
    assert len(group.call("digest")) == 2
    for number in (1, 2, 3):
        result = StepResult(number, [[7], [8], []], failed={2: "ours"} if number == 2 else {})
        writer.send(encode_result(result), timeout_s=1)
    taken = [group.take_result() for _ in range(3)]
    assert [result.failed for result in taken] == [{}, {0: "theirs", 2: "ours"}, {}]
    assert [result.sampled for result in taken] == [[[7], [8], []], [[], [8], []], [[7], [8], []]]


def test_a_result_waits_for_the_rows_that_were_counted_before_it(
    watch: FakeWatch, group: ProcessGroup, results: Channel, heartbeats: RankHeartbeats
) -> None:
    watch.sent += [{"failed_rows": [1, [[row, f"row {row}"]]]} for row in range(2)]
    for rank in range(2):
        heartbeats.count_failure(rank)
    writer = ChannelWriter(results.writer)
    for number in (1, 2):
        writer.send(encode_result(StepResult(number, [[7], [8]])), timeout_s=1)
    assert group.take_result().failed == {0: "row 0", 1: "row 1"}
    heartbeats.count_failure(1)
    watch.lost = RankLost(1, "was killed by SIGKILL")
    with pytest.raises(RankLost, match="was killed"):
        group.take_result()


# What a rank prepares beside its steps.


@dataclass(frozen=True)
class Text(Extra):
    """An extra to prepare."""

    text: str
    blocker: str = "text"


class UpperText(RunnerFeature):
    prepares = Text

    def prepare(self, extra: Text) -> str:
        if extra.text == "bad":
            raise RequestFailed("INVALID_ARGUMENT", "the text is bad")
        return extra.text.upper()


CODEC = ExtraCodec([Text])


@pytest.mark.parametrize("samples", [True, False])
def test_a_rank_that_samples_prepares_and_answers(samples: bool, channel: Channel) -> None:
    answers: SimpleQueue[RankMessage] = SimpleQueue()
    preparer = Preparer([UpperText()], lambda *answer: answers.put(write_prepared(*answer)))
    writer = ChannelWriter(channel.writer)
    for number, text in enumerate(("good", "bad", "gone")):
        body = encode_preparation(number, text, {Text: Text(text)}, "account", 1, CODEC)
        writer.send(PREPARE + body, timeout_s=1)
    writer.send(DROP + b"gone", timeout_s=1)
    writer.send(STOP, timeout_s=1)
    RankLoop(
        ChannelReader(channel.readers[0]),
        PlanDecoder(**SIZES),
        FakeRunner(),
        Silent(),
        calls={},
        answer=print,
        has_dealt=lambda: None,
        preparer=preparer if samples else None,
        extras=CODEC,
    ).run()
    found = {}
    while not answers.empty():
        number, failure = read_prepared(answers.get())
        found[number] = failure and (failure.code, failure.message)
    # The last was dropped while it waited, or while it was prepared, or when it was done.
    found.pop(2, None)
    assert found == ({0: None, 1: ("INVALID_ARGUMENT", "the text is bad")} if samples else {})
    kept = {
        name: preparer.with_prepared(
            AdmittedRequest(name, [1], 1, SamplingParams(max_tokens=1), [[]], {Text: Text("raw")})
        ).extras[Text]
        for name in ("good", "gone")
    }
    assert kept == {"good": "GOOD" if samples else Text("raw"), "gone": Text("raw")}


def test_a_group_sends_every_rank_what_to_prepare(
    watch: FakeWatch, results: Channel, heartbeats: RankHeartbeats
) -> None:
    plans = create_channel(2)
    readers = [ChannelReader(end) for end in plans.readers]
    group = ProcessGroup(
        cast(RankWatch, watch),
        heartbeats,
        plans,
        results,
        PlanEncoder(max_num_seqs=1, num_groups=1),
        GroupLimits(),
        CODEC,
        num_preparing=2,
    )
    group.prepare(3, "a", {Text: Text("long" * 9)}, "account", 5)
    with pytest.raises(UnknownExtra, match="Extra"):
        group.prepare(4, "b", {Extra: Extra()}, "account", 5)
    group.drop_prepared("a")
    for reader in readers:
        message = reader.receive(timeout_s=0.0) or b""
        assert message[:1] == PREPARE
        expected = (3, "a", {Text: Text("long" * 9)}, "account", 5)
        assert decode_preparation(message[1:], CODEC) == expected
        assert reader.receive(timeout_s=0.0) == DROP + b"a"
    group.shutdown()
