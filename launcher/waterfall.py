"""Draws the spans of one trace as lines of text. Knows no service."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.admin.v1 import admin_pb2

_WIDTH = 44
_BLOCK = "█"
# Smaller than one column, but there.
_SLIVER = "▏"


def draw(spans: Iterable[admin_pb2.Span]) -> list[str]:
    """A line for each span: who, what, when on a common axis, how long; children below their parents."""
    ordered = _by_parent(list(spans))
    if not ordered:
        return []
    start_ns = min(span.start_unix_ns for _, span in ordered)
    length_ns = max(1, max(span.end_unix_ns for _, span in ordered) - start_ns)
    names = [f"{'  ' * depth}{span.name}" for depth, span in ordered]
    name_width = max(len(name) for name in names)
    lines = []
    for name, (_, span) in zip(names, ordered, strict=True):
        left = min(_WIDTH - 1, (span.start_unix_ns - start_ns) * _WIDTH // length_ns)
        duration_ns = span.end_unix_ns - span.start_unix_ns
        bar = _BLOCK * (duration_ns * _WIDTH // length_ns) or _SLIVER
        where = f"{' ' * left}{bar}".ljust(_WIDTH)[:_WIDTH]
        who = f"{span.service:<9} {span.pid:>7}  {name:<{name_width}}"
        lines.append(f"{who}  {where} {duration_ns / 1e6:8.1f} ms{'' if span.ok else '  failed'}")
    return lines


def _by_parent(spans: list[admin_pb2.Span]) -> list[tuple[int, admin_pb2.Span]]:
    """Depth first, siblings in order of their start. A span whose parent is not there is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[admin_pb2.Span]] = {}
    for span in sorted(spans, key=lambda one: one.start_unix_ns):
        parent = span.parent_span_id if span.parent_span_id in known else ""
        children.setdefault(parent, []).append(span)
    ordered: list[tuple[int, admin_pb2.Span]] = []
    waiting = [(0, span) for span in reversed(children.get("", []))]
    while waiting:
        depth, span = waiting.pop()
        ordered.append((depth, span))
        waiting += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]
    return ordered
