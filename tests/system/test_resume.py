"""A real engine service and a real engine client, and between them a wire that breaks or goes silent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import random
from collections.abc import AsyncIterator, Callable

import pytest

from frontend_svc.engines.connection import connection
from frontend_svc.engines.connection.client import EngineClient, EngineState, FrontendIdentity
from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.engine_times import Progress
from frontend_svc.output.loss import Loss, LossKind
from tests.engine_svc.fakes import expected_tokens, make_scheduler
from tests.engine_svc.session.service_rig import ServiceRig, make_entry, make_facts, prompt_of, serving
from tests.system.wire_proxy import WireProxy, proxied
from triptych.engine.v1 import engine_pb2
from triptych_kit import resumable_stream
from triptych_kit.clock import MonotonicClock
from triptych_kit.errors import ServiceError

_PATIENCE_S = 30.0
_NUM_STREAMS = 64
_NUM_TOKENS = 100
_STRIDE_BYTES = 13


class Taker:
    """A request's receiver that keeps what it gets."""

    wants_logprobs = False
    has_stop_strings = False
    num_prompt_tokens = 5

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.token_ids: list[int] = []
        self.endings: list[Ending] = []
        self.losses: list[Loss] = []
        self.errors: list[ServiceError] = []
        self._on_change = on_change

    @property
    def has_begun(self) -> bool:
        return bool(self.token_ids)

    @property
    def is_over(self) -> bool:
        return bool(self.endings or self.losses or self.errors)

    def advance(self, token_ids, ending, columns=None) -> Ending | None:
        assert not self.is_over, "nothing comes after the end"
        self.token_ids += token_ids
        if ending is not None:
            self.endings.append(ending)
        self._on_change()
        return ending

    def note_cached(self, num_cached_tokens: int) -> None:
        """Not of interest here."""

    def note_progress(self, progress: Progress) -> None:
        """Nor is this."""

    def fail(self, error: ServiceError) -> None:
        self.errors.append(error)
        self._on_change()

    def lose(self, loss: Loss) -> None:
        self.losses.append(loss)
        self._on_change()


class NoFiles:
    """An artifact store for a model without a tokenizer."""

    async def model_of(self, ready, stub):
        return ready.model_name

    async def until_loaded(self, model):
        """No worker loads anything."""


