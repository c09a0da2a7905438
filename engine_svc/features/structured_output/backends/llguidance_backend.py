"""Grammars by llguidance: an Earley parser over lexemes, whose every step has a limit in fuel."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from torch import Tensor

from engine_svc.features.structured_output.backends.backend import (
    CompiledGrammar,
    Constraint,
    ConstraintKind,
    GrammarError,
    GrammarTooComplex,
    Matcher,
    MatcherError,
    Vocabulary,
    check_masks,
)
from engine_svc.features.structured_output.backends.limits import check_repetitions, check_text
from engine_svc.features.structured_output.backends.structural_tags import read_structural_tags

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# All are counts, the same on every machine; behind each what it costs on a current core.
MAX_TEXT_BYTES = 1 << 20  # of a constraint
MAX_NESTING = 256  # brackets of a constraint: the compiler recurses
INITIAL_LEXER_FUEL = 1_000_000  # to build the regular expressions; 20 ms
STEP_LEXER_FUEL = 200_000  # of one mask; 15 ms
STEP_MAX_ITEMS = 50_000  # of the parser in one mask; 3 ms
MAX_ITEMS_IN_ROW = 2_000
MAX_LEXER_STATES = 100_000  # at most 200 MB; a mask of usual schemas adds a few
MAX_GRAMMAR_SIZE = 500_000  # symbols; 100 bytes each
MAX_REPETITIONS = 20_000  # of a regular expression, nested counts multiplied: 5 us each, outside of the fuel

MAX_MULTIPLE = 10_000  # least common multiple of the digits of multipleOf; 25 us each, outside of the fuel
MAX_PROPERTIES = 2_000  # of one object; 0.4 s, and the cube of the number, outside of the fuel

# Escapes of strings. Without "u" a key cannot be spelled in two ways, so that a property cannot pass as an
# additional one under another schema.
_ESCAPES = '"\\bfnrt'
_LIMIT_WORDS = ("fuel", "too complex", "too large", "limit", "too many", "exceeded")
_MAX_ERROR_CHARS = 300


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class LLGuidanceBackend:
    """Compiles for one vocabulary, which takes a second to prepare at 128k tokens."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        self.vocabulary = vocabulary
        if not vocabulary.eos_ids:
            raise ValueError("a vocabulary without an end token cannot end an output")
        self._tokenizer = LLTokenizer(
            vocabulary.tokenizer_json, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids)
        )
        self._special_ids = _special_ids(vocabulary.tokenizer_json)
        self._executor = LLExecutor(num_threads)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        grammar = grammar_text(constraint, self._special_ids)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _grammar_error(matcher.get_error())
        return _LLGuidanceGrammar(matcher, self.vocabulary, len(grammar))

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Tensor) -> list[int]:
        check_masks(masks, self.vocabulary.num_words)
        for _, row in matchers:
            if not 0 <= row < masks.shape[0]:
                raise IndexError(f"row {row} is not within the {masks.shape[0]} rows of masks")
        pairs = [(cast(LLGuidanceMatcher, matcher).inner, row) for matcher, row in matchers]
        self._executor.unsafe_compute_mask_ptr(
            pairs, masks.data_ptr(), 4 * self.vocabulary.num_words, masks.shape[0]
        )
        return [index for index, (inner, _) in enumerate(pairs) if inner.is_error()]


class _LLGuidanceGrammar:
    def __init__(self, initial: LLMatcher, vocabulary: Vocabulary, num_chars: int) -> None:
        self._initial = initial  # never advanced
        self._vocabulary = vocabulary
        self.size_bytes = 100_000 + 100 * num_chars

    def matcher(self) -> Matcher:
        return LLGuidanceMatcher(self._initial.deep_copy(), self._vocabulary, has_ended=False)


