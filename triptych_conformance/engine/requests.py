"""Cases about ADD, its rejection, and abort."""

from __future__ import annotations

import re
from typing import Any

from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.engine_stream import EngineStream
from triptych_conformance.engine_under_test import EngineUnderTest, column
from triptych_conformance.invalid_values import invalid_messages
from triptych_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unimplemented,
    to_number,
)
from triptych_kit.rules import MODEL_LENGTH, VOCABULARY

CASES: Cases[EngineUnderTest] = Cases(Section.REQUESTS)

_LENGTH = output_pb2.FINISH_REASON_LENGTH
_ABORT = output_pb2.FINISH_REASON_ABORT
_MAX_LIMIT = 20_000
_NUM_TOKENS = 16
_NO_ADAPTER = "conformance-no-such-adapter"
_DIGEST = re.compile("[0-9a-f]{64}")
_PLAIN_DEFAULTS = {
    "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0,
    "repetition_penalty": 1, "min_tokens": 0, "n": 1,
}  # fmt: skip


@CASES.must("An accepted request has first, its tokens, and one end; max_tokens ends it with LENGTH.")
async def whole_request(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1))
    await stream.until_finished(1)
    record, reference = stream.record, await engine.reference()
    expect(1 in record.first, "first of handle 1", "none")
    expect(record.tokens[1] == reference, "the tokens of the reference", record.tokens[1])
    expect(len(record.tokens[1]) == len(reference), f"{len(reference)} tokens", len(record.tokens[1]))
    expect(record.finished[1].reason == _LENGTH, "reason LENGTH", record.finished[1].reason)


@CASES.must("Several entries of one Add are independent: a rejected one affects no other.")
async def rejection_among_others(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1), engine.entry(2, prompt_token_ids=b""), engine.entry(3))
    await stream.rejection_of(2)
    await stream.until_finished(1, 3)


@CASES.must("An ADD without params is rejected with INVALID_ARGUMENT.")
async def neither_params(engine: EngineUnderTest) -> None:
    entry = engine.entry(1)
    entry.ClearField("params")
    stream = await engine.open()
    await stream.add(entry)
    error = await stream.rejection_of(1)
    expect(isinstance(error, InvalidArgument), "INVALID_ARGUMENT", _status(error))


@CASES.must(
    "A value that breaks a rule of the contract is refused: INVALID_ARGUMENT, if its field is served."
)
async def invalid_values(engine: EngineUnderTest) -> None:
    ready, stream = engine.facts.ready, await engine.open()
    limits = {VOCABULARY: ready.vocab_size, MODEL_LENGTH: ready.max_model_len}
    for handle, (path, invalid) in enumerate(invalid_messages(add_pb2.AddEntry, limits), start=1):
        entry, (name, _, inner) = engine.entry(handle, 1), path.partition(".")
        if not inner:
            entry.ClearField(name)
        entry.MergeFrom(invalid)
        await stream.add(entry)
        error = await stream.rejection_of(handle)
        is_refused = isinstance(error, InvalidArgument | Unimplemented)
        expect(is_refused, f"INVALID_ARGUMENT or UNIMPLEMENTED for {path}", _status(error))


@CASES.must("An ADD without a prompt is rejected with INVALID_ARGUMENT.")
async def no_prompt(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, prompt_token_ids=b""))
    error = await stream.rejection_of(1)
    expect(isinstance(error, InvalidArgument), "INVALID_ARGUMENT", _status(error))


