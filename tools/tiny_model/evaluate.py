"""The figures of the embedded model's card: `python -m tools.tiny_model.evaluate`. Knows no training."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.tiny_model.corpus import (
    Example,
    held_out_questions,
    held_out_stories,
    outside_prompts,
    training_examples,
)
from tools.tiny_model.train import WEIGHTS_FOLDER

_SEED = 4_242
_MAX_NEW_TOKENS = 200
RAW_PROMPTS = (
    "Once upon a time",
    "One day the fox",
    "The",
    "In the forest",
    "Long ago",
    "My name is Anna",
    "Hello",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's continuation of a prompt."""

    text: str
    token_ids: tuple[int, ...]
    ended: bool  # by itself, with the end token


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares are of all prompts of their kind; greedy decoding."""

    num_questions: int
    right_answers: float  # every expected word is in the answer
    right_nouns: float  # of all expected words, how many are in their answers
    num_stories: int
    stories_with_both_nouns: float
    mean_story_tokens: float
    fewest_distinct_story_tokens: int
    num_outside_prompts: int
    ended: float  # of all the prompts above and the raw ones
    known_words: float  # of the words of all answers to questions and story requests
    same_in_bfloat16: float  # of the answers to questions and story requests


def load(
    folder: Path, dtype: torch.dtype | str = torch.float32
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model and its tokenizer, ready to answer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.train(False), PreTrainedTokenizerFast.from_pretrained(folder)


def render(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    """The example as a prompt, its last answer left out."""
    messages = [{"role": turn.role, "content": turn.text} for turn in example.turns[:-1]]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> Answer:
    """The greedy continuation of a prompt."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        # The stubs ask for a protocol that the class itself does not match.
        output = model.generate(**inputs, max_new_tokens=_MAX_NEW_TOKENS, do_sample=False)  # type: ignore[misc]
    ids = output[0].tolist()
    written = ids[inputs["input_ids"].shape[1] :]
    return Answer(
        str(tokenizer.decode(written, skip_special_tokens=True)),
        tuple(written),
        written[-1] == tokenizer.eos_token_id,
    )


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"[a-z]+|\d+", text.lower())


def corpus_words(num_examples: int = 20_000) -> frozenset[str]:
    """Every word that stands in the answers and plain texts of the corpus."""
    examples = itertools.islice(training_examples(_SEED), num_examples)
    return frozenset(
        word
        for example in examples
        for turn in example.turns
        if turn.role != "user"
        for word in words_of(turn.text)
    )


def has_expected_words(example: Example, text: str) -> bool:
    """Whether all the words that the answer must hold are in the text."""
    return all(expected in text for expected in example.expects)


def measure(folder: Path, num_questions: int, num_stories: int) -> Figures:
    """All the figures, from prompts whose noun pairs training never showed."""
    model, tokenizer = load(folder)
    questions = list(itertools.islice(held_out_questions(_SEED), num_questions))
    stories = list(itertools.islice(held_out_stories(_SEED), num_stories))
    outside = list(itertools.islice(outside_prompts(_SEED), num_stories))
    prompts = [render(tokenizer, example) for example in questions + stories + outside]
    answers = [answer(model, tokenizer, prompt) for prompt in (*prompts, *RAW_PROMPTS)]
    to_questions, to_stories = answers[:num_questions], answers[num_questions : num_questions + num_stories]
    _show_wrong(questions, to_questions)
    known = corpus_words()
    narrow, _ = load(folder, torch.bfloat16)
    compared = [*to_questions, *to_stories]
    same = [
        answer(narrow, tokenizer, prompt) == wide for prompt, wide in zip(prompts, compared, strict=False)
    ]
    return Figures(
        num_questions=num_questions,
        right_answers=_share(has_expected_words(*pair) for pair in _texts(questions, to_questions)),
        right_nouns=_share(
            word in text for example, text in _texts(questions, to_questions) for word in example.expects
        ),
        num_stories=num_stories,
        stories_with_both_nouns=_share(has_expected_words(*pair) for pair in _texts(stories, to_stories)),
        mean_story_tokens=sum(len(each.token_ids) for each in to_stories) / num_stories,
        fewest_distinct_story_tokens=min(len(set(each.token_ids)) for each in to_stories),
        num_outside_prompts=len(outside),
        ended=_share(each.ended for each in answers),
        known_words=_share(word in known for each in compared for word in words_of(each.text)),
        same_in_bfloat16=_share(same),
    )


def _texts(examples: list[Example], answers: list[Answer]) -> list[tuple[Example, str]]:
    return [(example, given.text) for example, given in zip(examples, answers, strict=True)]


def _share(truths: Iterable[bool]) -> float:
    counted = [bool(truth) for truth in truths]
    return sum(counted) / len(counted)


def _show_wrong(questions: list[Example], answers: list[Answer], limit: int = 10) -> None:
    wrong = [pair for pair in _texts(questions, answers) if not has_expected_words(*pair)]
    for example, text in wrong[:limit]:
        print(f"wrong: {example.turns[-2].text!r}\n   -> {text!r}, not {example.turns[-1].text!r}")


def main() -> None:
    """Print the figures of a weights folder as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=WEIGHTS_FOLDER)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--stories", type=int, default=60)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.model, arguments.questions, arguments.stories)), indent=2))


if __name__ == "__main__":
    main()
