"""Cases about hello, hello_ack and ready, and about which sessions a hello ends."""

from __future__ import annotations

import grpc

from triptych.engine.v1 import session_pb2, utility_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, Turn, expect
from triptych_conformance.engine_stream import EngineStream
from triptych_conformance.engine_under_test import FEATURES, EngineUnderTest
from triptych_conformance.invalid_values import invalid_messages
from triptych_kit.errors import Unavailable
from triptych_kit.rules import rules_of

CASES: Cases[EngineUnderTest] = Cases(Section.OPENING)

_NEWER_REVISION = 1_000_000
_HELLO_LIMIT_S = 10.0


@CASES.must(
    "hello_ack is the first message and has no seq; ready comes before any step, as message 1 if loaded."
)
async def first_messages(engine: EngineUnderTest) -> None:
    stream = engine.connect()
    await stream.say_hello()
    await stream.until(lambda: stream.hello_ack is not None, "hello_ack")
    await stream.until(lambda: stream.record.last_seq > 0, "message 1")
    if stream.hello_ack is not None and stream.hello_ack.state == session_pb2.ENGINE_STATE_READY:
        expect(stream.record.ready is not None, "ready as message 1", "another message")


@CASES.must("hello_ack and ready have the values that a frontend needs.")
async def facts_are_set(engine: EngineUnderTest) -> None:
    ack, ready = engine.facts.hello_ack, engine.facts.ready
    for name in ("engine_epoch", "max_frame_bytes", "max_inflight_adds", "schema_revision"):
        expect(getattr(ack, name) > 0, f"hello_ack.{name} above 0", getattr(ack, name))
    for name in ("model_name", "max_model_len", "vocab_size"):
        expect(getattr(ready, name), f"ready.{name}", "unset")


@CASES.must("A stream whose first message is not hello ends with FAILED_PRECONDITION, NO_HELLO.")
async def no_hello(engine: EngineUnderTest) -> None:
    stream = engine.connect()
    await stream.ack(0)
    await stream.must_end(grpc.StatusCode.FAILED_PRECONDITION, "NO_HELLO")


@CASES.must("A stream that is closed before hello ends with FAILED_PRECONDITION, NO_HELLO.")
async def closed_before_hello(engine: EngineUnderTest) -> None:
    stream = engine.connect()
    await stream.half_close()
    await stream.must_end(grpc.StatusCode.FAILED_PRECONDITION, "NO_HELLO")


@CASES.must("A stream without hello ends with DEADLINE_EXCEEDED after 10 s.", turn=Turn.BESIDE_OTHERS)
async def hello_too_late(engine: EngineUnderTest) -> None:
    stream = engine.connect()
    stream.patience_s += _HELLO_LIMIT_S
    await stream.must_end(grpc.StatusCode.DEADLINE_EXCEEDED)


