"""`Session`: turns of `LLM` over one stream, each of which continues all tokens before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import sampling_pb2
from triptych_cli.offline.inputs import Prompt, read_prompts
from triptych_cli.offline.params import SamplingParams
from triptych_cli.offline.results import RequestResult, to_result
from triptych_cli.vllm_names import checks_arguments
from triptych_kit.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    ServiceError,
    rpc_errors_translated,
)

Message = inference_pb2.GenerateSessionRequest


class SessionCall:
    """A call of GenerateSession, in the event loop. Its task is the call's: turns are awaited by others."""

    def __init__(
        self,
        generate_session: Callable[[AsyncIterator[Message]], Any],
        while_alive: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]],
        timeout_s: float | None,
    ) -> None:
        self._timeout_s = timeout_s
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        # None: the call has ended.
        self._received: asyncio.Queue[inference_pb2.GenerateSessionResponse | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(while_alive(self._run(generate_session)))
        self._task.add_done_callback(lambda task: self._received.put_nowait(None))

    async def turn(self, message: Message) -> inference_pb2.GenerateUnaryResponse:
        """Send an input, and wait for its whole answer. Raises the error that has ended the call.

        A wait that ends early ends the call.
        """
        self._sent.put_nowait(message)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._answer()
        except TimeoutError as error:
            self._task.cancel()
            raise DeadlineExceeded(f"no answer within timeout_s, {self._timeout_s} s") from error
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def close(self) -> None:
        """End the call, and the turn that runs."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self, generate_session: Callable[[AsyncIterator[Message]], Any]) -> None:
        with rpc_errors_translated():
            async for response in generate_session(self._messages()):
                self._received.put_nowait(response)

    async def _messages(self) -> AsyncIterator[Message]:
        while (message := await self._sent.get()) is not None:
            yield message

    async def _answer(self) -> inference_pb2.GenerateUnaryResponse:
        answer = inference_pb2.GenerateUnaryResponse()
        output = generate_pb2.Output()
        while True:
            response = (await self._next()).response
            if response.HasField("started"):
                answer.started.CopyFrom(response.started)
            elif response.HasField("delta"):
                _copy_common(response.delta, output)
            elif response.HasField("finished"):
                _copy_common(response.finished, output)
                answer.usage.CopyFrom(response.finished.usage)
                answer.outputs.append(output)
                return answer

    async def _next(self) -> inference_pb2.GenerateSessionResponse:
        response = await self._received.get()
        if response is not None:
            return response
        self._received.put_nowait(None)
        with contextlib.suppress(asyncio.CancelledError):
            self._task.result()
        raise Cancelled("the session has ended")


class Session:
    """Turns of one session, one at a time. An error ends it, as does `close`."""

    def __init__(
        self,
        start: Callable[[], SessionCall],
        request: generate_pb2.GenerateRequest,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        """request: that of the first turn, without its input. run: waits for work in the event loop."""
        self._request = request
        self._run = run
        self._has_begun = False
        self._call: SessionCall = run(_called(start))

    @checks_arguments
    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestResult:
        """Add `prompt`, a text or token ids, to the tokens so far, and continue them.

        Without `sampling_params` those of the turn before stay.
        """
        inputs = read_prompts(prompt, "prompt")
        if len(inputs) != 1:
            raise InvalidArgument(
                f"prompt has {len(inputs)} entries, must be one text or one list of token ids"
            )
        (text_or_ids,) = inputs
        if not (sampling_params is None or isinstance(sampling_params, SamplingParams)):
            raise InvalidArgument(f"sampling_params is {sampling_params!r}, must be SamplingParams")
        message = Message()
        target: Any = message.append if self._has_begun else message.start
        if not self._has_begun:
            target.CopyFrom(self._request)
        if text_or_ids.text is not None:
            target.prompt = text_or_ids.text
        else:
            target.token_ids.ids.extend(text_or_ids.token_ids)
        if sampling_params is not None:
            target.sampling.CopyFrom(sampling_params.to_proto())
        if sampling_params is not None or not self._has_begun:
            # One message has the whole output.
            target.sampling.output_kind = sampling_pb2.OUTPUT_KIND_FINAL_ONLY
        self._has_begun = True
        return to_result(self._run(self._call.turn(message)), text_or_ids.text)

    def close(self) -> None:
        """End it, and free the blocks that an engine keeps for it."""
        # Where the engine is dead or `LLM` is closed it has ended.
        with contextlib.suppress(ServiceError):
            self._run(self._call.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _called(start: Callable[[], SessionCall]) -> SessionCall:
    return start()


def _copy_common(part: generate_pb2.Delta | generate_pb2.Finished, output: generate_pb2.Output) -> None:
    """Set the fields of an output that a part of its stream has, by their names."""
    for field, value in part.ListFields():
        if field.name not in generate_pb2.Output.DESCRIPTOR.fields_by_name:
            continue
        if field.is_repeated:
            getattr(output, field.name).extend(value)
        elif field.message_type is not None:
            getattr(output, field.name).CopyFrom(value)
        else:
            setattr(output, field.name, value)
