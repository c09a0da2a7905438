"""Small wrong versions of a source file, which its tests must notice. From text to text; runs nothing.

Left alone is what decides nothing: docstrings, annotations, decorators, asserts, messages, logging.
An assignment that is the first to its name is not dropped: that is a crash, which any test would notice.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Edit = Callable[["Kind", tuple[int, int], str], None]


class Kind(StrEnum):
    """What was done to the source."""

    COMPARISON = "flipped comparison"
    OFF_BY_ONE = "off by one"
    DROPPED_LINE = "dropped line"
    MIN_MAX = "min for max"
    NEGATION = "negated condition"
    AND_OR = "and for or"
    BOOLEAN = "True for False"


# An operator as it is written, and what stands in its place: one mutant each.
_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: (r"<", ("<=", ">=")),
    ast.LtE: (r"<=", ("<", ">")),
    ast.Gt: (r">", (">=", "<=")),
    ast.GtE: (r">=", (">", "<")),
    ast.Eq: (r"==", ("!=",)),
    ast.NotEq: (r"!=", ("==",)),
    ast.Is: (r"is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
    ast.In: (r"in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
}
_SIGNS: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
_EXTREMES = {"min": "max", "max": "min"}
_DECLARATIONS = {"__slots__", "__all__"}
_LOGGERS = {"logger", "logging", "warnings"}
_CONSTRUCTORS = {"__init__", "__post_init__"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One file with one thing wrong in it."""

    path: str
    line: int
    kind: Kind
    text: str

    def diff(self, original: str) -> str:
        """The lines that differ from the original file, with `-` and `+` before them."""
        lines = difflib.unified_diff(original.splitlines(), self.text.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def make_mutants(path: str, text: str) -> list[Mutant]:
    """All mutants of one file, in the order of its lines. Each of them compiles, and no two are the same."""
    source = _Text(text)
    tree = ast.parse(text)
    same = ast.dump(tree)
    mutants: dict[str, tuple[int, Mutant]] = {}

    def edit(kind: Kind, span: tuple[int, int], replacement: str) -> None:
        mutated = source.edited(span, replacement)
        if mutated not in mutants and ast.dump(ast.parse(mutated)) != same:
            mutants[mutated] = (span[0], Mutant(path, source.line_of(span[0]), kind, mutated))

    _Finder(source, edit).visit(tree)
    return [mutant for _, mutant in sorted(mutants.values(), key=lambda found: found[0])]


class _Text:
    """A source file by byte offsets, which is how `ast` counts columns."""

    def __init__(self, text: str) -> None:
        self._bytes = text.encode()
        lines = self._bytes.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._code = self._without_comments(text)

    def start(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.start(node), self.end(node)

    def line_of(self, offset: int) -> int:
        return self._bytes.count(b"\n", 0, offset) + 1

    def written(self, span: tuple[int, int]) -> str:
        return self._bytes[slice(*span)].decode()

    def edited(self, span: tuple[int, int], replacement: str) -> str:
        start, end = span
        return (self._bytes[:start] + replacement.encode() + self._bytes[end:]).decode()

    def between(self, left: ast.AST, right: ast.AST, pattern: str) -> tuple[int, int]:
        """Where `pattern` stands between two nodes."""
        found = re.compile(pattern.encode()).search(self._code, self.end(left), self.start(right))
        assert found is not None, f"no {pattern} behind line {left.end_lineno}"  # type: ignore[attr-defined]
        return found.span()

    def _without_comments(self, text: str) -> bytes:
        code = bytearray(self._bytes)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                start = self._starts[row - 1] + len(token.line[:column].encode())
                length = len(token.string.encode())
                code[start : start + length] = b" " * length
        return bytes(code)


class _Finder(ast.NodeVisitor):
    """Walks a file and reports every edit that is worth a mutant."""

    def __init__(self, source: _Text, edit: _Edit) -> None:
        self._source = source
        self._edit = edit
        self._function: _Function | None = None
        self._bound: set[str] = set()  # names that have a value already, in this function

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Defaults and body; annotations and decorators are left alone."""
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """As a plain function."""
        self._visit_function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body alone."""
        outside, self._function = self._function, None
        self._visit_all(node.body)
        self._function = outside

    def visit_Assert(self, node: ast.Assert) -> None:
        """Nothing: asserts look for bugs, they decide nothing."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Nothing: what is in it is the message."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Nothing: words for a reader."""

    def visit_If(self, node: ast.If) -> None:
        """The condition, unless it is for type checkers."""
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """The condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """The conditions."""
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Binds its targets."""
        self._bind(node.target)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call for what it does."""
        called = node.value.func if isinstance(node.value, ast.Call) else None
        is_log = isinstance(called, ast.Attribute) and ast.unparse(called.value) in _LOGGERS
        if not is_log and not isinstance(node.value, ast.Constant):
            self._drop(node)
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A new value for something that has one."""
        names = [ast.unparse(target) for target in node.targets]
        if not _DECLARATIONS.intersection(names):
            if all(self._has_value(target) for target in node.targets):
                self._drop(node)
            for target in node.targets:
                self._bind(target)
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value; the annotation is left alone."""
        if node.value is not None:
            if self._has_value(node.target):
                self._drop(node)
            self._bind(node.target)
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Its sign, its operand, and the whole of it."""
        self._drop(node)
        if type(node.op) in _SIGNS:
            old, new = _SIGNS[type(node.op)]
            span = self._source.between(node.target, node.value, re.escape(old) + "=")
            self._edit(Kind.OFF_BY_ONE, span, new + "=")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        """The whole of it."""
        self._drop(node)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """An early one is dropped."""
        if self._function is not None and self._function.body[-1] is not node:
            self._drop(node)
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        """Dropped."""
        self._drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        """Dropped."""
        self._drop(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Each operator for its neighbour and its opposite."""
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            written, replacements = _COMPARISONS[type(operator)]
            span = self._source.between(left, right, written)
            for replacement in replacements:
                self._edit(Kind.COMPARISON, span, replacement)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Each `and` becomes `or`, each `or` becomes `and`."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._edit(Kind.AND_OR, self._source.between(left, right, old), new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Plus for minus, and without the one that is added or taken off."""
        if type(node.op) in _SIGNS:
            old, new = _SIGNS[type(node.op)]
            span = self._source.between(node.left, node.right, re.escape(old))
            self._edit(Kind.OFF_BY_ONE, span, new)
            if isinstance(node.right, ast.Constant) and node.right.value == 1:
                self._edit(Kind.OFF_BY_ONE, (span[0], self._source.end(node)), "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`min` for `max`; `strict=` is an assert."""
        if isinstance(node.func, ast.Name) and node.func.id in _EXTREMES:
            self._edit(Kind.MIN_MAX, self._source.span(node.func), _EXTREMES[node.func.id])
        self.visit(node.func)
        self._visit_all(node.args)
        self._visit_all(keyword.value for keyword in node.keywords if keyword.arg != "strict")

    def visit_Constant(self, node: ast.Constant) -> None:
        """One more, or the other truth."""
        if isinstance(node.value, bool):
            self._edit(Kind.BOOLEAN, self._source.span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._edit(Kind.OFF_BY_ONE, self._source.span(node), str(node.value + 1))

    def _visit_function(self, node: _Function) -> None:
        self._visit_all(node.args.defaults)
        self._visit_all(default for default in node.args.kw_defaults if default is not None)
        outside = self._function, self._bound
        arguments = [argument for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
        self._function, self._bound = node, {argument.arg for argument in arguments}
        self._visit_all(node.body)
        self._function, self._bound = outside

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _drop(self, node: ast.stmt) -> None:
        # Outside of functions there are declarations, without which nothing can be imported.
        if self._function is not None:
            self._edit(Kind.DROPPED_LINE, self._source.span(node), "pass")

    def _negate(self, condition: ast.expr) -> None:
        if isinstance(condition, ast.Compare) and len(condition.ops) == 1:
            return  # its opposite is among the flipped comparisons
        span = self._source.span(condition)
        if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            opposite = self._source.written(span).removeprefix("not").lstrip()
        else:
            opposite = f"not ({self._source.written(span)})"
        self._edit(Kind.NEGATION, span, opposite)

    def _has_value(self, target: ast.expr) -> bool:
        if isinstance(target, ast.Name):
            return target.id in self._bound or target.id == "_"
        if isinstance(target, ast.Attribute):
            return self._function is not None and self._function.name not in _CONSTRUCTORS
        if isinstance(target, ast.Tuple | ast.List):
            return all(self._has_value(element) for element in target.elts)
        return True

    def _bind(self, target: ast.expr) -> None:
        self._bound.update(name.id for name in _names(target))


def _names(target: ast.expr) -> Iterator[ast.Name]:
    return (
        node for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
