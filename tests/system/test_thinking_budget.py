"""A budget of reasoning on real weights: its end is forced when it is spent, and read as what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from tests.system.checkpoints import CLOSING, OPENING
from tests.system.generation import CALL_LIMIT_S
from tests.system.stack import Stack
from triptych.api.v1 import chat_message_pb2, chat_pb2, chat_pb2_grpc, generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

MAX_TOKENS = 48
# None is no budget, and minus one the same, spelled out.
BUDGETS: tuple[int | None, ...] = (0, 1, 2, 7, 16, 31, 47, -1, None)
QUESTIONS = ("the quick brown fox", "where is the bridge", "the river runs to the old stone bridge " * 4)


@dataclass
class Answered:
    """One whole answer."""

    content: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)


def ask(question: str, budget: int | None, **fields: object) -> chat_message_pb2.ChatRequest:
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, **fields)
    if budget is not None:
        sampling.thinking_token_budget = budget
    part = chat_message_pb2.ChatPart(text=question)
    return chat_message_pb2.ChatRequest(
        messages=[chat_message_pb2.ChatMessage(role=chat_message_pb2.CHAT_ROLE_USER, parts=[part])],
        sampling=sampling,
        template_options=chat_message_pb2.ChatTemplateOptions(enable_thinking=True),
        return_prompt_token_ids=True,
    )


async def read(stub: chat_pb2_grpc.ChatServiceStub, request: chat_message_pb2.ChatRequest) -> Answered:
    answer = Answered()
    async for response in stub.Chat(request, timeout=CALL_LIMIT_S):
        answer.content += response.delta.content
        answer.reasoning += response.delta.reasoning
        answer.token_ids += response.delta.token_ids
        answer.prompt += response.started.prompt_token_ids
    return answer


async def complete(
    stub: inference_pb2_grpc.InferenceServiceStub, prompt: Sequence[int], max_tokens: int, **fields: object
) -> list[int]:
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)
    request = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling=sampling)
    ids: list[int] = []
    async for response in stub.Generate(request, timeout=CALL_LIMIT_S):
        ids += response.delta.token_ids
    return ids


class Text:
    """What tokens say."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.opening, self.closing = (self.id_of(token) for token in (OPENING, CLOSING))

    def id_of(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None
        return token_id

    def of(self, token_ids: Sequence[int]) -> str:
        """The text with the markers that stay in it, and without the token that ends texts."""
        shown = [token_id for token_id in token_ids if token_id != self.id_of("<end>")]
        return self._tokenizer.decode(shown, skip_special_tokens=False)


async def test_127_reasoning_ends_exactly_with_its_budget_in_a_batch_and_is_kept_apart(
    thinking_llama: str,
) -> None:
    text = Text(thinking_llama)
    async with Stack() as stack:
        # Longer prompts are computed in chunks.
        trio = await stack.start_all(thinking_llama, "--max-num-batched-tokens=16")
        stub = chat_pb2_grpc.ChatServiceStub(stack.channel(trio.frontend))
        alone = [await read(stub, ask(question, None)) for question in QUESTIONS]
        asked = [
            (free, question, budget)
            for free, question in zip(alone, QUESTIONS, strict=True)
            for budget in BUDGETS
        ]
        together = await asyncio.gather(
            *(
                read(stub, ask(question, budget, stream_interval=1 + index % 3))
                for index, (_, question, budget) in enumerate(asked)
            )
        )
        inference = inference_pb2_grpc.InferenceServiceStub(stack.channel(trio.frontend))
        goes_on = await asyncio.gather(
            *(
                complete(inference, answer.prompt + answer.token_ids[: budget + 1], MAX_TOKENS - budget - 1)
                for answer, (_, _, budget) in zip(together, asked, strict=True)
                if budget is not None and 0 <= budget < MAX_TOKENS - 1
            )
        )
        unary = await stub.ChatUnary(
            chat_pb2.ChatUnaryRequest(request=ask(QUESTIONS[0], 7)), timeout=CALL_LIMIT_S
        )
    for free in alone:
        assert text.closing not in free.token_ids, "the model must not end its reasoning by itself"
        assert len(set(free.token_ids)) >= 20
        assert (free.content, free.reasoning) == ("", text.of(free.token_ids).strip("\n"))
    for (free, _, budget), answer in zip(asked, together, strict=True):
        if budget is None or budget < 0:
            assert answer == free
            continue
        ids = answer.token_ids
        assert len(ids) == MAX_TOKENS
        assert ids[:budget] == free.token_ids[:budget]
        assert ids.index(text.closing) == budget
        assert answer.reasoning == text.of(ids[:budget]).strip("\n")
        assert answer.content == text.of(ids[budget + 1 :]).lstrip("\n")
    # Behind the end the model goes on as if it had ended by itself.
    limited = [
        (answer.token_ids, budget)
        for answer, (_, _, budget) in zip(together, asked, strict=True)
        if budget is not None and 0 <= budget < MAX_TOKENS - 1
    ]
    for (ids, budget), rest in zip(limited, goes_on, strict=True):
        assert text.opening in rest or ids[budget + 1 :] == rest
    (output,) = unary.outputs
    (seven,) = [
        answer
        for (free, _, budget), answer in zip(asked, together, strict=True)
        if budget == 7 and free is alone[0]
    ]
    assert (output.message.reasoning, output.message.parts[0].text) == (seven.reasoning, seven.content)
    assert list(output.token_ids) == seven.token_ids


async def test_127_each_block_has_the_whole_budget_and_what_the_prompt_has_of_it_counts(thinking_llama):
    text, budget = Text(thinking_llama), 6
    plain = [100, 101, 102]
    async with Stack() as stack:
        trio = await stack.start_all(thinking_llama)
        stub = inference_pb2_grpc.InferenceServiceStub(stack.channel(trio.frontend))

        # All the model may do is open a block, which has nothing to spend.
        reopened = await complete(
            stub, plain, MAX_TOKENS, thinking_token_budget=0, allowed_token_ids=[text.opening]
        )
        spent = [text.opening, *plain * 2, text.closing]
        begun = await complete(
            stub, [*spent, *plain, text.opening, *plain], MAX_TOKENS, thinking_token_budget=budget
        )
        closed = await complete(
            stub, [*spent, *plain], MAX_TOKENS, thinking_token_budget=budget, bad_words=[OPENING]
        )
    assert reopened == [text.opening, text.closing] * (MAX_TOKENS // 2)
    assert begun.index(text.closing) == budget - len(plain)
    assert text.closing not in closed
