"""The contents of tokenizer.json, tokenizer_config.json and generation_config.json, from the metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.gguf.file import Metadata

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens
_SPACE, _SHOWN_SPACE = " ", "\u2581"

# Of Llama 3; others differ in the numbers that are one token, and in how they split words.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, numbers: str) -> str:
    """Words by their case: of small letters after capital ones, or of capital ones."""
    words = (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    return "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{ending}" for word in words) + f"|{numbers}" + _CASED_REST


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is split before merges.  split: None is that of GPT-2."""

    split: str | None
    splits_digits: bool = False
    is_composed: bool = False  # text is brought to the Unicode form NFC before
    skips_merges: bool = False  # for words that are tokens
    adds_bos: bool = False


_LLAMA3_BPE = _PreTokenizer(_LLAMA3, skips_merges=True, adds_bos=True)
_QWEN2_BPE = _PreTokenizer(_QWEN2, is_composed=True)
_GPT4O = _PreTokenizer(_cased(_CONTRACTIONS + "?", r"\p{N}{1,3}"))
# By `tokenizer.ggml.pre`.
_PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3_BPE,
    "llama3": _LLAMA3_BPE,
    "llama-v3": _LLAMA3_BPE,
    "smaug-bpe": _PreTokenizer(_LLAMA3),
    "dbrx": _PreTokenizer(_LLAMA3),
    "qwen2": _QWEN2_BPE,
    "deepseek-r1-qwen": _QWEN2_BPE,
    "gpt-4o": _GPT4O,
    "tekken": _PreTokenizer(_cased("", r"\p{N}"), skips_merges=True, adds_bos=True),
    "gpt-2": _PreTokenizer(None),
    "smollm": _PreTokenizer(None, splits_digits=True),
}
# Tokens that end an answer, beside those that the metadata name. In gpt-oss <|end|> ends but a part of one.
_ENDINGS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
_HARMONY_ENDINGS = frozenset({"<|return|>", "<|call|>", "<|endoftext|>"})
# Phi-3's own tokens, but for these, also take the white space behind them.
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_NO_TEMPLATE = (
    "{{ raise_exception('the GGUF file has no chat template: name one with --chat-template, or have the "
    "client complete a prompt') }}"
)
# Metadata of the authors' advice on sampling, and their names in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "penalty_repeat": "repetition_penalty",
}

Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file by id, with their types."""

    metadata: Metadata
    tokens: Sequence[str]
    types: Sequence[int | float]

    def ids(self) -> dict[str, int]:
        """By their texts. Of several tokens with one text the last has it, as in llama.cpp."""
        return {text: token_id for token_id, text in enumerate(self.tokens) if text}

    def of_types(self, *types: int) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]

    def special(self, name: str) -> int | None:
        """The id that the metadata state, of "eos" for example."""
        key = f"{_KEY}{name}_token_id"
        if key not in self.metadata:
            return None
        return self.metadata.whole(key, minimum=0, maximum=len(self.tokens) - 1)


def read_vocabulary(metadata: Metadata, num_tokens: int) -> Vocabulary:
    """The vocabulary of a model with as many embeddings. Raises CheckpointError."""
    tokens = metadata.texts(_KEY + "tokens")
    key = _KEY + "token_type"
    types = metadata.numbers(key) if key in metadata else (1,) * len(tokens)
    if len(tokens) != num_tokens:
        raise CheckpointError(f"{metadata.path} has {len(tokens)} tokens, and embeddings of {num_tokens}")
    if len(types) != num_tokens:
        raise CheckpointError(
            f"{metadata.path}: {key} has {len(types)} entries, there are {num_tokens} tokens"
        )
    return Vocabulary(metadata, tokens, types)


def tokenizer_json(vocabulary: Vocabulary) -> Content:
    """Raises CheckpointError for metadata that make no tokenizer, UnsupportedModel for kinds not served."""
    metadata = vocabulary.metadata
    kind = metadata.text(_KEY + "model")
    if kind == "llama":
        return _sentence_piece(vocabulary)
    if kind == "gpt2":
        return _byte_level(vocabulary)
    raise UnsupportedModel(
        f"{metadata.path}: {_KEY}model is {kind!r}; served are llama (SentencePiece) and gpt2 (BPE)"
    )


def tokenizer_config(vocabulary: Vocabulary) -> Content:
    """Special tokens by name, and the chat templates: one that refuses, where the file has none."""
    named = {
        f"{ours}_token": vocabulary.tokens[token_id]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := vocabulary.special(theirs)) is not None
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
        "chat_template": _templates(vocabulary.metadata),
    }


def generation_config(vocabulary: Vocabulary) -> Content:
    """The tokens that end an answer, the main one first, and the authors' advice on sampling."""
    stated = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    controls = vocabulary.of_types(_CONTROL, _USER_DEFINED)
    texts = {vocabulary.tokens[token_id] for token_id in controls}
    endings = _HARMONY_ENDINGS if "<|return|>" in texts else _ENDINGS
    named = [token_id for token_id in controls if vocabulary.tokens[token_id] in endings]
    eos_token_ids = list(dict.fromkeys(each for each in (*stated, *named) if each is not None))
    metadata = vocabulary.metadata
    advice = {
        name: metadata.whole(key, minimum=0) if name == "top_k" else metadata.number(key)
        for suffix, name in _SAMPLING.items()
        if (key := f"general.sampling.{suffix}") in metadata
    }
    content = {"eos_token_id": eos_token_ids, "bos_token_id": vocabulary.special("bos")}
    return {**content, "do_sample": True, **advice} if advice else content


