"""A rank deals with messages in order; a stage that does not sample waits for the tokens it needs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult, TokenLogprobs
from engine_svc.ranks.loop import EarlyStage, RankLoop, Reporter, Silent, UnknownCall
from engine_svc.ranks.plan_channel import Channel, ChannelReader, ChannelWriter, create_channel
from engine_svc.ranks.plan_codec import CALL, PLAN, STOP, PlanDecoder, PlanEncoder
from engine_svc.ranks.result_codec import decode_result, encode_result
from engine_svc.runner.input_batch import InputBatch
from tests.engine_svc.runner.fakes import apply

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
        """It."""
        return self.known


@dataclass
class FakeRunner:
    """Enters and releases rows, and yields the number of the step as the token of each row."""

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

    def tell(self, number: int, *sampled: list[int]) -> None:
        self.results.send(encode_result(StepResult(number, list(sampled))), timeout_s=1)

    def token(self, request_id: str, position: int) -> int:
        batch = self.runner.batch
        return int(batch.token_ids[batch.row_of[request_id], position])


def test_a_stage_waits_for_the_tokens_that_a_step_needs(channel: Channel) -> None:
    stage = Stage(channel)
    stage.run(plan_of(1, "a", admits=True))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(stage.part.before, plan_of(2, "a", computed=4))
        stage.tell(1, [77])
        waiting.result(timeout=20)
    assert stage.token("a", 4) == 77


def test_a_stage_does_not_wait_for_tokens_of_other_rows(channel: Channel) -> None:
    stage = Stage(channel)
    stage.run(plan_of(1, "a", admits=True))
    # Nobody has told what step 1 yielded: this would wait for ever if it waited for it.
    stage.run(plan_of(2, "b", admits=True))
    stage.tell(1, [77])
    stage.tell(2, [88])
    stage.part.settle()
    assert (stage.token("a", 4), stage.token("b", 4)) == (77, 88)


def test_tokens_of_a_request_that_left_go_to_nobody(channel: Channel) -> None:
    stage = Stage(channel)
    stage.run(plan_of(1, "a", admits=True))
    newcomer = plan_of(2, "b", admits=True)
    newcomer.released = ["a"]
    newcomer.admitted[0].token_ids = [5, 6, 7, 8, 9]
    newcomer.samples = [False]
    row = stage.runner.batch.row_of["a"]
    stage.run(newcomer)
    stage.tell(1, [77])
    stage.tell(2, [])
    stage.part.settle()
    # It has the row of the one that left, and a token of its own where that one's would have gone.
    assert stage.runner.batch.row_of == {"b": row}
    assert stage.token("b", 4) == 9


def test_a_row_without_a_token_gets_one_that_every_model_has(channel: Channel) -> None:
    stage = Stage(channel)
    stage.runner.batch.token_ids.fill_(-9)
    stage.run(plan_of(1, "a", admits=True))
    stage.tell(1, [])
    stage.part.settle()
    assert stage.token("a", 4) == 0


@pytest.mark.parametrize("end_rank", [None, print])
def test_results_are_told_in_the_order_of_the_steps(
    end_rank: Callable[[Exception], object] | None, channel: Channel
) -> None:
    reader = ChannelReader(channel.readers[0])
    reporter = Reporter(ChannelWriter(channel.writer), None, end_rank=end_rank)
    for number in range(1, 4):
        reporter.after(StepPlan(number), FakeStep(StepResult(number, [[number]])))
    reporter.settle()
    told = [reader.receive(timeout_s=0.0) for _ in range(3)]
    assert [decode_result(message or b"").step_number for message in told] == [1, 2, 3]


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


def test_an_error_of_a_step_that_is_told_from_a_thread_ends_the_rank(channel: Channel) -> None:
    ended: SimpleQueue[Exception] = SimpleQueue()

    class BrokenStep:
        def result(self) -> StepResult:
            raise RuntimeError("the device is gone")

    reporter = Reporter(ChannelWriter(channel.writer), None, end_rank=ended.put)
    reporter.after(StepPlan(1), BrokenStep())
    assert str(ended.get(timeout=20)) == "the device is gone"


def test_stages_are_told_the_tokens_alone(channel: Channel) -> None:
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
