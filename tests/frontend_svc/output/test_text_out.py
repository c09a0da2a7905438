"""Streamed text beside a one-shot decode cut at the same place: random texts, steps and stop strings."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer

from frontend_svc.output.collector import Collector, Ending, EndReason, OutputKind, ReaderLimit
from frontend_svc.output.processor import OutputProcessor, StepColumns
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from tests.frontend_svc.tokenizers import (
    SAMPLES,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    unigram_tokenizer,
    word_piece_tokenizer,
)

NUM_TEXTS = 1000
KINDS = {
    "byte-level BPE": byte_level_tokenizer(),
    "BPE with byte fallback": byte_fallback_tokenizer(),
    "Unigram": unigram_tokenizer(),
    "WordPiece": word_piece_tokenizer(),
}
LETTERS = "".join(SAMPLES) + "abcdefghij     \n\t😀🎉👩‍👩‍👧‍👦🇯🇵é日本한עב"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt's outputs and the stop strings they have in common."""

    prompt: list[int]
    outputs: list[list[int]]
    stops: list[str]
    include: bool


def specials(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def new_case(rng: random.Random, tokenizer: Tokenizer) -> Case:
    prompt = tokenizer.encode(random_text(rng, 12)).ids
    outputs = [random_ids(rng, tokenizer) for _ in range(rng.choice((1, 2)))]
    stops = []
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        source = (
            one_shot(tokenizer, prompt, rng.choice(outputs)) if rng.random() < 0.8 else random_text(rng, 9)
        )
        start = rng.randrange(len(source)) if source else 0
        stop = source[start : start + rng.randint(1, 7)]
        stops += [stop] if stop else []
    return Case(prompt, outputs, stops, rng.random() < 0.3)


def random_text(rng: random.Random, num_chars: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, num_chars)))


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    # A decoder with byte tokens makes marks of all bytes of a run when a later one does not fit, so that only
    # what was once a text can be streamed.
    revises = tokenizer.token_to_id("<0x00>") is not None
    if revises or rng.random() < 0.75:
        return tokenizer.encode(random_text(rng, 60)).ids
    # Any ids at all: halves of characters, special tokens, pieces that no text would be cut into.
    return [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 40))]


def one_shot(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of `ids` behind `prompt`, decoded at once."""
    hidden = specials(tokenizer)
    before = [token_id for token_id in prompt if token_id not in hidden]
    shown = [token_id for token_id in ids if token_id not in hidden]
    return tokenizer.decode(before + shown)[len(tokenizer.decode(before)) :]


def cut(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """`text` up to the stop string that completes first, found character by character."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text.endswith(stop, 0, end) and end >= len(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


async def stream(rng: random.Random, tokenizer: Tokenizer, case: Case) -> list[tuple[str, list[int], Ending]]:
    """What a client puts together, per output: text, ids and end. The reader reads now and then."""
    n = len(case.outputs)
    collector = Collector(OutputKind.DELTA, n, stream_interval=1, limit=ReaderLimit(), on_slow=lambda: None)
    processor = OutputProcessor(on_end=lambda handle: None)
    for index in range(n):
        state = RequestState(
            collector,
            Detokenizer(tokenizer, case.prompt, special_ids=specials(tokenizer), skip_special_tokens=True),
            StopBuffer(case.stops, include=case.include) if case.stops else None,
            include_stop=case.include,
            min_tokens=0,
            index=index,
        )
        processor.register(index, state)
    done = [0] * n
    texts = [""] * n
    ids: list[list[int]] = [[] for _ in range(n)]
    endings: dict[int, Ending] = {}
    while True:
        handles = [handle for handle in range(n) if handle in processor]
        rows = {handle: case.outputs[handle][done[handle] :][: rng.randint(0, 5)] for handle in handles}
        for handle, row in rows.items():
            done[handle] += len(row)
        at_end = [row for row, handle in enumerate(handles) if done[handle] == len(case.outputs[handle])]
        processor.process(
            StepColumns(
                handles,
                [len(row) for row in rows.values()],
                [token_id for row in rows.values() for token_id in row],
                dict.fromkeys(at_end, Ending(EndReason.LENGTH)),
                {},
            )
        )
        if len(processor) and rng.random() < 0.5:
            continue
        if not len(processor) or any(rows.values()):
            output = await collector.get()
            for piece in output.pieces:
                texts[piece.index] += piece.text
                ids[piece.index] += piece.token_ids
                if piece.ending is not None:
                    endings[piece.index] = piece.ending
            if output.is_last:
                return [(texts[index], ids[index], endings[index]) for index in range(n)]


@pytest.mark.parametrize("kind", KINDS)
async def test_deltas_are_the_one_shot_decode_cut_at_the_stop(kind):
    tokenizer, rng = KINDS[kind], random.Random(kind)
    num_stopped = num_groups = 0
    for _ in range(NUM_TEXTS):
        case = new_case(rng, tokenizer)
        received = await stream(rng, tokenizer, case)
        num_groups += len(received) > 1
        for (text, ids, ending), output in zip(received, case.outputs, strict=True):
            whole, stop = cut(one_shot(tokenizer, case.prompt, output), case.stops, include=case.include)
            assert (text, ending.stop_string) == (whole, stop), (case, output)
            assert output[: len(ids)] == ids
            assert stop is not None or ids == output
            num_stopped += stop is not None
    # The cases must be what they claim to be.
    assert num_stopped > NUM_TEXTS // 3
    assert num_groups > NUM_TEXTS // 3