class LLGuidanceMatcher:
    """A matcher whose errors, which llguidance keeps as a state, are raised.

    Where nothing may follow, llguidance stops by itself and does not count an end token: this class does.
    """

    def __init__(self, inner: LLMatcher, vocabulary: Vocabulary, has_ended: bool) -> None:
        self.inner = inner
        self._vocabulary = vocabulary
        self._has_ended = has_ended  # by an end token after llguidance had stopped

    @property
    def is_accepting(self) -> bool:
        return self.inner.is_accepting()

    @property
    def is_terminated(self) -> bool:
        return self.inner.is_stopped()

    def fill_mask(self, masks: Tensor, row: int) -> None:
        check_masks(masks, self._vocabulary.num_words)
        if not 0 <= row < masks.shape[0]:
            raise IndexError(f"row {row} is not within the {masks.shape[0]} rows of masks")
        size = 4 * self._vocabulary.num_words
        self.inner.unsafe_compute_mask_ptr(masks.data_ptr() + row * size, size)
        self._check()

    def accept(self, token_ids: Sequence[int]) -> int:
        known = self._known(token_ids)
        count = self.inner.try_consume_tokens(known)
        self._check()
        if self._ends_at(known, count):
            self._has_ended = True
            count += 1
        return count

    def count_valid(self, token_ids: Sequence[int]) -> int:
        if self._has_ended:
            return 0
        known = self._known(token_ids)
        count = self.inner.validate_tokens(known)
        self._check()
        return count

    def rollback(self, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, at least 0 is needed")
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens and not self.inner.rollback(num_tokens):
            self._check()
            raise MatcherError(f"cannot forget {num_tokens} tokens")

    def forced_tokens(self) -> list[int]:
        tokens = self.inner.compute_ff_tokens()
        self._check()
        return tokens

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.inner.deep_copy(), self._vocabulary, self._has_ended)

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens before the first that is not in the vocabulary, which would be an error for good."""
        known = []
        for token_id in token_ids:
            if not 0 <= token_id < self._vocabulary.size:
                break
            known.append(token_id)
        return known

    def _ends_at(self, token_ids: list[int], index: int) -> bool:
        return (
            index < len(token_ids)
            and token_ids[index] in self._vocabulary.eos_ids
            and not self._has_ended
            and self.inner.stop_reason() == "NoExtension"
        )

    def _check(self) -> None:
        if self.inner.is_error():
            raise MatcherError(_short(self.inner.get_error()))


def grammar_text(constraint: Constraint, special_ids: dict[str, int]) -> str:
    """The constraint in llguidance's own form, not checked yet. special_ids: of special tokens, by text."""
    check_text(constraint, max_bytes=MAX_TEXT_BYTES, max_nesting=MAX_NESTING)
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_grammar(_prepared_schema(_parsed(constraint.text), constraint), constraint)
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar({"type": "object"}, constraint)
        case ConstraintKind.REGEX:
            check_repetitions(constraint.text, "regex", MAX_REPETITIONS)
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICE:
            if not constraint.choices or "" in constraint.choices:
                raise GrammarError("choice has no texts, or an empty one")
            pattern = "|".join(_escaped(choice) for choice in constraint.choices)
            return LLMatcher.grammar_from_regex(f"(?:{pattern})")
        case ConstraintKind.GRAMMAR:
            check_repetitions(constraint.text, "grammar", MAX_REPETITIONS)
            return LLMatcher.grammar_from_lark(_lark(constraint.text))
        case ConstraintKind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(_tags_lark(constraint, special_ids))


def _check_schema(schema: Any, multiple: int = 1) -> int:
    """Refuse what the compiler's fuel does not limit; returns the least common multiple so far."""
    if isinstance(schema, list):
        for entry in schema:
            multiple = _check_schema(entry, multiple)
    if not isinstance(schema, dict):
        return multiple
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            check_repetitions(value, name, MAX_REPETITIONS)
        elif name == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                check_repetitions(pattern, name, MAX_REPETITIONS)
        elif name in ("properties", "required") and isinstance(value, dict | list):
            if len(value) > MAX_PROPERTIES:
                raise GrammarTooComplex(f"{name} has {len(value)} entries, {MAX_PROPERTIES} are allowed")
        elif name == "multipleOf" and isinstance(value, int | float) and 0 < value < float("inf"):
            number = Decimal(str(value)).normalize()
            multiple = math.lcm(multiple, int("".join(map(str, number.as_tuple().digits))))
            if multiple > MAX_MULTIPLE:
                raise GrammarTooComplex(f"multipleOf: the least common multiple exceeds {MAX_MULTIPLE}")
        multiple = _check_schema(value, multiple)
    return multiple


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"json_schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("json_schema is false, which no output satisfies")
    if not isinstance(schema, dict):
        raise GrammarError("json_schema is neither a JSON object nor a bool")
    _check_schema(schema)
    return schema


