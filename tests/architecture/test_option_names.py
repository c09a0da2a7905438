"""No file of the frontend but its own names a request option that concerns a few requests alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT

OWN_FILES = {
    "prompt embeddings": ("frontend_svc/options/prompt_embeddings.py", r"embeds|embedded|prompt_?embed"),
    "prompt logprobs": ("frontend_svc/options/prompt_logprobs.py", r"prompt_?logprob"),
}
ALLOWED = {
    "frontend_svc/options/__init__.py": "the list of options",
    "frontend_svc/protocols/openai/bodies.py": "the fields of another API, by their names",
    "frontend_svc/protocols/openai/requests.py": "which of its fields are fields of requests",
    "frontend_svc/options/prompt_embeddings.py": "positions without a token have no log probability: refused",
}


def names_in(tree: ast.Module) -> Iterator[str]:
    """Identifiers, names of modules, and strings other than docstrings, such as names of fields."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def files_that_name(pattern: str) -> dict[str, str]:
    """The files of the frontend with a name that matches, and one such name of each."""
    found = {}
    for file in sorted((ROOT / "frontend_svc").rglob("*.py")):
        for name in names_in(ast.parse(file.read_text())):
            if re.search(pattern, name, re.IGNORECASE):
                found[file.relative_to(ROOT).as_posix()] = name
    return found


@pytest.mark.parametrize("option", OWN_FILES)
def test_only_its_own_file_names_it(option: str) -> None:
    own_file, pattern = OWN_FILES[option]
    found = files_that_name(pattern)
    assert own_file in found
    assert {file: name for file, name in found.items() if file not in (own_file, *ALLOWED)} == {}
