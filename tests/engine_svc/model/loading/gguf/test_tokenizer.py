"""Tokenizers from the metadata cut text as the libraries do whose vocabularies they have."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from engine_svc.model.loading.gguf.file import read_model
from engine_svc.model.loading.gguf.tokenizer import read_vocabulary, tokenizer_config, tokenizer_json
from frontend_svc.text.chat.template import ChatTemplate, read_special_tokens, read_templates
from frontend_svc.text.tokenize.text_files import TextRefused
from tests.engine_svc.model.loading.gguf.gguf_bytes import (
    F32,
    U32,
    GgufBytes,
    flag,
    numbers,
    text,
    texts,
    tiny_llama,
    u32,
)

TEXTS = (
    "Hello world, it's 12345 o'clock!",
    "  two spaces\n\n\tand a tab ",
    "camelCaseWORDS and ÄÖÜ äöü, 北京 \U0001f600",
    "don't DON'T e\u0301 \u00e9",
    "",
    " ",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def tokenizer_of(file: GgufBytes, tmp_path: Path) -> Tokenizer:
    metadata = read_model([file.write(tmp_path / "model.gguf")]).metadata
    vocabulary = read_vocabulary(metadata, len(metadata.texts("tokenizer.ggml.tokens")))
    return Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))


def with_vocabulary(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> GgufBytes:
    file = tiny_llama().set("tokenizer.ggml.tokens", texts(tokens))
    file.set("tokenizer.ggml.token_type", numbers(U32, types))
    return file.set("tokenizer.ggml.scores", numbers(F32, scores))


def sentence_piece(seed: int) -> tuple[list[str], list[int], list[float]]:
    """A random vocabulary over few letters, with bytes and two tokens that a text may have."""
    choose = random.Random(seed)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    letters = ["a", "b", "c", "\u2581"]
    longer = {"".join(choose.choices(letters, k=choose.randint(2, 5))) for _ in range(120)}
    pieces = [*letters, *sorted(longer)]
    tokens += [*pieces, "<user>", "\n\n"]
    types += [*[NORMAL] * len(pieces), USER_DEFINED, USER_DEFINED]
    # The longer and the earlier the better, as in vocabularies that were learned.
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))] + [0.0, 0.0]
    return tokens, types, scores


def merged(piece: str, scores: dict[str, float]) -> list[str]:
    """The pieces by SentencePiece: of all neighbours those that make the best token, the leftmost first."""
    parts = list(piece)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        index = -max(pairs)[1]
        parts[index : index + 2] = ["".join(parts[index : index + 2])]


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_those_of_sentence_piece(tmp_path: Path, has_prefix: bool, seed: int) -> None:
    tokens, types, values = sentence_piece(seed)
    file = with_vocabulary(tokens, types, values)
    if not has_prefix:
        file.set("tokenizer.ggml.add_space_prefix", flag(False))
    tokenizer = tokenizer_of(file, tmp_path)
    scores = {
        token: score for token, kind, score in zip(tokens, types, values, strict=True) if kind == NORMAL
    }
    choose = random.Random(seed)
    for _ in range(60):
        line = "".join(choose.choices("abc ", k=choose.randint(1, 40)))
        piece = ("\u2581" if has_prefix else "") + line.replace(" ", "\u2581")
        encoded = tokenizer.encode(line)
        assert encoded.tokens == ["<s>", *merged(piece, scores)]
        assert tokenizer.decode(encoded.ids) == line


def test_what_is_no_piece_is_bytes_and_added_tokens_stay_whole(tmp_path: Path) -> None:
    file = with_vocabulary(*sentence_piece(0)).set("tokenizer.ggml.add_space_prefix", flag(False))
    tokenizer = tokenizer_of(file, tmp_path)
    encoded = tokenizer.encode("<user>\n\n\u00e9</s>")
    assert encoded.tokens == ["<s>", "<user>", "\n\n", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(encoded.ids) == "<user>\n\n\u00e9"


def test_runs_of_spaces_that_are_stored_as_such_are_tokens(tmp_path: Path) -> None:
    tokens, types, scores = sentence_piece(0)
    file = with_vocabulary([*tokens, "    "], [*types, USER_DEFINED], [*scores, 0.0])
    tokenizer = tokenizer_of(file.set("tokenizer.ggml.add_space_prefix", flag(False)), tmp_path)
    ids = tokenizer.encode("a    b", add_special_tokens=False).ids
    assert ids == [tokens.index("a"), len(tokens), tokens.index("b")]
    assert tokenizer.decode(ids) == "a    b"


@pytest.mark.parametrize("parts", [("a ", "b"), ("#version", "s")])
def test_merges_of_tokens_that_no_line_of_merges_can_have_are_applied(
    tmp_path: Path, parts: tuple[str, str]
) -> None:
    tokens, types, scores = sentence_piece(0)
    whole = "".join(parts)
    letters = [text for text in dict.fromkeys(whole) if text not in tokens]
    # Each token from its first character on, so that merges make the two parts.
    added = [*letters, *(part[:end] for part in parts for end in range(2, len(part) + 1)), whole]
    file = with_vocabulary(
        [*tokens, *added], [*types, *[NORMAL] * len(added)], [*scores, *map(float, range(len(added)))]
    )
    tokenizer = tokenizer_of(file.set("tokenizer.ggml.add_space_prefix", flag(False)), tmp_path)
    if " " not in whole:  # which a text never has, once it is normalized
        assert tokenizer.encode(whole, add_special_tokens=False).tokens == [whole]
    assert tokenizer.token_to_id(whole) == len(tokens) + len(added) - 1


def test_tokens_of_a_phi_3_take_the_space_behind_them(tmp_path: Path) -> None:
    tokens, types, scores = sentence_piece(0)
    file = with_vocabulary([*tokens, "<|user|>"], [*types, CONTROL], [*scores, 0.0])
    phi3 = tokenizer_of(file.set("general.architecture", text("phi3")), tmp_path)
    # The space behind <s> stays, and gets the one that begins each text before it.
    ids = phi3.encode("<|user|> \n a<s> b", add_special_tokens=False).ids
    expected = ["<|user|>", "\u2581a", "<s>", "\u2581", "\u2581b"]
    assert [phi3.id_to_token(token_id) for token_id in ids] == expected
    others = tokenizer_of(file.set("general.architecture", text("llama")), tmp_path)
    assert "<0x0A>" in others.encode("<|user|> \n a", add_special_tokens=False).tokens


@pytest.fixture(scope="module")
def byte_level() -> tuple[dict[str, int], list[str]]:
    """A vocabulary and merges that were learned from the texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 3, BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [" ".join(pair) for pair in model["merges"]]


