"""Constraints in the text that llguidance compiles, and refusals of work that its fuel does not limit.

Knows no vocabulary but special tokens, so that a constraint can be checked without a model.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from engine_svc.features.structured_output.constraint import (
    MAX_WHITESPACE,
    Constraint,
    ConstraintKind,
    GrammarError,
    GrammarNotEnforced,
    GrammarTooComplex,
    Spacing,
)
from engine_svc.features.structured_output.json_schema.lark_rules import (
    SchemaRules,
    is_within,
    needs_rules,
    slashed,
)
from engine_svc.features.structured_output.json_schema.numbers import MAX_DIGITS, exact, is_number, whole
from engine_svc.features.structured_output.json_schema.shapes import UnsupportedShape
from engine_svc.features.structured_output.limits import (
    SCHEMA_MAPS,
    ConjoinedPatterns,
    check_intersections,
    check_repetitions,
    check_text,
    part_at,
    subschemas,
)
from engine_svc.features.structured_output.structural_tags import Tag, keyword_arguments, read_structural_tags
from triptych_kit.exact_json import dumps

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# All are counts, the same on every machine; behind each what it costs on a current core.
INITIAL_LEXER_FUEL = 1_000_000  # to build the regular expressions; 20 ms
STEP_LEXER_FUEL = 200_000  # of one mask; 15 ms
STEP_MAX_ITEMS = 50_000  # of the parser in one mask; 3 ms
MAX_ITEMS_IN_ROW = 2_000
MAX_LEXER_STATES = 100_000  # at most 200 MB; a mask of usual schemas adds a few
MAX_GRAMMAR_SIZE = 500_000  # symbols; 100 bytes each
MAX_SYMBOLS = 65_524  # of those left after simplification: 16 bits number them, one more is a panic

UNUSED_CHARACTER = "\ue000"  # in no text

MAX_TEXT_BYTES = 1 << 20  # of a constraint
MAX_NESTING = 256  # brackets of a constraint: the compiler recurses
MAX_REPETITIONS = 20_000  # of a regular expression, nested counts multiplied: 5 us each, outside of the fuel
MAX_MULTIPLE = 10_000  # least common multiple of the digits of multipleOf; 25 us each, outside of the fuel
MAX_CONJOINED = 3  # patterns for the same text; 5 ms for one mask, with 5 of them 2 s, outside of the fuel
MAX_CONJOINED_VALUES = 50_000  # looked at to find them
MAX_LITERAL = 16_384  # characters of one text: 0.2 us each in every mask of it, outside of the fuel
MAX_PROPERTIES = 2_000  # of one object; 0.4 s, and the cube of the number, outside of the fuel

# Escapes of strings. Without "u" a key cannot be spelled in two ways, so that a property cannot pass as an
# additional one under another schema.
_ESCAPES = '"\\bfnrt'
_EXACT = Context(prec=2 * MAX_DIGITS)
_MAX_ERROR_CHARS = 300
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s\[\]]+>')
_JSON_PARTS = re.compile(r'"[^"]*"|[,:] ?|[{}\[\]]|[^"{}\[\],:]+|"')
# Of a message: what follows is for developers of llguidance, or shows the text that it was given, which for
# schemas is not the client's.
_DETAILS = re.compile("<state>|<backtrace>|\n *1 \\| start: json_")
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")  # in that text
_PANIC = "panic: "
_EMPTY = "Unsatisfiable schema"
_LIMITATIONS = {
    "circular references with sibling keys": (
        "no backend enforces $ref to a schema that contains itself where other keywords limit the same value"
    ),
    "min/maxProperties only": "no backend enforces minProperties or maxProperties beside optional properties",
    "are not disjoint": "no backend enforces patternProperties of which several may match one name",
}
_LIMIT_WORDS = ("fuel", "too complex", "too large", "limit", "too many", "exceeded")


def parser_limits() -> LLParserLimits:
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
            _check_literals("choice", list(constraint.choices))
            pattern = "|".join(_escaped(choice) for choice in constraint.choices)
            return LLMatcher.grammar_from_regex(f"(?:{pattern})")
        case ConstraintKind.GRAMMAR:
            check_repetitions(constraint.text, "grammar", MAX_REPETITIONS)
            check_intersections(constraint.text, MAX_CONJOINED)
            return LLMatcher.grammar_from_lark(_with_ids(_lark(constraint.text), special_ids))
        case ConstraintKind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(_tags_lark(constraint, special_ids))


def _check_schema(document: Any) -> None:
    """Refuse keywords whose work the fuel does not limit."""
    multiple = 1  # least common multiple of the schemas before
    open_values, seen = [document], set()
    while open_values:
        schema = open_values.pop()
        if not isinstance(schema, dict | list) or id(schema) in seen:
            continue
        seen.add(id(schema))
        if isinstance(schema, list):
            open_values += schema
            continue
        multiple = _check_keywords(schema, multiple)
        open_values += subschemas(schema)
        if isinstance(reference := schema.get("$ref"), str):
            # The target may be no schema at its own place.
            open_values.append(part_at(document, reference))
    ConjoinedPatterns(document, max_conjoined=MAX_CONJOINED, max_values=MAX_CONJOINED_VALUES).check(document)


def _check_keywords(schema: dict[str, Any], multiple: int) -> int:
    """Returns the least common multiple with that of the schema."""
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            check_repetitions(value, name, MAX_REPETITIONS)
        elif name == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                check_repetitions(pattern, name, MAX_REPETITIONS)
        elif name == "multipleOf" and is_number(value) and value > 0:
            number = Decimal(value).normalize(_EXACT)
            multiple = math.lcm(multiple, int("".join(map(str, number.as_tuple().digits))))
            if multiple > MAX_MULTIPLE:
                raise GrammarTooComplex(f"multipleOf: the least common multiple exceeds {MAX_MULTIPLE}")
        elif name in ("const", "enum"):
            _check_literals(name, value)
        elif name in ("properties", "required") and isinstance(value, dict | list):
            if len(value) > MAX_PROPERTIES:
                raise GrammarTooComplex(f"{name} has {len(value)} entries, {MAX_PROPERTIES} are allowed")
            _check_literals(name, list(value))
    return multiple


def _check_literals(name: str, value: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_LITERAL:
        raise GrammarTooComplex(f"{name} has a text of {len(value)} characters, {MAX_LITERAL} are allowed")
    if isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_literals(name, part)


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_float=exact, parse_int=whole)
    except ValueError as error:
        raise GrammarError(f"json_schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("json_schema is false, which no output satisfies")
    if not isinstance(schema, dict):
        raise GrammarError("json_schema is neither a JSON object nor a bool")
    return schema


_SUBSCHEMAS = ("items", "contains", "not", "if", "then", "else", "propertyNames")
_SUBSCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")


def _prepared_schema(schema: Any, constraint: Constraint) -> Any:
    """The schema without the keyword that would change the options below, its objects closed on request."""
    if not isinstance(schema, dict):
        return schema
    prepared = {name: value for name, value in schema.items() if name != "x-guidance"}
    for name, value in prepared.items():
        if name in SCHEMA_MAPS and isinstance(value, dict):
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
        "lenient": constraint.is_lenient,
        "json_allowed_escapes": _ESCAPES,
        "whitespace_flexible": whitespace.spacing is Spacing.FREE,
    }
    if whitespace.pattern:
        check_repetitions(whitespace.pattern, "whitespace_pattern", MAX_REPETITIONS)
        options["whitespace_pattern"] = whitespace.pattern
    elif whitespace.spacing is Spacing.FREE:
        options["whitespace_pattern"] = f"[ \t\r\n]{{1,{MAX_WHITESPACE}}}"
    else:
        # These are regular expressions.
        space = " " if whitespace.spacing is Spacing.SINGLE else " ?"
        options["item_separator"] = f",{space}"
        options["key_separator"] = f":{space}"
    return options


def _schema_rules(schema: dict[str, Any], constraint: Constraint) -> str | None:
    """The schema as rules of a grammar; None where llguidance's own form of it has the same numbers."""
    if not needs_rules(schema):
        return None
    try:
        return SchemaRules(schema, cast(dict[str, Any], _json_options(constraint)), _check_schema).text()
    except UnsupportedShape as error:
        if is_within(schema):
            return None
        raise GrammarError(f"json_schema: {error}") from None


