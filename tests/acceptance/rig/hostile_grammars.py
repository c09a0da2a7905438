"""Constraints that cost much, and a process that sends them to a frontend or straight to an engine.

Answers `{"name": NAME, "to": "frontend" or "engine", "round": N, "limit_s": S, "is_plain": BOOL}` with the
statuses of the requests, which have no constraints if they are plain; those that have none within the limit
are cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.rig.lines import Line, answer_lines, give_way, send_line
from triptych_kit.process.setup import prepare_process

prepare_process("client")

import grpc.aio  # noqa: E402  Its import reads what the line above has set.

from triptych.api.v1 import generate_pb2, inference_pb2_grpc  # noqa: E402
from triptych.common.v1 import sampling_pb2  # noqa: E402
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2  # noqa: E402
from triptych_kit.channel import open_channel  # noqa: E402

NUM_DISTINCT = 10_000
NUM_AT_ONCE = 32
_MAX_OPEN = 32
_PROMPT_IDS = (5).to_bytes(4, "little") * 4
_ENDED = "OK"
_Constraint = sampling_pb2.StructuredOutput | None
_MESSAGE_CHARS = 160


def _schema(document: object) -> sampling_pb2.StructuredOutput:
    return sampling_pb2.StructuredOutput(json_schema=json.dumps(document), backend="llguidance")


def _alternatives(depth: int) -> dict[str, object]:
    if not depth:
        return {"type": "string"}
    return {
        "anyOf": [
            {"type": "object", "properties": {f"a{index}": _alternatives(depth - 1)}} for index in range(3)
        ]
    }


def _many_properties(index: int) -> sampling_pb2.StructuredOutput:
    objects = [
        {"type": "object", "properties": {f"p{index}_{number}": {} for number in range(1500)}}
        for _ in range(20)
    ]
    return _schema({"type": "array", "prefixItems": objects})


def _ambiguous(index: int) -> dict[str, str]:
    return {"pattern": f"^((a|b)*a(a|b){{{index}}}|c)$"}


@dataclass(frozen=True, slots=True)
class Load:
    """last_s: within which all requests of the last window end. is_many: requests alone already take the
    cores, so that the windows without the load have as many plain ones.
    """

    num_requests: int
    constraint: Callable[[int], sampling_pb2.StructuredOutput]
    last_s: float = 60.0
    is_many: bool = False


LOADS = {
    "exploding schema": Load(3, lambda index: _many_properties(index)),
    "exploding patterns": Load(
        3, lambda index: _schema({"allOf": [_ambiguous(20 + index + each) for each in range(8)]})
    ),
    "exploding alternatives, xgrammar": Load(
        2,
        lambda index: sampling_pb2.StructuredOutput(
            json_schema=json.dumps({"title": str(index), **_alternatives(6)}), backend="xgrammar"
        ),
    ),
    # Its length is what takes so long.
    "regex of 3 s": Load(3, lambda index: sampling_pb2.StructuredOutput(regex=r"\w" * (400_000 + index))),
    "longest text": Load(3, lambda index: _schema({"const": f"{index}" + 900_000 * "k"})),
    "distinct grammars": Load(
        NUM_DISTINCT,
        lambda index: sampling_pb2.StructuredOutput(regex=f"(a|b){{1,9}}{index}"),
        last_s=180.0,
        is_many=True,
    ),
    "32 at the limit": Load(NUM_AT_ONCE, _many_properties, last_s=180.0),
}


def _harmless(index: int) -> sampling_pb2.StructuredOutput:
    if index % 3 == 0:
        return sampling_pb2.StructuredOutput(regex=f"[a-z]{{5}}{index}", backend="xgrammar")
    return _schema({"enum": [f"value {index} {number}" for number in range(1000 if index % 3 == 1 else 3)]})


# For xgrammar, a large and a small one: starts, once more after their end, the processes that compile.
HARMLESS = "harmless"
_ALL = {**LOADS, HARMLESS: Load(3, _harmless)}


class Sender:
    def __init__(self, frontend: str, engine: str) -> None:
        self._addresses = {"frontend": frontend, "engine": engine}

    async def answer(self, line: Line) -> Line:
        load = _ALL[line["name"]]
        number = load.num_requests
        first = number * line["round"]
        constraints = (
            None if line["is_plain"] else load.constraint(first + index) for index in range(number)
        )
        send = self._to_frontend if line["to"] == "frontend" else self._to_engine
        statuses: list[str] = []
        try:
            async with asyncio.timeout(line["limit_s"]):
                await send(self._addresses[line["to"]], constraints, statuses)
        except grpc.aio.AioRpcError as error:
            statuses += [f"stream {error.code().name}: {error.details()}"] * (number - len(statuses))
        except TimeoutError:
            statuses += ["no answer yet"] * (number - len(statuses))
        counted = Counter(status.partition(":")[0] for status in statuses)
        examples = {status.partition(":")[0]: status for status in statuses}
        return {"statuses": dict(counted), "examples": examples}

    async def _to_frontend(
        self, address: str, constraints: Iterator[_Constraint], statuses: list[str]
    ) -> None:
        async with open_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)

            async def send() -> None:
                for constraint in constraints:
                    sampling = sampling_pb2.SamplingParams(max_tokens=1, structured_output=constraint)
                    request = generate_pb2.GenerateRequest(prompt="x", sampling=sampling)
                    try:
                        async for _ in stub.Generate(request):
                            pass
                        statuses.append(_ENDED)
                    except grpc.aio.AioRpcError as error:
                        statuses.append(_shown(error.code().name, error.details() or ""))

            await asyncio.gather(*(send() for _ in range(_MAX_OPEN)))

    async def _to_engine(self, address: str, constraints: Iterator[_Constraint], statuses: list[str]) -> None:
        """All requests in one session, at most some of them open."""
        async with open_channel(address) as channel:
            call = engine_pb2_grpc.EngineCoreServiceStub(channel).Connect()
            hello = session_pb2.Hello(
                schema_revision=1,
                frontend_id=uuid.uuid4().hex,
                session_id=uuid.uuid4().bytes.hex(),
                frontend_epoch=1,
            )
            await call.write(engine_pb2.ConnectRequest(hello=hello))
            entries = enumerate(constraints)
            num_open = await self._add(call, entries, _MAX_OPEN)
            while num_open:
                response = await call.read()
                if not isinstance(response, engine_pb2.ConnectResponse):
                    raise RuntimeError(f"the engine's stream ended: {await call.details()}")
                ended = [
                    _shown(grpc_name(finished.code), finished.message) if finished.message else _ENDED
                    for finished in response.step.finished
                ]
                if response.HasField("add_rejected"):
                    status = response.add_rejected.status
                    ended.append(_shown(grpc_name(status.code), status.message))
                statuses += ended
                num_open -= len(ended)
                num_open += await self._add(call, entries, len(ended))
            call.cancel()

    async def _add(
        self,
        call: grpc.aio.StreamStreamCall,
        entries: Iterator[tuple[int, _Constraint]],
        number: int,
    ) -> int:
        count = 0
        for _ in range(number):
            index, constraint = next(entries, (-1, None))
            if index < 0:
                break
            sampling = sampling_pb2.SamplingParams(max_tokens=1, structured_output=constraint)
            entry = add_pb2.AddEntry(
                handle=index, request_id=uuid.uuid4().hex, prompt_token_ids=_PROMPT_IDS, sampling=sampling
            )
            await call.write(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[entry])))
            count += 1
        return count


def grpc_name(code: int) -> str:
    return next((each.name for each in grpc.StatusCode if each.value[0] == code), str(code))


def _shown(code: str, message: str) -> str:
    cut = message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]} [{len(message)}]"
    return f"{code}: {cut}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frontend", required=True)
    parser.add_argument("--engine", required=True)
    options = parser.parse_args()
    give_way()
    sender = Sender(options.frontend, options.engine)

    async def run() -> None:
        send_line({"ready": True})
        await answer_lines(sender.answer)

    asyncio.run(run())


if __name__ == "__main__":
    main()
