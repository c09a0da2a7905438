"""The stream to an engine: any start order, silence, gaps, reloads, and what the engine is sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import grpc
import pytest

from frontend_svc.engines import artifacts
from frontend_svc.engines.artifacts import MAX_FILES, ArtifactStore, parse_tokenizer
from frontend_svc.engines.connection.client import EngineClient, EngineState, FrontendIdentity
from frontend_svc.text.model import ServedModel
from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.tokenize.tokenizer import ModelTokenizer
from frontend_svc.text.workers.workers import TextWorkers
from tests.connections import until_connections, without_collections
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    HEARTBEAT_S,
    WAIT_S,
    FakeEngine,
    answer,
    read_all,
    serving,
    serving_one,
)
from tests.frontend_svc.tokenizers import word_piece_tokenizer
from triptych.api.v1 import model_pb2
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2
from triptych_kit.clock import MonotonicClock


async def test_an_engine_that_starts_later_is_found():
    engine = FakeEngine(answer("late"))
    await engine.start()
    await engine.kill()
    async with serving(engine, start_engines=False, waits_ready=False) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await engine.start(engine.address)
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "late"


class SlowFiles(FakeEngine):
    """Gives its files once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.num_asked = 0

    async def GetArtifacts(self, request, context):
        self.num_asked += 1
        self._notify()
        await self.gate.wait()
        async for response in super().GetArtifacts(request, context):
            yield response


async def test_an_engine_that_begins_anew_is_not_ready_by_what_it_has_said_before():
    engine = SlowFiles()
    async with serving(engine, waits_ready=False) as (client, frontend):
        await engine.wait(lambda: engine.num_asked == 1)
        await engine.kill()
        engine.is_ready = False
        engine.gate.set()
        await engine.start(engine.address)
        await engine.wait(lambda: engine.num_heartbeats == 2)
        (engine_client,) = frontend.engines.directory.clients()
        assert engine_client.state is EngineState.LOADING
        engine.become_ready()
        await client.wait_ready()


async def test_a_silent_engine_is_down_and_up_again_when_it_speaks():
    async with serving_one(heartbeat_s=HEARTBEAT_S) as (engine, client, _):
        call = client.generate()
        await engine.wait_for_requests(1)
        engine.has_heartbeat = False
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "heartbeat" in (caught.value.details() or "")
        engine.has_heartbeat = True
        engine.script = answer("again")
        await client.wait_ready(is_ready=False)
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "again"


async def test_steps_of_many_rows_reach_every_request_in_order():
    async with serving_one() as (engine, client, _):
        calls = [asyncio.ensure_future(read_all(client.generate([5], detokenize=False))) for _ in range(80)]
        requests = await engine.wait_for_requests(len(calls))
        engine.step({request: [row] for row, request in enumerate(requests)}, step_number=1)
        engine.step({request: [row + 1] for row, request in enumerate(requests)}, step_number=2)
        ends = dict.fromkeys(requests, AT_LENGTH)
        engine.step(
            {request: [row + 2] for row, request in enumerate(requests)}, finished=ends, step_number=3
        )
        found = [ids for _, _, ids, _ in await asyncio.gather(*calls)]
    assert sorted(found) == [[row, row + 1, row + 2] for row in range(len(calls))]


async def test_a_step_that_comes_in_several_messages_reaches_its_request_whole_and_in_order():
    async with serving_one() as (engine, client, _):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5, 6]}, cached={request: 0}, step_number=9)
        engine.step({request: [7]}, step_number=9)
        engine.step({request: [8]}, finished={request: AT_LENGTH}, step_number=9)
        assert (await read_all(call))[2] == [5, 6, 7, 8]


async def test_a_draining_engine_finishes_and_gets_no_more():
    async with serving_one(reconnect_window_s=0.0) as (engine, client, _):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        request.session.send(draining=engine_pb2.Draining(deadline_ms=1000))
        await client.wait_ready(is_ready=False)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate())
        engine.step({request: [5]}, finished={request: AT_LENGTH})
        assert (await read_all(call))[2] == [5]


async def test_an_engine_that_was_to_leave_and_stays_gets_requests_again():
    async with serving_one() as (engine, client, _):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        request.session.send(draining=engine_pb2.Draining(deadline_ms=1000))
        await client.wait_ready(is_ready=False)
        engine.become_ready()
        await client.wait_ready()
        again = client.generate()
        _, second = await engine.wait_for_requests(2)
        engine.step({request: [5]}, finished={request: AT_LENGTH})
        engine.step({second: [6]}, finished={second: AT_LENGTH})
        assert [(await read_all(one))[2] for one in (call, again)] == [[5], [6]]


