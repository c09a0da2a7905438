"""Requests for texts of languages, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from benchmarks.rig import faults
from benchmarks.rig.history import OutputSeen
from benchmarks.rig.processes import ServiceProcess
from benchmarks.rig.streams import Case, Kind, Load, StreamRecord
from engine_svc.features.structured_output.constraint import Constraint
from tests.acceptance.rig.languages import Language
from tests.acceptance.scenarios.languages.models import Model
from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2_grpc,
    tokenize_pb2,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from triptych.common.v1 import sampling_pb2

_PREFACE = "Answer with one text of the language that is asked for, and with nothing else. The language is "
_MAX_SHOWN_CHARS = 300
_LIMIT_S = 900.0
_POLL_S = 0.02


async def make_cases(channel: grpc.aio.Channel, model: Model, languages: Sequence[Language]) -> list[Case]:
    """A request for each language, whose prompt names it."""
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    cases = []
    for key, language in enumerate(languages):
        if model.chat_template:
            chat = tokenizer_pb2.ApplyChatTemplateRequest(messages=_messages(language), tokenize=True)
            token_ids = (await stub.ApplyChatTemplate(chat)).token_ids
        else:
            text = tokenize_pb2.TokenizeRequest(text=_question(language))
            token_ids = (await stub.Tokenize(text)).token_ids
        sampling = sampling_pb2.SamplingParams(
            temperature=1.0,
            seed=10_000 + key,
            max_tokens=model.max_tokens,
            structured_output=_structured_output(language.constraint),
        )
        cases.append(Case(key, Kind.SEEDED, tuple(token_ids), sampling))
    return cases


def changed(case: Case, *, kind: Kind = Kind.SEEDED, key: int | None = None, **fields: int) -> Case:
    """The same request with other fields of its sampling."""
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(case.sampling)
    sampling.MergeFrom(sampling_pb2.SamplingParams(**fields))
    return Case(case.key if key is None else key, kind, case.token_ids, sampling)


async def send(
    channel: grpc.aio.Channel,
    cases: Sequence[Case],
    label: str,
    at_once: int,
    meanwhile: Callable[[Load], Awaitable[None]] | None = None,
) -> list[StreamRecord]:
    """Streams of all cases, at most `at_once` open at any time; `meanwhile` runs beside them."""
    load, gate = Load(label=label, limit_s=_LIMIT_S), asyncio.Semaphore(at_once)

    async def answer(case: Case) -> None:
        async with gate:
            (record,) = load.send(channel, [case])
            await load.ended(record)

    async with asyncio.TaskGroup() as tasks:
        for case in cases:
            tasks.create_task(answer(case))
        if meanwhile is not None:
            tasks.create_task(meanwhile(load))
    return load.records


async def kill_amid(engine: ServiceProcess, num_ended: int, num_begun: int, load: Load) -> None:
    """Kill an engine once `num_ended` requests of a load have ended and `num_begun` have begun."""
    while len(load.records) - load.num_open < num_ended or load.num_begun < num_begun:
        if not load.num_open:
            raise faults.FaultMissed(f"all requests ended before {engine.name} was killed")
        await asyncio.sleep(_POLL_S)
    await faults.kill(engine)


async def chat(
    channel: grpc.aio.Channel, cases: Sequence[Case], languages: Sequence[Language], at_once: int
) -> dict[int, OutputSeen]:
    """The answers of the same requests as conversations, by their keys."""
    stub, gate = chat_pb2_grpc.ChatServiceStub(channel), asyncio.Semaphore(at_once)
    found: dict[int, OutputSeen] = {}

    async def answer(case: Case) -> None:
        messages = _messages(languages[case.key])
        request = chat_message_pb2.ChatRequest(messages=messages, sampling=case.sampling)
        seen = OutputSeen()
        async with gate:
            async for event in stub.Chat(request, timeout=_LIMIT_S):
                if event.HasField("delta"):
                    seen.token_ids += event.delta.token_ids
                    seen.text += event.delta.content
                elif event.HasField("finished"):
                    seen.reason, seen.is_incomplete = event.finished.reason, event.finished.is_incomplete
        found[case.key] = seen

    async with asyncio.TaskGroup() as tasks:
        for case in cases:
            tasks.create_task(answer(case))
    return found


def _messages(language: Language) -> list[chat_message_pb2.ChatMessage]:
    parts = [chat_message_pb2.ChatPart(text=_question(language))]
    return [chat_message_pb2.ChatMessage(role=chat_message_pb2.CHAT_ROLE_USER, parts=parts)]


def _question(language: Language) -> str:
    return _PREFACE + language.constraint.text[:_MAX_SHOWN_CHARS]


def _structured_output(constraint: Constraint) -> sampling_pb2.StructuredOutput:
    asked = sampling_pb2.StructuredOutput()
    setattr(asked, constraint.kind.value, constraint.text)
    return asked
