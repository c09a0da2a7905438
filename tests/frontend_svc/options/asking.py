"""Requests that go through every option of the list, without workers and engines."""

from __future__ import annotations

import asyncio

from tokenizers import Tokenizer

from frontend_svc.generation.caller import LOCAL_CALLER
from frontend_svc.generation.preprocess import Prepared, check_request, prepare
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import GenerationDefaults, ServedModel
from frontend_svc.text.prompt import RequestPrompt
from tests.frontend_svc.fakes import make_request
from tests.frontend_svc.tokenizers import byte_level_tokenizer
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument

VOCAB_SIZE = 600
LIMITS = RequestLimits()
PLAIN = GenerationDefaults()
BYTE_LEVEL = byte_level_tokenizer()


class Encoder:
    """Tokenizes at once."""

    token_texts = None

    def __init__(self, tokenizer: Tokenizer = BYTE_LEVEL) -> None:
        self._tokenizer = tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def model_of(
    defaults: GenerationDefaults = PLAIN, max_model_len: int = 1001, **fields: object
) -> ServedModel:
    return ServedModel(
        name="tiny",
        text_key="k",
        fingerprint="f",
        tokenizer=Encoder(),
        defaults=defaults,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        **fields,
    )


def breaches(
    limits: RequestLimits = LIMITS, defaults: GenerationDefaults = PLAIN, **fields: object
) -> dict[str, str]:
    """What is wrong with these parameters: description by field."""
    request = make_request([5], **fields)
    try:
        asyncio.run(check_request(request, RequestPrompt(request), model_of(defaults), limits))
    except InvalidArgument as error:
        return dict(error.violations)
    return {}


async def prepared(model: ServedModel, /, num_prompt_tokens: int = 1, **fields: object) -> Prepared:
    """A request that is not checked."""
    request = make_request([5] * num_prompt_tokens, **fields)
    return await prepare(request, RequestPrompt(request), model, LOCAL_CALLER)


async def completed(
    defaults: GenerationDefaults = PLAIN, max_new_tokens: int = 1000, **fields: object
) -> sampling_pb2.SamplingParams:
    """What the engine gets of these parameters for the first output."""
    model = model_of(defaults, max_new_tokens + 1)
    return (await prepared(model, **fields)).entries[0].sampling
