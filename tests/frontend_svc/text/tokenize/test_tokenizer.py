"""A model's tokenizer over text workers, and what is known without tokenizing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from frontend_svc.output.logprobs import LogprobColumns, LogprobReader
from frontend_svc.text.tokenize.slow_tokenizer import CONVERT_COMMAND, SlowTokenizerError, SlowTokenizers
from frontend_svc.text.tokenize.token_text import TokenTexts
from frontend_svc.text.workers.workers import TextWorkers
from tests.frontend_svc.tokenizers import (
    EOS,
    SAMPLES,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    id_of,
    tokenizer_over,
    unigram_tokenizer,
    word_piece_tokenizer,
)


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


async def test_offsets_are_those_of_the_library(workers):
    raw = byte_level_tokenizer()
    tokenizer = tokenizer_over(workers, raw)
    for text in (*SAMPLES, ""):
        expected = raw.encode(text, add_special_tokens=True)
        encoded = await tokenizer.encode_with_offsets(text, add_special_tokens=True)
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


# A tokenizer.model is converted once, in a process, and refused in words for an operator.

FILES = {"tokenizer.model": b"model", "tokenizer_config.json": b"{}"}


def converter(deed: str, folder: Path, **options) -> SlowTokenizers:
    script = str(Path(__file__).with_name("fake_converter.py"))
    return SlowTokenizers(command=(sys.executable, script, deed, str(folder / "diary")), **options)


def conversions(folder: Path) -> list[str]:
    return (folder / "diary").read_text().split()


async def test_a_tokenizer_is_converted_once_however_many_ask(tmp_path):
    slow = converter("converts", tmp_path)
    contents = await asyncio.gather(*(slow.convert(dict(FILES)) for _ in range(5)))
    assert contents == [b"model+{}"] * 5
    assert len(conversions(tmp_path)) == 1
    assert await slow.convert({**FILES, "tokenizer.model": b"other"}) == b"other+{}"
    assert len(conversions(tmp_path)) == 2
    assert [folder for folder in conversions(tmp_path) if Path(folder).exists()] == []


@pytest.mark.parametrize(
    ("deed", "time_limit_s", "num_tries", "words"),
    [
        ("misses its extra", 60.0, 1, r"pip install 'triptych\[slow-tokenizers\]'"),
        ("fails", 60.0, 1, "cannot be converted: line one\nno such model type"),
        ("does nothing", 60.0, 1, "no output file"),
        ("hangs", 1.0, 2, "took longer than the limit of 1 s"),
    ],
)
async def test_a_failure_says_what_to_do_and_is_not_repeated(tmp_path, deed, time_limit_s, num_tries, words):
    slow = converter(deed, tmp_path, time_limit_s=time_limit_s)
    with pytest.raises(SlowTokenizerError, match=words):
        await slow.convert(dict(FILES))
    assert [folder for folder in conversions(tmp_path) if Path(folder).exists()] == []
    with pytest.raises(SlowTokenizerError, match=words):
        await slow.convert(dict(FILES))
    assert len(conversions(tmp_path)) == num_tries


TRAIN = """
import sys, sentencepiece
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["the cat sat on the mat and the dog sat on the cat"] * 200),
    model_prefix=sys.argv[1], vocab_size=300, model_type="bpe", byte_fallback=True,
    hard_vocab_limit=False, minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(model_file=sys.argv[1] + ".model")
