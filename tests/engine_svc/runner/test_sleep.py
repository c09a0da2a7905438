"""Sleeping and waking: what is released, what comes back, and that KV that is gone is not read."""

from __future__ import annotations

import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_svc.core.control import WakeTag
from engine_svc.model.decoder import Model
from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import load_model
from engine_svc.runner.memory.parked_memory import NoRoom
from engine_svc.runner.sleep import Resident, WeightSource
from tests.engine_svc.runner.memory.test_parked_memory import FullDevice
from tests.engine_svc.runner.sleep_rig import LOAD_OPTIONS, Rig, change


@pytest.fixture
def rig(checkpoint: Path, tmp_path: Path) -> Rig:
    return Rig(Path(shutil.copytree(checkpoint, tmp_path / "model")))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_after_sleeping_and_waking_the_same_prompt_has_the_same_tokens_and_no_stale_hit(rig, level):
    before = rig.generate("before")
    rig.runner.sleep(level)
    rig.forget()
    rig.runner.wake()
    for stack in rig.kv.stacks:
        # What a block holds now is chance: the worst of it must reach no request.
        stack.fill_(float("nan"))
    hits = rig.core.kv_cache.prefix_hits
    assert rig.generate("after") == before
    assert rig.core.kv_cache.prefix_hits == hits
    assert rig.generate("again") == before
    assert rig.core.kv_cache.prefix_hits > hits
    assert rig.loads == ([rig.folder] if level == 2 else [])


def test_without_forgetting_a_stale_hit_would_be_seen(rig):
    rig.generate("before")
    rig.runner.sleep(1)
    rig.runner.wake()
    for stack in rig.kv.stacks:
        stack.fill_(float("nan"))
    assert rig.generate("after") == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_that_runs_is_preempted_and_goes_on_as_if_nothing_had_been(rig, level):
    wanted = rig.generate("alone")
    rig.forget()
    request = rig.add("slept through")
    for _ in range(5):
        rig.step()
    num_tokens = len(request.token_ids)
    assert 30 < num_tokens < 42
    rig.forget()
    rig.runner.sleep(level)
    rig.runner.wake()
    while rig.core.scheduler.has_work:
        rig.step()
    assert request.token_ids[30:] == wanted
    assert request.num_preemptions == 1


def test_level_1_frees_the_kv_cache_and_on_a_cpu_keeps_the_weights(rig):
    size = rig.kv_bytes
    assert size > 0
    rig.runner.sleep(1)
    assert rig.kv_bytes == 0
    rig.runner.wake()
    assert rig.kv_bytes == size
    assert rig.loads == []


def test_a_step_is_refused_while_anything_is_asleep(rig):
    rig.add("r")
    plan = rig.core.scheduler.schedule(0.0)
    rig.runner.sleep(2)
    with pytest.raises(RuntimeError, match="asleep are kv_cache, weights"):
        rig.runner.execute(plan)
    rig.runner.wake({WakeTag.WEIGHTS})
    with pytest.raises(RuntimeError, match=r"asleep are kv_cache$"):
        rig.runner.execute(plan)
    rig.runner.wake({WakeTag.KV_CACHE})
    assert rig.runner.execute(plan).result().sampled[0]


def test_parts_wake_by_their_tags_alone(rig):
    rig.runner.sleep(2)
    rig.runner.wake({WakeTag.SCHEDULING})
    assert rig.kv_bytes == 0 and rig.loads == []
    rig.runner.wake({WakeTag.KV_CACHE})
    assert rig.kv_bytes > 0 and rig.loads == []
    rig.runner.wake({WakeTag.WEIGHTS})
    assert rig.loads == [rig.folder]
    rig.runner.wake()
    assert rig.loads == [rig.folder]


def test_sleeping_deeper_and_less_deep_while_asleep(rig):
    before = rig.generate("before")
    rig.runner.sleep(1)
    rig.runner.sleep(2)
    rig.runner.sleep(1)
    rig.runner.sleep(2)
    rig.forget()
    rig.runner.wake()
    assert rig.generate("after") == before
    assert rig.loads == [rig.folder]


@pytest.mark.parametrize("level", [-1, 3])
def test_other_levels_are_refused(rig, level):
    with pytest.raises(ValueError, match=f"sleep level is {level}, it has to be 0, 1 or 2"):
        rig.runner.sleep(level)


