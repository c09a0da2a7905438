"""Cases about ADD, its rejection, and abort."""

from __future__ import annotations

import asyncio
from typing import Any

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.frontend_under_test import Attempt, ClientCall, FrontendUnderTest
from triptych_kit.errors import InvalidArgument, NotFound, Unavailable, Unimplemented

CASES: Cases[FrontendUnderTest] = Cases(Section.REQUESTS)

_DEADLINE_S = 30.0
_MAX_TRIES, _PAUSE_S = 100, 0.05
_NUM_TURNS = 5
_ADAPTER, _FIRST, _SECOND = "conformance-adapter", "a" * 64, "b" * 64


@CASES.must(
    "An ADD has a handle of its own, a request_id, the prompt, one of params, and max_tokens of the client."
)
async def complete_add(frontend: FrontendUnderTest) -> None:
    calls = [frontend.generate(6) for _ in range(3)]
    attempts = [await frontend.attempt_of(call) for call in calls]
    for attempt in attempts:
        entry = attempt.entry
        expect(entry.request_id, "request_id", "none")
        expect(entry.WhichOneof("params") == "sampling", "sampling", entry.WhichOneof("params"))
        expect(entry.sampling.max_tokens == 6, "max_tokens 6", entry.sampling.max_tokens)
        expect(not entry.output_token_ids, "no output_token_ids of a new request", entry.output_token_ids)
    used = {(id(attempt.session), attempt.entry.handle) for attempt in attempts}
    expect(len(used) == len(attempts), "a handle for each request in flight", used)
    ids = {attempt.entry.request_id for attempt in attempts}
    expect(len(ids) == len(attempts), "a request_id for each request", ids)


