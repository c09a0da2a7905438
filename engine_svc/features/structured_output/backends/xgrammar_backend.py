"""Grammars by xgrammar, an extra: it is imported with this file alone.

It has no limit on the work of a compilation: constraints are limited by their text, and compiled in a process
that can be killed before. Schemas are rewritten in another one, without the torch that it needs, which lets
those through whose keywords it enforces, by name alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import xgrammar
from torch import Tensor

from engine_svc.features.structured_output.backends.backend import (
    CompiledGrammar,
    Matcher,
    MatcherError,
    Vocabulary,
    check_masks,
)
from engine_svc.features.structured_output.constraint import (
    MAX_WHITESPACE,
    Constraint,
    ConstraintKind,
    GrammarError,
    GrammarTooComplex,
    Spacing,
)
from engine_svc.features.structured_output.limits import check_repetitions, check_text, subschemas
from engine_svc.features.structured_output.structural_tags import (
    StructuralTags,
    Tag,
    keyword_arguments,
    read_structural_tags,
)
from triptych_kit.exact_json import dumps, loads

MAX_TEXT_BYTES = 64 << 10  # of a constraint; tens of milliseconds and megabytes at most for usual ones
MAX_NESTING = 128
MAX_PARTS = 5_000  # of a text read as a regular expression, counts multiplied: each is unrolled
MAX_COUNT = 2_000  # sum of the limits on lengths in a schema, for the same reason
# Keywords of schemas that it ignores, or takes for others: rewriting leaves none of them.
_IGNORED = frozenset(
    {
        "oneOf", "not", "if", "contains", "uniqueItems", "dependencies", "dependentRequired",
        "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_COUNT = re.compile(r'"m(?:ax|in)(?:Length|Items|Properties)"\s*:\s*(\d+)')
_MAX_ERROR_CHARS = 300
# In its own sources, and the condition there that failed.
_ERROR_PLACE = re.compile(r"^(?:\[[\d:]+\] \S+: )?(?:Check failed: \(.*\) is (?:true|false): )?")
# A separator of JSON as a whole text of a grammar. Other texts have escaped quotes alone.
_SEPARATOR = re.compile(r'(?<!\\)"([,:]) "')
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)


class XGrammarBackend:
    """Compiles for one vocabulary, on the calling thread, without a cache of its own."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_threads: int = 1,
        check: Callable[[Constraint], object] | None = None,
    ) -> None:
        """check: raises ConstraintRefused for what takes too much time or memory."""
        self._check = check
        self.vocabulary = vocabulary
        if not vocabulary.eos_ids:
            raise ValueError("a vocabulary without an end token cannot end an output")
        self.special_ids: dict[str, int] = {}  # it has no names for them
        self._special_tokens = _special_tokens(vocabulary)
        metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.tokenizer_json)
        self._tokenizer = xgrammar.TokenizerInfo(
            _texts(vocabulary),
            metadata["vocab_type"],
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
            add_prefix_space=metadata["add_prefix_space"],
        )
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def compile(self, constraint: Constraint, grammar: str = "") -> CompiledGrammar:
        check_text(constraint, max_bytes=MAX_TEXT_BYTES, max_nesting=MAX_NESTING)
        if constraint.kind in (ConstraintKind.REGEX, ConstraintKind.GRAMMAR):
            check_repetitions(constraint.text, constraint.kind.value, MAX_PARTS)
        elif (total := sum(map(int, _COUNT.findall(constraint.text)))) > MAX_COUNT:
            raise GrammarTooComplex(f"{constraint.kind.value} counts to {total}, {MAX_COUNT} is allowed")
        if self._check is not None:
            self._check(constraint)
        try:
            return _XGrammarGrammar(self._compile(constraint), self.vocabulary)
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            # Some of its errors have no message.
            short = _short(str(error)) or f"xgrammar cannot compile the {constraint.kind.value}"
            raise GrammarError(short) from None

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Tensor) -> list[int]:
        check_masks(masks, self.vocabulary.num_words)
        failed = []
        live: list[xgrammar.GrammarMatcher] = []
        rows: list[int] = []
        for index, (matcher, row) in enumerate(matchers):
            inner = cast(XGrammarMatcher, matcher).inner
            if not 0 <= row < masks.shape[0]:
                raise IndexError(f"row {row} is not within the {masks.shape[0]} rows of masks")
            if inner.is_terminated():
                failed.append(index)
            else:
                live.append(inner)
                rows.append(row)
        if live:
            self._batch.batch_fill_next_token_bitmask(live, masks, rows)
        return failed

    def _compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                schema = loads(constraint.text)
                if not constraint.is_lenient:
                    _check_keywords(schema)
                return compiler.compile_grammar(_json_grammar(schema, constraint))
            case ConstraintKind.JSON_OBJECT:
                return compiler.compile_grammar(_json_grammar({"type": "object"}, constraint))
            case ConstraintKind.REGEX:
                return compiler.compile_regex(_regex(constraint.text))
            case ConstraintKind.CHOICE:
                if not constraint.choices or "" in constraint.choices:
                    raise GrammarError("choice has no texts, or an empty one")
                texts = " | ".join(json.dumps(choice) for choice in constraint.choices)
                return compiler.compile_grammar(f"root ::= {texts}")
            case ConstraintKind.GRAMMAR:
                if "::=" in constraint.text:
                    return compiler.compile_grammar(constraint.text)
                return compiler.compile_lark(constraint.text)
            case ConstraintKind.STRUCTURAL_TAG:
                tags = read_structural_tags(constraint.text)
                for text in self._special_tokens:
                    if any(text in part for part in tags.texts()):
                        raise GrammarError(
                            f"structural_tag: the special token {text!r} is not supported by xgrammar"
                        )

                return compiler.compile_structural_tag(_tags_document(tags, constraint))