def _json_grammar(schema: dict[str, Any], constraint: Constraint) -> str:
    options = _json_options(constraint)
    if (rules := _schema_rules(schema, constraint)) is not None:
        return LLMatcher.grammar_from_lark(rules)
    _check_schema(schema)
    try:
        return LLMatcher.grammar_from_json_schema(dumps(schema), overrides=options)
    except ValueError as error:
        raise GrammarError(f"json_schema: {short_message(str(error))}") from None


def _lark(text: str) -> str:
    """Lark as it is; EBNF with ::=, whose first rule is root, converted."""
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarError(f"grammar: {short_message(str(error))}") from None
    except (Exception, RecursionError) as error:  # noqa: BLE001  # the converter raises Exception itself
        raise GrammarError(f"grammar is not EBNF: {short_message(str(error))}") from None


def _with_ids(lark: str, special_ids: dict[str, int]) -> str:
    """The grammar with special tokens by their ids where it names them, which is not within its texts."""

    def written(part: re.Match[str]) -> str:
        return f"<[{special_ids[part[0]]}]>" if part[0] in special_ids else part[0]

    return _LARK_PARTS.sub(written, lark) if special_ids else lark


def _tags_lark(constraint: Constraint, special_ids: dict[str, int]) -> str:
    tags = read_structural_tags(constraint.text)
    options = _json_options(constraint)

    rules: list[str] = []

    def value(schema: dict[str, Any]) -> str:
        if (rules := _schema_rules(schema, constraint)) is not None:
            return f"%lark {{\n{rules}}}"
        _check_schema(schema)
        return f"%json {dumps(_prepared_schema(schema, constraint) | {'x-guidance': options})}"

    def arguments(tag: Tag) -> str:
        """The name of a rule for them: any of the optional ones behind those that are required."""
        name, found = f"arguments_{len(rules)}", keyword_arguments(tag)
        num_required = sum(argument.is_required for argument in found)
        for index, argument in enumerate(found):
            rules.append(f"{name}_{index}: {_quoted(argument.name + '=')} {value(argument.schema)}")
        rest = '""'
        firsts = [] if num_required else ['""']
        for index in reversed(range(len(found))):
            one = f"{name}_{index} {name}_rest_{index + 1}"
            if index == 0 or not num_required:
                firsts.append(one)
            rules.append(f"{name}_rest_{index + 1}: {rest}")
            rest = f"{_quoted(', ')} {one}" + ("" if index < num_required else ' | ""')
            if index >= num_required:
                rest = f"{_quoted(', ')} {one} | {name}_rest_{index + 1}"
        rules.append(f"{name}: {' | '.join(firsts)}")
        return name

    def body(text: str, tag: Tag) -> str:
        schema: dict[str, Any] = {} if tag.schema is True else cast(dict[str, Any], tag.schema)
        if tag.schema is False:
            raise GrammarError(f"structural_tag: the schema of {tag.begin!r} is false")
        if tag.pattern:
            check_repetitions(tag.pattern, "regex", MAX_REPETITIONS)
            rules.append(f"TEXT_{len(rules)}: /{slashed(tag.pattern)}/")
            content = f"TEXT_{len(rules) - 1}"
        else:
            content = arguments(tag) if tag.is_keywords else value(schema)
        begin = _literals(text, special_ids)
        if tags.alternative is not None and not tags.alternative.begin:
            # Where both may begin alike, the lexer has to find the same ends in a tag as in JSON.
            begin = [part for piece in _JSON_PARTS.findall(text) for part in _literals(piece, special_ids)]
        return " ".join((*begin, content, *_literals(tag.end, special_ids)))

    if not tags.triggers:
        one = " | ".join(f"({body(tag.begin, tag)})" for tag in tags.tags)
        more = (
            ""
            if tags.stop_after_first
            else f"({' '.join([*_literals(tags.separator, special_ids), 'tag'])})*"
        )
        start = f"tag {more}" if tags.at_least_one else f"(tag {more})?"
        around = (*_literals(tags.begin, special_ids), f"({start})", *_literals(tags.end, special_ids))
        start = " ".join(around)
        if tags.alternative is not None:
            start = f"{start} | {body(tags.alternative.begin, tags.alternative)}"
        if tags.preface is not None:
            start = f"({body(tags.preface.begin, tags.preface)})? ({start})"
        return "\n".join([f"start: {start}", f"tag: {one}", *rules, ""])
    rules.append("TEXT: /(?s:.*)/")
    names = []
    for number, trigger in enumerate(tags.triggers):
        # The longest trigger that begins a tag is the one that its text reaches last.
        alternatives = [
            body(tag.begin[len(trigger) :], tag) for tag in tags.tags if tag.begin.startswith(trigger)
        ]
        names.append(f"tag_{number}")
        rules.append(f"spelled_{number}[lazy]: TEXT {_quoted(trigger)}")
        by_id = f" | TEXT <[{special_ids[trigger]}]>" if trigger in special_ids else ""
        rules.append(f"begin_{number}: spelled_{number}{by_id}")
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
    """A regular expression of `text` alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/ ]", lambda match: f"\\x{ord(match[0]):02x}", text)


def short_message(message: str) -> str:
    """The message on one line, without the parser's state or the backtrace of a panic."""
    text = _PLACE.sub("", " ".join(_DETAILS.split(message)[0].split()))
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " ..."


