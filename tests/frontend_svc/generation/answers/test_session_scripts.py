"""Random sessions over engines that keep turns, end what they keep, and leave: ids follow from tokens."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array

from tests.frontend_svc.fakes import FakeEngine, FakeRequest, FakeSession, serving
from tests.frontend_svc.generation.answers.test_session import CANCEL, END, KEEPS, Session, append, start
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2

NUM_SCRIPTS = 200
NUM_AT_ONCE = 8
LENGTH, ABORT = output_pb2.FINISH_REASON_LENGTH, output_pb2.FINISH_REASON_ABORT


def token_after(context: list[int]) -> int:
    return zlib.crc32(array("I", context).tobytes()) % 200


class KeepingEngine(FakeEngine):
    """Its next token is a hash of all before it. It ends some of the requests that it keeps."""

    def __init__(self, seed: int) -> None:
        super().__init__(self._take, features=KEEPS, dp_rank=seed)
        self.kept: dict[tuple[FakeSession, int], tuple[FakeRequest, list[int]]] = {}
        self.num_segments = self.num_ended = 0
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    def num_kept(self) -> int:
        # An abort that crosses the end of a turn ends what is kept.
        kept = [request for request, _ in self.kept.values() if request.abort_reason is None]
        return sum(request.session in self.sessions for request in kept)

    def _take(self, engine: FakeEngine, request: FakeRequest) -> None:
        context = request.prompt + request.output
        if request.entry.segment:
            kept = self.kept.pop((request.session, request.handle), None)
            if kept is None:
                return  # it has ended, which its last row reports
            self.num_segments += 1
            context = kept[1][:-1] + context
            if not request.entry.resumable:
                self._end(request, ABORT)
                return
        task = asyncio.ensure_future(self._answer(request, context, len(request.output)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: FakeRequest, context: list[int], num_tokens: int) -> None:
        entry, is_first, reason = request.entry, True, None
        while reason is None:
            await asyncio.sleep(0)
            if request.abort_reason is not None:
                self._end(request, ABORT)
                return
            context.append(token_after(context))
            num_tokens += 1
            cancelled = [(cancel.handle, cancel.segment) for cancel in self.cancels]
            if num_tokens >= entry.sampling.max_tokens:
                reason = LENGTH
            elif (entry.handle, entry.segment) in cancelled:
                reason = ABORT
            end = step_pb2.StepFinished(reason=reason, turn_ended=True)
            self.step(
                {request: context[-1:]},
                cached={request: 0} if is_first else None,
                finished={request: end} if reason is not None else None,
            )
            is_first = False
        key, kept = (request.session, request.handle), (request, context)
        self.kept[key] = kept
        if self._random.random() < 0.2:
            for _ in range(self._random.randrange(40)):
                await asyncio.sleep(0)
            # Its next turn may be under way.
            if self.kept.get(key) is kept:
                del self.kept[key]
                self.num_ended += 1
                self._end(request, ABORT)

    def _end(self, request: FakeRequest, reason: output_pb2.FinishReason) -> None:
        self.step({request: []}, finished={request: step_pb2.StepFinished(reason=reason)})


async def run_script(client, engines: list[KeepingEngine], seed: int) -> None:
    rng = random.Random(seed)
    session, context = Session(client), []
    for number in range(rng.randrange(1, 7)):
        given = [rng.randrange(200) for _ in range(rng.randrange(1, 6))]
        num_tokens, is_cancelled = rng.randrange(1, 12), rng.random() < 0.3
        if number == 0:
            await session.send(start(given, max_tokens=num_tokens, return_prompt_token_ids=True))
        else:
            await session.send(append(given, max_tokens=num_tokens))
        if is_cancelled:
            await session.send(CANCEL)
        if rng.random() < 0.05:
            rng.choice(engines).leave()
        if rng.random() < 0.1:
            session.call.cancel()
            return
        turn, has_next = await session.turn()
        assert has_next
        context += given
        assert list(turn.started.prompt_token_ids) == context
        for token_id in turn.ids:
            assert token_id == token_after(context)
            context.append(token_id)
        assert turn.finished.reason == LENGTH or is_cancelled
        assert len(turn.ids) == num_tokens or turn.finished.reason == ABORT
    await session.send(END)
    assert not (await session.read()).turn_ended
    assert await session.is_at_end()


async def test_turns_of_random_sessions_have_the_ids_of_their_tokens_and_engines_keep_nothing():
    engines = [KeepingEngine(seed) for seed in range(2)]
    async with serving(*engines, reconnect_window_s=30.0) as (client, _):
        await client.until_engines_are_ready(2)
        seeds = iter(range(NUM_SCRIPTS))

        async def run_scripts() -> None:
            for seed in seeds:
                await run_script(client, engines, seed)

        await asyncio.gather(*(run_scripts() for _ in range(NUM_AT_ONCE)))
        for engine in engines:
            await engine.wait(lambda engine=engine: not engine.num_kept())
    assert sum(engine.num_segments for engine in engines) > NUM_SCRIPTS
    assert sum(engine.num_ended for engine in engines) > 10
    assert sum(engine.num_connects for engine in engines) > 10
