"""Each kind of mutant is made where it belongs, compiles, and is the same every time."""

from __future__ import annotations

import ast
import textwrap

import pytest

from tests.mutation.mutants import Kind, Mutant, make_mutants
from tests.mutation.run import draw

BLOCK_POOL = '''
"""A pool, with every kind of line that a mutant is made of. `free < 1` is no code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pool import Block

__all__ = ["Pool"]
FIRST = 1


class Pool:
    __slots__ = ("free", "used")

    def __init__(self, num_blocks: int = 2, *, caching: bool = True) -> None:
        self.free = list(range(num_blocks))  # 0 < 1
        self.used: dict[int, int] = {}

    def take(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none when 1 is missing."""
        assert count > 0, f"{count + 1} blocks"
        if not self.free and (
            count < len(self.free)  # no "and" here, and no >
            or count is None
        ):
            return None
        if count > 9:
            raise ValueError(f"{count - 1} blocks are too many")
        taken: list[int] = []
        for block in self.free:
            if block in self.used:
                continue
            logger.info("taken", extra={"count": 1})
            taken.append(block)
            self.used[block] = max(count, 3)
        count += 1
        return taken[: count - 1]
'''


def mutants(text: str) -> list[Mutant]:
    return make_mutants("engine_svc/cache/pool.py", textwrap.dedent(text))


def changed_to(text: str, kind: Kind) -> list[str]:
    """The lines that mutants of one kind put in the place of the original's, in their order."""
    return [
        line[1:].strip()
        for mutant in mutants(text)
        if mutant.kind is kind
        for line in mutant.diff(textwrap.dedent(text)).splitlines()
        if line.startswith("+")
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a <= b", ["a < b", "a > b"]),
        ("a > b", ["a >= b", "a <= b"]),
        ("a >= b", ["a > b", "a < b"]),
        ("a == b", ["a != b"]),
        ("a != b", ["a == b"]),
        ("a is b", ["a is not b"]),
        ("a is  not b", ["a is b"]),
        ("a in b", ["a not in b"]),
        ("a not in b", ["a in b"]),
        ("(a) < (b)", ["(a) <= (b)", "(a) >= (b)"]),
        ("0 < a <= b", ["0 <= a <= b", "0 >= a <= b", "0 < a < b", "0 < a > b"]),
        ("a[b < c] == d", ["a[b <= c] == d", "a[b >= c] == d", "a[b < c] != d"]),
    ],
)
def test_comparisons_are_flipped(written: str, expected: list[str]) -> None:
    assert sorted(changed_to(f"x = {written}", Kind.COMPARISON)) == sorted(f"x = {line}" for line in expected)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("x = 7", ["x = 8"]),
        ("x = y[-1]", ["x = y[-2]"]),
        ("x = a + 1", ["x = a - 1", "x = a", "x = a + 2"]),
        ("x = a - b", ["x = a + b"]),
        ("x = (a - b) - (c)", ["x = (a + b) - (c)", "x = (a - b) + (c)"]),
        ("x += a", ["x -= a"]),
        ("x -= 1", ["x += 1", "x -= 2"]),
        ("x = 'é' + a", ["x = 'é' - a"]),
        ("x = 1.5", []),
    ],
)
def test_numbers_are_off_by_one(written: str, expected: list[str]) -> None:
    assert sorted(changed_to(written, Kind.OFF_BY_ONE)) == sorted(expected)


@pytest.mark.parametrize(
    ("body", "num_dropped"),
    [
        ("f(a)", 1),
        ("self.x = a", 1),
        ("a = 2", 1),
        ("a += 2", 1),
        ("del a[0]", 1),
        ("new = a", 0),
        ("new = a\n    new = f(a)", 1),
        ("'words'", 0),
        ("...", 0),
        ("logger.info(a)", 0),
        ("return a", 0),
        ("if a:\n        return 1\n    return 2", 1),
        ("for b in a:\n        b = f(b)\n        break", 2),
        ("while a:\n        continue", 1),
        ("self.x = f(\n        a,\n        b,\n    )", 1),
    ],
)
def test_lines_are_dropped_where_that_is_no_crash(body: str, num_dropped: int) -> None:
    text = f"def method(self, a):\n    {body}\n"
    assert changed_to(text, Kind.DROPPED_LINE) == ["pass"] * num_dropped