def grammar_error(constraint: Constraint, message: str) -> GrammarError:
    """The refusal of a constraint for llguidance's message about its grammar."""
    if "NoExtensionBias" in message:
        return GrammarError("the constraint allows no output")
    for words, refusal in _LIMITATIONS.items():
        if words in message:
            return GrammarNotEnforced(refusal)
    if _EMPTY in message:
        return GrammarError(f"{constraint.kind.value} is satisfied by no value")
    short = short_message(message)
    if short.startswith(_PANIC):
        # Its assertions guard the sizes that it was built for.
        panic, name = short.removeprefix(_PANIC), constraint.kind.value
        if "symbols.len()" in panic:
            return GrammarTooComplex(f"{name} needs more than {MAX_SYMBOLS} symbols of a grammar")
        return GrammarTooComplex(f"{name} cannot be compiled: {panic}")
    is_limit = any(word in message.lower() for word in _LIMIT_WORDS)
    return GrammarTooComplex(short) if is_limit else GrammarError(short)


def with_markers_apart(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """The tokenizer's file for llguidance, and the ids of its markers by their texts.

    Markers are special tokens and, to llguidance, all that look like <this>: no text contains them, grammars
    name them by id. But where a text is forced, llguidance allows the tokens alone that the tokenizer writes
    it with, markers among them, and refuses these then. So no text may be written with a marker.
    """
    document = json.loads(tokenizer_json)
    vocab = document["model"].get("vocab")
    marker_ids, added = {}, []
    for token in document.get("added_tokens") or ():
        text = token["content"]
        is_marked = text.startswith("<") and text.endswith(">")
        if not text or not (token.get("special") or is_marked):
            added.append(token)
            continue
        marker_ids[text] = token["id"]
        apart = text[:1] + UNUSED_CHARACTER + text[1:]
        if isinstance(vocab, dict) and text in vocab:
            if not token.get("special"):
                continue  # as a piece it is a marker, too, and the tokenizer's merges may name it
            vocab[apart] = vocab.pop(text)
        elif isinstance(vocab, list):
            vocab[:] = [[apart, score] if piece == text else [piece, score] for piece, score in vocab]
        added.append(token | {"content": apart})
    document["added_tokens"] = added
    return json.dumps(document, ensure_ascii=False), marker_ids