async def test_the_first_ready_of_a_session_that_begins_in_a_drain_does_not_cancel_it():
    engine = FakeEngine(answer("x"), is_draining=True)
    async with serving(engine, waits_ready=False) as (client, frontend):
        (engine_client,) = frontend.engines.directory.clients()
        async with asyncio.timeout(WAIT_S):
            while engine_client.model is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert engine_client.state is EngineState.DRAINING
        engine.become_ready()
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "x"


async def test_a_dying_engines_last_words_are_known():
    async with serving_one() as (engine, client, frontend):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        request.session.send(dead=engine_pb2.Dead(reason="out of memory"))
        _, second = await engine.wait_for_requests(2)
        (engine_client,) = frontend.engines.directory.clients()
        assert "out of memory" in engine_client.down_reason
        engine.step({second: [6]}, finished={second: AT_LENGTH})
        assert (await read_all(call))[2] == [6]


async def test_each_loss_of_an_engine_that_served_is_logged_whatever_its_reason(caplog):
    engine = FakeEngine(answer("x"))
    async with serving(engine) as (client, _):
        for num_losses in (1, 2):
            await read_all(client.generate())
            engine.die()
            async with asyncio.timeout(WAIT_S):
                while caplog.text.count("engine lost") < num_losses:  # noqa: ASYNC110
                    await asyncio.sleep(0)
    assert caplog.text.count("engine lost") == 2


async def test_files_are_fetched_once_for_all_engines_and_sessions():
    first, second = FakeEngine(answer("x")), FakeEngine(answer("y"), dp_rank=1)
    await first.start()
    async with serving(first, start_engines=False) as (client, frontend):
        await second.start()
        frontend.engines.directory.set_addresses("more", [second.address])
        await second.wait(lambda: bool(second.sessions))
        async with asyncio.timeout(WAIT_S):
            while (await client.model.GetModel(model_pb2.GetModelRequest())).model.num_engines < 2:
                pass
        await second.kill()
    assert (first.num_downloads, second.num_downloads) == (1, 0)


async def test_the_tokenizer_of_an_engine_is_made_while_it_loads():
    engine = FakeEngine(answer("x"))
    engine.is_ready = False
    async with serving(engine, waits_ready=False) as (client, _):
        await engine.wait(lambda: engine.num_downloads == 1)
        engine.become_ready()
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "x"
        await engine.kill()
        engine.is_ready = False
        await engine.start(engine.address)
        # Asked what it has that the frontend lacks.
        await engine.wait(lambda: engine.num_downloads == 2)
        engine.become_ready()
        await client.wait_ready()
    assert engine.num_downloads == 2


async def test_of_files_that_are_lacking_the_beginning_is_enough_to_know_it():
    class Endless(FakeEngine):
        async def GetArtifacts(self, request, context):
            async for response in super().GetArtifacts(request, context):
                yield response
                if request.known_sha256:
                    await asyncio.Event().wait()

    engine = Endless(answer("x"))
    async with serving(engine):
        await engine.kill()
        engine.is_ready = False
        engine.files[session_pb2.ARTIFACT_KIND_GENERATION_CONFIG] = b'{"top_k": 5}'
        await engine.start(engine.address)
        # Asked for what the frontend lacks, then for all.
        await engine.wait(lambda: engine.num_downloads == 3)


async def test_files_that_a_loading_engine_does_not_give_are_fetched_when_it_is_ready():
    class Late(FakeEngine):
        async def GetArtifacts(self, request, context):
            if not self.is_ready:
                self.num_downloads += 1
                self._notify()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "it is loading")
            async for response in super().GetArtifacts(request, context):
                yield response

    engine = Late(answer("x"))
    engine.is_ready = False
    async with serving(engine, waits_ready=False) as (client, _):
        await engine.wait(lambda: engine.num_downloads == 1)
        engine.become_ready()
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "x"


async def test_a_ready_engine_does_not_wait_for_the_files_of_another_one():
    silent, engine = SlowFiles(), FakeEngine(answer("x"))
    silent.is_ready = engine.is_ready = False
    async with serving(silent, engine, waits_ready=False) as (client, _):
        await silent.wait(lambda: silent.num_asked == 1)
        # It may have been first before.
        await engine.kill()
        await engine.start(engine.address)
        await engine.wait(lambda: bool(engine.sessions))
        engine.become_ready()
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "x"
        silent.gate.set()


