"""Report on the shape of the code: `make house`. Not a gate: each line is a place to look at.

Lists classes with more than 15 attributes, folders with more than 20 hand-written Python files, and files
under 60 lines with one importer; counts code lines (blank, comment and docstring lines left out) and places
of prose without a noun by package. `python tools/house.py engine_svc/core` lists these places below a path.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = (
    "triptych_kit", "coordinator_svc", "frontend_svc", "engine_svc", "triptych_client", "triptych_cli",
    "triptych_conformance", "kernels/triptych_kernels",
)  # fmt: skip
# Modules that list others by name; what a registry imports is not a fragment of it.
REGISTRIES = {
    "engine_svc.features", "engine_svc.scheduler.policies", "frontend_svc.parsers.registry",
    "triptych_kernels.cpu", "triptych_kernels.reference", "triptych_kernels.triton",
}  # fmt: skip
MAX_ATTRIBUTES = 15
MAX_FILES = 20
SHORT_LINES = 60
# Prose without a noun: amounts, first words of docstrings, and names of values.
AMOUNT = re.compile(r"\bso (many|long|far)\b", re.IGNORECASE)
FIRST_WORDS = ("It", "What", "That", "Those", "Of")
PARTICIPLES = ("found", "asked", "given", "most", "some")

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Print the report of the checkout in the current folder, or its prose without a noun below a path."""
    files = {path: Path(path).read_text(encoding="utf-8") for path in hand_written()}
    trees = {path: ast.parse(text) for path, text in files.items()}
    if sys.argv[1:]:
        for path in files:
            if path.startswith(tuple(sys.argv[1:])):
                for line, words in nounless_prose(files[path], trees[path]):
                    print(f"{path}:{line}: {words}")
        return
    product = [path for path in files if path.startswith(tuple(f"{name}/" for name in PRODUCT))]

    print(f"Classes with more than {MAX_ATTRIBUTES} attributes")
    for path in product:
        for name, count in large_classes(trees[path]):
            print(f"  {count:4}  {path} {name}")
    print(f"Folders with more than {MAX_FILES} files")
    for folder, count in Counter(str(Path(path).parent) for path in files).most_common():
        if count > MAX_FILES:
            print(f"  {count:4}  {folder}")
    print(f"Files under {SHORT_LINES} lines whose only importer is not a registry")
    fragments = list(short_files({path: (files[path], trees[path]) for path in product}))
    for path, num_lines, importer in fragments:
        print(f"  {num_lines:4}  {path} <- {importer}")
    print(f"  {len(fragments):4}  in all")
    print("Code lines, and places of prose without a noun")
    totals: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for path, text in files.items():
        package = next((name for name in PRODUCT if path.startswith(f"{name}/")), path.split("/")[0])
        totals[package] += code_lines(text)
        places[package] += sum(1 for _ in nounless_prose(text, trees[path]))
    for name, count in sorted(totals.items()):
        print(f"  {count:6} {places[name]:4}  {name}")
    print(f"  {sum(totals[name] for name in PRODUCT):6} {sum(places[name] for name in PRODUCT):4}  product")


def hand_written() -> list[str]:
    """Python files that git tracks, generated stubs left out."""
    listed = subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout
    return [path for path in listed.split() if "_pb2" not in path and Path(path).exists()]


def nounless_prose(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Amounts without a unit, docstrings that begin without a subject, and participles as names, by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and AMOUNT.search(token.string):
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            docstring = ast.get_docstring(node) or ""
            if docstring.split(" ")[0] in FIRST_WORDS or AMOUNT.search(docstring):
                yield node.body[0].lineno, docstring
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
            ) if name.strip("_") in PARTICIPLES:
                yield node.lineno, name


def code_lines(text: str) -> int:
    """Lines with a token that is neither a comment nor a docstring."""
    kept: set[int] = set()
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documentation.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    layout = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            kept.update(range(token.start[0], token.end[0] + 1))
    return len(kept - documentation)


def large_classes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Classes with methods that hold too much: `self.x` assignments, or fields of a dataclass."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        if not methods:
            continue
        names = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for method in methods:
            for inner in ast.walk(method):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and ast.unparse(inner.value) == "self"
                ):
                    names.add(inner.attr)
        if len(names) > MAX_ATTRIBUTES:
            yield node.name, len(names)


def short_files(product: dict[str, tuple[str, ast.Module]]) -> Iterator[tuple[str, int, str]]:
    """Short modules with exactly one importer in the product that is not a registry."""
    modules = {module_name(path): path for path in product}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path, (_, tree) in product.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [
                    inner if (inner := f"{node.module}.{alias.name}") in modules else node.module
                    for alias in node.names
                ]
            else:
                continue
            for name in names:
                importers[name].add(module_name(path))
    for name, path in sorted(modules.items()):
        num_lines = product[path][0].count("\n")
        if len(importers[name]) == 1 and num_lines < SHORT_LINES and not path.endswith("__init__.py"):
            (importer,) = importers[name]
            if importer not in REGISTRIES:
                yield path, num_lines, importer


def module_name(path: str) -> str:
    """The dotted name of a file; kernels are imported from their own source root."""
    return path.removeprefix("kernels/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


if __name__ == "__main__":
    main()
