"""A request option is one file and its line in the list: a copy of the tree without both works as well."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from frontend_svc.options import OPTIONS
from tests.architecture.sources import ROOT

# A request that asks for the option: by its first field, where that is a number or a truth value.
ASKED = {
    type(option).__module__.rpartition(".")[2]: f"prompt: 'x' {option.fields[0].replace('.', ' { ')}: 1 }}"
    for option in OPTIONS
} | {
    "adapter": "prompt: 'x' adapter: 'cook'",
    "job": "prompt: 'x' job_id: 'j'",
    "forward_outputs": "prompt: 'x' return_hidden_states: true",
    "token_rules": "prompt: 'x' sampling { bad_words: 'cat' }",
    "prompt_embeddings": "embeds { is_token: '0' }",
    "structured_output": "prompt: 'x' sampling { structured_output { json_object: true } }",
}
# Tests whose requests have lengths and sampling groups, which are parameters of this option.
OF_LIMITS = ("generation/test_preprocess.py", "options/test_prompt_embeddings.py", "options/test_adapter.py")
# Breaks the rules of every option's fields.
OF_ALL = "options/test_rules.py"
OPTION_TESTS = "tests/frontend_svc/options"
FEW = (
    "tests/frontend_svc/output/test_processor.py",
    "tests/frontend_svc/output/test_request_state.py",
    f"{OPTION_TESTS}/test_sampling_limits.py",
    f"{OPTION_TESTS}/test_prompt_logprobs.py",
    f"{OPTION_TESTS}/test_token_rules.py",
)
ALL = (
    "tests/frontend_svc/output",
    "tests/frontend_svc/generation/test_admission.py",
    "tests/frontend_svc/generation/test_preprocess.py",
    OPTION_TESTS,
)

CHECK = """
import asyncio, importlib, pkgutil, sys
import frontend_svc
for module in pkgutil.walk_packages(frontend_svc.__path__, "frontend_svc."):
    importlib.import_module(module.name)

import pytest
from google.protobuf import text_format
from frontend_svc.generation.preprocess import check_request
from frontend_svc.text.prompt import RequestPrompt
from triptych_kit.errors import Unimplemented
from tests.frontend_svc.options.asking import LIMITS, model_of
from triptych.api.v1 import generate_pb2

request = text_format.Parse({asked!r}, generate_pb2.GenerateRequest())
with pytest.raises(Unimplemented, match="not served yet"):
    asyncio.run(check_request(request, RequestPrompt(request), model_of(), LIMITS))
# Plugins of pytest are among what the frontend imports.
options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
sys.exit(pytest.main([*options, *{tests}]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The checkout, of which the frontend and its tests may be changed."""
    for copied in (tmp_path, tmp_path / "tests"):
        copied.mkdir(exist_ok=True)
        for entry in (ROOT / copied.relative_to(tmp_path)).iterdir():
            if entry.name == "frontend_svc":
                # With its bytecode, but none that another process is writing.
                ignored = shutil.ignore_patterns("*.pyc.*")
                shutil.copytree(entry, copied / entry.name, ignore=ignored)
            elif entry.name != "tests" and not entry.name.startswith("."):
                (copied / entry.name).symlink_to(entry)
    return tmp_path


def remove(tree: Path, option: str) -> None:
    """Delete the file of an option with its test, and the lines of the list that have its name."""
    (tree / f"frontend_svc/options/{option}.py").unlink()
    (tree / OPTION_TESTS / f"test_{option}.py").unlink()
    # It asks for every option.
    (tree / OPTION_TESTS / "test_options.py").unlink()
    names = tree / "frontend_svc/options/__init__.py"
    text = names.read_text()
    (name,) = re.findall(rf"^from frontend_svc\.options\.{option} import (\w+)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines(keepends=True) if not re.search(rf"\b{name}\b", line)]
    assert len(lines) == len(text.splitlines()) - 2
    names.write_text("".join(lines))


def run_in(tree: Path, program: str) -> None:
    path = os.pathsep.join(str(tree / folder) for folder in (".", "protos", "kernels"))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def check_without(tree: Path, option: str, tests: tuple[str, ...]) -> None:
    remove(tree, option)
    run_in(tree, CHECK.format(asked=ASKED[option], tests=tests))


@pytest.mark.parametrize("option", ["structured_output", "prompt_embeddings"])
def test_without_an_option_the_rest_works_and_the_option_is_refused_by_name(tree: Path, option: str) -> None:
    check_without(tree, option, FEW)


@pytest.mark.chaos
@pytest.mark.parametrize("option", ASKED)
def test_without_any_option_all_tests_of_generation_and_output_pass(tree: Path, option: str) -> None:
    for test in (OF_ALL, *(OF_LIMITS if option == "sampling_limits" else ())):
        (tree / "tests/frontend_svc" / test).unlink()
    check_without(tree, option, tuple(test for test in ALL if (tree / test).exists()))


def test_every_option_is_removed_by_a_test() -> None:
    files = {path.stem for path in (ROOT / "frontend_svc/options").glob("*.py")}
    assert files - {"__init__", "option"} == ASKED.keys()