def _tags_document(tags: StructuralTags, constraint: Constraint) -> dict[str, Any]:
    """The document in xgrammar's own form."""

    def schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
        _check_keywords(schema)
        # A content of the type json_schema has no options of white space.
        return {"type": "grammar", "grammar": str(_json_grammar(schema, constraint))}

    def arguments(tag: Tag) -> dict[str, Any]:
        """Any of the optional ones behind those that are required, or behind the first of them."""
        found = keyword_arguments(tag)
        values = [(argument, schema(argument.schema)) for argument in found]

        def written(first: int) -> dict[str, Any]:
            parts: list[dict[str, Any]] = []
            for index, (argument, value) in enumerate(values[first:]):
                begin = f"{', ' if index else ''}{argument.name}="
                part = _sequence([{"type": "const_string", "value": begin}, value])
                is_optional = index > 0 and not argument.is_required
                parts.append({"type": "optional", "content": part} if is_optional else part)
            return _sequence(parts)

        if not found:
            return {"type": "const_string", "value": ""}
        if found[0].is_required:
            return written(0)
        return {"type": "optional", "content": _one_of([written(first) for first in range(len(found))])}

    def content(tag: Tag) -> dict[str, Any]:
        if tag.pattern:
            check_repetitions(tag.pattern, "regex", MAX_PARTS)
            return {"type": "regex", "pattern": _regex(tag.pattern)}
        return arguments(tag) if tag.is_keywords else schema(tag.schema)

    document = tags.document(content)
    form = document["format"]
    preface = form.pop("preface", None)
    separated = form["elements"][0] if form["type"] == "or" else form
    around = [{"type": "const_string", "value": separated.pop(name, "")} for name in ("begin", "end")]
    if tags.begin or tags.end:
        written = _sequence([around[0], dict(separated), around[1]])
        form = _one_of([written, *form["elements"][1:]]) if form["type"] == "or" else written
    if preface is not None:
        form = _sequence([{"type": "optional", "content": preface}, form])
    return {"type": "structural_tag", "format": form}


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [element for element in elements if element != {"type": "const_string", "value": ""}]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def _one_of(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


class _XGrammarGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self.size_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary, 0)