_SUBSCHEMAS = ("items", "contains", "not", "if", "then", "else", "propertyNames")
_SUBSCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _prepared_schema(schema: Any, constraint: Constraint) -> Any:
    """Without the keyword that would change the options below; objects closed where the request says so."""
    if not isinstance(schema, dict):
        return schema
    prepared = {name: value for name, value in schema.items() if name != "x-guidance"}
    for name, value in prepared.items():
        if name in _SUBSCHEMA_MAPS and isinstance(value, dict):
            prepared[name] = {key: _prepared_schema(entry, constraint) for key, entry in value.items()}
        elif name in _SUBSCHEMA_LISTS and isinstance(value, list):
            prepared[name] = [_prepared_schema(entry, constraint) for entry in value]
        elif name in _SUBSCHEMAS or name in ("additionalProperties", "additionalItems"):
            prepared[name] = _prepared_schema(value, constraint)
    if (
        not constraint.has_additional_properties
        and "properties" in prepared
        and "additionalProperties" not in prepared
    ):
        prepared["additionalProperties"] = False
    return prepared


def _json_options(constraint: Constraint) -> JsonCompileOptions:
    whitespace = constraint.whitespace
    options: JsonCompileOptions = {
        "coerce_one_of": False,
        "lenient": False,
        "json_allowed_escapes": _ESCAPES,
        "whitespace_flexible": whitespace.is_any,
    }
    if whitespace.pattern:
        options["whitespace_pattern"] = whitespace.pattern
    elif not whitespace.is_any:
        # The single spaces of json.dumps and of most examples.
        options["item_separator"] = ", "
        options["key_separator"] = ": "
    return options


def _json_grammar(schema: dict[str, Any], constraint: Constraint) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_json_options(constraint))


def _lark(text: str) -> str:
    """Lark as it is; EBNF with ::=, whose first rule is root, converted."""
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarError(f"grammar: {_short(str(error))}") from None
    except (Exception, RecursionError) as error:  # noqa: BLE001  # the converter raises Exception itself
        raise GrammarError(f"grammar is not EBNF: {_short(str(error))}") from None


def _tags_lark(constraint: Constraint, special_ids: dict[str, int]) -> str:
    tags = read_structural_tags(constraint.text)
    options = _json_options(constraint)

    def body(text: str, index: int) -> str:
        tag = tags.tags[index]
        schema: dict[str, Any] = {} if tag.schema is True else cast(dict[str, Any], tag.schema)
        if tag.schema is False:
            raise GrammarError(f"structural_tag: the schema of {tag.begin!r} is false")
        _check_schema(schema)
        content = _prepared_schema(schema, constraint) | {"x-guidance": options}
        parts = (
            *_literals(text, special_ids),
            f"%json {json.dumps(content)}",
            *_literals(tag.end, special_ids),
        )
        return " ".join(parts)

    if not tags.triggers:
        return f"start: {body(tags.tags[0].begin, 0)}\n"
    rules = ["TEXT: /(?s:.*)/"]
    names = []
    for number, trigger in enumerate(tags.triggers):
        # The longest trigger that begins a tag is the one that its text reaches last.
        alternatives = [
            body(tag.begin[len(trigger) :], index)
            for index, tag in enumerate(tags.tags)
            if tag.begin.startswith(trigger)
        ]
        names.append(f"tag_{number}")
        if trigger in special_ids:
            rules.append(f"begin_{number}: TEXT <[{special_ids[trigger]}]>")
        else:
            rules.append(f"begin_{number}[lazy]: TEXT {_quoted(trigger)}")
        rules.append(f"tag_{number}: begin_{number} (" + " | ".join(alternatives) + ")")
    one = " | ".join(names)
    if tags.stop_after_first:
        start = f"({one})" if tags.at_least_one else f"({one}) | tail"
    else:
        start = f"({one}){'+' if tags.at_least_one else '*'} tail"
    return "\n".join([f"start: {start}", "tail: TEXT", *rules, ""])


def _literals(text: str, special_ids: dict[str, int]) -> list[str]:
    """Parts of a rule that match the text, its special tokens by their ids."""
    if not text:
        return []
    if not special_ids:
        return [_quoted(text)]
    longest_first = sorted(special_ids, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [
        f"<[{special_ids[piece]}]>" if piece in special_ids else _quoted(piece) for piece in pieces if piece
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A regular expression of this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/ ]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _special_ids(tokenizer_json: str) -> dict[str, int]:
    document = json.loads(tokenizer_json)
    return {
        entry["content"]: entry["id"]
        for entry in document.get("added_tokens") or ()
        if entry.get("special") and entry["content"]
    }


def _grammar_error(message: str) -> GrammarError:
    short = _short(message)
    is_limit = any(word in message.lower() for word in _LIMIT_WORDS)
    return GrammarTooComplex(short) if is_limit else GrammarError(short)


def _short(message: str) -> str:
    """The message on one line, without the parser's state."""
    text = " ".join(message.split("<state>")[0].split())
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " ..."
