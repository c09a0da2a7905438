"""Other weights in the place of the present ones: what a runner has afterwards, whatever went wrong."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.core.control import WakeTag, WeightsLost
from engine_svc.model.decoder import Model
from engine_svc.model.errors import CheckpointError
from engine_svc.model.facts import ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import load_model
from engine_svc.runner.sleep import Resident, WeightSource
from tests.engine_svc.runner.sleep_rig import LOAD_OPTIONS, Rig, change
from triptych_kernels import ops_for

OPS = ops_for(torch.device("cpu"))


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
    assert facts.weights_digest == load_model(changed, LOAD_OPTIONS).facts.weights_digest
    assert rig.generate("new") == expected
    # Where it is asked for no other folder, it is that one from now on.
    rig.runner.reload_weights()
    assert rig.loads == [changed, changed]
    rig.runner.sleep(2)
    rig.forget()
    rig.runner.wake()
    assert rig.generate("newer") == expected


@pytest.mark.skipif(OPS.name == "reference", reason="the native kernels cannot run here")
def test_present_weights_are_written_for_later_starts(rig, checkpoint, tmp_path):
    changed = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
    change(changed)
    kept = tmp_path / "kept"
    files = {rig.runner.save_weights(kept)}
    rig.runner.reload_weights(changed)
    files.add(rig.runner.save_weights(kept))
    assert len(files) == 2
    rig.runner.reload_weights(rig.folder, [DOWN])
    with pytest.raises(ValueError, match="of one folder"):
        rig.runner.save_weights(kept)
    assert set(kept.iterdir()) == files


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
        (_truncated, "is truncated"),
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
    model, facts = rig.load(Checkpoint(rig.folder))
    other = replace(facts, weights_digest="other")
    source = WeightSource(Checkpoint(rig.folder), lambda checkpoint: (model, other), lambda model: None)
    resident = Resident(model, facts, rig.kv, source=source)
    assert resident.reload() is other
    assert resident.facts is other


@pytest.mark.parametrize("folder_given", [True, False])
@pytest.mark.parametrize("spoil", [_truncated, _of_another_form])
def test_weights_spoiled_in_place_are_lost_until_their_folder_is_whole_again(rig, spoil, folder_given):
    before = rig.generate("before")
    whole = {path: path.read_bytes() for path in rig.folder.iterdir()}
    spoil(rig.folder)
    with pytest.raises(WeightsLost, match=r"is truncated|has max_position 64"):
        rig.runner.reload_weights(rig.folder if folder_given else None)
    rig.forget()
    with pytest.raises(CheckpointError):
        rig.runner.wake()
    for path, content in whole.items():
        path.write_bytes(content)
    rig.runner.wake()
    assert rig.generate("after") == before


def test_the_reasons_why_both_folders_are_refused_are_reported(rig, tmp_path):
    change(rig.folder)
    with pytest.raises(WeightsLost, match=r"typo is not a folder.*; \S+model has other weights"):
        rig.runner.reload_weights(tmp_path / "typo")


def test_lost_weights_can_be_replaced_by_those_of_another_folder(rig, checkpoint, tmp_path):
    before = rig.generate("before")
    rig.folder.rename(rig.folder.with_name("away"))
    with pytest.raises(WeightsLost):
        rig.runner.reload_weights(tmp_path / "typo")
    rig.forget()
    with pytest.raises(CheckpointError, match="is not a folder"):
        rig.runner.reload_weights(tmp_path / "typo")
    rig.runner.reload_weights(checkpoint)
    assert rig.generate("after") == before


def test_what_was_read_of_refused_weights_is_gone_before_the_old_ones_come_back(rig):
    read: list[weakref.ref] = []
    num_alive: list[int] = []

    def load(checkpoint: Checkpoint) -> tuple[Model, ModelFacts]:
        num_alive.append(sum(each() is not None for each in read))
        model, facts = rig.load(Checkpoint(rig.folder))
        read.append(weakref.ref(model.embedding.weight))
        return model, facts if checkpoint.folder == rig.folder else replace(facts, vocab_size=1)

    source = WeightSource(Checkpoint(rig.folder), load, lambda model: None)
    resident = Resident(*rig.load(Checkpoint(rig.folder)), rig.kv, source=source)
    with pytest.raises(CheckpointError, match="has vocab_size 1"):
        resident.reload(Path("other"))
    assert num_alive == [0, 0]


def test_weights_whose_steps_cannot_be_recorded_do_not_take_the_place_of_the_old_ones(rig):
    is_broken = True

    def record(model: Model) -> None:
        if is_broken:
            raise RuntimeError("device error")

    model, facts = rig.load(Checkpoint(rig.folder))
    source = WeightSource(Checkpoint(rig.folder), rig.load, record)
    resident = Resident(model, facts, rig.kv, source=source)
    change(other := Path(shutil.copytree(rig.folder, rig.folder.with_name("other"))))
    with pytest.raises(RuntimeError, match="device error"):
        resident.reload(other)
    assert resident.asleep == {WakeTag.WEIGHTS}
    is_broken = False
    resident.wake()
    assert rig.loads[-1] == rig.folder
    assert resident.facts.weights_digest == facts.weights_digest


def other_weights(folder: Path, **tensors: object) -> Path:
    """A folder with these tensors alone, and no configuration."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