def test_what_a_constructor_declares_is_not_dropped() -> None:
    text = (
        "class Pool:\n    size = f()\n    def __init__(self):\n        self.free = []\n        self.fill()\n"
    )
    assert [mutant.line for mutant in mutants(text)] == [5]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("if a: f()", ["if not (a): f()"]),
        ("if not a: f()", ["if a: f()"]),
        ("if not (a and b): f()", ["if (a and b): f()"]),
        ("if a or b: f()", ["if not (a or b): f()"]),
        ("if a < b: f()", []),
        ("while a: f()", ["while not (a): f()"]),
        ("x = b if a else c", ["x = b if not (a) else c"]),
        ("x = [b for b in a if b]", ["x = [b for b in a if not (b)]"]),
    ],
)
def test_conditions_are_negated(written: str, expected: list[str]) -> None:
    assert changed_to(written, Kind.NEGATION) == expected


def test_and_or_min_max_and_booleans_are_swapped() -> None:
    assert changed_to("x = a and b and c", Kind.AND_OR) == ["x = a or b and c", "x = a and b or c"]
    assert changed_to("x = a or (b)", Kind.AND_OR) == ["x = a and (b)"]
    assert changed_to("x = min(a, max(b, c))", Kind.MIN_MAX) == [
        "x = max(a, max(b, c))",
        "x = min(a, min(b, c))",
    ]
    assert changed_to("x = f(a, key=True)", Kind.BOOLEAN) == ["x = f(a, key=False)"]
    assert changed_to("x = zip(a, b, strict=True)", Kind.BOOLEAN) == []


def test_what_decides_nothing_is_left_alone() -> None:
    left_alone = ("__all__", "__slots__", "assert", "raise", "TYPE_CHECKING", '"""', "logger", "import")
    lines = textwrap.dedent(BLOCK_POOL).splitlines()
    hit = {lines[mutant.line - 1].strip() for mutant in mutants(BLOCK_POOL)}
    assert not [line for line in hit if line.startswith(left_alone)]


def test_lines_are_those_of_the_original() -> None:
    lines = textwrap.dedent(BLOCK_POOL).splitlines()
    hit = [lines[mutant.line - 1].split("#")[0].strip() for mutant in mutants(BLOCK_POOL)]
    assert list(dict.fromkeys(hit)) == [
        "FIRST = 1",
        "def __init__(self, num_blocks: int = 2, *, caching: bool = True) -> None:",
        "if not self.free and (",
        "count < len(self.free)",
        "or count is None",
        "return None",
        "if count > 9:",
        "if block in self.used:",
        "continue",
        "taken.append(block)",
        "self.used[block] = max(count, 3)",
        "count += 1",
        "return taken[: count - 1]",
    ]


def test_every_mutant_compiles_and_differs_from_all_others() -> None:
    made = [ast.dump(ast.parse(mutant.text)) for mutant in mutants(BLOCK_POOL)]
    assert len({*made, ast.dump(ast.parse(textwrap.dedent(BLOCK_POOL)))}) == len(made) + 1
    assert {mutant.kind for mutant in mutants(BLOCK_POOL)} == set(Kind)


def test_the_same_text_makes_the_same_mutants() -> None:
    assert mutants(BLOCK_POOL) == mutants(BLOCK_POOL)


def test_a_draw_takes_of_each_file_its_share_and_a_larger_one_begins_with_it() -> None:
    large = make_mutants("large.py", "\n".join(f"x = {number}" for number in range(30)))
    small = make_mutants("small.py", "\n".join(f"x = {number}" for number in range(10)))
    drawn = draw([large, [], small], 20, seed=1)
    assert [mutant.path for mutant in drawn].count("small.py") == 5
    assert drawn == draw([large, [], small], 40, seed=1)[:20]
    assert drawn != draw([large, [], small], 20, seed=2)
    assert len(draw([large, [], small], 0, seed=1)) == 40
