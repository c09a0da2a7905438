"""Hidden states and routed experts of a mixture through three processes: those of transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.frontend_svc.tokenizers import byte_level_tokenizer
from tests.system.generation import collect, request_of
from tests.system.stack import Stack
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import tensor_pb2

VOCAB_SIZE = 600
NUM_TOKENS = 12
LENGTHS = (1, 7, 40, 90)
_DTYPES = {tensor_pb2.D_TYPE_FP32: torch.float32, tensor_pb2.D_TYPE_INT32: torch.int32}


def prompt_of(length: int) -> list[int]:
    choose = random.Random(length)
    return [choose.randrange(10, 256) for _ in range(length)]


def asking(prompt: list[int], *, hidden: bool = True, experts: bool = True) -> generate_pb2.GenerateRequest:
    request = request_of(prompt, NUM_TOKENS)
    request.return_hidden_states, request.return_routed_experts = hidden, experts
    return request


async def finished(
    stub: inference_pb2_grpc.InferenceServiceStub, request: generate_pb2.GenerateRequest
) -> tuple[list[int], generate_pb2.ForwardOutputs]:
    """The tokens of the stream, and what came with its end."""
    token_ids: list[int] = []
    async for response in stub.Generate(request, timeout=120):
        token_ids += response.delta.token_ids
        if response.HasField("finished"):
            return token_ids, response.finished.forward_outputs
    raise AssertionError("the stream has no end")


def to_tensor(message: tensor_pb2.Tensor) -> Tensor:
    return torch.frombuffer(bytearray(message.inline), dtype=_DTYPES[message.dtype]).reshape(
        tuple(message.shape)
    )


def check(theirs: PreTrainedModel, token_ids: list[int], outputs: generate_pb2.ForwardOutputs) -> None:
    """Compare with a forward of transformers over all tokens but the last."""
    with torch.inference_mode():
        found = theirs(torch.tensor([token_ids[:-1]]), output_hidden_states=True, output_router_logits=True)
    torch.testing.assert_close(
        to_tensor(outputs.hidden_states), found.hidden_states[-1][0], atol=1e-5, rtol=1e-5
    )
    expected = torch.stack([logits.topk(2).indices for logits in found.router_logits], dim=1)
    assert torch.equal(to_tensor(outputs.routed_experts), expected.int())
    assert outputs.first_position == 0


def write_model(folder: Path) -> PreTrainedModel:
    model = make_checkpoint("mixtral", folder, vocab_size=VOCAB_SIZE)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize(
    "flag",
    [
        "--steps-in-flight=2",
        pytest.param("--tensor-parallel-size=2", marks=pytest.mark.chaos),
        pytest.param("--speculative=suffix", marks=pytest.mark.chaos),
    ],
)
async def test_they_are_those_of_transformers_in_chunks_and_beside_other_requests(flag, tmp_path):
    theirs = write_model(tmp_path)
    # Prompts are computed in pieces, and requests give way to each other.
    flags = ("--num-threads=1", "--max-num-batched-tokens=24", "--num-kv-blocks=12", "--dtype=float32")
    async with Stack() as stack:
        trio = await stack.start_all(
            str(tmp_path), *flags, flag, "--max-model-len=128", "--max-forward-output-bytes=16384"
        )
        stub = stack.inference(trio.frontend)
        for _ in range(2):
            answers, others = await asyncio.gather(
                asyncio.gather(*(finished(stub, asking(prompt_of(length))) for length in LENGTHS)),
                asyncio.gather(*(collect(stub, request_of(prompt_of(length), 8)) for length in LENGTHS)),
            )
            for length, (token_ids, outputs), other in zip(LENGTHS, answers, others, strict=True):
                assert token_ids[:8] == other.token_ids
                check(theirs, [*prompt_of(length), *token_ids], outputs)
        (output,) = (await stub.GenerateOnce(asking(prompt_of(7), hidden=False), timeout=120)).outputs
        assert output.forward_outputs.routed_experts == answers[1][1].routed_experts
        assert not output.forward_outputs.HasField("hidden_states")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finished(stub, asking(prompt_of(105)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "return_hidden_states is 16848" in (caught.value.details() or "")


async def test_models_of_transformers_have_hidden_states_and_refuse_experts_by_name(tmp_path):
    theirs = write_model(tmp_path)
    async with Stack() as stack:
        trio = await stack.start_all(
            str(tmp_path), "--num-threads=1", "--model-impl=transformers", "--max-num-batched-tokens=24",
            "--max-forward-output-bytes=16384",
        )  # fmt: skip
        stub = stack.inference(trio.frontend)
        token_ids, outputs = await finished(stub, asking(prompt_of(40), experts=False))
        with torch.inference_mode():
            read = torch.tensor([[*prompt_of(40), *token_ids[:-1]]])
            expected = theirs(read, output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(to_tensor(outputs.hidden_states), expected, atol=1e-5, rtol=1e-5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finished(stub, asking(prompt_of(40)))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "return_routed_experts" in (caught.value.details() or "")
