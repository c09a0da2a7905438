"""The verbs `pull`, `list` and `rm`, with a cache as the hub's library makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from triptych_cli.cli import app

COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def add_model(cache: Path, name: str, num_bytes: int) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot, blob = folder / "snapshots" / COMMIT, folder / "blobs" / "b"
    for made in (snapshot, blob.parent, folder / "refs"):
        made.mkdir(parents=True)
    blob.write_bytes(bytes(num_bytes))
    (snapshot / "model.safetensors").symlink_to(blob)
    (folder / "refs" / "main").write_text(COMMIT)
    return folder


def test_models_of_one_commit_are_listed_and_one_is_removed(cache: Path) -> None:
    removed, kept = add_model(cache, "org/large", 3 << 20), add_model(cache, "org/small", 1 << 20)
    listed = CliRunner().invoke(app, ["list"])
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("3.0", "MiB", "org/large"),
        ("1.0", "MiB", "org/small"),
        ("4.0", "MiB", str(cache)),
    ]
    gone = CliRunner().invoke(app, ["rm", "org/large"])
    assert (gone.exit_code, gone.stdout) == (0, "org/large: 3.0 MiB are free again\n")
    assert (removed.exists(), kept.exists()) == (False, True)


def test_a_model_that_is_not_there_is_refused(cache: Path) -> None:
    add_model(cache, "org/small", 1)
    refused = CliRunner().invoke(app, ["rm", "org/other"])
    assert refused.exit_code == 2
    assert "org/other is not in" in refused.stderr
    assert (cache / "models--org--small").exists()


def test_a_cache_that_does_not_exist_is_empty(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "none"))
    listed = CliRunner().invoke(app, ["list"])
    assert (listed.exit_code, listed.stdout.split()[:2]) == (0, ["0.0", "MiB"])
    assert CliRunner().invoke(app, ["rm", "org/name"]).exit_code == 2


def test_a_path_is_not_pulled() -> None:
    refused = CliRunner().invoke(app, ["pull", "./model"])
    assert (refused.exit_code, refused.stderr) == (2, "triptych pull: ./model is no org/name of the hub\n")
