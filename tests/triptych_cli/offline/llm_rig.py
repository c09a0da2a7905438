"""A frontend of fakes for the offline facade, and real processes for it, both for tests that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial

from tests.system.stack import Stack, address_of
from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2,
    chat_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    generate_pb2,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenize_pb2,
    tokenizer_pb2_grpc,
)
from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych_cli.engines.loop_thread import LoopThread
from triptych_kit.errors import InvalidArgument, ResourceExhausted
from triptych_kit.process.child import Child
from triptych_kit.server import PUBLIC, Registration, Server

VOCAB_SIZE = 100
MAX_MODEL_LEN = 32


class FakeFrontend(
    inference_pb2_grpc.InferenceServiceServicer,
    chat_pb2_grpc.ChatServiceServicer,
    embedding_pb2_grpc.EmbeddingServiceServicer,
    tokenizer_pb2_grpc.TokenizerServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
):
    """A token is a character's code modulo the vocabulary; an answer is the prompt backwards."""

    def __init__(self, tasks: tuple[str, ...]) -> None:
        self.tasks = tasks
        self.requests: list = []
        self.num_refusals = 0  # so many requests are refused with RESOURCE_EXHAUSTED first
        # A prompt that begins with this id is never answered, and what is refused waits for it to come.
        self.hangs_on: int | None = None
        self.on_hang: Callable[[], None] = lambda: None
        self.was_cancelled = threading.Event()
        self._hanging = asyncio.Event()

    async def GetModel(self, request, context):
        sampling = sampling_pb2.SamplingParams(temperature=0.5, top_k=7)
        model = model_pb2.Model(
            name=request.model or "only",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            supported_tasks=self.tasks,
            default_sampling=sampling,
        )
        return model_pb2.GetModelResponse(model=model)

    async def Tokenize(self, request, context):
        ids = [ord(character) % VOCAB_SIZE for character in request.text]
        special = [0] if request.add_special_tokens else []
        return tokenize_pb2.TokenizeResponse(token_ids=special + ids)

    async def Detokenize(self, request, context):
        return tokenize_pb2.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    async def GenerateOnce(self, request, context):
        if self.num_refusals:
            self.num_refusals -= 1
            raise ResourceExhausted("full", retry_after_ms=1)
        self.requests.append(request)
        ids = list(request.token_ids.ids)
        if request.sampling.n > 64:
            if self.hangs_on is not None:
                await self._hanging.wait()
            raise InvalidArgument("n is 100, must be in 1..64", field="sampling.n")
        if ids[0] == self.hangs_on:
            await self._hang()
        started = generate_pb2.Started(
            request_id=request.request_id, num_prompt_tokens=len(ids), prompt_token_ids=ids
        )
        output = generate_pb2.Output(
            token_ids=ids[::-1], text="".join(map(str, ids[::-1])), reason=output_pb2.FINISH_REASON_LENGTH
        )
        usage = output_pb2.Usage(num_prompt_tokens=len(ids), num_completion_tokens=len(ids))
        return inference_pb2.GenerateUnaryResponse(started=started, outputs=[output], usage=usage)

    async def ChatOnce(self, request, context):
        self.requests.append(request)
        texts = [part.text for message in request.messages for part in message.parts]
        message = request.messages[-1]
        answer = type(message)(
            parts=[type(message.parts[0])(text=" ".join(texts))],
            reasoning="because",
            tool_calls=[{"id": "1", "name": "look", "arguments_json": "{}"}],
        )
        output = chat_message_pb2.ChatOutput(
            message=answer, token_ids=[1], reason=output_pb2.FINISH_REASON_STOP
        )
        return chat_pb2.ChatUnaryResponse(
            started=generate_pb2.Started(request_id=request.request_id), outputs=[output]
        )

    async def Embed(self, request, context):
        self.requests.append(request)
        rows = [_tensor([float(len(one.prompt)), 0.5]) for one in request.inputs]
        if request.pooling.task == sampling_pb2.POOLING_TASK_TOKEN_EMBED:
            rows = [_tensor([1.0, 2.0, 3.0, 4.0], shape=[2, 2]) for _ in request.inputs]
        return embedding_pb2.EmbedResponse(embeddings=rows)

    async def Classify(self, request, context):
        self.requests.append(request)
        results = [_tensor([0.25, 0.75]) for _ in request.inputs]
        return embedding_pb2.ClassifyResponse(results=results, labels=["no", "yes"])

    async def Score(self, request, context):
        self.requests.append(request)
        return embedding_pb2.ScoreResponse(scores=[float(len(one.prompt)) for one in request.documents])

    async def _hang(self) -> None:
        self._hanging.set()
        try:
            self.on_hang()
            await asyncio.Event().wait()
        finally:
            self.was_cancelled.set()


@contextlib.contextmanager
def fake_frontend(*tasks: str) -> Iterator[tuple[FakeFrontend, str]]:
    """A fake frontend on a port of the kernel's choice, in a thread of its own, and where it listens."""
    frontend = FakeFrontend(tasks or ("generate",))
    adders = {
        "InferenceService": inference_pb2_grpc.add_InferenceServiceServicer_to_server,
        "ChatService": chat_pb2_grpc.add_ChatServiceServicer_to_server,
        "EmbeddingService": embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server,
        "TokenizerService": tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server,
        "ModelService": model_pb2_grpc.add_ModelServiceServicer_to_server,
    }
    thread = LoopThread("fake-frontend")

    async def start() -> tuple[Server, str]:
        registrations = [
            Registration(f"triptych.api.v1.{name}", partial(add, frontend)) for name, add in adders.items()
        ]
        server = Server(listen="127.0.0.1:0", registrations=registrations, profile=PUBLIC, service="frontend")
        return server, await server.start()

    server, address = thread.call(start())
    try:
        yield frontend, address
    finally:
        thread.call(server.stop(0))
        thread.close()


@contextlib.contextmanager
def frontend_process(model: str, *engine_flags: str) -> Iterator[str]:
    """The address of a real frontend process with a real engine process behind it."""
    thread = LoopThread("processes")
    stack = Stack()

    async def start() -> Child:
        engine = await stack.start("engine", model, "--port=0", *engine_flags)
        frontend = await stack.start("frontend", "--port=0", f"--engine={address_of(engine)}")
        await stack.ready("frontend", frontend)
        return frontend

    try:
        yield address_of(thread.call(start()))
    finally:
        thread.call(stack.__aexit__(None, None, None))
        thread.close()


def _tensor(values: list[float], *, shape: list[int] | None = None) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        dtype=tensor_pb2.D_TYPE_FP32, shape=shape or [len(values)], inline=array("f", values).tobytes()
    )