@CASES.must("The outputs of one request are requests of their own: `sampling.n` is 1 at most, seeds differ.")
async def sampling_group(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(2, n=2)
    await frontend.until(lambda: len(frontend.attempts_of(call)) == 2 or call.is_over, "two entries")
    attempts = frontend.attempts_of(call)
    expect(len(attempts) == 2, "two entries", repr(call.error))
    for name in ("handle", "request_id", "request_seed"):
        values = {getattr(attempt.entry, name) for attempt in attempts}
        expect(len(values) == 2, f"a {name} for each output", values)
    for attempt in attempts:
        expect(attempt.entry.sampling.n <= 1, "sampling.n of 1 at most", attempt.entry.sampling.n)
        attempt.send([5, 6], is_first=True, ends=True)
    await frontend.until(lambda: len(call.finished) == 2 or call.is_over, "both outputs at the client")
    expect(len(call.finished) == 2, "both outputs at the client", repr(call.error))


@CASES.must("A client's seed is the request_seed of its request, whatever the attempt.")
async def client_seed(frontend: FrontendUnderTest) -> None:
    seeds = set()
    for _ in range(2):
        call = frontend.generate(2, seed=7)
        attempt = await frontend.attempt_of(call)
        seeds.add(attempt.entry.request_seed)
        attempt.send([5, 6], is_first=True, ends=True)
        await frontend.must_finish(call, [5, 6])
    expect(len(seeds) == 1, "the same request_seed for the same seed of a client", seeds)


@CASES.must("The deadline of a client is sent as remaining_ms.")
async def deadline(frontend: FrontendUnderTest) -> None:
    attempt = await frontend.attempt_of(frontend.generate(timeout_s=_DEADLINE_S))
    expect(attempt.entry.HasField("remaining_ms"), "remaining_ms", "none")
    # gRPC rounds the timeout of a call up.
    limit_ms = int(1000 * _DEADLINE_S * 1.02)
    expect(0 < attempt.entry.remaining_ms <= limit_ms, f"up to {limit_ms} ms", attempt.entry.remaining_ms)


@CASES.must("A client that cancels has its request aborted; rows that come nevertheless are ignored.")
async def cancelled_client(frontend: FrontendUnderTest) -> None:
    call = frontend.generate()
    attempt = await frontend.attempt_of(call)
    attempt.send([5], is_first=True)
    await frontend.until_tokens(call, 1)
    await call.cancel()
    session, handle = attempt.session, attempt.entry.handle
    await frontend.until(lambda: handle in dict(session.aborts), "abort of the request")
    attempt.send([6])
    attempt.session.abort(handle)
    await _must_be_served(frontend, attempt)


@CASES.must("A stop string is the frontend's: it ends the output, and aborts the request with STOP_STRING.")
async def stop_string(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(8, stop=["w77"])
    attempt = await frontend.attempt_of(call)
    for number, token_id in enumerate((5, 77, 6)):
        attempt.send([token_id], is_first=number == 0)
    session, handle = attempt.session, attempt.entry.handle
    await frontend.until(lambda: handle in dict(session.aborts), "abort of the request")
    reason = dict(session.aborts)[handle]
    expect(reason == engine_pb2.ABORT_REASON_STOP_STRING, "reason STOP_STRING", reason)
    attempt.session.abort(handle)
    await frontend.until(lambda: call.is_over, "the end of the client's call")
    expect(0 in call.finished, "an output that is finished", repr(call.error))
    expect(call.finished[0].reason == output_pb2.FINISH_REASON_STOP, "reason STOP", call.finished[0].reason)
    expect("w6 " not in call.text + " ", "no text after the stop string", call.text)


@CASES.must("A rejection with INVALID_ARGUMENT ends the request with that status.")
async def invalid_request(frontend: FrontendUnderTest) -> None:
    call = frontend.generate()
    attempt = await frontend.attempt_of(call)
    attempt.reject(InvalidArgument("conformance", field="prompt"))
    await frontend.until(lambda: call.is_over, "the end of the client's call")
    expect(isinstance(call.error, InvalidArgument), "INVALID_ARGUMENT at the client", repr(call.error))
    await _must_be_served(frontend, attempt)


@CASES.must("A rejection with UNAVAILABLE sends the request to another engine.")
async def unavailable_engine(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(2)
    attempt = await frontend.attempt_of(call)
    attempt.reject(Unavailable("conformance", reason="ENGINE_DRAINING"))

    def others() -> list[Attempt]:
        return [one for one in frontend.attempts_of(call) if one.entry is not attempt.entry]

    await frontend.until(lambda: others() or call.is_over, "another ADD")
    expect(others(), "another ADD", repr(call.error))
    others()[0].send([5, 6], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6])


@CASES.must(
    "The ADD of a request with an adapter has its name, and the digest that the engine has announced."
)
async def named_adapter(frontend: FrontendUnderTest) -> None:
    digests = _announce(frontend, _FIRST, _SECOND)
    attempt = await frontend.attempt_of(await _with_adapter(frontend))
    expect(attempt.entry.adapter == _ADAPTER, f"adapter {_ADAPTER}", attempt.entry.adapter)
    digest = digests[attempt.engine.engine_id]
    expect(attempt.entry.adapter_digest == digest, f"digest {digest}", attempt.entry.adapter_digest)


@CASES.must("A name that no engine has announced is NOT_FOUND, and is not sent.")
async def unannounced_adapter(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(adapter=_ADAPTER)
    await _until_sent(frontend, call)
    _check_served(call.error, "adapters")
    expect(isinstance(call.error, NotFound), "NOT_FOUND at the client", repr(call.error))


@CASES.must("A request with an adapter continues on an engine alone whose name stands for the same content.")
async def same_content(frontend: FrontendUnderTest) -> None:
    digests = _announce(frontend, _FIRST, _SECOND)
    call = await _with_adapter(frontend)
    attempt = await frontend.attempt_of(call)
    engine, digest = attempt.engine, digests[attempt.engine.engine_id]
    attempt.send([5], is_first=True)
    await frontend.until_tokens(call, 1)
    engine.kill()
    await engine.restart(adapters={_ADAPTER: digest})
    other = await frontend.attempt_of(call, after=attempt)
    expect(other.engine is engine, f"an ADD at {engine.engine_id} alone", f"at {other.engine.engine_id}")
    expect(other.entry.adapter_digest == digest, f"digest {digest}", other.entry.adapter_digest)
    other.send([6], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6])


@CASES.must(
    "The ADDs of a job's turns have one `job_id`, another than those of other jobs, and `is_last_step`."
)
async def turns_of_a_job(frontend: FrontendUnderTest) -> None:
    turns = ("one", False), ("one", True), ("other", False)
    entries = [(await _turn(frontend, job_id, is_last_step=is_last))[1].entry for job_id, is_last in turns]
    first, second, other = (entry.job_id for entry in entries)
    expect(first and first == second, "the same job_id in both turns", (first, second))
    expect(other not in ("", first), "another job_id for another job", other)
    flags = [entry.is_last_step for entry in entries]
    expect(flags == [False, True, False], "is_last_step of the second turn alone", flags)


@CASES.should("The turns of a job go to one engine.")
async def engine_of_a_job(frontend: FrontendUnderTest) -> None:
    used = []
    for _ in range(_NUM_TURNS):
        call, attempt = await _turn(frontend, "conformance")
        used.append(attempt.engine.engine_id)
        attempt.send([5, 6], is_first=True, ends=True)
        await frontend.must_finish(call, [5, 6])
    expect(len(set(used)) == 1, "one engine for all turns", used)


@CASES.should("After the end of a turn that another may follow `finish_hint` is sent, once.")
async def hint_after_end(frontend: FrontendUnderTest) -> None:
    call, attempt = await _turn(frontend, "conformance")
    attempt.send([5, 6], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6])
    await _until_hinted(frontend, attempt)
    await _must_be_served(frontend, attempt)


@CASES.should("Where a stop string ends a turn, `finish_hint` follows the abort.")
async def hint_after_stop_string(frontend: FrontendUnderTest) -> None:
    call, attempt = await _turn(frontend, "conformance", max_tokens=8, stop=["w77"])
    for number, token_id in enumerate((5, 77, 6)):
        attempt.send([token_id], is_first=number == 0)
    # One before the abort is a finding of the engine's own.
    await _until_hinted(frontend, attempt)
    attempt.session.abort(attempt.entry.handle)
    await frontend.until(lambda: call.is_over, "the end of the client's call")


async def _turn(
    frontend: FrontendUnderTest,
    job_id: str,
    *,
    max_tokens: int = 2,
    is_last_step: bool = False,
    **sampling: Any,
) -> tuple[ClientCall, Attempt]:
    """A turn of a job, which is sent."""
    call = frontend.generate(max_tokens, job_id=job_id, is_last_step=is_last_step, **sampling)
    await _until_sent(frontend, call)
    _check_served(call.error, "jobs")
    return call, await frontend.attempt_of(call)


async def _until_hinted(frontend: FrontendUnderTest, attempt: Attempt) -> None:
    session, handle = attempt.session, attempt.entry.handle
    await frontend.until(lambda: handle in session.hints, "finish_hint of the request")


def _announce(frontend: FrontendUnderTest, *digests: str) -> dict[str, str]:
    """Have each engine announce the adapter with its digest; returns them by engine."""
    for engine, digest in zip(frontend.engines, digests, strict=True):
        engine.change(adapters={_ADAPTER: digest})
        engine.become_ready()
    return {engine.engine_id: digest for engine, digest in zip(frontend.engines, digests, strict=True)}


async def _with_adapter(frontend: FrontendUnderTest) -> ClientCall:
    """A request with the adapter, which is sent; repeated until the frontend has read what is announced."""
    for _ in range(_MAX_TRIES):
        call = frontend.generate(2, adapter=_ADAPTER)
        await _until_sent(frontend, call)
        if not isinstance(call.error, NotFound):
            break
        await asyncio.sleep(_PAUSE_S)
    _check_served(call.error, "adapters")
    return call


async def _until_sent(frontend: FrontendUnderTest, call: ClientCall) -> None:
    await frontend.until(lambda: call.is_over or frontend.attempts_of(call), "an ADD or an error")


def _check_served(error: Exception | None, what: str) -> None:
    if isinstance(error, Unimplemented):
        raise NotApplicable(f"the frontend does not serve {what}: {error}")


async def _must_be_served(frontend: FrontendUnderTest, attempt: Attempt) -> None:
    """Another request is answered, and the stream of `attempt` is the same as before."""
    call = frontend.generate(2)
    other = await frontend.attempt_of(call)
    other.send([5, 6], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6])
    session = attempt.session
    expect(session.num_streams == 1 and len(session.hellos) == 1, "the same stream as before", "another one")