async def test_damaged_files_keep_an_engine_out():
    engine = FakeEngine(answer("x"))
    good = engine.files[session_pb2.ARTIFACT_KIND_TOKENIZER]
    engine.files[session_pb2.ARTIFACT_KIND_TOKENIZER] = b"{broken"
    async with serving(engine, waits_ready=False) as (client, _):
        await engine.wait(lambda: engine.num_connects >= 2)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(client.generate())
        engine.files[session_pb2.ARTIFACT_KIND_TOKENIZER] = good
        await client.wait_ready()


async def test_a_file_that_does_not_have_its_digest_keeps_an_engine_out():
    class Liar(FakeEngine):
        async def GetArtifacts(self, request, context):
            async for response in super().GetArtifacts(request, context):
                if self.num_downloads < 3:
                    response.chunk = response.chunk[:-1] + b"!"
                yield response

    engine = Liar(answer("x"))
    async with serving(engine) as (client, _):
        assert engine.num_downloads == 3
        assert (await read_all(client.generate()))[1] == "x"


async def test_the_tokenizer_override_needs_no_tokenizer_from_the_engine(tmp_path):
    engine = FakeEngine(answer("x"))
    (tmp_path / "tokenizer.json").write_bytes(engine.files.pop(session_pb2.ARTIFACT_KIND_TOKENIZER))
    async with serving(engine, tokenizer=str(tmp_path)) as (client, _):
        assert (await read_all(client.generate()))[1] == "x"


async def test_an_abort_by_the_engine_ends_the_stream_with_its_reason():
    async with serving_one() as (engine, client, _):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        record = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ABORT)
        engine.step({request: []}, finished={request: record})
        _, text, ids, finished = await read_all(call)
    assert (text, ids, finished.reason) == ("", [], output_pb2.FINISH_REASON_ABORT)


async def test_model_defaults_are_read_from_files():
    engine = FakeEngine(answer("x"), generation_config={"do_sample": False, "max_new_tokens": 7})
    assert json.loads(engine.files[session_pb2.ARTIFACT_KIND_GENERATION_CONFIG])["max_new_tokens"] == 7
    async with serving(engine) as (client, _):
        await read_all(client.generate())
    assert engine.requests[0].entry.sampling.temperature == 0.0
    assert engine.requests[0].entry.sampling.max_tokens == 7