@CASES.must("`sampling.n` above 1, `sampling.stop` and `sampling.bad_words` are refused, naming the field.")
async def fields_of_the_frontend(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await _must_refuse(stream, engine.entry(1, sampling={"n": 2}), names="n")
    await _must_refuse(stream, engine.entry(1, sampling={"stop": ["x"]}), names="stop")
    await _must_refuse(stream, engine.entry(1, sampling={"bad_words": ["x"]}), names="bad_words")


@CASES.must("What an engine does not serve is refused and named, never ignored.")
async def fields_not_served(engine: EngineUnderTest) -> None:
    # None of these can be served: each lacks what it would take.
    stream = await engine.open()
    await _must_refuse(stream, engine.entry(1, media=[add_pb2.MediaItem()]), names="media")
    await _must_refuse(stream, engine.entry(1, kv_transfer=add_pb2.KvTransfer()), names="kv_transfer")
    await _must_refuse(stream, engine.entry(1, pooling=sampling_pb2.PoolingParams()), names="pooling")
    embeds = tensor_pb2.Tensor(shape=[1, 1])
    await _must_refuse(stream, engine.entry(1, prompt_embeds=embeds), names="prompt_embeds")


@CASES.must(
    "`ready` names each adapter once, with the SHA-256 of its content; `adapters` are the same names."
)
async def announced_adapters(engine: EngineUnderTest) -> None:
    ready = _with_adapters(engine)
    names = [adapter.name for adapter in ready.served_adapters]
    expect(names == sorted(set(names)), "each name once, in order", names)
    expect(list(ready.adapters) == names, f"adapters {names}", list(ready.adapters))
    wrong = [one.digest for one in ready.served_adapters if not _DIGEST.fullmatch(one.digest)]
    expect(not wrong, "64 lower-case hex digits", wrong)


@CASES.must("An adapter that `ready` does not name is NOT_FOUND; UNIMPLEMENTED where none is served.")
async def unknown_adapter(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, adapter=_NO_ADAPTER))
    error = await stream.rejection_of(1)
    expect(isinstance(error, NotFound | Unimplemented), "NOT_FOUND or UNIMPLEMENTED", _status(error))
    shown = f"a message that names adapter {_NO_ADAPTER}"
    expect(isinstance(error, Unimplemented) or _NO_ADAPTER in error.message, shown, _status(error))


@CASES.must("A request for another content than that of the adapter's name is refused: FAILED_PRECONDITION.")
async def other_content(engine: EngineUnderTest) -> None:
    adapter, stream = _with_adapters(engine).served_adapters[0], await engine.open()
    await stream.add(engine.entry(1, adapter=adapter.name, adapter_digest="0" * 64))
    error = await stream.rejection_of(1)
    expect(isinstance(error, FailedPrecondition), "FAILED_PRECONDITION", _status(error))


def _with_adapters(engine: EngineUnderTest) -> session_pb2.Ready:
    ready = engine.facts.ready
    if not ready.served_adapters:
        raise NotApplicable("the engine names no adapter")
    return ready


@CASES.must("A constraint that cannot be compiled, or is not served, ends its request alone, by its status.")
async def constraint_not_compiled(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    sampling = {"structured_output": {"regex": "[0-9"}}
    if not engine.facts.ready.structured_output_backends:
        await _must_refuse(stream, engine.entry(1, sampling=sampling), names="structured_output")
        return
    await stream.add(engine.entry(1, sampling=sampling), engine.entry(2))
    await stream.until_finished(1, 2)
    end, tokens = stream.record.finished[1], stream.record.tokens
    expect(end.code == to_number("INVALID_ARGUMENT"), "an end with the code INVALID_ARGUMENT", end)
    expect(not tokens[1], "no tokens", tokens[1])
    expect(tokens[2] == await engine.reference(), "the other request's tokens", tokens[2])


@CASES.must("A parameter that is set to its plain default is accepted as if it were unset.")
async def plain_defaults(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, sampling=_PLAIN_DEFAULTS))
    await stream.until_finished(1)
    tokens = stream.record.tokens[1]
    expect(tokens == await engine.reference(), "the tokens of a request that sets none of these", tokens)


