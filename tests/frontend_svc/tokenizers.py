"""Small real tokenizers, trained or written here, for tests that need true token boundaries."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.tokenize.tokenizer import ModelTokenizer
from frontend_svc.text.workers.workers import TextWorkers

EOS = "<|end|>"
SAMPLES = (
    "Hello world, my name is Lee, and I'm a student at the organization.",
    "the cat sat on the mat and the dog sat on the cat",
    "日本語のテキストと漢字、そして中文字符也在这里。한국어도 있습니다",
    "emoji 😀😃🎉👩‍👩‍👧‍👦 and flags 🇯🇵🇩🇪, é vs e\u0301, naïve café",
    "Кириллица и ελληνικά και עברית والعربية",
)


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE like that of GPT-2, Llama 3 or Qwen, with two special tokens."""
    return Tokenizer.from_str(_byte_level_json())


def byte_fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like BPE as of Llama 2: words begin with a mark, rare characters are byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ("▁", "a", "b", "c", "▁a", "▁b", "日", "é"):
        vocab[token] = len(vocab)
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    """A SentencePiece-like Unigram as of T5: words begin with a mark, what it does not know is <unk>."""
    return Tokenizer.from_str(_unigram_json())


def word_piece_tokenizer() -> Tokenizer:
    """A WordPiece like that of BERT: pieces inside of a word begin with ##."""
    return Tokenizer.from_str(_word_piece_json())


def tokenizer_over(workers: TextWorkers, tokenizer: Tokenizer) -> ModelTokenizer:
    """A model's tokenizer whose work `workers` do."""
    return ModelTokenizer(tokenizer, workers, TextFiles(tokenizer.to_str().encode()))


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary has."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[EOS, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer.to_str()


@cache
def _unigram_json() -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", EOS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer.to_str()


@cache
def _word_piece_json() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", EOS], show_progress=False)
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer.to_str()