async def test_a_hung_engine_loses_its_requests_and_gets_none_until_its_steps_go_on():
    async with serving_one(reconnect_window_s=0.0) as (engine, client, frontend):
        call = client.generate()
        await engine.wait_for_requests(1)
        engine.heartbeat = session_pb2.Heartbeat(has_work=True, step_number=7, step_started_age_ms=6000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert "hangs" in (caught.value.details() or "")
        # It is there, it says that it is ready, and gets nothing.
        await engine.wait(lambda: engine.num_connects >= 2)
        await engine.wait(lambda: engine.num_heartbeats >= 3)
        (engine_client,) = frontend.engines.directory.clients()
        assert engine_client.state is not EngineState.READY
        engine.heartbeat = session_pb2.Heartbeat(has_work=True, step_number=8)
        engine.script = answer("again")
        await client.wait_ready()
        assert (await read_all(client.generate()))[1] == "again"
        assert engine.num_connects == 2


async def test_an_operator_sees_why_an_engine_is_not_used_and_it_is_logged_once(caplog):
    newer = FakeEngine(schema_revision=2, min_peer_revision=2)
    await newer.start()
    async with serving(FakeEngine(dp_rank=1)) as (client, frontend):
        frontend.engines.directory.set_addresses("configuration too", [newer.address])
        async with asyncio.timeout(WAIT_S):
            while f"engine.{newer.address}.down_reason" not in frontend.status():
                await client.model.ListModels(model_pb2.ListModelsRequest())
        reason = frontend.status()[f"engine.{newer.address}.down_reason"]
        assert "engine has contract revision 2, this frontend 1" in str(reason)
        found = [
            record for record in caplog.records if "contract revision 2" in str(vars(record).get("reason"))
        ]
        assert [record.levelname for record in found] == ["WARNING"]
    await newer.kill()


@pytest.mark.parametrize(
    "revisions",
    [{"schema_revision": 2, "min_peer_revision": 2}, {"schema_revision": 0}],
    ids=["newer", "older"],
)
async def test_an_engine_of_a_contract_that_does_not_fit_is_kept_out_by_name(revisions):
    engine = FakeEngine(**revisions)
    down = asyncio.Event()
    client = EngineClient(
        await engine.start(),
        FrontendIdentity("f", 1),
        None,  # type: ignore[arg-type]
        MonotonicClock(),
        on_change=lambda client: down.set() if client.state is EngineState.DOWN else None,
    )
    client.start()
    async with asyncio.timeout(WAIT_S):
        await down.wait()
    assert (
        f"engine has contract revision {revisions['schema_revision']}, this frontend 1" in client.down_reason
    )
    await client.close()
    await engine.kill()


# A text worker that loads nothing while there is a file of this name.
REFUSING_WORKER = """
import sys
from pathlib import Path
from frontend_svc.text.workers import process

class LoadedText(process.LoadedText):
    def __init__(self, *parts):
        if Path(sys.argv[1]).exists():
            raise process.TextRefused("no room")
        super().__init__(*parts)

process.LoadedText = LoadedText
raise SystemExit(process.main())
"""


async def test_an_engine_is_used_only_where_a_text_worker_can_load_its_tokenizer(tmp_path: Path):
    refusing = tmp_path / "refusing"
    refusing.touch()
    workers = TextWorkers(
        1, time_limit_s=WAIT_S, command=(sys.executable, "-c", REFUSING_WORKER, str(refusing))
    )
    engine, states, changed = FakeEngine(), list[EngineState](), asyncio.Event()

    def note(client: EngineClient) -> None:
        states.append(client.state)
        changed.set()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                changed.clear()
                await changed.wait()

    client = EngineClient(
        await engine.start(),
        FrontendIdentity("f", 1),
        ArtifactStore(workers),
        MonotonicClock(),
        on_change=note,
    )
    client.start()
    await until(lambda: states.count(EngineState.DOWN) == 2)
    assert client.down_reason.endswith("no room")
    # Announced while the worker loaded it for the first time, and not again.
    assert states.count(EngineState.READY) == 1
    refusing.unlink()
    await until(lambda: states[-1] is EngineState.READY)
    assert client.model is not None
    assert await client.model.tokenizer.encode("the cat", add_special_tokens=False)
    assert states[-1] is EngineState.READY
    await client.close()
    await workers.close()
    await engine.kill()


class _PendingRequest:
    """A request of which nothing came yet, until its engine is lost."""

    wants_logprobs = False
    has_stop_strings = False

    def __init__(self) -> None:
        self.is_lost = asyncio.Event()

    def lose(self, loss: object) -> None:
        self.is_lost.set()


@pytest.mark.parametrize(
    "end", [FakeEngine.kill, FakeEngine.leave, FakeEngine.die], ids=lambda end: end.__name__
)
async def test_a_ready_engine_takes_requests_until_it_is_ready_no_more(end):
    async with serving_one() as (engine, _, frontend):
        (client,) = frontend.engines.directory.clients()
        requests = []

        async def add_in_every_turn() -> None:
            while client.state is EngineState.READY:
                requests.append(_PendingRequest())
                client.requests.add([add_pb2.AddEntry(request_id=str(len(requests)))], requests[-1:])
                await asyncio.sleep(0)

        adding = asyncio.ensure_future(add_in_every_turn())
        ending = end(engine)
        if ending is not None:
            await ending
        async with asyncio.timeout(WAIT_S):
            await adding
            await asyncio.gather(*(request.is_lost.wait() for request in requests))
    assert requests


# A frontend has one connection to an engine, whatever became of the ones before it.


async def _restart(engine: FakeEngine) -> None:
    await engine.kill()
    await engine.start(engine.address)


async def _fall_silent(engine: FakeEngine) -> None:
    session = engine.sessions[0]
    engine.has_heartbeat = False
    await engine.wait(lambda: session not in engine.sessions)
    engine.has_heartbeat = True


async def _lose_a_message(engine: FakeEngine) -> None:
    engine.sessions[0].skip()


async def _send_nonsense(engine: FakeEngine) -> None:
    engine.sessions[0].send(step=step_pb2.Step(handles=b"xyz"))


async def _offer_other_files(engine: FakeEngine) -> None:
    artifact = session_pb2.Artifact(kind=session_pb2.ARTIFACT_KIND_TOKENIZER, sha256="0" * 64)
    engine.sessions[0].send(ready=session_pb2.Ready(artifacts=[artifact]))


async def _leave(engine: FakeEngine) -> None:
    engine.leave()


async def _die(engine: FakeEngine) -> None:
    engine.die()


@pytest.mark.parametrize(
    "end",
    [_restart, _fall_silent, _lose_a_message, _send_nonsense, _offer_other_files, _leave, _die],
    ids=lambda end: end.__name__,
)
async def test_a_lost_stream_leaves_no_connection_behind(end):
    engine = FakeEngine()
    with without_collections():
        await _lose_streams(engine, end)


async def _lose_streams(engine: FakeEngine, end: Callable[[FakeEngine], Awaitable[None]]) -> None:
    async with serving(engine, heartbeat_s=HEARTBEAT_S) as (client, frontend):
        for _ in range(3):
            num_connects = engine.num_connects
            await end(engine)
            await engine.wait(lambda: engine.num_connects > num_connects)  # noqa: B023
            await client.wait_ready()
            await until_connections(engine.address, 1)
        for one in frontend.engines.directory.clients():
            await one.close()
        await until_connections(engine.address, 0)


# Of models that engines bring, the files and tokenizers of the last few are kept.


class FakeStub:
    """Offers one tokenizer with one of many chat templates."""

    def __init__(self) -> None:
        self._contents = {session_pb2.ARTIFACT_KIND_TOKENIZER: word_piece_tokenizer().to_str().encode()}

    def ready(self, template: str) -> session_pb2.Ready:
        self._contents[session_pb2.ARTIFACT_KIND_CHAT_TEMPLATE] = template.encode()
        return session_pb2.Ready(model_name="m", artifacts=[self._artifact(kind) for kind in self._contents])

    async def GetArtifacts(
        self, request: engine_pb2.GetArtifactsRequest, timeout: float
    ) -> AsyncIterator[engine_pb2.GetArtifactsResponse]:
        for kind in request.kinds:
            yield engine_pb2.GetArtifactsResponse(artifact=self._artifact(kind), chunk=self._contents[kind])

    def _artifact(self, kind: session_pb2.ArtifactKind) -> session_pb2.Artifact:
        content = self._contents[kind]
        return session_pb2.Artifact(
            kind=kind, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)
        )