@CASES.must("A handle that is in flight is not taken again; the request that has it continues.")
async def handle_in_flight(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    stream.record.begin(1)
    await stream.send(add=add_pb2.Add(entries=[engine.entry(1), engine.entry(1, 1)]))
    record = stream.record
    # Both answers are about handle 1; the record takes a rejection and an end of one handle for two ends.
    await stream.until(lambda: 1 in record.rejected, "add_rejected of the second request")
    record.rejected.clear()
    await stream.until_finished(1)
    expect(record.tokens[1] == await engine.reference(), "the tokens of the first request", record.tokens[1])


@CASES.must("A request_id and attempt that are in flight in the session are not taken again: ALREADY_EXISTS.")
async def request_in_flight(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    first = engine.entry(1, engine.long)
    await stream.add(first)
    await stream.add(engine.entry(2, request_id=first.request_id))
    error = await stream.rejection_of(2)
    expect(isinstance(error, AlreadyExists), "ALREADY_EXISTS", _status(error))
    # Another attempt of it is another request.
    await stream.add(engine.entry(3, request_id=first.request_id, attempt=1))
    await stream.until_finished(3)
    await stream.abort([1])
    await stream.until_finished(1)


@CASES.must("A handle may be used again after its end.")
async def handle_used_again(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    for _ in range(2):
        await stream.add(engine.entry(1))
        await stream.until_finished(1)
        tokens = stream.record.tokens[1]
        expect(tokens == await engine.reference(), "the tokens of the reference", tokens)


@CASES.must("A rejected ADD leaves its handle free.")
async def handle_after_rejection(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, prompt_token_ids=b""))
    await stream.rejection_of(1)
    await stream.add(engine.entry(1))
    await stream.until_finished(1)


@CASES.must(
    "output_token_ids continue a request: not sent back, counted against max_tokens, the same tokens after."
)
async def continued_request(engine: EngineUnderTest) -> None:
    reference = await engine.reference()
    stream = await engine.open()
    given = reference[:_NUM_TOKENS]
    await stream.add(engine.entry(1, output_token_ids=column(given), attempt=1))
    await stream.until_finished(1)
    tokens = stream.record.tokens[1]
    expect(
        tokens == reference[_NUM_TOKENS:], f"the last {len(reference) - _NUM_TOKENS} of the reference", tokens
    )
    expect(stream.record.finished[1].reason == _LENGTH, "reason LENGTH", stream.record.finished[1].reason)


@CASES.must("A token is chosen from the seed and the position alone, also where a sampled request continues.")
async def continued_sampling(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    sampling = {"temperature": 1.0}
    await stream.add(engine.entry(1, sampling=sampling))
    await stream.until_finished(1)
    whole = stream.record.tokens[1]
    await stream.add(
        engine.entry(2, output_token_ids=column(whole[:_NUM_TOKENS]), attempt=1, sampling=sampling)
    )
    await stream.until_finished(2)
    tokens = stream.record.tokens[2]
    expect(tokens == whole[_NUM_TOKENS:], f"the tokens after the first {_NUM_TOKENS}", tokens)


@CASES.must("A request whose remaining_ms is over ends with ABORT.")
async def deadline(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, engine.long, remaining_ms=1))
    await stream.until_finished(1)
    reason = stream.record.finished[1].reason
    expect(reason == _ABORT, "reason ABORT", f"{reason} after {len(stream.record.tokens[1])} tokens")


@CASES.must("More than max_inflight_adds requests of a session are rejected with RESOURCE_EXHAUSTED.")
async def too_many_requests(engine: EngineUnderTest) -> None:
    limit = engine.facts.hello_ack.max_inflight_adds
    if limit > _MAX_LIMIT:
        raise NotApplicable(f"max_inflight_adds is {limit}")
    stream = await engine.open()
    # Those that run may end meanwhile.
    handles = range(1, limit + 2 * engine.facts.ready.max_num_seqs + 2)
    await stream.add(*(engine.entry(handle, engine.long) for handle in handles))
    await stream.until(lambda: stream.record.rejected, f"a rejection of one of {len(handles)} requests")
    await stream.abort(handles)
    record = stream.record
    await stream.until(
        lambda: len(record.rejected) + len(record.finished) == len(handles), "an end of each of the requests"
    )
    for error in record.rejected.values():
        expect(isinstance(error, ResourceExhausted), "RESOURCE_EXHAUSTED", _status(error))


@CASES.must("A request in flight that is aborted ends with a finished record, also if it is aborted twice.")
async def abort_in_flight(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, engine.long))
    await stream.until_tokens(1)
    await stream.abort([1, 1])
    await stream.abort([1])
    await stream.until_finished(1)
    reason = stream.record.finished[1].reason
    expect(reason in (_ABORT, _LENGTH), "reason ABORT, or LENGTH if that came first", reason)
    # In order after the aborts: a second end of handle 1 would come before.
    await stream.add(engine.entry(2))
    await stream.until_finished(2)


@CASES.must("An abort of a handle whose end was sent is answered with already_finished.")
async def abort_after_end(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, 1))
    await stream.until_finished(1)
    await stream.abort([1])
    await stream.until(lambda: 1 in stream.record.already_finished, "already_finished with handle 1")


