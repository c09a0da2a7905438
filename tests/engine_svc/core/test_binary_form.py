"""A dataclass has a binary form that its fields decide; a field of a type without one is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pytest

from engine_svc.core.binary_form import form_of
from engine_svc.core.byte_fields import MessageError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True)
class Drawing:
    name: str
    content: bytes
    colour: Colour
    is_open: bool
    origin: Point | None
    points: list[Point]
    flags: tuple[bool, ...]
    ids: frozenset[int] | None
    edges: tuple[tuple[str, Point], ...]


DRAWING = Drawing(
    "\u00e9\0\ud800", b"\0\1", Colour.BLUE, False, Point(-(1 << 63), 0.1), [Point(1, 2.0), Point(3, -0.0)],
    (True, False), frozenset({7, 1}), (("a", Point(0, 1.0)), ("", Point(1, 0.0))),
)  # fmt: skip


@pytest.mark.parametrize(
    "drawing", [DRAWING, Drawing("", b"", Colour.RED, True, None, [], (), None, ())], ids=["full", "empty"]
)
def test_every_kind_of_field_is_read_as_it_was_written(drawing: Drawing) -> None:
    form = form_of(Drawing)
    assert form.decode(form.encode(drawing)) == drawing


def test_bytes_that_end_early_or_go_on_are_refused() -> None:
    form = form_of(Drawing)
    data = form.encode(DRAWING)
    for end in range(len(data)):
        with pytest.raises(MessageError, match=f"a message has {end} bytes"):
            form.decode(data[:end])
    with pytest.raises(MessageError, match=f"a message has {len(data) + 1} bytes, {len(data)} were expected"):
        form.decode(data + b"1")


def test_a_member_that_an_enum_lacks_is_refused() -> None:
    form = form_of(Drawing)
    with pytest.raises(ValueError, match="'blub' is not a valid Colour"):
        form.decode(form.encode(DRAWING).replace(b"blue", b"blub"))


@dataclass
class Unwritable:
    names: dict[str, int]


def test_a_field_without_a_form_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"dict\[str, int\] has no binary form"):
        form_of(Unwritable)
