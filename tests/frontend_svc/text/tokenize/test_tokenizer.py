"""A model's tokenizer over text workers, and what is known without tokenizing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from frontend_svc.text.workers.workers import TextWorkers
from tests.frontend_svc.tokenizers import SAMPLES, byte_level_tokenizer, tokenizer_over


@pytest.fixture
async def workers() -> AsyncIterator[TextWorkers]:
    workers = TextWorkers(1)
    yield workers
    await workers.close()


async def test_the_lower_bound_holds(workers):
    tokenizer = tokenizer_over(workers, byte_level_tokenizer())
    for sample in SAMPLES:
        ids = await tokenizer.encode(sample * 20, add_special_tokens=True)
        assert 0 < tokenizer.min_num_tokens(sample * 20) <= len(ids)


async def test_settings_of_a_tokenizer_file_do_not_cut_prompts(workers):
    raw = byte_level_tokenizer()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    tokenizer = tokenizer_over(workers, raw)
    text = "the cat sat on the mat and the dog"
    ids = await tokenizer.encode(text, add_special_tokens=True)
    assert await tokenizer.decode(ids, skip_special_tokens=False) == text


async def test_places_are_those_of_the_library(workers):
    raw = byte_level_tokenizer()
    tokenizer = tokenizer_over(workers, raw)
    for text in (*SAMPLES, ""):
        expected = raw.encode(text, add_special_tokens=True)
        encoded = await tokenizer.encode_with_places(text, add_special_tokens=True)
        assert encoded.ids == expected.ids
        assert encoded.tokens == expected.tokens
        assert list(zip(encoded.starts, encoded.ends, strict=True)) == expected.offsets


async def test_a_model_without_a_template_chats_as_its_vocabulary_allows(workers):
    conversation = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
    plain = tokenizer_over(workers, byte_level_tokenizer())
    assert await plain.render(conversation, max_chars=100) == "user: hi\nassistant:"
    raw = byte_level_tokenizer()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    text, ids = await tokenizer_over(workers, raw).render_and_encode(conversation, max_chars=100)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == raw.encode(text, add_special_tokens=False).ids
    assert raw.token_to_id("<|im_start|>") in ids
