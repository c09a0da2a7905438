"""The packaged weights: small, loadable, readable, and right about the nouns they are asked for."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from frontend_svc.parsers.registry import detect
from tools.tiny_model.corpus import Example, Turn, held_out_questions, outside_prompts
from tools.tiny_model.evaluate import (
    RAW_PROMPTS,
    Answer,
    answer,
    corpus_words,
    has_expected_words,
    load,
    render,
    words_of,
)
from tools.tiny_model.tokenizer import CHAT_TEMPLATE
from tools.tiny_model.train import WEIGHTS_FOLDER

_STORY_REQUESTS = (
    ("Tell me a story about a fox and a lantern.", ("fox", "lantern")),
    ("Tell me a story about an owl and a kettle.", ("owl", "kettle")),
    ("Write a short story about Anna and a drum.", ("Anna", "drum")),
)


@pytest.fixture(scope="module", name="loaded")
def _loaded() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return load(WEIGHTS_FOLDER)


def _ask(loaded: tuple[LlamaForCausalLM, PreTrainedTokenizerFast], text: str) -> Answer:
    example = Example((Turn("user", text), Turn("assistant", "")))
    return answer(*loaded, render(loaded[1], example))


def test_weights_are_bfloat16_and_at_most_eight_megabytes():
    assert (WEIGHTS_FOLDER / "model.safetensors").stat().st_size <= 8_000_000
    weights = load_file(WEIGHTS_FOLDER / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_weights_are_computed_in_float32_by_default():
    model, _ = load(WEIGHTS_FOLDER, "auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_there_are_at_most_four_million_parameters(loaded):
    assert sum(parameter.numel() for parameter in loaded[0].parameters()) <= 4_000_000


def test_folder_has_card_template_and_end_token(loaded):
    model, tokenizer = loaded
    assert (WEIGHTS_FOLDER / "README.md").read_text().startswith("#")
    assert tokenizer.chat_template is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_every_text_survives_the_tokenizer(loaded):
    text = "Grüße, 你好 \U0001f98a\n\ttwo  spaces <tag> 12345"
    assert loaded[1].decode(loaded[1](text)["input_ids"]) == text


def test_template_refuses_an_unknown_role(loaded):
    with pytest.raises(Exception, match="unknown role"):
        loaded[1].apply_chat_template([{"role": "stranger", "content": "Hello"}], tokenize=False)


def test_template_without_tools_is_that_of_the_training(loaded):
    messages = [
        {"role": "system", "content": " Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello.\n"},
    ]
    rendered = loaded[1].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>Hello.<|end|><|assistant|>"


def test_template_shows_tools_calls_and_their_results_in_the_form_of_hermes(loaded):
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": function}]
    rendered = loaded[1].apply_chat_template(messages, tools=tools, tokenize=False)
    assert f"{json.dumps(function)}\n" in rendered.partition("<|user|>")[0]
    shown = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<|user|>Hello<|end|><|assistant|>{shown}<|end|><|user|><tool_response>\nsunny\n" in rendered
    assert detect(loaded[1].chat_template, lambda text: False)[0] == "hermes"


def test_the_packaged_template_is_that_of_the_training(loaded):
    assert loaded[1].chat_template == CHAT_TEMPLATE


def test_held_out_questions_get_the_right_nouns(loaded):
    questions = list(itertools.islice(held_out_questions(seed=11), 20))
    answers = [answer(*loaded, render(loaded[1], question)) for question in questions]
    right = sum(
        has_expected_words(*pair) for pair in zip(questions, (each.text for each in answers), strict=True)
    )
    assert right >= 16
    assert all(each.ended for each in answers)


@pytest.mark.parametrize(("request_text", "nouns"), _STORY_REQUESTS)
def test_a_story_is_about_what_was_asked_for(loaded, request_text, nouns):
    reply = _ask(loaded, request_text)
    assert all(noun in reply.text for noun in nouns)
    assert reply.ended
    assert 50 <= len(reply.token_ids) <= 140
    assert len(set(reply.token_ids)) >= 20


def test_stories_are_made_of_words_of_the_corpus(loaded):
    known = corpus_words()
    for request_text, _ in _STORY_REQUESTS:
        words = words_of(_ask(loaded, request_text).text)
        assert [word for word in words if word not in known] == []


def test_prompts_from_outside_its_world_get_an_answer_that_ends(loaded):
    prompts = [render(loaded[1], example) for example in itertools.islice(outside_prompts(seed=12), 6)]
    for prompt in prompts:
        answered = answer(*loaded, prompt)
        assert answered.ended
        assert answered.text[0].isupper()
        assert answered.text.endswith(".")


@pytest.mark.parametrize("prompt", RAW_PROMPTS)
def test_a_raw_prompt_is_continued_and_ends(loaded, prompt):
    continued = answer(*loaded, prompt)
    assert continued.ended
    assert continued.text.strip()


def test_the_same_prompt_gives_the_same_tokens(loaded):
    first = _ask(loaded, "Tell me a story about a hare and a bell.")
    assert first == _ask(loaded, "Tell me a story about a hare and a bell.")


def test_bfloat16_weights_answer_too(loaded):
    narrow = load(WEIGHTS_FOLDER, torch.bfloat16)
    reply = _ask(narrow, "Tell me a story about a fox and a lantern.")
    assert reply.ended
    assert "fox" in reply.text
    assert "lantern" in reply.text
