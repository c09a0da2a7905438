"""Writes the tables of docs/fields.md: `python tools/rules_doc.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from triptych.admin.v1 import admin_pb2
from triptych.api.v1 import chat_message_pb2, embedding_pb2, generate_pb2
from triptych.engine.v1 import add_pb2
from triptych.options.v1 import rules_pb2
from triptych_kit.rules import declared_rules, range_words

FILE = Path(__file__).resolve().parents[1] / "docs" / "fields.md"
REQUESTS = (
    generate_pb2.GenerateRequest,
    chat_message_pb2.ChatRequest,
    embedding_pb2.EmbedRequest,
    embedding_pb2.ScoreRequest,
    embedding_pb2.RerankRequest,
    embedding_pb2.ClassifyRequest,
    add_pb2.AddEntry,
    admin_pb2.WatchSchedulerRequest,
)
_MAX_ROW = 200  # characters; the totals of a longer one stand below the table
_TABLES = "<!-- What follows is written by tools/rules_doc.py. -->"
_LIMITS = {
    rules_pb2.LIMIT_VOCABULARY: "the vocabulary has",
    rules_pb2.LIMIT_MODEL_LENGTH: "the model's longest sequence has",
    rules_pb2.LIMIT_MAX_N: "`--max-n` of the frontend",
    rules_pb2.LIMIT_MAX_LOGPROBS: "`--max-logprobs` of frontend and engine, where -1 is the vocabulary",
}


def fields_of(descriptor: Any, seen: set[str]) -> Iterator[FieldDescriptor]:
    """The fields of a message, then those of the messages in it, each message once."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    yield from descriptor.fields
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def request_fields() -> Iterator[FieldDescriptor]:
    """The fields of all requests and of the messages in them."""
    seen: set[str] = set()
    for request in REQUESTS:
        yield from fields_of(request.DESCRIPTOR, seen)


def is_alternative(field: FieldDescriptor) -> bool:
    """Whether the field is one of several of a oneof."""
    return field.containing_oneof is not None and len(field.containing_oneof.fields) > 1


def generated(document: str) -> str:
    """The document with its tables replaced; what is before them stays."""
    return "\n".join((document.partition(_TABLES)[0] + _TABLES, *_tables(), ""))


def _tables() -> Iterator[str]:
    for message, fields in itertools.groupby(request_fields(), lambda field: field.containing_type):
        yield f"\n## {message.name}\n"
        yield f"In [{message.file.name}](../protos/{message.file.name}).\n"
        yield "| field | values | unset |\n|---|---|---|"
        below: list[str] = []
        for field in fields:
            rules = declared_rules(field) or rules_pb2.Rules()
            own, totals = list(_values(field, rules)), list(_totals(rules))
            row = _row(field, rules, [*own, *totals])
            if len(row) > _MAX_ROW:
                row = _row(field, rules, [*own, "see below"])
                below += [f"- `{field.name}`: {total}" for total in totals]
            yield row
        if below:
            yield "\n" + "\n".join(below)


def _row(field: FieldDescriptor, rules: Any, values: Iterable[str]) -> str:
    return f"| `{field.name}` | {'; '.join(values)} | {_unset(field, rules)} |"


def _values(field: FieldDescriptor, rules: Any) -> Iterator[str]:
    if rules.maximum_limit:
        yield f"{range_words(rules)}, unless another maximum is set by {_LIMITS[rules.maximum_limit]}"
    elif rules.HasField("minimum") or rules.HasField("maximum"):
        yield range_words(rules)
    elif rules.finite:
        yield "finite"
    if rules.HasField("raised_to"):
        yield f"lower ones but 0 are raised to {rules.raised_to:,g}"
    if rules.HasField("lowered_to"):
        yield f"higher ones are lowered to {rules.lowered_to:,g}"
    if rules.HasField("max_results"):
        yield f"at most {rules.max_results:,} results for all positions"
    if rules.max_items_limit:
        yield f"no more {rules.unit or 'numbers'} than {_LIMITS[rules.max_items_limit]}"
    elif rules.min_items or rules.HasField("max_items"):
        most = rules.max_items if rules.HasField("max_items") else None
        yield _count(rules.min_items, most, rules.unit or "entries")
    if rules.column:
        yield "little-endian u32 numbers"
    if rules.in_vocabulary:
        yield "ids of the vocabulary"
    if rules.min_chars or rules.HasField("max_chars"):
        most = rules.max_chars if rules.HasField("max_chars") else None
        yield _count(rules.min_chars, most, "characters" + (" each" if field.is_repeated else ""))
    if rules.HasField("max_bytes"):
        yield _count(0, rules.max_bytes, "bytes")
    if rules.defined:
        yield "a name of the enum" + (" but UNSPECIFIED" if rules.specified else "")
    if rules.printable:
        yield "characters that can be printed"
    if rules.no_nul:
        yield "no NUL"


def _totals(rules: Any) -> Iterator[str]:
    for total in rules.totals:
        fields = " and ".join(f"`{path}`" for path in total.paths)
        yield _count(0, total.maximum, total.unit or "characters") + (
            f" in all {fields}" if fields else " together"
        )


def _count(least: int, most: int | None, unit: str) -> str:
    """A number of items in words. Without a maximum, the contract has no minimum but 1."""
    if most is None:
        return "not empty"
    return f"at most {most:,} {unit}" if least == 0 else f"{least:,} to {most:,} {unit}"


def _unset(field: FieldDescriptor, rules: Any) -> str:
    if rules.unset:
        return str(rules.unset)
    oneof = field.containing_oneof
    if oneof is not None and is_alternative(field):
        return f"another of `{oneof.name}`"
    return f"required where `{rules.where}` is set" if rules.where else "required"


if __name__ == "__main__":
    FILE.write_text(generated(FILE.read_text(encoding="utf-8")), encoding="utf-8")
