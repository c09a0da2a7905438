"""A pooling request among others in flight."""

from __future__ import annotations

import asyncio

import pytest

from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.loss import Loss, LossKind
from frontend_svc.output.pooling_state import Pooled, PoolingState
from frontend_svc.output.processor import OutputProcessor, StepColumns
from service_kit.errors import Aborted, Internal, Unavailable
from triptych.common.v1 import tensor_pb2

TENSOR = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1], inline=b"0000")
AT_STOP = Ending(EndReason.STOP)


def registered() -> tuple[OutputProcessor, PoolingState, list[int]]:
    ended: list[int] = []
    processor, state = OutputProcessor(on_end=ended.append), PoolingState()
    processor.register(7, state)
    return processor, state, ended


async def test_the_result_is_there_when_the_request_ends_and_nothing_is_aborted():
    processor, state, ended = registered()
    told = StepColumns([9, 7], [0, 0], [], {}, {1: 16}, pooled={1: TENSOR, 0: TENSOR})
    assert processor.process(told) == []
    assert 7 in processor
    assert processor.process(StepColumns([7], [0], [], {0: AT_STOP}, {})) == []
    assert await state.result() == Pooled(TENSOR, 16)
    assert (len(processor), ended) == (0, [7])


@pytest.mark.parametrize(
    ("reason", "error"),
    [(EndReason.STOP, Internal), (EndReason.ERROR, Internal), (EndReason.ABORT, Aborted)],
)
async def test_an_end_without_a_result_is_an_error(reason, error):
    processor, state, _ = registered()
    processor.process(StepColumns([7], [0], [], {0: Ending(reason)}, {}))
    with pytest.raises(error):
        await state.result()


async def test_a_lost_engine_ends_it():
    processor, state, ended = registered()
    processor.lose_all(Loss("engine:1", LossKind.DEATH, "reset"))
    with pytest.raises(Unavailable, match="was lost"):
        await state.result()
    assert ended == [7]


async def test_what_comes_after_its_reader_has_gone_changes_nothing():
    processor, state, _ = registered()
    reader = asyncio.ensure_future(state.result())
    # Behind the reader's own first turn, in which it begins to wait.
    asyncio.get_running_loop().call_soon(reader.cancel)
    await asyncio.wait({reader})
    assert processor.fail(7, Unavailable("too late"))
    assert state.advance([], AT_STOP) == AT_STOP
    assert reader.cancelled()


async def test_a_loss_or_a_refusal_for_now_is_told_and_another_engine_may_end_it():
    processor, state, _ = registered()
    told = []
    state.on_lost = lambda cause, error: told.append(cause)
    processor.lose_all(Loss("engine:1", LossKind.DEATH, "reset"))
    processor.register(8, state)
    assert processor.fail(8, Unavailable("drains"))
    processor.register(9, state)
    processor.process(StepColumns([9], [0], [], {0: AT_STOP}, {}, pooled={0: TENSOR}))
    assert (await state.result()).tensor == TENSOR
    assert told == [LossKind.DEATH, LossKind.REFUSED]