def test_weights_that_cannot_be_loaded_again_are_not_given_up(rig):
    model, facts = rig.load(Checkpoint(rig.folder))
    resident = Resident(model, facts, rig.kv)
    with pytest.raises(ValueError, match="nothing to load them from"):
        resident.sleep(2)
    with pytest.raises(ValueError, match="nothing to load them from"):
        resident.reload()
    assert resident.asleep == frozenset()
    assert resident.awake_model() is model
    resident.sleep(1)
    assert resident.asleep == {WakeTag.KV_CACHE}


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_nothing_keeps_the_weights_of_a_model_that_was_given_up(rig, model_impl):
    loaded = load_model(rig.folder, replace(LOAD_OPTIONS, model_impl=model_impl))
    weight = loaded.model.embedding.weight if model_impl == "native" else loaded.model.module.lm_head.weight
    alive = weakref.ref(weight)
    resident = Resident(
        loaded.model,
        loaded.facts,
        rig.kv,
        source=WeightSource(Checkpoint(rig.folder), rig.load, lambda model: None),
    )
    # As an engine does once it is built.
    gc.freeze()
    try:
        del loaded, weight
        assert alive() is not None
        resident.sleep(2)
        assert alive() is None
    finally:
        gc.unfreeze()


def test_a_checkpoint_that_changed_meanwhile_does_not_wake_as_the_old_one(rig):
    original = (rig.folder / "model.safetensors").read_bytes()
    before = rig.generate("before")
    rig.runner.sleep(2)
    rig.forget()
    change(rig.folder)
    with pytest.raises(CheckpointError, match="has other weights than when it was loaded"):
        rig.runner.wake()
    (rig.folder / "model.safetensors").write_bytes(original)
    rig.runner.wake()
    assert rig.generate("after") == before


def test_a_wake_that_fails_leaves_it_asleep_and_can_be_tried_again(rig):
    before = rig.generate("before")
    rig.runner.sleep(2)
    rig.forget()
    away = rig.folder.rename(rig.folder.with_name("away"))
    with pytest.raises(CheckpointError, match="is not a folder"):
        rig.runner.wake()
    assert rig.kv_bytes == 0
    away.rename(rig.folder)
    rig.runner.wake()
    assert rig.generate("after") == before


def test_a_wake_without_room_leaves_it_asleep_and_can_be_tried_again(rig):
    model, facts = rig.load(Checkpoint(rig.folder))
    memory = FullDevice()
    kv = SimpleNamespace(stacks=[memory], device=torch.device("cpu"), renew=lambda: None)
    resident = Resident(model, facts, kv)  # type: ignore[arg-type]  # What is asked of a cache.
    resident.sleep(1)
    with pytest.raises(NoRoom):
        resident.wake()
    assert resident.asleep == {WakeTag.KV_CACHE}
    with pytest.raises(RuntimeError, match="asleep are kv_cache"):
        resident.awake_model()
    memory.is_full = False
    resident.wake()
    assert resident.awake_model() is model


def test_a_wake_whose_weights_find_no_room_leaves_all_asleep(rig):
    before = rig.generate("before")
    rig.runner.sleep(2)
    rig.forget()
    rig.is_full = True
    with pytest.raises(NoRoom, match="cannot be allocated"):
        rig.runner.wake()
    assert rig.kv_bytes == 0
    rig.is_full = False
    rig.runner.wake()
    assert rig.generate("after") == before


def test_decode_steps_are_recorded_again_for_the_model_that_came_back(rig):
    class Graphs:
        def __init__(self, model: Model) -> None:
            self.model = model

    model, facts = rig.load(Checkpoint(rig.folder))
    source = WeightSource(Checkpoint(rig.folder), rig.load, Graphs)
    resident = Resident(model, facts, rig.kv, graphs=Graphs(model), source=source)
    resident.sleep(2)
    assert resident.graphs is None
    resident.wake({WakeTag.WEIGHTS})
    assert resident.graphs is None
    resident.wake({WakeTag.KV_CACHE})
    assert resident.graphs.model is resident.awake_model()
    recorded = resident.graphs
    resident.reload()
    assert resident.graphs is not recorded
    assert resident.graphs.model is resident.awake_model()
