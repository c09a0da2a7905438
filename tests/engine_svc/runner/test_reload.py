"""Other weights in the place of the present ones: what a runner has afterwards, whatever went wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loader import load_model
from engine_svc.runner.sleep import Resident, WeightSource
from tests.engine_svc.runner.sleep_rig import WISHES, Rig, change


@pytest.fixture
def rig(checkpoint: Path, tmp_path: Path) -> Rig:
    return Rig(Path(shutil.copytree(checkpoint, tmp_path / "model")))


def test_reloaded_weights_take_the_place_of_the_old_ones(rig, checkpoint, tmp_path):
    old = rig.generate("old")
    changed = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
    change(changed)
    expected = Rig(changed).generate("expected")
    assert expected != old
    facts = rig.runner.reload_weights(changed)
    rig.forget()
    assert facts.weights_digest == load_model(changed, WISHES).facts.weights_digest
    assert rig.generate("new") == expected
    # Where it is asked for no other folder, it is that one from now on.
    rig.runner.reload_weights()
    assert rig.loads == [changed, changed]
    rig.runner.sleep(2)
    rig.forget()
    rig.runner.wake()
    assert rig.generate("newer") == expected


def test_weights_changed_in_place_are_reloaded(rig):
    old = rig.generate("old")
    change(rig.folder)
    rig.runner.reload_weights()
    rig.forget()
    assert rig.generate("new") != old


def test_weights_are_reloaded_while_asleep_and_the_rest_stays_so(rig, checkpoint, tmp_path):
    changed = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
    change(changed)
    rig.runner.sleep(2)
    rig.runner.reload_weights(changed)
    assert rig.kv_bytes == 0
    rig.runner.wake()
    assert rig.loads == [changed]
    assert rig.generate("new") == Rig(changed).generate("expected")


def _missing(folder: Path) -> Path:
    return folder / "nowhere"


def _truncated(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def _of_another_form(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    return folder


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_missing, "is not a folder"),
        (_truncated, "cannot be read"),
        (_of_another_form, "has max_position 64, the weights to replace have 160"),
    ],
)
def test_a_reload_that_fails_leaves_the_old_weights(rig, checkpoint, tmp_path, spoil: Callable, reason):
    before = rig.generate("before")
    other = spoil(Path(shutil.copytree(checkpoint, tmp_path / "other")))
    with pytest.raises(CheckpointError, match=reason):
        rig.runner.reload_weights(other)
    rig.forget()
    assert rig.generate("after") == before


def test_facts_say_which_weights_are_there(rig):
    model, facts = rig.load(rig.folder)
    other = replace(facts, weights_digest="other")
    source = WeightSource(rig.folder, lambda folder: (model, other), lambda model: None)
    resident = Resident(model, facts, rig.kv, source=source)
    assert resident.reload() is other
    assert resident.facts is other