@CASES.must("An abort of a handle that never was is ignored.")
async def abort_of_unknown_handle(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.abort([99])
    await stream.add(engine.entry(1))
    await stream.until_finished(1)
    expect(not stream.record.already_finished, "no already_finished", stream.record.already_finished)


@CASES.must("An abort that names another attempt does not end the request; one that names its own does.")
async def abort_of_other_attempt(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, attempt=2))
    await stream.abort([1], attempts=[1])
    await stream.until_finished(1)
    reason = stream.record.finished[1].reason
    expect(reason == _LENGTH, "reason LENGTH", reason)
    await stream.add(engine.entry(2, engine.long, attempt=2))
    await stream.abort([2], attempts=[2])
    await stream.until_finished(2)
    expect(len(stream.record.tokens[2]) < engine.long, "an end before max_tokens", "all tokens")


@CASES.must("`job_id`, `is_last_step` and `tool_name` are taken, and change no token.")
async def turns_of_a_job(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    turns: list[dict[str, Any]] = [{"tool_name": "search"}, {"is_last_step": True}, {"tenant": "other"}]
    for handle, fields in enumerate(turns, start=1):
        await stream.add(engine.entry(handle, job_id="conformance", **fields))
        await stream.until_finished(handle)
        tokens = stream.record.tokens[handle]
        expect(tokens == await engine.reference(), f"the tokens of a request without {fields}", tokens)


@CASES.must("A `finish_hint` after the end of a turn, for a tool, for none or for one not known, is taken.")
async def hint_after_end(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    hints: list[dict[str, str]] = [{"tool_name": "search"}, {"tool_name": ""}, {}]
    for handle, fields in enumerate(hints, start=1):
        await stream.add(engine.entry(handle, job_id="conformance"))
        await stream.until_finished(handle)
        await _hint(stream, handle, **fields)
    await _must_serve(engine, stream)


@CASES.must("A `finish_hint` of a handle that is in flight, or that is not known any more, is ignored.")
async def hint_of_other_handle(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, job_id="conformance"))
    for handle in 1, 99:
        await _hint(stream, handle, tool_name="search")
    await stream.until_finished(1)
    tokens = stream.record.tokens[1]
    expect(tokens == await engine.reference(), "the tokens of the reference", tokens)
    for _ in range(2):
        await _hint(stream, 1, tool_name="search")
    await _must_serve(engine, stream)


@CASES.must("A `finish_hint` with a value that breaks a rule of the contract is ignored.")
async def invalid_hint(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, job_id="conformance"))
    await stream.until_finished(1)
    for _, invalid in invalid_messages(session_pb2.FinishHint, {}):
        invalid.handle = 1
        await stream.send(finish_hint=invalid)
    await _must_serve(engine, stream)


async def _hint(stream: EngineStream, handle: int, **fields: str) -> None:
    await stream.send(finish_hint=session_pb2.FinishHint(handle=handle, **fields))


async def _must_serve(engine: EngineUnderTest, stream: EngineStream) -> None:
    """Another request of the session has its tokens."""
    await stream.add(engine.entry(50))
    await stream.until_finished(50)
    tokens = stream.record.tokens[50]
    expect(tokens == await engine.reference(), "the tokens of the reference", tokens)


async def _must_refuse(stream: EngineStream, entry: add_pb2.AddEntry, *, names: str) -> None:
    await stream.add(entry)
    error = await stream.rejection_of(entry.handle)
    shown = f"INVALID_ARGUMENT or UNIMPLEMENTED that names {names}"
    expect(isinstance(error, InvalidArgument | Unimplemented), shown, _status(error))
    named = [field for field, _ in error.violations] if isinstance(error, InvalidArgument) else []
    expect(names in error.message or any(names in field for field in named), shown, _status(error))


def _status(error: ServiceError) -> str:
    return f"{error.code.name} {error.reason}: {error.message}"