class Rig:
    def __init__(self, workers: TextWorkers, *, chat_template: bytes | None = None) -> None:
        self._stub = FakeStub()
        self._store = ArtifactStore(workers, chat_template=chat_template)

    async def model_of(self, number: int) -> ServedModel:
        """The model whose chat template is that of `number`."""
        ready = self._stub.ready(f"template {number}")
        return await self._store.model_of(ready, cast(engine_pb2_grpc.EngineCoreServiceStub, self._stub))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    workers = TextWorkers(1, time_limit_s=60.0)
    yield Rig(workers)
    await workers.close()


async def test_engines_of_the_same_files_share_one_tokenizer(rig: Rig) -> None:
    first, second = await rig.model_of(0), await rig.model_of(0)
    assert first.tokenizer is second.tokenizer
    third, fourth = await asyncio.gather(rig.model_of(2), rig.model_of(2))
    assert third.tokenizer is fourth.tokenizer
    assert (await rig.model_of(1)).tokenizer is not first.tokenizer


async def test_a_tokenizer_is_made_on_where_the_stream_that_wanted_it_is_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, gate, num_made = asyncio.Event(), threading.Event(), 0
    loop = asyncio.get_running_loop()

    def parse(files: TextFiles, workers: TextWorkers) -> ModelTokenizer:
        nonlocal num_made
        num_made += 1
        loop.call_soon_threadsafe(has_begun.set)
        assert gate.wait(60.0)
        return parse_tokenizer(files, workers)

    monkeypatch.setattr(artifacts, "parse_tokenizer", parse)
    first = asyncio.ensure_future(rig.model_of(0))
    await has_begun.wait()
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    second = asyncio.ensure_future(rig.model_of(0))
    gate.set()
    await second
    assert num_made == 1


async def test_the_tokenizer_used_longest_ago_is_forgotten_first(rig: Rig) -> None:
    first = await rig.model_of(0)
    second = await rig.model_of(1)
    for number in range(2, MAX_FILES):
        await rig.model_of(number)
    assert (await rig.model_of(0)).tokenizer is first.tokenizer
    await rig.model_of(MAX_FILES)
    assert (await rig.model_of(0)).tokenizer is first.tokenizer
    assert (await rig.model_of(1)).tokenizer is not second.tokenizer


async def test_a_template_of_the_frontend_replaces_that_of_every_model() -> None:
    workers = TextWorkers(1, time_limit_s=60.0)
    rig = Rig(workers, chat_template=b"{{ messages[0].content }}!")
    first, second = await rig.model_of(0), await rig.model_of(1)
    assert first.tokenizer is second.tokenizer
    conversation = {"messages": [{"role": "user", "content": "hi"}]}
    assert await first.tokenizer.render(conversation, max_chars=10) == "hi!"
    await workers.close()


async def test_the_end_of_a_frontend_whose_worker_loads_a_tokenizer_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = TextWorkers(1, time_limit_s=60.0)
    await Rig(workers).model_of(0)
    # The process of the worker has been started, no more.
    await workers.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