def _templates(metadata: Metadata) -> str | list[Content]:
    default = metadata.text("tokenizer.chat_template", _NO_TEMPLATE)
    if "tokenizer.chat_templates" not in metadata:
        return default
    names = metadata.texts("tokenizer.chat_templates")
    named = [(name, metadata.text(f"tokenizer.chat_template.{name}")) for name in names]
    return [{"name": name, "template": text} for name, text in (("default", default), *named)]


def _sentence_piece(vocabulary: Vocabulary) -> Content:
    """Merges of neighbours by the scores of what they make; bytes for what is no token."""
    metadata = vocabulary.metadata
    scores = metadata.numbers(_KEY + "scores")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{metadata.path}: {_KEY}scores has {len(scores)} entries, for {len(vocabulary.tokens)} tokens"
        )
    has_prefix = metadata.flag(_KEY + "add_space_prefix", True)
    # Runs of spaces may be stored as they are, and not as shown in all other tokens.
    shown = [
        text.replace(_SPACE, _SHOWN_SPACE) if not text.strip(" ") else text for text in vocabulary.tokens
    ]
    vocabulary = replace(vocabulary, tokens=shown)
    ids = vocabulary.ids()
    unknown = next(iter(vocabulary.of_types(_UNKNOWN)), vocabulary.special("unknown"))
    to_shown = {"type": "Replace", "pattern": {"String": _SPACE}, "content": _SHOWN_SPACE}
    prefix = {"type": "Prepend", "prepend": _SHOWN_SPACE}
    from_shown = {"type": "Replace", "pattern": {"String": _SHOWN_SPACE}, "content": _SPACE}
    decoders: list[Content] = [from_shown, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        decoders.append({"type": "Strip", "content": _SPACE, "start": 1, "stop": 0})
    return _tokenizer(
        vocabulary,
        # A text is normalized piece by piece between tokens that are not, so that each gets a prefix.
        added=_added(vocabulary, is_normalized=not has_prefix),
        adds_bos=True,
        normalizer={"type": "Sequence", "normalizers": [prefix, to_shown]} if has_prefix else to_shown,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model={
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": _written(_merges_by_score(vocabulary, ids, scores)),
        },
    )


def _merges_by_score(
    vocabulary: Vocabulary, ids: Mapping[str, int], scores: Sequence[int | float]
) -> list[tuple[str, str]]:
    """Each pair of tokens that makes a token, the best first."""
    never_made = set(vocabulary.of_types(_UNKNOWN, _CONTROL, _BYTE))
    merges = []
    for text, token_id in ids.items():
        if token_id in never_made:
            continue
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                # With equal scores as in the conversion that Hugging Face has: longer ones on the left first.
                merges.append((-scores[token_id], -cut, left, right))
    merges.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in merges]


