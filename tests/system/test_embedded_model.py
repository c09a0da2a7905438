"""The model that ships with the package answers through three processes what transformers alone answers."""

from __future__ import annotations

from launcher.services import embedded_model
from tests.system.checkpoints import Reference
from tests.system.generation import collect, request_of
from tests.system.stack import Stack
from triptych.api.v1 import tokenize_pb2, tokenizer_pb2_grpc
from triptych.common.v1 import output_pb2

MAX_TOKENS = 200
QUESTIONS = (
    "Tell me a story about a fox and a lantern.",
    "Tell me a story about a crab and a key.",
    "The box is blue. What colour is the box?",
    "Where is the owl? The owl is in the garden.",
    "Hello",
    "What is a gRPC service?",
)


async def test_greedy_answers_equal_transformers_on_the_packaged_weights() -> None:
    folder = embedded_model()
    prompts = [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS] + ["Once upon a time"]
    reference = Reference(folder)
    async with Stack() as stack:
        trio = await stack.start_all(str(folder), "--num-threads=1")
        stub = stack.inference(trio.frontend)
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(stack.channel(trio.frontend))
        for prompt in prompts:
            ids = (await tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text=prompt), timeout=10)).token_ids
            answer = await collect(stub, request_of(list(ids), MAX_TOKENS, ignore_eos=False))
            expected = reference.generate(list(ids), MAX_TOKENS, stop_at_eos=True)
            assert expected.first_real_difference(answer.token_ids) is None, prompt
            assert answer.reason == output_pb2.FINISH_REASON_STOP, prompt
            assert answer.text.strip(), prompt
