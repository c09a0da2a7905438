"""Where the masks of llguidance and xgrammar differ, and which known difference of the two each case is.

    python -m tests.acceptance mask_agreement --json benchmarks/results/mask_agreement.json

Random JSON schemas of keywords that both enforce, regular expressions and grammars are compiled by both, for
the embedded model's vocabulary and for one of single bytes, and walked at random over tokens that both allow.
At each state every token that one of them alone allows is put into a class, by a check: the text with that
token is rewritten as the class says, e.g. without white space between the parts of JSON. It is in the class
if both backends say the same of the rewritten text, byte by byte, and did not before. Of an end token the
same is asked of the whole text. Where both allow the text of a token, but one of them not the token, it is in
the class of forced text, if nothing else may follow. In regular expressions classes like \\w are rewritten.

Promised: no token remains without a class.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import triptych_cli.tiny_model
from benchmarks.report import Report, Row
from engine_svc.features.structured_output.backends.backend import (
    CompiledGrammar,
    GrammarBackend,
    Matcher,
    Vocabulary,
)
from engine_svc.features.structured_output.backends.llguidance_backend import LLGuidanceBackend
from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind
from engine_svc.features.structured_output.json_schema.keywords import serve

MAX_WALK = 20  # tokens of one walk
_NAMES = ("llguidance", "xgrammar")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--states", type=int, default=2_000, help="of each vocabulary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=5, help="tokens without a class that are printed")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    num_left = 0
    for vocabulary in (embedded_vocabulary(), byte_vocabulary()):
        comparison = Comparison(vocabulary, options.show)
        comparison.walk_until(options.states, random.Random(options.seed))
        rows += comparison.rows()
        num_left += comparison.num_unclassified
    settings = {"states": options.states, "seed": options.seed}
    shortfalls = [f"{num_left} tokens have no class"] if num_left else []
    return Report("mask_agreement", settings, rows, shortfalls)


# Vocabularies


@dataclass(frozen=True)
class Tokens:
    name: str
    vocabulary: Vocabulary
    texts: list[bytes]  # b"" of special tokens


def embedded_vocabulary() -> Tokens:
    text = (Path(triptych_cli.tiny_model.__file__).parent / "weights" / "tokenizer.json").read_text()
    return _tokens("embedded", Tokenizer.from_str(text))


def byte_vocabulary() -> Tokens:
    vocab = {"<end>": 0} | {char: index + 1 for index, char in enumerate(_byte_chars().values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return _tokens("bytes", tokenizer)


def _tokens(name: str, tokenizer: Tokenizer) -> Tokens:
    byte_of = {char: byte for byte, char in _byte_chars().items()}
    special = {entry["id"] for entry in json.loads(tokenizer.to_str())["added_tokens"]}
    texts = [
        b"" if index in special else bytes(byte_of[char] for char in tokenizer.id_to_token(index) or "")
        for index in range(tokenizer.get_vocab_size())
    ]
    return Tokens(name, Vocabulary(tokenizer.to_str(), len(texts), (0,)), texts)


def _byte_chars() -> dict[int, str]:
    """How byte-level tokenizers spell each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    spelled = {byte: chr(byte) for byte in plain}
    return spelled | {byte: chr(256 + index) for index, byte in enumerate(others)}


# Languages


def languages(noise: random.Random) -> Iterator[Constraint]:
    while True:
        for _ in range(5):
            text = json.dumps(make_schema(noise))
            yield Constraint(ConstraintKind.JSON_SCHEMA, serve(text, ["xgrammar"]).text)
        for _ in range(3):
            yield Constraint(ConstraintKind.REGEX, make_pattern(noise))
        yield Constraint(ConstraintKind.GRAMMAR, noise.choice(GRAMMARS))


