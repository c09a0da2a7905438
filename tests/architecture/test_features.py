"""Features of the engine are known in their own folders alone, and everything works without any of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_svc.features import FEATURES
from tests.architecture.feature_trees import check_without
from tests.architecture.sources import ROOT

# Words that name a feature, all of which an identifier has to have. The model computes embeddings.
NAMES = {
    "prompt_embeds": [{"embeds"}, {"embedded"}, {"embeddings"}],
    "prompt_logprobs": [{"prompt", "logprobs"}, {"prompt", "logprob"}],
    "penalties": [{"penalty"}, {"penalties"}],
    "thinking_budget": [{"thinking"}],
    "token_rules": [{"bias"}, {"bad", "words"}, {"allowed", "token"}],
}
# Files outside of a feature's folder that name it, with the reason.
ALLOWED = {
    "penalties": {
        "engine_svc/core/facts.py": "the model's defaults, which the frontend applies",
        "engine_svc/build/fingerprint.py": "reads these defaults",
        "engine_svc/admin/announce.py": "announces them",
    },
}


@pytest.mark.parametrize("feature", NAMES)
def test_no_file_outside_of_its_folder_names_a_feature(feature: str) -> None:
    folders = (ROOT / "engine_svc" / "features" / feature, ROOT / "engine_svc" / "model")
    naming = set()
    for path in (ROOT / "engine_svc").rglob("*.py"):
        if any(path.is_relative_to(folder) for folder in folders):
            continue
        for name in identifiers(path):
            words = set(re.findall(r"[a-z]+|[A-Z][a-z]*", name.replace("_", " ")))
            if any(wanted <= {word.lower() for word in words} for wanted in NAMES[feature]):
                naming.add((str(path.relative_to(ROOT)), name))
    assert {(path, name) for path, name in naming if path not in ALLOWED.get(feature, {})} == set()


def test_without_a_feature_the_rest_works(tmp_path: Path) -> None:
    check_without("penalties", tmp_path, tests=("tests/engine_svc/scheduler/test_update.py",))


def test_every_feature_is_in_the_list() -> None:
    folder = ROOT / "engine_svc" / "features"
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == set(FEATURES)


def identifiers(path: Path) -> Iterator[str]:
    """The names that a file defines, reads or imports; no text of strings and comments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.ImportFrom(module=str(module), names=names):
                yield from (module, *(alias.name for alias in names))
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
