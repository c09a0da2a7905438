"""Features of the engine are known in their own folders alone, and everything works without any of them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_svc.features import FEATURES
from tests.architecture.sources import ROOT

# Words that name a feature, all of which an identifier has to have. The model computes embeddings.
NAMES = {
    "adapters": [{"lora"}],
    "pins": [{"job", "pins"}, {"job", "turn"}, {"tool", "gaps"}],
    "request_events": [{"request", "events"}],
    "request_spans": [{"request", "spans"}, {"llm", "request"}],
    "kv_events": [{"kv", "events"}],
    "kv_residency": [{"residency"}],
    "log_steps": [{"log", "steps"}],
    "sched_trace": [{"sched", "trace"}],
    "nan_counts": [{"nan", "counts"}],
    "prompt_embeds": [{"embeds"}, {"embedded"}, {"embeddings"}],
    "media": [{"media"}],
    "prompt_logprobs": [{"prompt", "logprobs"}, {"prompt", "logprob"}],
    "pooling": [{"pooling"}, {"pooler"}, {"pooled"}],
    "forward_outputs": [{"forward", "outputs"}, {"forward", "output"}],
    "penalties": [{"penalty"}, {"penalties"}],
    "structured_output": [{"structured"}, {"grammar"}, {"grammars"}],
    "thinking_budget": [{"thinking"}],
    "token_rules": [{"bias"}, {"bad", "words"}, {"allowed", "token"}],
}
# Files outside of a feature's folder that name it, with the reason.
_SUBSCRIPTION = dict.fromkeys(
    (
        "engine_svc/convert/messages.py",
        "engine_svc/session/kv_subscription.py",
        "engine_svc/session/servicer.py",
    ),
    "messages of a call that any engine serves",
)
ALLOWED = {
    "adapters": {},
    "prompt_embeds": {
        "engine_svc/features/media/runner.py": "outputs take the place of tokens by the same means"
    },
    "request_events": _SUBSCRIPTION,
    "kv_events": _SUBSCRIPTION | {"engine_svc/build/engine.py": "makes the log that the call reads"},
    "pooling": {
        "engine_svc/core/pooling_spec.py": "what a checkpoint says of it, for its loader and the wire",
        "engine_svc/config.py": "says what the checkpoint is loaded for",
        "engine_svc/build/runner.py": "passes it to the loader",
        "engine_svc/build/engine.py": "tells engines apart by it",
    },
    "penalties": {
        "engine_svc/core/facts.py": "the model's defaults, which the frontend applies",
        "engine_svc/build/fingerprint.py": "reads these defaults",
        "engine_svc/admin/announce.py": "announces them",
    },
}


FEW = ("tests/engine_svc/scheduler/test_update.py", "tests/engine_svc/runner/test_input_batch.py")
ALL = (
    "tests/engine_svc/scheduler/test_update.py",
    "tests/engine_svc/loop/test_engine.py",
    "tests/engine_svc/runner/test_input_batch.py",
)
CHECK = """
import importlib, pkgutil, sys, pytest
# No random runs: they concern no feature.
exit_code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", "not no_innocent", *{tests}])
import engine_svc
for module in pkgutil.walk_packages(engine_svc.__path__, "engine_svc."):
    importlib.import_module(module.name)
sys.exit(exit_code)
"""


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


def test_without_a_feature_the_rest_works(tree: Path) -> None:
    check_without("prompt_logprobs", tree, FEW)


@pytest.mark.chaos
@pytest.mark.parametrize("feature", FEATURES)
def test_without_any_feature_the_rest_works(tree: Path, feature: str) -> None:
    check_without(feature, tree, ALL)


def test_every_feature_is_in_the_list() -> None:
    folder = ROOT / "engine_svc" / "features"
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == set(FEATURES) == NAMES.keys()


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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The checkout, of which the engine and its tests may be changed."""
    for copied in (tmp_path, tmp_path / "tests"):
        copied.mkdir(exist_ok=True)
        for entry in (ROOT / copied.relative_to(tmp_path)).iterdir():
            if entry.name == "engine_svc":
                # With its bytecode, but none that another process is writing.
                ignored = shutil.ignore_patterns("*.pyc.*")
                shutil.copytree(entry, copied / entry.name, ignore=ignored)
            elif entry.name != "tests" and not entry.name.startswith("."):
                (copied / entry.name).symlink_to(entry)
    return tmp_path


def check_without(feature: str, tree: Path, tests: tuple[str, ...]) -> None:
    """Without the folder of a feature and its line in the list everything imports, and `tests` pass."""
    shutil.rmtree(tree / "engine_svc" / "features" / feature)
    shutil.rmtree(tree / "tests" / "engine_svc" / "features" / feature)
    listing = tree / "engine_svc" / "features" / "__init__.py"
    text, num_lines = re.subn(rf'^    "{feature}",\n', "", listing.read_text(), flags=re.MULTILINE)
    assert num_lines == 1, f"the list has one line for {feature}"
    listing.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(tests=tests)],
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(tree / name) for name in (".", "protos", "kernels")),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