def make_schema(noise: random.Random, depth: int = 3) -> Any:
    """A schema of keywords that both backends enforce."""
    kinds = ["integer", "number", "constant", "enum", "plain", "any"]
    kinds += ["object", "object", "map", "array", "tuple", "anyOf"] if depth else []
    match noise.choice(kinds):
        case "integer":
            least = noise.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + noise.randint(0, 200)}
        case "number":
            return {
                "type": "number",
                "exclusiveMinimum": noise.randint(-3, 0),
                "maximum": noise.randint(1, 9),
            }
        case "constant":
            return {"const": noise.choice(["a b", 1, -2.5, None, True, {"k": [1, "é"]}])}
        case "enum":
            return {"enum": noise.sample(["red", 'gr"een', 1, 2.5, None, False, "a/b", [], "日本"], 3)}
        case "plain":
            return {
                "type": noise.choice(["string", "integer", "number", "boolean", "null", "object", "array"])
            }
        case "any":
            return {}
        case "array":
            least = noise.randint(0, 2)
            items = make_schema(noise, depth - 1)
            return {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + noise.randint(0, 2),
            }
        case "tuple":
            entries = [make_schema(noise, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": entries, "items": False, "minItems": 2}
        case "map":
            return {"type": "object", "additionalProperties": make_schema(noise, depth - 1)}
        case "anyOf":
            return {"anyOf": [make_schema(noise, depth - 1) for _ in range(2)]}
        case _:
            names = noise.sample(["name", "size", "kind of", "naïve", 'q"t'], noise.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: make_schema(noise, depth - 1) for name in names},
                "required": noise.sample(names, noise.randint(0, len(names))),
                "additionalProperties": False,
            }


def make_pattern(noise: random.Random, depth: int = 3) -> str:
    if not depth or noise.random() < 0.2:
        return noise.choice(["[a-c]", "[^x]", r"\d", "é", r"[^\n]", "ab", "-", r"\w", "[日本]", " "])
    parts = [make_pattern(noise, depth - 1) for _ in range(noise.randint(1, 3))]
    match noise.choice(["join", "either", "repeat"]):
        case "join":
            return "".join(parts)
        case "either":
            return f"(?:{'|'.join(parts)})"
        case _:
            return f"(?:{''.join(parts)}){noise.choice(['*', '+', '?', '{1,3}', '{2}'])}"


GRAMMARS = (
    'start: "a" start "b" | "c"',
    'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: list | NUMBER\nNUMBER: /[0-9]{1,3}/',
    'start: sum\nsum: product ("+" product)*\nproduct: atom ("*" atom)*\natom: /[0-9]/ | "(" sum ")"',
    'root ::= line+\nline ::= word (" " word)* "\\n"\nword ::= [a-z]+ | "é"',
    'root ::= "if " name " then " stmt ("else " stmt)?\nstmt ::= name "=" name | root\nname ::= [a-z0-9]+',
    'root ::= "<" [a-z]+ ">" ([^<>] | root)* "</>"',
)

# Comparison


class Comparison:
    def __init__(self, tokens: Tokens, num_shown: int) -> None:
        self._tokens = tokens
        self._backends: dict[str, GrammarBackend] = {
            "llguidance": LLGuidanceBackend(tokens.vocabulary),
            "xgrammar": XGrammarBackend(tokens.vocabulary),
        }
        bytes_alone = byte_vocabulary().vocabulary
        self._byte_backends: dict[str, GrammarBackend] = {
            "llguidance": LLGuidanceBackend(bytes_alone),
            "xgrammar": XGrammarBackend(bytes_alone),
        }
        self._num_shown = num_shown
        self._states: Counter[str] = Counter()
        self._differing: Counter[str] = Counter()
        self._by_class: Counter[tuple[str, str, str]] = Counter()  # kind, class, the backend that allows
        self._states_by_class: Counter[tuple[str, str, str]] = Counter()
        self.num_unclassified = 0

    def walk_until(self, num_states: int, noise: random.Random) -> None:
        for constraint in languages(noise):
            self._walk(constraint, noise)
            if self._states.total() >= num_states:
                return

    def rows(self) -> list[Row]:
        found: list[Row] = [
            {
                "vocabulary": self._tokens.name,
                "constraint": kind,
                "states": number,
                "states_that_differ": self._differing[kind],
            }
            for kind, number in sorted(self._states.items())
        ]
        for (kind, name, allowed_by), number in sorted(self._by_class.items()):
            row: Row = {
                "vocabulary": self._tokens.name,
                "constraint": kind,
                "class": name,
                "allowed_by": allowed_by,
                "states": self._states_by_class[kind, name, allowed_by],
                "tokens": number,
            }
            found.append(row)
        return found

    def _walk(self, constraint: Constraint, noise: random.Random) -> None:
        matchers = {name: made.compile(constraint).matcher() for name, made in self._backends.items()}
        language = Language(constraint, self._byte_backends)
        text = b""
        for _ in range(MAX_WALK):
            masks = {name: _mask(matcher, self._tokens.vocabulary) for name, matcher in matchers.items()}
            self._compare(constraint, language, text, masks)
            both = masks["llguidance"] & masks["xgrammar"]
            both[0] = False
            if not both.any():
                return
            token = int(noise.choice(both.nonzero()[0]))
            if any(matcher.accept([token]) != 1 for matcher in matchers.values()):
                raise RuntimeError(f"{constraint.text}: token {token} is allowed but not accepted")
            text += self._tokens.texts[token]

    def _compare(
        self, constraint: Constraint, language: Language, text: bytes, masks: dict[str, np.ndarray[Any, Any]]
    ) -> None:
        kind = constraint.kind.value
        self._states[kind] += 1
        here = set()
        for token in (masks["llguidance"] ^ masks["xgrammar"]).nonzero()[0]:
            allowed_by = _NAMES[int(masks["xgrammar"][token])]
            name = language.class_of(text, self._tokens.texts[token])
            if name is None:
                name = "unclassified"
                self.num_unclassified += 1
                if self.num_unclassified <= self._num_shown:
                    print(
                        f"{allowed_by} alone: {text!r} + {self._tokens.texts[token]!r} in {constraint.text}"
                    )
            self._by_class[kind, name, allowed_by] += 1
            here.add((kind, name, allowed_by))
        self._states_by_class.update(here)
        self._differing[kind] += bool(here)


def _mask(matcher: Matcher, vocabulary: Vocabulary) -> np.ndarray[Any, Any]:
    masks = torch.zeros((1, vocabulary.num_words), dtype=torch.int32)
    if matcher.is_terminated:
        found = np.zeros(vocabulary.size, dtype=bool)
        found[0] = True
        return found
    matcher.fill_mask(masks, 0)
    return np.unpackbits(masks.numpy().view(np.uint8)[0], bitorder="little")[: vocabulary.size].astype(bool)


class Language:
    """Verdicts of both backends on texts, byte by byte, and the classes of tokens on which they differ."""

    def __init__(self, constraint: Constraint, backends: dict[str, GrammarBackend]) -> None:
        self._grammars = [backends[name].compile(constraint) for name in _NAMES]
        self._ascii_grammars: list[CompiledGrammar] | None = None
        if constraint.kind is ConstraintKind.REGEX and (text := _ascii_pattern(constraint.text)):
            in_ascii = backends["llguidance"].compile(Constraint(ConstraintKind.REGEX, text))
            self._ascii_grammars = [in_ascii, self._grammars[1]]
        self._is_json = constraint.kind is ConstraintKind.JSON_SCHEMA
        self._size = backends["llguidance"].vocabulary

    def class_of(self, text: bytes, token: bytes) -> str | None:
        """The class of a token that one backend alone allows behind a text; b"": of the end there."""
        if not _is_utf8(text + token):
            return "bytes that are not UTF-8"
        if token and self._is_forced(text, token):
            return "forced text in other tokens"
        if self._ascii_grammars and not token.isascii() and _agree(self._ascii_grammars, text + token, False):
            return "letters and digits beyond ASCII"
        if not self._is_json or _agree(self._grammars, text + token, not token):
            return None
        for name, rewrite in _CLASSES:
            rewritten = rewrite(text + token)
            if rewritten != text + token and _agree(self._grammars, rewritten, not token):
                return name
        return None

    def _is_forced(self, text: bytes, token: bytes) -> bool:
        """Whether both allow the token's text and llguidance allows no other text of its length."""
        if not all(_allows(grammar, text + token) for grammar in self._grammars):
            return False
        matcher = self._grammars[0].matcher()
        matcher.accept(_ids(text))
        for token_id in _ids(token):
            if _mask(matcher, self._size).sum() != 1:
                return False
            matcher.accept([token_id])
        return True


def _allows(grammar: CompiledGrammar, text: bytes, is_end: bool = False) -> bool:
    matcher = grammar.matcher()
    return matcher.accept(_ids(text)) == len(text) and (matcher.is_accepting or not is_end)


def _agree(grammars: list[CompiledGrammar], text: bytes, is_end: bool) -> bool:
    return len({_allows(grammar, text, is_end) for grammar in grammars}) == 1


def _ids(text: bytes) -> list[int]:
    """In the vocabulary of single bytes."""
    return [_ID_OF_BYTE[byte] for byte in text]


def _ascii_pattern(pattern: str) -> str | None:
    """With the classes in ASCII alone; None if it has none."""
    found = pattern.replace(r"\w", "[0-9A-Za-z_]").replace(r"\d", "[0-9]")
    return found if found != pattern else None


_ID_OF_BYTE = {byte: index + 1 for index, byte in enumerate(_byte_chars())}


def _is_utf8(text: bytes) -> bool:
    """Whether a text is the beginning of one in UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.end == len(text) and error.reason == "unexpected end of data"
    return True


# Classes: how JSON is rewritten to have one spelling alone

_PARTS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?$)|[ \t\r\n]+|[^" \t\r\n]+', re.DOTALL)
_ESCAPE = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,4}|.|$)", re.DOTALL)


def _without_space(text: bytes) -> bytes:
    return b"".join(part for part in _PARTS.findall(text) if not part.isspace())


def _without_delete(text: bytes) -> bytes:
    return text.replace(b"\x7f", b"")


def _without_escapes(text: bytes) -> bytes:
    """Escapes in texts, and what may become one, as a letter."""
    return b"".join(
        _ESCAPE.sub(b"x", part) if part.startswith(b'"') else part for part in _PARTS.findall(text)
    )


def _of_numbers(pattern: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def rewrite(text: bytes) -> bytes:
        parts = _PARTS.findall(text)
        return b"".join(part if part.startswith(b'"') else re.sub(pattern, new, part) for part in parts)

    return rewrite


_CLASSES: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    ("white space between parts", _without_space),
    ("delete character in a text", _without_delete),
    ("escape in a text", _without_escapes),
    ("more than six digits of a fraction", _of_numbers(rb"(\.[0-9]{6})[0-9]+", rb"\1")),
    ("zeros at the end of a fraction", _of_numbers(rb"(\.[0-9]*[1-9])0+(?![0-9])", rb"\1")),
    ("negative zero", _of_numbers(rb"-0(?![.0-9])", b"0")),
)