def _byte_level(vocabulary: Vocabulary) -> Content:
    metadata = vocabulary.metadata
    name = metadata.text(_KEY + "pre", "default")
    pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise UnsupportedModel(
            f"{metadata.path}: {_KEY}pre is {name!r}, a pre-tokenizer that is not known here; served are "
            f"{', '.join(_PRE_TOKENIZERS)}"
        )
    ids = vocabulary.ids()
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    splits: list[Content] = []
    if pre_tokenizer.splits_digits:
        splits.append({"type": "Digits", "individual_digits": True})
    if pre_tokenizer.split is not None:
        pattern = {"Regex": pre_tokenizer.split}
        splits.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    splits.append({**by_bytes, "use_regex": pre_tokenizer.split is None})
    return _tokenizer(
        vocabulary,
        added=_added(vocabulary, is_normalized=False),
        adds_bos=pre_tokenizer.adds_bos,
        normalizer={"type": "NFC"} if pre_tokenizer.is_composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": splits},
        decoder={**by_bytes, "use_regex": False},
        model={
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.skips_merges,
            "vocab": ids,
            "merges": _written(_stated_merges(metadata, ids)),
        },
    )


def _stated_merges(metadata: Metadata, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in metadata.texts(_KEY + "merges"):
        left, _, right = text.partition(_SPACE)
        if left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"{metadata.path}: {_KEY}merges has {text!r}, which makes no token")
        merges.append((left, right))
    return merges


def _written(merges: list[tuple[str, str]]) -> list[str] | list[tuple[str, str]]:
    """Merges as lines, which take a third less time and half the memory to read, or else as pairs."""
    lines = [f"{left} {right}" for left, right in merges]
    # The library skips a line of a merges.txt that states its version.
    is_read = all(line.count(_SPACE) == 1 and not line.startswith("#version") for line in lines)
    return lines if is_read else merges


def _added(vocabulary: Vocabulary, *, is_normalized: bool) -> list[Content]:
    """Tokens that are found in a text before all others."""
    ids = vocabulary.ids()
    takes_space = (
        vocabulary.metadata.text("general.architecture") == "phi3"
        and vocabulary.metadata.text(_KEY + "model") == "llama"
    )
    return [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": takes_space and text not in _PHI3_KEEPS_SPACE,
            "normalized": is_normalized and vocabulary.types[token_id] == _USER_DEFINED,
            "special": vocabulary.types[token_id] != _USER_DEFINED,
        }
        for token_id in vocabulary.of_types(_UNKNOWN, _CONTROL, _USER_DEFINED)
        if (text := vocabulary.tokens[token_id]) and ids[text] == token_id
    ]


def _tokenizer(
    vocabulary: Vocabulary,
    *,
    added: list[Content],
    adds_bos: bool,
    normalizer: Content | None,
    pre_tokenizer: Content | None,
    decoder: Content,
    model: Content,
) -> Content:
    """The content of a tokenizer.json with a BPE model.  adds_bos: where the metadata do not say."""
    without_affixes = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(vocabulary, adds_bos),
        "decoder": decoder,
        "model": {"type": "BPE", **without_affixes, **model},
    }


def _post_processor(vocabulary: Vocabulary, adds_bos: bool) -> Content | None:
    """Adds the tokens that begin and end each text."""
    metadata = vocabulary.metadata
    used = {
        name: token_id
        for name, default in (("bos", adds_bos), ("eos", False))
        if metadata.flag(f"{_KEY}add_{name}_token", default)
        and (token_id := vocabulary.special(name)) is not None
    }
    if not used:
        return None

    def around(sequence: str, type_id: int) -> list[Content]:
        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        before, behind = (
            [{"SpecialToken": {"id": vocabulary.tokens[used[name]], "type_id": type_id}}]
            if name in used
            else []
            for name in ("bos", "eos")
        )
        return [*before, text, *behind]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            vocabulary.tokens[token_id]: {
                "id": vocabulary.tokens[token_id],
                "ids": [token_id],
                "tokens": [vocabulary.tokens[token_id]],
            }
            for token_id in used.values()
        },
    }