@CASES.must("A second hello ends the session with INVALID_ARGUMENT.")
async def second_hello(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.say_hello()
    await stream.must_end(grpc.StatusCode.INVALID_ARGUMENT)


@CASES.must(
    "A frontend_id or session_id that breaks a rule of the contract is refused, the longest is taken."
)
async def bad_ids(engine: EngineUnderTest) -> None:
    for name, hello in invalid_messages(session_pb2.Hello, {}):
        stream = engine.connect()
        await stream.say_hello(**{name: getattr(hello, name)})
        await stream.must_end(grpc.StatusCode.INVALID_ARGUMENT)
    for name in ("frontend_id", "session_id"):
        await engine.connect().open(**{name: "y" * rules_of(session_pb2.Hello, name).max_chars})


@CASES.must("hello.min_peer_revision above the engine's is refused: FAILED_PRECONDITION, REVISION_TOO_OLD.")
async def engine_too_old(engine: EngineUnderTest) -> None:
    stream = engine.connect(min_peer_revision=_NEWER_REVISION)
    await stream.say_hello()
    await stream.must_end(grpc.StatusCode.FAILED_PRECONDITION, "REVISION_TOO_OLD")


@CASES.must("hello.schema_revision below the engine's minimum is refused in the same way.")
async def frontend_too_old(engine: EngineUnderTest) -> None:
    minimum = engine.facts.hello_ack.min_peer_revision
    if minimum == 0:
        raise NotApplicable("the engine works with frontends of any revision")
    stream = engine.connect(schema_revision=minimum - 1)
    await stream.say_hello()
    await stream.must_end(grpc.StatusCode.FAILED_PRECONDITION, "REVISION_TOO_OLD")


@CASES.must("A frontend of a newer revision that works with this one is accepted.")
async def newer_frontend(engine: EngineUnderTest) -> None:
    await engine.open(schema_revision=_NEWER_REVISION)


@CASES.must("hello_ack.features are those that both sides named, and no more.")
async def common_features(engine: EngineUnderTest) -> None:
    for named in ((), ("resume",), (*FEATURES, "x-conformance")):
        stream = await engine.open(features=named)
        seen = set(stream.hello_ack.features) if stream.hello_ack is not None else set()
        expected = set(named) & set(engine.facts.hello_ack.features)
        expect(seen == expected, f"features {sorted(expected)} of {list(named)}", sorted(seen))


@CASES.must("A feature may be named or set in feature_set; hello_ack does both.")
async def typed_features(engine: EngineUnderTest) -> None:
    expected = [name for name in FEATURES if name in engine.facts.hello_ack.features]
    typed = session_pb2.FeatureSet(**dict.fromkeys(FEATURES, True))
    for fields in ({"features": FEATURES}, {"features": (), "feature_set": typed}):
        ack = (await engine.open(**fields)).hello_ack or session_pb2.HelloAck()
        expect(sorted(ack.features) == sorted(expected), f"features {expected}", list(ack.features))
        in_set = [name for name in FEATURES if getattr(ack.feature_set, name)]
        expect(in_set == expected, f"{expected} in feature_set", in_set)


@CASES.must("A role in hello grants nothing: calls that change the engine are not served on a stream.")
async def claimed_role(engine: EngineUnderTest) -> None:
    stream = await engine.open(role=session_pb2.PEER_ROLE_ADMIN)
    # Of these calls the one that does the least, should the engine serve it.
    call = utility_pb2.UtilityCall(call_id=1, reset_prefix_cache=utility_pb2.ResetPrefixCacheCall())
    await stream.send(utility=call)
    await stream.until(lambda: 1 in stream.record.results, "utility_result")
    result = stream.record.results[1]
    refusals = (grpc.StatusCode.PERMISSION_DENIED.value[0], grpc.StatusCode.UNIMPLEMENTED.value[0])
    expected = "a failure with PERMISSION_DENIED or UNIMPLEMENTED"
    expect(result.HasField("failure") and result.failure.code in refusals, expected, result)


@CASES.must("A new frontend_epoch ends older sessions of the frontend_id, and no session of others.")
async def newer_epoch(engine: EngineUnderTest) -> None:
    other = await engine.open()
    await other.add(engine.entry(1))
    older = await engine.open()
    await older.add(engine.entry(1, engine.long))
    await engine.open(frontend_id=older.hello_fields["frontend_id"])
    await older.until(lambda: older.is_over, "the end of the older session")
    resumed = await engine.resume(older)
    expect(resumed.hello_ack is not None and not resumed.hello_ack.resume_ok, "resume_ok false", "true")
    await other.until_finished(1)
    expect(other.record.tokens[1] == await engine.reference(), "the tokens of the reference", "others")


@CASES.must("A new session of the same epoch and session_id ends the older one.")
async def same_session_again(engine: EngineUnderTest) -> None:
    older = await engine.open()
    newer = await engine.open(**older.hello_fields)
    await older.until(lambda: older.is_over, "the end of the older session")
    await newer.add(engine.entry(1))
    await newer.until_finished(1)


@CASES.must("A hello with the session_id of another frontend does not affect that session.")
async def foreign_session_id(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await engine.open(session_id=stream.hello_fields["session_id"])
    await stream.add(engine.entry(1))
    await stream.until_finished(1)


@CASES.must(
    "An engine that is loading beats, rejects ADDs with UNAVAILABLE, resumes sessions, and then sends ready.",
    turn=Turn.LAST,
)
async def loading(engine: EngineUnderTest) -> None:
    early = await engine.restart()
    if engine.facts.hello_ack.state != session_pb2.ENGINE_STATE_LOADING:
        raise NotApplicable("the engine has loaded before it answers")
    await _must_refuse_while_loading(engine, early)
    await early.until(lambda: early.record.heartbeats, "a heartbeat")
    state = early.record.heartbeats[0].state
    expect(early.record.ready or state == session_pb2.ENGINE_STATE_LOADING, "state LOADING", state)
    # It dies while it loads.
    epoch, stream = engine.facts.hello_ack.engine_epoch, await engine.restart()
    await early.must_break()
    await stream.cut()
    if "resume" in engine.facts.hello_ack.features:
        stream = await engine.must_resume(stream, last_seq=0)
    else:
        stream = engine.connect()
        await stream.say_hello()
    await engine.until_loaded(stream)
    resumed = await engine.resume(early, engine_epoch=epoch)
    await engine.must_be_new(resumed, session_pb2.RESUME_REFUSAL_OTHER_EPOCH)
    await stream.add(engine.entry(1))
    await stream.until_finished(1)


async def _must_refuse_while_loading(engine: EngineUnderTest, stream: EngineStream) -> None:
    await stream.add(engine.entry(1, 1))
    record = stream.record
    await stream.until(lambda: 1 in record.rejected or 1 in record.first, "an answer to an ADD")
    error = record.rejected.get(1)
    # It may have loaded meanwhile; a step before ready is a finding of the record's own.
    expect(record.ready or error is not None, "add_rejected while the engine is loading", "it was accepted")
    expect(error is None or isinstance(error, Unavailable), "UNAVAILABLE", repr(error))