DOWN, UP = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"


def test_named_tensors_alone_are_replaced_and_stay_so(rig, tmp_path):
    weights = load_file(rig.folder / "model.safetensors")
    first = other_weights(tmp_path / "first", **{DOWN: weights[DOWN] * -0.5, UP: weights[UP] * 9})
    second = other_weights(tmp_path / "second", **{UP: weights[UP] * 0.25})
    old = rig.generate("old")
    digests = [rig.runner.reload_weights(first, [DOWN]).weights_digest]
    rig.forget()
    assert rig.generate("one") != old
    digests.append(rig.runner.reload_weights(second, [UP]).weights_digest)
    rig.forget()
    both = Path(shutil.copytree(rig.folder, tmp_path / "both"))
    save_file(
        weights | {DOWN: weights[DOWN] * -0.5, UP: weights[UP] * 0.25},
        both / "model.safetensors",
        metadata={"format": "pt"},
    )
    expected = Rig(both).generate("expected")
    assert rig.generate("two") == expected
    rig.runner.sleep(2)
    rig.forget()
    rig.runner.wake()
    assert rig.generate("woken") == expected
    # Without a folder it is that of all others.
    digests.append(rig.runner.reload_weights(None, [UP]).weights_digest)
    assert digests[2] != digests[0] != digests[1]
    rig.runner.reload_weights()
    rig.forget()
    assert rig.generate("whole") == old


@pytest.mark.parametrize(
    ("names", "scale", "reason"),
    [
        ([DOWN, "model.typo"], torch.Tensor.clone, "lacks model.typo"),
        ([DOWN, "extra"], torch.Tensor.clone, "the checkpoint lacks extra"),
        ([UP, DOWN], torch.t, r"down_proj.weight has shape \(\d+, \d+\), it replaces"),
    ],
)
def test_named_tensors_that_do_not_fit_replace_none(rig, tmp_path, names, scale: Callable, reason):
    weights = load_file(rig.folder / "model.safetensors")
    tensors = {DOWN: scale(weights[DOWN]).contiguous(), UP: weights[UP] * 9, "extra": weights[UP]}
    before, digest = rig.generate("before"), rig.load(Checkpoint(rig.folder))[1].weights_digest
    with pytest.raises(CheckpointError, match=reason):
        rig.runner.reload_weights(other_weights(tmp_path / "other", **tensors), names)
    rig.forget()
    assert rig.generate("after") == before
    assert rig.runner.reload_weights().weights_digest == digest