def with_byte_level(byte_level: tuple[dict[str, int], list[str]], pre: str) -> GgufBytes:
    vocabulary, merges = byte_level
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    # Behind the others: a token of its own, and one that only a template has.
    types = [NORMAL] * len(tokens) + [USER_DEFINED, CONTROL]
    file = with_vocabulary([*tokens, "<think>", "<|im_end|>"], types, [])
    file.remove("tokenizer.ggml.bos_token_id").set("tokenizer.ggml.eos_token_id", u32(len(tokens) + 1))
    file.set("tokenizer.ggml.merges", texts(merges)).set("tokenizer.ggml.model", text("gpt2"))
    return file.set("tokenizer.ggml.pre", text(pre))


@pytest.mark.parametrize(("pre", "theirs"), [("qwen2", Qwen2Tokenizer), ("gpt-2", GPT2Tokenizer)])
def test_ids_are_those_of_the_tokenizers_of_transformers(
    byte_level, tmp_path: Path, pre: str, theirs: type[Qwen2Tokenizer] | type[GPT2Tokenizer]
) -> None:
    vocabulary, merges = byte_level
    ours = tokenizer_of(with_byte_level(byte_level, pre), tmp_path)
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    reference = theirs(vocab=vocabulary, merges=pairs)
    for line in TEXTS:
        ids = ours.encode(line).ids
        assert ids == reference.backend_tokenizer.encode(line, add_special_tokens=False).ids, line
        assert ours.decode(ids) == (line.replace("e\u0301", "\u00e9") if pre == "qwen2" else line)
    assert ours.encode("a<think>b<|im_end|>").tokens == ["a", "<think>", "b", "<|im_end|>"]
    assert ours.decode(ours.encode("<think><|im_end|>").ids) == "<think>"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("llama-bpe", ["It", "'S", "\u0120helloWORLD", "\u0120", "123", "45", "!\u010a", "\u0120/", "x"]),
        ("smaug-bpe", ["It", "'S", "\u0120helloWORLD", "\u0120", "123", "45", "!\u010a", "\u0120/", "x"]),
        ("dbrx", ["It", "'S", "\u0120helloWORLD", "\u0120", "123", "45", "!\u010a", "\u0120/", "x"]),
        (
            "qwen2",
            ["It", "'S", "\u0120helloWORLD", "\u0120", "1", "2", "3", "4", "5", "!\u010a", "\u0120/", "x"],
        ),
        ("gpt-4o", ["It'S", "\u0120hello", "WORLD", "\u0120", "123", "45", "!\u010a", "\u0120/", "x"]),
        (
            "tekken",
            [
                "It",
                "'S",
                "\u0120hello",
                "WORLD",
                "\u0120",
                "1",
                "2",
                "3",
                "4",
                "5",
                "!\u010a",
                "\u0120/",
                "x",
            ],
        ),
        ("gpt-2", ["It", "'", "S", "\u0120helloWORLD", "\u012012345", "!", "\u010a", "\u0120/", "x"]),
        (
            "smollm",
            ["It", "'", "S", "\u0120helloWORLD", "\u0120", *"12345", "!", "\u010a", "\u0120/", "x"],
        ),
    ],
)
def test_text_is_split_by_the_name_of_the_pre_tokenizer(
    byte_level, tmp_path: Path, pre: str, expected: list[str]
) -> None:
    tokenizer = tokenizer_of(with_byte_level(byte_level, pre), tmp_path)
    words = tokenizer.pre_tokenizer.pre_tokenize_str("It'S helloWORLD 12345!\n /x")
    assert [word for word, _ in words] == expected