print(*processor.encode("the cat sat on 日本"))
"""


WITH_LIBRARIES = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.network
async def test_the_real_converter_keeps_the_ids(tmp_path):
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
    subprocess.run([*pip, "sentencepiece>=0.2,<0.2.2", "tiktoken>=0.9"], check=True)
    path = os.pathsep.join((str(installed), *(entry for entry in sys.path if entry)))
    trained = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "tokenizer")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [int(token_id) for token_id in trained.stdout.split()]
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    files = {
        "tokenizer.model": (tmp_path / "tokenizer.model").read_bytes(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": b"{}",
    }
    # The environment of a frontend with the extra: its own module path, with the libraries on it.
    command = (sys.executable, "-c", WITH_LIBRARIES, str(installed), CONVERT_COMMAND[-1])
    content = await SlowTokenizers(command=command).convert(files)
    converted = Tokenizer.from_str(content.decode())
    assert converted.encode("the cat sat on 日本", add_special_tokens=False).ids == expected


# The texts of single tokens, over every kind of tokenizer there is.

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level_tokenizer,
    "BPE with byte fallback": byte_fallback_tokenizer,
    "Unigram": unigram_tokenizer,
    "WordPiece": word_piece_tokenizer,
}


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def random_text(rng: random.Random) -> str:
    alphabet = "".join(SAMPLES) + "abc 日é😀ﷺ🇯🇵\u0301"
    words = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 12))]
    return " ".join(words)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def texts_in_turn(texts: TokenTexts, context: Sequence[int], ids: Sequence[int]) -> list[str]:
    """What consecutive tokens add, as the log probabilities of an output behind `context` show them."""
    columns = LogprobColumns(array("f", [-1.0] * len(ids)), array("I", [1] * len(ids)))
    return LogprobReader(texts, context, has_top=False).read(ids, columns).texts


def test_the_texts_of_a_sequence_are_its_decoded_text(tokenizer):
    rng, texts = random.Random(5), TokenTexts(tokenizer)
    num_tokens = 0
    for _ in range(250):
        ids = ids_of(tokenizer, random_text(rng))
        pieces = texts_in_turn(texts, [], ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
        num_tokens += len(ids)
    assert num_tokens > 2000


def test_a_sequence_cut_anywhere_has_the_same_texts(tokenizer):
    rng, texts = random.Random(6), TokenTexts(tokenizer)
    for _ in range(60):
        ids = ids_of(tokenizer, random_text(rng))
        cut = rng.randint(1, len(ids))
        whole = texts_in_turn(texts, [], ids)
        assert texts_in_turn(texts, ids[:cut], ids[cut:]) == whole[cut:]


def test_no_text_shows_half_a_character(tokenizer):
    rng, texts = random.Random(7), TokenTexts(tokenizer)
    vocabulary = range(tokenizer.get_vocab_size())
    for _ in range(300):
        context = rng.choices(vocabulary, k=rng.randint(0, 5))
        for text in texts.added_each(context, rng.choices(vocabulary, k=20)):
            assert not text.endswith("\ufffd")


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_a_token_that_only_begins_a_character_has_no_text_and_the_one_that_ends_it_has_all(make):
    tokenizer = make()
    ids = ids_of(tokenizer, "aﷺ")[-3:]
    assert tokenizer.decode(ids) == "ﷺ"
    context = ids_of(tokenizer, "a")
    assert texts_in_turn(TokenTexts(tokenizer), context, ids) == ["", "", "ﷺ"]


def test_two_characters_of_bytes_in_a_row_are_separated():
    tokenizer = byte_fallback_tokenizer()
    ids = ids_of(tokenizer, "aﷺ😀")[-7:]
    assert texts_in_turn(TokenTexts(tokenizer), [], ids) == ["", "", "ﷺ", "", "", "", "😀"]


def test_alternatives_complete_the_character_that_the_tokens_before_them_began():
    tokenizer = byte_fallback_tokenizer()
    first, second, third = (id_of(tokenizer, f"<0x{byte:02X}>") for byte in "本".encode())
    other, letter = id_of(tokenizer, "<0xA4>"), id_of(tokenizer, "a")
    texts = TokenTexts(tokenizer).added_each([letter, first, second], [third, other, letter, first])
    assert texts == ["本", bytes("本".encode()[:2] + b"\xa4").decode(), "a", ""]


def test_a_word_keeps_the_space_before_it_but_at_the_start_of_a_prompt():
    tokenizer = byte_fallback_tokenizer()
    word = id_of(tokenizer, "▁a")
    texts = TokenTexts(tokenizer)
    assert texts.added([word], word) == " a"
    assert texts_in_turn(texts, [], [word, word]) == ["a", " a"]


def test_special_tokens_are_shown_as_they_are_spelled(tokenizer):
    special = next(
        token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )
    spelled = tokenizer.id_to_token(special)
    assert TokenTexts(tokenizer).added([special], special).strip() == spelled


def test_the_end_of_sequence_has_its_text_although_the_output_does_not_show_it():
    tokenizer = byte_level_tokenizer()
    assert TokenTexts(tokenizer).added([id_of(tokenizer, "a")], id_of(tokenizer, EOS)) == EOS


def test_texts_beyond_the_limit_are_forgotten_and_found_again(tokenizer):
    small, large = TokenTexts(tokenizer, max_kept=4), TokenTexts(tokenizer)
    ids = list(range(tokenizer.get_vocab_size())) * 2
    assert small.added_each(ids[:1], ids) == large.added_each(ids[:1], ids)


def test_the_mark_of_broken_text_is_a_character_where_a_token_spells_it():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["\ufffd"])
    mark, letter = id_of(tokenizer, "\ufffd"), id_of(tokenizer, "a")
    assert texts_in_turn(TokenTexts(tokenizer), [letter], [mark, letter]) == ["\ufffd", "a"]


def test_nothing_adds_nothing(tokenizer):
    assert texts_in_turn(TokenTexts(tokenizer), [], []) == []


async def test_padding_and_limits_of_its_file_are_no_special_tokens(workers: TextWorkers):
    plain = word_piece_tokenizer()
    end = id_of(plain, EOS)
    plain.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A {EOS}", pair=f"{EOS} $A {EOS} $B {EOS}", special_tokens=[(EOS, end)]
    )
    plain.enable_padding(length=16)
    plain.enable_truncation(4)
    tokenizer = tokenizer_over(workers, plain)
    assert tokenizer.num_special_behind == 1
    assert tokenizer.pair_template.num_special == 3
    assert await tokenizer.encode("the cat", add_special_tokens=True) == plain.encode("the cat").ids