class SlowFiles(NoFiles):
    """The same, which has read a model once its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_begun = 0
        self.on_change: Callable[[], None] = lambda: None

    async def model_of(self, ready, stub):
        self.num_begun += 1
        self.on_change()
        await self.gate.wait()
        self.on_change()
        return ready.fingerprint.weights_sha256


class Rig:
    """One client of one engine, through a proxy."""

    def __init__(self, engine: ServiceRig, proxy: WireProxy, files: NoFiles | SlowFiles) -> None:
        self.engine = engine
        self.proxy = proxy
        self.states: list[EngineState] = []
        self._changed = asyncio.Event()
        self.changed = self._changed.set
        self.client = EngineClient(
            proxy.address,
            FrontendIdentity("f", 1),
            files,  # type: ignore[arg-type]
            MonotonicClock(),
            on_change=lambda client: self._note(client.state),
        )

    def add(self, handles: range, *, num_tokens: int = _NUM_TOKENS) -> list[Taker]:
        """Send requests; the seed and the prompt of each are those of its number."""
        takers = [Taker(self.changed) for _ in handles]
        entries = [make_entry(number, max_tokens=num_tokens) for number in handles]
        self.client.requests.add(entries, takers)
        return takers

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what the client received, or what became of it, makes `condition` true."""
        async with asyncio.timeout(_PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_held(self, takers: list[Taker]) -> None:
        """Wait until the executor holds its step, and some of `takers` have tokens of the steps before it."""
        executor = self.engine.executor
        # A gate that is opened before that step is launched would be closed by it after all.
        await asyncio.to_thread(executor.wait_for_launches, executor.hold_at)
        await self.until(lambda: any(taker.token_ids for taker in takers))

    async def until_state(self, state: EngineState) -> None:
        await self.until(lambda: self.client.state is state)

    async def until_one_connection(self) -> None:
        """Wait until the connection in use is the only one."""
        async with asyncio.timeout(_PATIENCE_S):
            while self.proxy.num_open != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_taken(self) -> None:
        """Wait until the engine has taken what was sent so far, e.g. aborts: a refusal comes behind it."""
        (refused,) = self.add(range(9999, 10_000), num_tokens=0)
        await self.until(lambda: refused.is_over)

    def _note(self, state: EngineState) -> None:
        self.states.append(state)
        self._changed.set()


@contextlib.asynccontextmanager
async def connected(
    engine: ServiceRig,
    *,
    next_cut: Callable[[], int | None] = lambda: None,
    files: SlowFiles | None = None,
) -> AsyncIterator[Rig]:
    """The engine is served, and its client is ready, or as far as its files let it be."""
    async with serving(engine), proxied(engine.address, next_cut=next_cut) as proxy:
        rig = Rig(engine, proxy, files or NoFiles())
        if files is not None:
            files.on_change = rig.changed
        # Both sides are in this process: a collection through all that other tests have left in it may take
        # longer than a stream is waited for. And a connection that only a collection ends is one too many.
        gc.disable()
        rig.client.start()
        try:
            await rig.until(
                lambda: (EngineState.READY if files is None else EngineState.LOADING) in rig.states
            )
            yield rig
        finally:
            proxy.thaw()
            await rig.client.close()
            gc.enable()


def large_engine() -> ServiceRig:
    return ServiceRig(
        scheduler=make_scheduler(num_blocks=4096, max_num_seqs=128, max_num_batched_tokens=1024)
    )


@pytest.mark.parametrize("seed", [1, 2])
async def test_streams_that_break_at_any_byte_lose_no_token_and_compute_none_twice(seed):
    rng, engine, is_cutting, num_asked = random.Random(seed), large_engine(), False, itertools.count()

    def next_cut() -> int | None:
        if not is_cutting:
            return None
        # gRPC drops what was not read when a connection breaks, and a client gives up after ten in a row
        # that brought nothing: every third one stands for longer.
        return rng.randrange(400, 40_000) if next(num_asked) % 3 else rng.randrange(100_000, 200_000)

    async with connected(engine, next_cut=next_cut) as rig:
        is_cutting = True
        # The first connection is older than that, and is cut by hand.
        rig.proxy.cut()
        num_rounds = 0
        # Counted by the client: of cuts in quick succession it sees one.
        while rig.states.count(EngineState.RECONNECTING) < 10:
            await rig.until_state(EngineState.READY)
            numbers = range(num_rounds * _NUM_STREAMS, (num_rounds + 1) * _NUM_STREAMS)
            takers = rig.add(numbers)
            await rig.until(lambda takers=takers: all(taker.is_over for taker in takers))
            for number, taker in zip(numbers, takers, strict=True):
                assert (taker.losses, taker.errors) == ([], [])
                assert taker.token_ids == expected_tokens(prompt_of(number), taker_seed(number), _NUM_TOKENS)
                assert [ending.reason for ending in taker.endings] == [EndReason.LENGTH]
            num_rounds += 1
        stats = engine.engine.stats_snapshot.read()
        assert stats.num_prompt_tokens == num_rounds * _NUM_STREAMS * 5
        assert stats.num_generated_tokens == num_rounds * _NUM_STREAMS * _NUM_TOKENS
        assert EngineState.DOWN not in rig.states
        assert engine.servicer.num_sessions + engine.servicer.num_parked_sessions == 1
        await rig.until_one_connection()


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is does not matter: no limit of time of a client ends a session."""
    monkeypatch.setattr(connection, "_RESUME_S", _PATIENCE_S)
    monkeypatch.setattr(connection, "_MAX_REOPENING_S", _PATIENCE_S)
    monkeypatch.setattr(resumable_stream, "_MAX_MISSED_HEARTBEATS", 100)


@pytest.mark.parametrize("is_up", [True, False], ids=["of an ADD", "of a step"])
@pytest.mark.usefixtures("any_speed")
async def test_a_cut_at_every_byte_of_a_message_loses_nothing_and_repeats_nothing(is_up):
    engine = ServiceRig()
    engine.engine.replay_window_s = _PATIENCE_S
    async with connected(engine) as rig:
        # Nothing else is sent: a cut after so many bytes is a cut inside the message.
        engine.stop_beating()
        for num_bytes in itertools.count():
            await rig.until_state(EngineState.READY)
            rig.proxy.cut_after(num_bytes, is_up=is_up)
            (taker,) = rig.add(range(num_bytes, num_bytes + 1), num_tokens=1)
            await rig.until(lambda taker=taker: taker.is_over)
            rig.proxy.cut_after(None, is_up=is_up)
            assert (taker.losses, taker.errors) == ([], [])
            assert taker.token_ids == expected_tokens(prompt_of(num_bytes), taker_seed(num_bytes), 1)
            assert [ending.reason for ending in taker.endings] == [EndReason.LENGTH]
            if rig.proxy.num_cuts == num_bytes:
                break
        stats = engine.engine.stats_snapshot.read()
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (5 * num_bytes + 5, num_bytes + 1)
        assert EngineState.DOWN not in rig.states
        # Frame headers included, the ADD takes about 100 bytes and the step about 60.
        assert num_bytes >= (90 if is_up else 50)


@pytest.mark.usefixtures("any_speed")
@pytest.mark.parametrize("is_up", [True, False], ids=["before hello is read", "before the replay is read"])
async def test_a_session_whose_next_connection_breaks_as_well_is_resumed_by_another(is_up):
    engine = ServiceRig()
    engine.engine.replay_window_s = _PATIENCE_S
    async with connected(engine) as rig:
        engine.stop_beating()
        # With a stride of 1, which is every byte, it takes 40 s.
        for number in itertools.count():
            await rig.until_state(EngineState.READY)
            rig.proxy.cut_after(0, is_up=False)
            (taker,) = rig.add(range(number, number + 1), num_tokens=1)
            await rig.until_state(EngineState.RECONNECTING)
            num_cuts = rig.proxy.num_cuts
            rig.proxy.cut_after(_STRIDE_BYTES * number, is_up=is_up)
            await rig.until(lambda taker=taker: taker.is_over)
            rig.proxy.cut_after(None, is_up=is_up)
            assert (taker.losses, taker.errors) == ([], [])
            assert taker.token_ids == expected_tokens(prompt_of(number), taker_seed(number), 1)
            assert len(taker.endings) == 1
            if rig.proxy.num_cuts == num_cuts:
                break
        stats = engine.engine.stats_snapshot.read()
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (5 * number + 5, number + 1)
        assert EngineState.DOWN not in rig.states
        assert number >= 10


async def test_aborts_that_a_break_has_swallowed_are_sent_again():
    engine = large_engine()
    engine.executor.hold_at = 3
    async with connected(engine) as rig:
        takers = rig.add(range(8))
        await rig.until_held(takers)
        rig.proxy.freeze()
        rig.client.requests.abort(range(1, 5), engine_pb2.ABORT_REASON_CLIENT)
        rig.proxy.cut()
        await rig.until_state(EngineState.RECONNECTING)
        # Also what is said while there is no stream at all.
        rig.client.requests.abort(range(5, 7), engine_pb2.ABORT_REASON_CLIENT)
        rig.proxy.thaw()
        await rig.until_state(EngineState.READY)
        await rig.until_taken()
        engine.executor.gate.set()
        await rig.until(lambda: all(taker.is_over for taker in takers[6:]))
        assert [len(taker.token_ids) == _NUM_TOKENS for taker in takers] == [False] * 6 + [True] * 2
        assert engine.engine.stats_snapshot.read().num_generated_tokens < 8 * _NUM_TOKENS


async def test_an_engine_that_was_silent_is_ready_again_when_its_stale_outputs_are_dropped():
    engine = large_engine()
    engine.executor.hold_at = 3
    async with connected(engine) as rig:
        takers = rig.add(range(_NUM_STREAMS))
        await rig.until_held(takers)
        rig.proxy.freeze()
        await rig.until_state(EngineState.DOWN)
        assert {taker.losses[0].kind for taker in takers} == {LossKind.SILENCE}
        received = [list(taker.token_ids) for taker in takers]
        # What it computed meanwhile, and no client waits for any more.
        engine.executor.hold_at = 6
        engine.executor.gate.set()
        await asyncio.to_thread(engine.executor.wait_for_launches, 6)
        rig.proxy.thaw()
        await rig.until_state(EngineState.READY)
        await rig.until_taken()
        engine.executor.gate.set()
        (after,) = rig.add(range(1000, 1001))
        await rig.until(lambda: after.is_over)
        assert after.token_ids == expected_tokens(prompt_of(1000), taker_seed(1000), _NUM_TOKENS)
        assert [taker.token_ids for taker in takers] == received
        assert rig.client.requests.stale_outputs > 0
        assert EngineState.RECONNECTING in rig.states
        stats = engine.engine.stats_snapshot.read()
        assert (stats.num_finished, stats.scheduler.num_used_blocks) == (_NUM_STREAMS + 1, 0)
        assert stats.num_generated_tokens < _NUM_STREAMS * _NUM_TOKENS
        await rig.until_one_connection()


async def test_a_refused_connection_is_a_death_at_once():
    engine = large_engine()
    engine.executor.hold_at = 3
    async with connected(engine) as rig:
        takers = rig.add(range(4))
        await rig.until_held(takers)
        rig.proxy.refuse()
        await rig.until(lambda: all(taker.is_over for taker in takers))
        assert {taker.losses[0].kind for taker in takers} == {LossKind.DEATH}
        assert "refused" in takers[0].losses[0].reason


async def test_a_session_that_a_live_engine_has_given_up_is_no_death_and_another_one_begins():
    engine = large_engine()
    engine.engine.replay_window_s = 0.0
    engine.executor.hold_at = 3
    async with connected(engine) as rig:
        takers = rig.add(range(4))
        await rig.until_held(takers)
        rig.proxy.cut()
        await rig.until(lambda: all(taker.is_over for taker in takers))
        assert {taker.losses[0].kind for taker in takers} == {LossKind.DISMISSAL}
        assert "does not have the session any more (NO_SESSION)" in takers[0].losses[0].reason
        # A step that is held for long looks hung to the session that begins.
        engine.executor.gate.set()
        await rig.until_state(EngineState.READY)
        (after,) = rig.add(range(9, 10))
        await rig.until(lambda: after.is_over)
        assert (after.losses, after.errors) == ([], [])
        assert len(after.token_ids) == _NUM_TOKENS
        assert rig.client.requests.stale_outputs == 0


async def test_a_stream_that_breaks_while_a_model_is_read_keeps_no_engine_loading():
    files, engine = SlowFiles(), large_engine()
    async with connected(engine, files=files) as rig:
        await rig.until(lambda: files.num_begun == 1)
        rig.proxy.cut()
        await rig.until(lambda: EngineState.DOWN in rig.states)
        files.gate.set()
        # The session goes on, in which the engine has said already that it is ready.
        await rig.until_state(EngineState.READY)
        assert engine.servicer.num_sessions + engine.servicer.num_parked_sessions == 1
        assert files.num_begun == 2


async def test_what_an_engine_has_become_is_read_although_its_stream_is_replaced_meanwhile():
    files, engine, weights = SlowFiles(), large_engine(), "ff" * 32
    files.gate.set()
    async with connected(engine, files=files) as rig:
        await rig.until_state(EngineState.READY)
        files.gate.clear()
        facts = make_facts()
        fingerprint = dataclasses.replace(facts.fingerprint, weights_sha256=weights)
        engine.engine.renew(dataclasses.replace(facts, fingerprint=fingerprint))
        await rig.until(lambda: files.num_begun == 2)
        rig.proxy.cut()
        await rig.until(lambda: EngineState.RECONNECTING in rig.states)
        files.gate.set()
        await rig.until(lambda: rig.client.model == weights)
        assert (rig.client.state, EngineState.DOWN in rig.states) == (EngineState.READY, False)


async def test_a_bug_in_what_takes_outputs_costs_a_stream_and_not_the_engine():
    class Broken(Taker):
        def advance(self, token_ids, ending, columns=None) -> Ending | None:
            raise RuntimeError("a bug")

    async with connected(large_engine()) as rig:
        (whole,) = rig.add(range(1))
        broken = Broken(rig.changed)
        rig.client.requests.add([make_entry(1)], [broken])
        await rig.until(lambda: broken.is_over and whole.is_over)
        assert {loss.kind for loss in broken.losses} == {LossKind.DEATH}
        await rig.until_state(EngineState.READY)
        (after,) = rig.add(range(2, 3))
        await rig.until(lambda: after.is_over)
        assert after.token_ids == expected_tokens(prompt_of(2), taker_seed(2), _NUM_TOKENS)


def taker_seed(number: int) -> int:
    """The seed that `make_entry` gives a request of that number."""
    return number