@pytest.mark.parametrize(
    ("pre", "values", "begins"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": flag(False)}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": flag(True)}, True),
    ],
)
def test_the_first_token_is_added_as_the_metadata_say(
    byte_level, tmp_path: Path, pre, values, begins
) -> None:
    file = with_byte_level(byte_level, pre).set("tokenizer.ggml.bos_token_id", u32(len(byte_level[0])))
    for name, value in values.items():
        file.set(f"tokenizer.ggml.{name}", value)
    tokenizer = tokenizer_of(file, tmp_path)
    assert (tokenizer.encode("a").tokens == ["<think>", "a"]) is begins
    assert (tokenizer.encode("a", "b").type_ids[-1]) == 1


def test_a_word_that_is_a_token_is_not_merged_where_the_model_says_so(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    for pre, expected in (("llama-bpe", ["abc"]), ("qwen2", ["a", "bc"])):
        file = with_vocabulary(tokens, [NORMAL] * 6, []).remove("tokenizer.ggml.bos_token_id")
        file.set("tokenizer.ggml.eos_token_id", u32(0)).set("tokenizer.ggml.model", text("gpt2"))
        file.set("tokenizer.ggml.merges", texts(["b c", "a b"])).set("tokenizer.ggml.pre", text(pre))
        assert tokenizer_of(file, tmp_path).encode("abc").tokens == expected


def test_a_chat_without_a_template_names_the_flag(tmp_path: Path) -> None:
    metadata = read_model([tiny_llama().write(tmp_path / "model.gguf")]).metadata
    config = tokenizer_config(read_vocabulary(metadata, 262))
    template = ChatTemplate(read_templates(config, ""), read_special_tokens(config))
    with pytest.raises(TextRefused, match="has no chat template: name one with --chat-template"):
        template.render({"messages": [{"role": "user", "content": "Hi"}]}, max_chars=1000)
