"""The scripts for shells: bash completes by them, and each has the verbs and flags."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from tests.triptych_cli.fakes import triptych
from triptych_cli.cli import app
from triptych_cli.verbs.completion import completion_script


@pytest.fixture(scope="module", name="scripts")
def _scripts() -> dict[str, str]:
    return {shell: completion_script(shell, get_command(app)) for shell in ("bash", "zsh", "fish")}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["triptych", "ser"], ["serve"]),
        (["triptych", "serve", "--served"], ["--served-model-name"]),
        (["triptych", "serve", "org/name", "--max-num-s"], ["--max-num-seqs"]),
        (["triptych", "bench", ""], ["serve"]),
        (["triptych", "bench", "serve", "--base"], ["--base-url"]),
        (["triptych", "complete", "--repetition-p"], ["--repetition-penalty"]),
        (["triptych", "admin", "engine-0", "sta"], ["status"]),
        (["triptych", "serve", "--coordinator"], []),
        (["triptych", "nothing", "--x"], []),
    ],
)
def test_bash_completes_verbs_and_flags(
    scripts: dict[str, str], tmp_path: Path, line: list[str], words: list[str]
) -> None:
    file = tmp_path / "completion"
    file.write_text(scripts["bash"])
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _triptych; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    answer = subprocess.run(
        ["bash", "-c", program, "bash", str(file), *line], capture_output=True, text=True, check=True
    )
    completed = [word for word in answer.stdout.split() if word != "--help"]
    assert set(words) <= set(completed)
    assert bool(words) == bool(completed)
    assert answer.stderr == ""


@pytest.mark.parametrize(
    ("shell", "lines"),
    [
        ("zsh", ["    ' bench') compadd -- serve --help;;", "compdef _triptych triptych"]),
        ("fish", ["    case ' bench'", "      printf '%s\\n' serve --help"]),
    ],
)
def test_other_shells_have_the_same_words(scripts: dict[str, str], shell: str, lines: list[str]) -> None:
    for line in lines:
        assert line in scripts[shell].splitlines()
    for word in (" serve ", "--served-model-name", "--repetition-penalty", "--base-url"):
        assert word in scripts[shell]


async def test_the_verb_prints_a_script_and_refuses_another_shell() -> None:
    outcome = await triptych("completion", "bash")
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert outcome.out.endswith("complete -o default -F _triptych triptych\n")
    refused = await triptych("completion", "csh")
    assert refused.exit_code == 2
    assert "csh" in refused.err
