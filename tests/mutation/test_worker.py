"""What the tests notice is told apart from what they do not, and from what never ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.copied_tree import ROOT

ORIGINAL = "def doubled(number):\n    return number * 2\n"
MUTANTS = {
    "equal": "return number + number",
    "noticed at once": "return number * 3",
    "noticed later": "return number + 2",
    "endless": "while True: pass",
    "crash": "import os; os.abort()",
    "import": "return number\nmissing()",
}
STAGES = [["test_first.py"], ["test_second.py"]]
LIMITS_S = [1.0, 1.0]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, and a test of it in each of two stages."""
    folder = tmp_path_factory.mktemp("tree")
    test = "from doubled import doubled\n\ndef test_{name}():\n    assert doubled({number}) == {result}\n"
    (folder / "doubled.py").write_text(ORIGINAL)
    (folder / "test_first.py").write_text(test.format(name="two", number=2, result=4))
    (folder / "test_second.py").write_text(test.format(name="three", number=3, result=6))
    return folder


@pytest.fixture(scope="module")
def verdicts(tree: Path) -> dict[str, dict[str, Any]]:
    """What one worker says of every mutant, and of the original before and after them."""
    changes: dict[str, tuple[str | None, str]] = {"before": (None, "")}
    for name, body in MUTANTS.items():
        changes[name] = ("doubled.py", f"def doubled(number):\n    {body}\n")
    changes["after"] = (None, "")
    orders = [
        {"path": path, "text": text, "stages": STAGES, "limits_s": LIMITS_S}
        for path, text in changes.values()
    ]
    worker = subprocess.run(
        [sys.executable, "-m", "tests.mutation.worker"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        check=True,
        text=True,
    )
    return dict(zip(changes, map(json.loads, worker.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("name", "outcome", "stage", "test"),
    [
        ("equal", "survived", None, None),
        ("noticed at once", "killed", 0, "test_first.py::test_two"),
        ("noticed later", "killed", 1, "test_second.py::test_three"),
        ("endless", "time limit", 0, None),
        ("crash", "killed", 0, f"the process ended with status {signal.SIGABRT:d}"),
        ("import", "killed", 0, "test_first.py (import)"),
    ],
)
def test_a_mutant_is_judged(
    verdicts: dict[str, dict[str, Any]], name: str, outcome: str, stage: int | None, test: str | None
) -> None:
    verdict = verdicts[name]
    assert (verdict["outcome"], verdict["stage"], verdict["test"]) == (outcome, stage, test)


def test_nothing_of_a_mutant_stays_behind(verdicts: dict[str, dict[str, Any]], tree: Path) -> None:
    assert verdicts["before"]["outcome"] == verdicts["after"]["outcome"] == "survived"
    assert (tree / "doubled.py").read_text() == ORIGINAL


def test_the_worker_tells_which_files_were_tested(verdicts: dict[str, dict[str, Any]], tree: Path) -> None:
    assert Path(verdicts["before"]["modules"]["doubled"]) == tree / "doubled.py"
