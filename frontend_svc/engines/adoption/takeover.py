"""Takes over streams of a frontend that has gone: marks requests for engines to keep, and finds them again.

The ids under which engines keep the outputs of a stream are derived from its resume token: they can be found
with the token and cannot be guessed without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from frontend_svc.engines.adoption.orphaned_requests import Adoptee
from frontend_svc.engines.connection.client import EngineClient, EngineState
from frontend_svc.engines.directory import Directory
from frontend_svc.text.tokenize.id_column import ids_of
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.engine.v1 import add_pb2, engine_pb2
from triptych_kit.clock import Clock
from triptych_kit.errors import FailedPrecondition, NotFound, ServiceError
from triptych_kit.rules import rules_of

TOKEN_CHARACTERS = 32
MAX_RESUME_STATE_BYTES = rules_of(add_pb2.AddEntry, "resume_state").max_bytes
_ID_BYTES = 16
# An engine needs time to notice that a frontend is gone: 2 s if the frontend's host is lost or it hangs.
_ASK_AGAIN_S = 0.05
_MAX_ASKING_S = 4.0
# An engine that this frontend has no stream to may have the request.
_OUT_OF_REACH = frozenset({EngineState.CONNECTING, EngineState.LOADING, EngineState.RECONNECTING})
# A draining engine finishes its requests.
_ASKABLE = frozenset({EngineState.READY, EngineState.DRAINING})


def output_request_id(key: str, output_index: int) -> str:
    """The request id of one output of a stream at the engines, from its token, scoped to its tenant."""
    seed = key.encode() + output_index.to_bytes(4, "little")
    return hashlib.blake2b(seed, digest_size=_ID_BYTES).hexdigest()


def make_resumable(
    entries: Sequence[add_pb2.AddEntry],
    request: generate_pb2.GenerateRequest,
    request_id: str,
    key: str,
    *,
    has_tensors: bool,
) -> None:
    """Mark a stream's requests so that engines keep them for another frontend when this one dies.

    request_id: the id that the client knows.  key: the token of the stream, scoped to its tenant.
    """
    state = b"" if has_tensors else _resume_state(entries[0].request_seed, request, request_id)
    # A request with tensors, which another frontend cannot get, ends with this frontend.
    can_move = 0 < len(state) <= MAX_RESUME_STATE_BYTES
    for index, entry in enumerate(entries):
        entry.request_id = output_request_id(key, index)
        if can_move:
            entry.orphan_grace_ms, entry.resume_state = request.orphan_grace_ms, state


def _resume_state(seed: int, request: generate_pb2.GenerateRequest, request_id: str) -> bytes:
    """The request for another frontend: without its prompt, which engines have, and with its seed."""
    kept = generate_pb2.GenerateRequest()
    kept.CopyFrom(request)
    kept.ClearField("input")
    kept.ClearField("truncate_prompt_tokens")
    kept.request_id = request_id
    kept.sampling.seed = seed
    return kept.SerializeToString()


@dataclass(frozen=True, slots=True)
class AdoptedRequest:
    """A request that was taken over, and its running outputs. An output missing in `outputs` has ended."""

    request: generate_pb2.GenerateRequest
    client: EngineClient
    outputs: Mapping[int, Adoptee]  # by output index

    @property
    def num_attempts(self) -> int:
        """How often the request was sent to an engine."""
        return 1 + max(adoptee.attempt for adoptee in self.outputs.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that all outputs have."""
        return sum(adoptee.outputs.num_tokens for adoptee in self.outputs.values())

    @property
    def size_bytes(self) -> int:
        """Upper bound of the memory that the outputs take while they wait for their reader."""
        return sum(adoptee.outputs.size_bytes for adoptee in self.outputs.values())


class Adoption:
    """Asks engines for the requests of streams whose frontend has gone."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    @contextlib.asynccontextmanager
    async def take_over(
        self,
        token: str,
        received: Mapping[int, inference_pb2.ReceivedOutput],
        is_left: Callable[[], bool] = lambda: False,
        scoped: Callable[[str], str] = str,
    ) -> AsyncGenerator[AdoptedRequest, None]:
        """The request of a stream; aborted after the block if it has not ended. Raises NotFound.

        If `is_left()` is true after the block, the engine keeps it for the next frontend instead. `scoped`
        makes the token as engines know it from the client's.
        """
        key = scoped(token)
        match = await self._find(key, received)
        if match is None:
            raise not_kept(token)
        index, client, first = match
        outputs = {index: first}
        try:
            request = _request_of(token, first)
            for other in range(max(1, request.sampling.n)):
                if other != index:
                    await self._ask_too(client, token, key, other, received, outputs)
            yield AdoptedRequest(request, client, outputs)
        finally:
            # Those that have ended or were moved to another engine are skipped.
            handles = [adoptee.handle for adoptee in outputs.values()]
            if is_left():
                client.requests.adoptions.leave(handles)
            else:
                client.requests.abort(handles, engine_pb2.ABORT_REASON_CLIENT)

    async def _find(
        self, key: str, received: Mapping[int, inference_pb2.ReceivedOutput]
    ) -> tuple[int, EngineClient, Adoptee] | None:
        for index in _probes(received):
            match = await self._ask_all_engines(output_request_id(key, index))
            if match is not None:
                return index, *match
        return None

    async def _ask_all_engines(self, request_id: str) -> tuple[EngineClient, Adoptee] | None:
        give_up_at = self._clock.now() + _MAX_ASKING_S
        while True:
            clients = self._directory.clients()
            # A frontend that has just started knows no engine yet.
            may_have_it = not clients or any(client.state in _OUT_OF_REACH for client in clients)
            for client in clients:
                if (
                    client.state not in _ASKABLE
                    or client.model is None
                    or not client.requests.adoptions.are_possible
                ):
                    continue
                try:
                    return client, await client.requests.adoptions.ask(request_id)
                except NotFound:
                    continue
                except FailedPrecondition:
                    may_have_it = True
                except ServiceError:
                    # The engine is lost or full: a retry may succeed, or the request is lost with the engine.
                    may_have_it = True
            if not may_have_it or self._clock.now() >= give_up_at:
                return None
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _ask_too(
        self,
        client: EngineClient,
        token: str,
        key: str,
        index: int,
        received: Mapping[int, inference_pb2.ReceivedOutput],
        outputs: dict[int, Adoptee],
    ) -> None:
        try:
            outputs[index] = await client.requests.adoptions.ask(output_request_id(key, index))
        except ServiceError as error:
            if not (isinstance(error, NotFound) and _is_finished(received, index)):
                raise not_kept(token) from error


def not_kept(token: str) -> NotFound:
    """The error for a token without a kept stream."""
    return NotFound(
        "no stream with this resume_token is kept: it ended, its grace is over, or it cannot be continued by "
        "another frontend process than its own",
        resource_type="stream",
        resource_name=token,
    )


def _probes(received: Mapping[int, inference_pb2.ReceivedOutput]) -> Iterator[int]:
    """Outputs to ask for: the first unfinished one, which is kept if any is, then the first."""
    unfinished = next(index for index in range(len(received) + 1) if not _is_finished(received, index))
    yield unfinished
    if unfinished:
        yield 0


def _is_finished(received: Mapping[int, inference_pb2.ReceivedOutput], index: int) -> bool:
    return index in received and received[index].is_finished


def _request_of(token: str, adoptee: Adoptee) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest()
    try:
        request.ParseFromString(adoptee.resume_state)
    except DecodeError as error:
        raise not_kept(token) from error
    request.token_ids.ids.extend(ids_of(adoptee.prompt_token_ids))
    return request