class XGrammarMatcher:
    def __init__(self, inner: xgrammar.GrammarMatcher, vocabulary: Vocabulary, num_accepted: int) -> None:
        self.inner = inner
        self._vocabulary = vocabulary
        self._num_accepted = num_accepted

    @property
    def is_accepting(self) -> bool:
        return bool(self.inner.is_completed()) or self.is_terminated

    @property
    def is_terminated(self) -> bool:
        return bool(self.inner.is_terminated())

    def fill_mask(self, masks: Tensor, row: int) -> None:
        check_masks(masks, self._vocabulary.num_words)
        if not 0 <= row < masks.shape[0]:
            raise IndexError(f"row {row} is not within the {masks.shape[0]} rows of masks")
        if self.is_terminated:
            raise MatcherError("nothing may follow the end of the output")
        self.inner.fill_next_token_bitmask(masks, row)

    def accept(self, token_ids: Sequence[int]) -> int:
        count = 0
        for token_id in token_ids:
            if (
                not 0 <= token_id < self._vocabulary.size
                or self.is_terminated
                or not self.inner.accept_token(token_id)
            ):
                break
            count += 1
        self._num_accepted += count
        return count

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_accepted:
            raise MatcherError(f"cannot forget {num_tokens} of {self._num_accepted} tokens")
        if num_tokens:
            self.inner.rollback(num_tokens)
            self._num_accepted -= num_tokens

    def copy(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.inner.fork(), self._vocabulary, self._num_accepted)


def _regex(text: str) -> str:
    """The pattern with constructs spelled out or refused that this backend reads differently."""
    if "[[:" in text:
        raise GrammarError("regex: classes by name, as in [[:alpha:]], are not supported by xgrammar")
    return _REGEX_PARTS.sub(lambda match: r"[^\n]" if match[0] == "." else match[0], text)


def _json_grammar(schema: Any, constraint: Constraint) -> xgrammar.Grammar:
    if constraint.whitespace.pattern:
        raise GrammarError("whitespace_pattern is not supported by xgrammar")
    spacing = constraint.whitespace.spacing
    is_free = spacing is Spacing.FREE
    _number(schema)
    # Not any_order, with which required keys may be missing and keys may repeat.
    grammar = xgrammar.Grammar.from_json_schema(
        dumps(schema),
        any_whitespace=is_free,
        max_whitespace_cnt=MAX_WHITESPACE if is_free else None,
        separators=None if is_free else (", ", ": "),
        strict_mode=not constraint.has_additional_properties,
    )
    if spacing is not Spacing.COMPACT:
        return grammar
    # Its separators are texts, of which none is optional.
    return xgrammar.Grammar.from_ebnf(_SEPARATOR.sub(r'"\1" " "?', str(grammar)))


def _check_keywords(schema: Any) -> None:
    """Raises GrammarError by name of a keyword that would be ignored."""
    if isinstance(schema, list):
        for entry in schema:
            _check_keywords(entry)
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name in _IGNORED and value is not False:
            raise GrammarError(f"json_schema: {name} is not enforced by xgrammar")
    _check_keywords(list(subschemas(schema)))


def _number(schema: Any) -> None:
    """Give each part of a schema a keyword of its own.

    xgrammar takes equal parts for one, and compares them without annotations such as `title`, among which it
    counts properties and members of constants with these names.
    """
    parts, count = [schema], 0
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts.extend(part)
        elif isinstance(part, dict):
            parts.extend(subschemas(part))
            if "$ref" not in part:
                count += 1
                part["x-number"] = count


def _special_tokens(vocabulary: Vocabulary) -> set[str]:
    entries = json.loads(vocabulary.tokenizer_json).get("added_tokens") or ()
    return {entry["content"] for entry in entries if entry.get("special") and entry["content"]}


def _texts(vocabulary: Vocabulary) -> list[str]:
    """Texts of tokens by id, as the tokenizer's file spells them. Special tokens have none."""
    document = json.loads(vocabulary.tokenizer_json)
    vocab = document["model"]["vocab"]
    pairs = (
        [(entry[0], index) for index, entry in enumerate(vocab)]
        if isinstance(vocab, list)
        else list(vocab.items())
    )
    pairs += [
        ("" if entry.get("special") else entry["content"], entry["id"])
        for entry in document.get("added_tokens") or ()
    ]
    texts = [""] * min(vocabulary.size, max((index for _, index in pairs), default=-1) + 1)
    for text, index in pairs:
        if index < len(texts):
            texts[index] = text
    return texts


def _short(message: str) -> str:
    text = _ERROR_PLACE.sub("", " ".join(message.split()))
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " ..."
