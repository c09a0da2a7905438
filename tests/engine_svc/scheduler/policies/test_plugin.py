"""Policies and schedulers by name: ours, and those that installed packages offer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies import POLICIES
from engine_svc.scheduler.policies.continuum import Continuum
from engine_svc.scheduler.policies.fair import Fair
from engine_svc.scheduler.policies.fcfs import FirstComeFirstServed
from engine_svc.scheduler.policies.least_recompute import LeastRecompute
from engine_svc.scheduler.policies.prefill_first import PrefillFirst
from engine_svc.scheduler.policies.priority import ByPriority
from tests.engine_svc.scheduler.fakes import Stage, request
from triptych_kit.config import ConfigError

PLUGIN = '''
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.policies.fcfs import FirstComeFirstServed
from engine_svc.scheduler.scheduler import Scheduler


class LastComeFirstServed(FirstComeFirstServed):
    """A package's own order."""

    def order_key(self, request):
        return self.requeue_key(request)


class EvenSteps(Scheduler):
    """A package's own scheduler: every other step computes nothing."""

    num_asked = 0

    def schedule(self, now):
        self.num_asked += 1
        self.set_pause(PauseState.ALL if self.num_asked % 2 else PauseState.NONE)
        return super().schedule(now)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[None]:
    """A package with two policies is installed."""
    (tmp_path / "lifo_plugin.py").write_text(PLUGIN)
    info = tmp_path / "lifo_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lifo-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[triptych.policies]\n"
        "last-first = lifo_plugin:LastComeFirstServed\n"
        "fcfs = lifo_plugin:LastComeFirstServed\n"
        "[triptych.schedulers]\n"
        "even-steps = lifo_plugin:EvenSteps\n"
        "default = lifo_plugin:EvenSteps\n"
    )
    sys.path.insert(0, str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))
    sys.modules.pop("lifo_plugin", None)


def test_there_are_six_policies():
    assert {
        "fcfs": FirstComeFirstServed,
        "fair": Fair,
        "priority": ByPriority,
        "prefill-first": PrefillFirst,
        "least-recompute": LeastRecompute,
        "continuum": Continuum,
    } == POLICIES


# Row 191.
@pytest.mark.usefixtures("plugin")
def test_an_installed_package_may_offer_a_policy():
    stage = Stage(policy="last-first", max_num_seqs=2)
    stage.add(*(request(name, 8) for name in "abc"))
    assert stage.step().request_ids == ["c", "b"]


@pytest.mark.usefixtures("plugin")
def test_a_plugin_cannot_take_a_built_in_name():
    stage = Stage(policy="fcfs", max_num_seqs=2)
    stage.add(*(request(name, 8) for name in "abc"))
    assert stage.step().request_ids == ["a", "b"]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(("name", "first_step"), [("even-steps", []), ("default", ["a"])])
def test_an_installed_package_may_offer_a_scheduler_but_not_under_our_name(name, first_step):
    config, cache = SchedulerConfig(max_model_len=64), CacheConfig(10, (FullAttention(4),))
    scheduler = build_core(config, cache, scheduler_class=name).scheduler
    scheduler.add(request("a", 8))
    assert scheduler.schedule(0.0).request_ids == first_step


@pytest.mark.usefixtures("plugin")
def test_an_unknown_name_is_refused_with_those_that_are_known():
    config, cache = SchedulerConfig(max_model_len=64), CacheConfig(10, (FullAttention(4),))
    with pytest.raises(ConfigError) as refusal:
        build_core(config, cache, policy="round-robin")
    assert str(refusal.value) == (
        "--scheduling-policy is 'round-robin', it has to be one of "
        "continuum, fair, fcfs, last-first, least-recompute, prefill-first, priority"
    )


def test_what_is_not_installed_is_unknown():
    known = "continuum, fair, fcfs, least-recompute, prefill-first, priority"
    with pytest.raises(ConfigError, match=f"one of {known}$"):
        Stage(policy="last-first")
    config, cache = SchedulerConfig(max_model_len=64), CacheConfig(10, (FullAttention(4),))
    with pytest.raises(
        ConfigError, match=r"^--scheduler-class is 'even-steps', it has to be one of default$"
    ):
        build_core(config, cache, scheduler_class="even-steps")
