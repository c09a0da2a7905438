"""Utility calls into an engine with a fake model: which are permitted, and what becomes of requests."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import CallContext, Role, UtilityCall
from engine_svc.admin.utility import ENGINE_CALLS, UtilityService, registered
from engine_svc.convert.feature import WireFeature, WireFeatures
from engine_svc.core.control import Refused, WeightsLost
from engine_svc.core.step import StepPlan
from engine_svc.loop.mailbox import LoopStats
from engine_svc.loop.protocols import NoLockstep
from tests.engine_svc.fakes import make_scheduler
from tests.engine_svc.loop.controlled_rig import (
    ABORT,
    KEEP,
    NEW_DIGEST,
    WAIT,
    Controlled,
    controlled,
    running,
    tokens_of,
)
from tests.engine_svc.scheduler.doubles import Retainer
from tests.engine_svc.session.service_rig import ABORT as ENDED_BY_ABORT
from tests.engine_svc.session.service_rig import (
    LENGTH,
    ServiceRig,
    StreamClient,
    make_entry,
    prompt_of,
    serving,
)
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2, utility_pb2
from triptych_kit.channel import open_channel
from triptych_kit.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
)

ALL_CALLS = tuple(field.name for field in utility_pb2.UtilityCall.DESCRIPTOR.oneofs_by_name["call"].fields)
SERVED_TO_FRONTENDS = {
    "get_supported_tasks", "is_paused", "is_sleeping", "get_weight_version", "get_config", "get_statistics",
}  # fmt: skip
NOT_SERVED = {
    "reset_multimodal_cache", "reset_encoder_cache", "add_adapter", "remove_adapter", "list_adapters",
    "pin_adapter", "unpin_adapter", "flush_pins", "pin_blocks", "release_pins", "list_pins",
}  # fmt: skip
UNIMPLEMENTED, PERMISSION_DENIED = 12, 7


def call_named(name: str) -> utility_pb2.UtilityCall:
    call = utility_pb2.UtilityCall()
    field = call.DESCRIPTOR.fields_by_name[name]
    call.MergeFrom(utility_pb2.UtilityCall(**{field.name: {}}))
    return call


async def test_a_wait_past_its_time_is_taken_back_and_the_engine_goes_on():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=10)
        pause = utility_pb2.PauseCall(mode=WAIT)
        with pytest.raises(DeadlineExceeded, match=r"call to pause failed: no answer within 0\.05 s"):
            await engine.call(pause=pause, timeout_ms=50)
        engine.rig.executor.gate.set()
        await engine.frontend.add(make_entry(2))
        await engine.frontend.until_ended(1, 2)
        assert not (await engine.call(is_paused={})).is_paused


async def test_a_cancelled_call_is_not_started():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=10)
        with pytest.raises(DeadlineExceeded, match="nothing was changed"):
            await engine.call(set_weight_version={"version": "late"}, timeout_ms=0)
        engine.rig.executor.gate.set()
        await engine.frontend.until_ended(1)
        await engine.pass_by()
        assert (await engine.call(get_weight_version={})).weight_version == ""


async def test_a_refusal_by_the_ranks_is_reported_and_the_engine_continues():
    async with controlled() as engine:
        engine.runners.error = Refused("nothing to load them from")
        with pytest.raises(FailedPrecondition, match=r"^call to sleep failed: nothing to load them from$"):
            await engine.call(sleep={"level": 2})
        await engine.frontend.add(make_entry(1))
        await engine.frontend.until_ended(1)
    assert engine.frontend.finished == {1: [LENGTH]}


async def test_an_error_of_ours_is_internal_without_its_text_and_the_engine_goes_on():
    async with controlled() as engine:
        engine.runners.error = RuntimeError("/secret/path")
        with pytest.raises(Internal, match=r"^call to collective failed: internal error") as caught:
            await engine.call(collective={"name": "memory"})
        assert "secret" not in caught.value.message
        await engine.frontend.add(make_entry(1))
        await engine.frontend.until_ended(1)


async def test_the_state_is_in_every_heartbeat():
    async with controlled() as engine:
        await engine.pause(KEEP)
        await engine.frontend.add(make_entry(1))
        await engine.pass_by()
        await heartbeat_with(engine, session_pb2.ENGINE_STATE_PAUSED)
        assert announce.engine_info(engine.rig.engine).state == session_pb2.ENGINE_STATE_PAUSED
        await engine.call(sleep={"level": 0, "mode": KEEP})
        await heartbeat_with(engine, session_pb2.ENGINE_STATE_ASLEEP)
        assert announce.status(engine.rig.engine, 1)["run_state"] == "asleep"
        await engine.call(wake={})
        await engine.resume()
        await engine.frontend.until_ended(1)
        await heartbeat_with(engine, session_pb2.ENGINE_STATE_READY)


async def test_the_status_names_the_model_and_the_share_of_the_cache_that_is_used():
    stats = replace(make_scheduler().stats(), num_used_blocks=16, num_total_blocks=64)
    async with controlled() as engine:
        engine.rig.engine.stats_snapshot.post(LoopStats(step_number=5, scheduler=stats))
        status = announce.status(engine.rig.engine, 1)
    assert (status["model"], status["kv_usage_percent"]) == ("fake", 25.0)


async def heartbeat_with(engine: Controlled, state: session_pb2.EngineState) -> None:
    """Wait for a heartbeat that says so, and that nothing is to be done."""
    start = len(engine.frontend.received)
    engine.rig.servicer.beat()
    await engine.frontend.until(
        lambda: any(
            message.heartbeat.state == state and not message.heartbeat.has_work
            for message in engine.frontend.received[start:]
            if message.HasField("heartbeat")
        )
    )


async def test_facts_that_change_reach_frontends_as_another_ready():
    async with controlled() as engine:
        core = engine.rig.engine.core
        assert core is not None
        num_readies = engine.frontend.kinds().count("ready")
        engine.rig.engine.renew(core.facts)
        assert engine.rig.engine.core is core
        engine.rig.engine.renew(replace(core.facts, model_name="other"))
        await engine.frontend.until(lambda: engine.frontend.kinds().count("ready") == num_readies + 1)
    assert engine.frontend.last("ready").ready.model_name == "other"


class Announcing(WireFeature):
    """Announces what its call has set last, and reports it as part of the load."""

    def __init__(self) -> None:
        self.name = "first"
        self.utilities = [UtilityCall("pin_adapter", Role.FRONTEND, self._set)]

    def announce(self, ready: session_pb2.Ready) -> None:
        ready.supported_tasks.append(self.name)

    def report(self, stats: session_pb2.Stats) -> None:
        stats.slot_digests.append(self.name)

    async def _set(self, context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
        self.name = call.pin_adapter.name
        context.engine.announce_again()
        return utility_pb2.UtilityResult(done=utility_pb2.UtilityDone())


async def test_a_feature_has_calls_of_its_own_and_announces_again_what_they_change():
    async with controlled(features=WireFeatures([Announcing()])) as engine:
        assert engine.frontend.last("ready").ready.supported_tasks[-1] == "first"
        await engine.call(pin_adapter={"name": "second"})
        await engine.frontend.until(lambda: engine.frontend.kinds().count("ready") == 2)
        assert engine.frontend.last("ready").ready.supported_tasks[-1] == "second"
        await engine.frontend.until(lambda: reported_slots(engine.frontend) == ["second"])


async def test_what_changes_during_a_drain_is_announced_when_it_is_cancelled():
    async with controlled(features=WireFeatures([Announcing()])) as engine:
        lifecycle = engine.rig.engine.lifecycle
        lifecycle.move_to(EngineState.DRAINING)
        engine.rig.engine.announce_again()
        lifecycle.move_to(EngineState.READY)
        await engine.frontend.until(lambda: engine.frontend.kinds().count("ready") == 2)
    assert engine.frontend.kinds() == ["hello_ack", "ready", "draining", "ready"]


def reported_slots(frontend: StreamClient) -> list[str]:
    stats = [message.stats for message in frontend.received if message.HasField("stats")]
    return list(stats[-1].slot_digests) if stats else []


class Stepping(NoLockstep):
    """Other ranks may step with this one while `steps`."""

    steps = True

    def check_quiet(self, *, or_apart: bool = False) -> None:
        assert or_apart
        if self.steps:
            raise FailedPrecondition("pause all of them first", reason="RANKS_NOT_QUIET")


async def test_profiles_of_ranks_that_step_together_begin_and_end_while_all_stand_still(tmp_path: Path):
    lockstep = Stepping()
    async with controlled(profile_dir=tmp_path, lockstep=lockstep) as engine:
        for start in (True, False):
            with pytest.raises(FailedPrecondition, match="pause all of them first"):
                await engine.call(profile={"start": start})
        assert engine.runners.asked == []
        lockstep.steps = False
        for start in (True, False):
            await engine.call(profile={"start": start})
    assert [name for name, _ in engine.runners.asked] == ["start_profile", "stop_profile"]


async def test_profiles_need_a_folder_and_a_plain_name(tmp_path: Path):
    async with controlled() as engine:
        with pytest.raises(FailedPrecondition, match="--profile-dir"):
            await engine.call(profile={"start": True})
    async with controlled(profile_dir=tmp_path) as engine:
        for prefix in ("../up", "a/b", "a\0b", "x" * 65):
            with pytest.raises(InvalidArgument):
                await engine.call(profile={"start": True, "prefix": prefix})
        await engine.call(profile={"start": True, "prefix": "mine"})
        await engine.call(profile={"start": True})
        await engine.call(profile={})
    assert engine.runners.asked == [
        ("start_profile", "mine"), ("start_profile", "engine"), ("stop_profile", None),
    ]  # fmt: skip


async def test_every_rank_writes_its_weights_to_a_folder_while_none_steps(tmp_path: Path):
    lockstep = Stepping()
    async with controlled(lockstep=lockstep) as engine:
        with pytest.raises(FailedPrecondition, match="pause all of them first"):
            await engine.call(save_sharded_state={"path": str(tmp_path)})
        lockstep.steps = False
        for wrong, field_name in (
            ({}, "path"),
            ({"path": "kept"}, "path"),
            ({"path": "/kept", "pattern": "{rank}"}, "pattern"),
            ({"path": "/kept", "max_size_bytes": 1}, "max_size_bytes"),
        ):
            with pytest.raises(InvalidArgument, match=field_name):
                await engine.call(save_sharded_state=wrong)
        assert engine.runners.asked == []
        await engine.call(save_sharded_state={"path": str(tmp_path)})
    assert engine.runners.asked == [("save_weights", {"folder": str(tmp_path)})]


async def test_weights_that_are_asleep_are_not_written():
    async with controlled() as engine:
        await engine.call(sleep={"level": 2})
        with pytest.raises(FailedPrecondition, match="wake it first"):
            await engine.call(save_sharded_state={"path": "/kept"})
    assert engine.runners.asked == [("sleep", 2)]


async def test_a_collective_answers_for_each_rank():
    async with controlled() as engine:
        answer = await engine.call(collective={"name": "memory"})
        assert list(answer.collective.ranks) == ["0", "1"]
        for name in ("__class__", "sleep", "", "memory\0", "m" * 1_000_000):
            with pytest.raises(Unimplemented):
                await engine.call(collective={"name": name})
        argument = utility_pb2.CollectiveArgument(name="a", integer=1)
        with pytest.raises(InvalidArgument):
            await engine.call(collective={"name": "memory", "arguments": [argument] * 10_000})


ARGUMENTS = {
    "factor": {"number": 0.5}, "layer": {"integer": 3}, "dry": {"flag": True}, "note": {"text": "x"},
}  # fmt: skip


async def scale(engine: Controlled, arguments: dict[str, dict[str, object]]) -> utility_pb2.UtilityResult:
    typed = [utility_pb2.CollectiveArgument(name=name, **value) for name, value in arguments.items()]
    return await engine.call(collective={"name": "scale", "arguments": typed})


async def test_arguments_of_a_collective_reach_the_ranks_with_their_types():
    async with controlled() as engine:
        assert list((await scale(engine, ARGUMENTS)).collective.ranks) == ["0", "1"]
    values = {"factor": 0.5, "layer": 3, "dry": True, "note": "x"}
    assert engine.runners.asked == [("collective", {"name": "scale", "arguments": values})]


@pytest.mark.parametrize(
    "change",
    [{"layer": {"number": 3.0}}, {"layer": {"flag": True}}, {"note": {}}, {"other": {"integer": 1}}],
)
async def test_a_collective_with_other_arguments_than_its_own_runs_nowhere(change):
    async with controlled() as engine:
        with pytest.raises(InvalidArgument, match="argument"):
            await scale(engine, ARGUMENTS | change)
        with pytest.raises(InvalidArgument, match="there are 3 arguments"):
            await scale(engine, {name: ARGUMENTS[name] for name in list(ARGUMENTS)[1:]})
    assert engine.runners.asked == []


async def test_an_idle_engine_runs_one_step_without_requests():
    async with controlled() as engine:
        plans: list[list[str]] = []
        engine.rig.executor.on_launch = lambda plan: plans.append(list(plan.request_ids))
        await engine.call(execute_dummy_batch={})
        assert plans == [[]]
        await engine.frontend.add(make_entry(1))
        await engine.frontend.until_ended(1)
    assert engine.frontend.tokens == {1: tokens_of(1, 5)}


async def test_a_step_without_requests_is_refused_where_requests_run_or_the_engine_sleeps():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        stepping = asyncio.create_task(engine.call(execute_dummy_batch={}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        with pytest.raises(FailedPrecondition, match="1 requests run and 0 wait"):
            await stepping
        await engine.frontend.until_ended(1)
        await engine.call(sleep={"level": 1})
        with pytest.raises(FailedPrecondition, match="wake it first"):
            await engine.call(execute_dummy_batch={})


async def test_a_step_without_requests_that_fails_is_reported_and_the_engine_goes_on():
    def fail(plan: StepPlan) -> None:
        raise ValueError("bad step")

    async with controlled() as engine:
        engine.rig.executor.on_launch = fail
        with pytest.raises(Aborted, match="failed and was rolled back"):
            await engine.call(execute_dummy_batch={})
        engine.rig.executor.on_launch = lambda plan: None
        await engine.frontend.add(make_entry(1))
        await engine.frontend.until_ended(1)
    assert engine.frontend.tokens == {1: tokens_of(1, 5)}


async def list_adapters(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    held = await context.ask(lambda controls: controls.weight_version)
    adapters = utility_pb2.LoadedAdapters(adapters=[utility_pb2.LoadedAdapter(name=f"of {held}")])
    return utility_pb2.UtilityResult(adapters=adapters)


async def test_a_call_that_a_feature_registers_is_served_and_others_are_not():
    entry = UtilityCall("list_adapters", Role.FRONTEND, list_adapters)
    async with controlled() as engine:
        await engine.call(set_weight_version={"version": "v1"})
        engine.rig.engine.utilities = registered([*ENGINE_CALLS, entry])
        assert (await engine.call(list_adapters={})).adapters.adapters[0].name == "of v1"
        with pytest.raises(Unimplemented, match="pin_adapter is not served"):
            await engine.call(pin_adapter={"name": "a"})


def test_a_call_is_registered_once_and_by_a_name_of_the_proto():
    entry = UtilityCall("list_adapters", Role.FRONTEND, list_adapters)
    with pytest.raises(ValueError, match="'list_adapters' is registered twice"):
        registered([entry, entry])
    with pytest.raises(ValueError, match="'list_things' is no field"):
        registered([replace(entry, name="list_things")])


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ({"pause": {"mode": 9}}, InvalidArgument),
        ({"sleep": {"level": 3}}, InvalidArgument),
        ({"sleep": {"level": 1, "mode": 9}}, InvalidArgument),
        ({"wake": {"tags": ["weights", "scheduler"]}}, InvalidArgument),
        ({"reset_prefix_cache": {"reset_connector": True}}, FailedPrecondition),
        ({"update_weights": {"names": ["lm_head.weight"] * 2}}, InvalidArgument),
        ({"set_weight_version": {"version": "v" * 257}}, InvalidArgument),
        ({}, Unimplemented),
    ],
)
async def test_what_is_wrong_is_refused_and_changes_nothing(call, kind):
    async with controlled() as engine:
        with pytest.raises(kind):
            await engine.call(**call)
        await engine.frontend.add(make_entry(1))
        await engine.frontend.until_ended(1)
    assert engine.runners.asked == []


@pytest.mark.parametrize("name", ALL_CALLS)
async def test_over_a_session_every_call_answers_its_own_status(name: str):
    async with controlled() as engine:
        call = call_named(name)
        call.call_id = 77
        await engine.frontend.send(engine_pb2.ConnectRequest(utility=call))
        await engine.frontend.until(lambda: "utility_result" in engine.frontend.kinds())
        result = engine.frontend.last("utility_result").utility_result
    assert result.call_id == 77
    code = result.failure.code
    assert code == (
        0 if name in SERVED_TO_FRONTENDS else UNIMPLEMENTED if name in NOT_SERVED else PERMISSION_DENIED
    )
    assert code == 0 or name in result.failure.message


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
async def test_what_is_not_served_is_named_to_the_operator(name: str):
    async with controlled() as engine:
        with pytest.raises(Unimplemented, match=name):
            await engine.call(**{name: {}})


async def test_no_claim_makes_a_session_an_operator():
    async with controlled() as engine:
        stub = engine_pb2_grpc.EngineCoreServiceStub(channel := open_channel(engine.rig.address))
        claims = StreamClient(stub, "operator")
        await claims.open(role=session_pb2.PEER_ROLE_ADMIN)
        pause = utility_pb2.UtilityCall(call_id=5, pause=utility_pb2.PauseCall(mode=KEEP))
        await claims.send(engine_pb2.ConnectRequest(utility=pause))
        await claims.until(lambda: "utility_result" in claims.kinds())
        assert claims.last("utility_result").utility_result.failure.code == PERMISSION_DENIED
        await claims.close()
        await channel.close(None)
        assert not (await engine.call(is_paused={})).is_paused


async def test_an_operator_makes_four_calls_at_once_that_may_wait():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=10)
        waits = [asyncio.create_task(engine.pause(WAIT)) for _ in range(4)]
        await engine.let_calls_begin()
        with pytest.raises(ResourceExhausted, match="4 calls are in progress, the limit is 4"):
            await engine.pause(WAIT)
        # Others have room of their own: one of them would end the waits.
        assert not (await engine.call(is_paused={})).is_paused
        engine.rig.executor.gate.set()
        await asyncio.gather(*waits)
        assert (await engine.call(is_paused={})).is_paused


async def test_who_waits_hears_that_somebody_resumed():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=10)
        waiting = asyncio.create_task(engine.pause(WAIT))
        resuming = asyncio.create_task(engine.resume())
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        with pytest.raises(Aborted):
            await waiting
        await resuming


async def test_an_engine_that_loads_or_drains_takes_no_calls():
    rig = ServiceRig()
    async with serving(rig, load=False):
        with pytest.raises(Unavailable, match="engine is loading"):
            await UtilityService(rig.engine).answer(call_named("resume"), Role.ADMIN)
    async with controlled() as engine:
        await running(engine, 1, num_tokens=10)
        engine.rig.engine.lifecycle.move_to(EngineState.DRAINING)
        with pytest.raises(Unavailable, match="call to resume failed: engine is draining"):
            await engine.resume()


# What an operator does to an engine with a fake model, and what becomes of its requests.


async def test_keep_holds_streams_where_they_are_and_resume_continues_them():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        pausing = asyncio.create_task(engine.pause(KEEP))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await pausing
        await engine.pass_by()
        num_launched, num_tokens = engine.rig.executor.num_launched, len(engine.frontend.tokens[1])
        assert 0 < num_tokens < 30
        await engine.frontend.add(make_entry(2, max_tokens=5))
        await engine.pass_by()
        assert engine.rig.executor.num_launched == num_launched
        assert len(engine.frontend.tokens[1]) == num_tokens
        await engine.resume()
        await engine.frontend.until_ended(1, 2)
    assert engine.frontend.tokens == {1: tokens_of(1, 30), 2: tokens_of(2, 5)}
    assert engine.frontend.finished == {1: [LENGTH], 2: [LENGTH]}


async def test_a_request_queued_during_keep_and_aborted_ends_with_no_token():
    async with controlled() as engine:
        await engine.pause(KEEP)
        await engine.frontend.add(make_entry(1))
        await engine.frontend.abort(1)
        await engine.frontend.until_ended(1)
    assert engine.frontend.finished == {1: [ENDED_BY_ABORT]}
    assert engine.frontend.tokens.get(1, []) == []


async def test_a_request_that_a_pause_holds_ends_at_its_deadline():
    async with controlled() as engine:
        await engine.pause(KEEP)
        entry = make_entry(1)
        entry.remaining_ms = 50
        await engine.frontend.add(entry)
        await engine.frontend.until_ended(1)
    assert engine.frontend.finished == {1: [ENDED_BY_ABORT]}


async def test_abort_ends_what_runs_and_waits_and_what_comes_waits_for_resume():
    async with controlled() as engine:
        await running(engine, *range(1, 21), num_tokens=100)
        pausing = asyncio.create_task(engine.pause(ABORT))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await pausing
        await engine.frontend.until_ended(*range(1, 21))
        num_launched = engine.rig.executor.num_launched
        await engine.frontend.add(make_entry(30))
        await engine.pass_by()
        assert engine.rig.executor.num_launched == num_launched
        assert 30 not in engine.frontend.tokens
        await engine.resume()
        await engine.frontend.until_ended(30)
    assert all(engine.frontend.finished[handle] == [ENDED_BY_ABORT] for handle in range(1, 21))
    assert engine.frontend.tokens[30] == tokens_of(30, 5)


async def test_wait_returns_when_the_ten_tokens_are_done_and_admits_no_request_meanwhile():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=10)
        pausing = asyncio.create_task(engine.pause(WAIT))
        await engine.frontend.add(make_entry(2))
        await engine.frontend.flush()
        assert not pausing.done()
        engine.rig.executor.gate.set()
        await pausing
        await engine.frontend.until_ended(1)
        assert engine.frontend.tokens == {1: tokens_of(1, 10)}
        await engine.resume()
        await engine.frontend.until_ended(2)
    assert engine.frontend.tokens[2] == tokens_of(2, 5)


async def test_sleep_gives_memory_back_and_held_streams_go_on_after_wake():
    async with controlled() as engine:
        await running(engine, 1, 2, num_tokens=30)
        sleeping = asyncio.create_task(engine.call(sleep={"level": 2, "mode": KEEP}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await sleeping
        assert (await engine.call(is_sleeping={})).is_sleeping
        await engine.call(wake={"tags": ["weights"]})
        await engine.frontend.add(make_entry(3))
        await engine.pass_by()
        assert (await engine.call(is_sleeping={})).is_sleeping
        await engine.call(wake={})
        await engine.frontend.until_ended(1, 2, 3)
    assert engine.runners.asked == [("sleep", 2), ("wake", {"weights"}), ("wake", {"kv_cache"})]
    assert engine.frontend.tokens == {1: tokens_of(1, 30), 2: tokens_of(2, 30), 3: tokens_of(3, 5)}


async def test_sleep_of_no_mode_and_level_ends_running_requests_and_is_level_1():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=100)
        sleeping = asyncio.create_task(engine.call(sleep={}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await sleeping
        await engine.frontend.until_ended(1)
    assert engine.frontend.finished == {1: [ENDED_BY_ABORT]}
    assert engine.runners.asked == [("sleep", 1)]


async def test_a_pause_of_no_mode_ends_running_requests_and_clears_the_cache():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=100)
        pausing = asyncio.create_task(engine.call(pause={}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await pausing
        await engine.frontend.until_ended(1)
        await engine.resume()
        await engine.frontend.add(make_entry(2, prompt=prompt_of(1)))
        await engine.frontend.until_ended(2)
    assert engine.frontend.finished == {1: [ENDED_BY_ABORT], 2: [LENGTH]}
    assert [first.num_cached_tokens for first in firsts_of(engine)] == [0, 0]


async def test_a_pause_that_clears_the_cache_preempts_what_it_holds():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        pausing = asyncio.create_task(engine.pause(KEEP, clear_cache=True))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await pausing
        await engine.resume()
        await engine.frontend.until_ended(1)
        assert (await engine.call(get_statistics={})).statistics.num_preemptions == 1
    assert engine.frontend.tokens == {1: tokens_of(1, 30)}


async def test_a_cache_in_use_is_reset_only_where_running_requests_may_lose_their_blocks():
    async with controlled() as engine:
        await running(engine, 1, 2, num_tokens=30)
        resetting = asyncio.create_task(engine.call(reset_prefix_cache={}))
        forcing = asyncio.create_task(engine.call(reset_prefix_cache={"reset_running": True}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        with pytest.raises(FailedPrecondition, match="2 of them run"):
            await resetting
        assert (await forcing).reset_prefix_cache
        await engine.frontend.until_ended(1, 2)
    assert engine.frontend.tokens == {1: tokens_of(1, 30), 2: tokens_of(2, 30)}


# Row 252.
async def test_the_hit_rate_is_0_after_a_pause_that_clears_the_cache():
    async with controlled() as engine:
        prompt = list(range(40))
        for handle, clears in (1, False), (2, True), (3, False):
            await engine.pause(KEEP, clear_cache=clears)
            await engine.resume()
            await engine.frontend.add(make_entry(handle, prompt=prompt))
            await engine.frontend.until_ended(handle)
    assert [first.num_cached_tokens for first in firsts_of(engine)] == [0, 0, 36]


@pytest.mark.parametrize(
    "call",
    [
        {"reset_prefix_cache": {}},
        {"pause": {"clear_cache": True}},
        {"sleep": {"level": 1}},
        {"update_weights": {}},
    ],
    ids=lambda call: next(iter(call)),
)
async def test_calls_that_empty_the_cache_take_what_is_retained(call):
    retainer = Retainer()
    async with controlled(scheduler=make_scheduler(features=[retainer])) as engine:
        await engine.frontend.add(make_entry(1, prompt=list(range(40))))
        await engine.frontend.until_ended(1)
        assert (await engine.call(get_statistics={})).statistics.num_pinned_blocks == 11
        await engine.call(**call)
        await engine.pass_by()
        assert (await engine.call(get_statistics={})).statistics.num_pinned_blocks == 0
    assert retainer.num_resets == 1


def firsts_of(engine):
    return [first for message in engine.frontend.received for first in message.step.first]


async def test_weights_are_replaced_only_where_nothing_runs_or_all_is_held():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        updating = asyncio.create_task(engine.call(update_weights={"path": "/models/new"}))
        pausing = asyncio.create_task(engine.pause(KEEP))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        with pytest.raises(FailedPrecondition, match="1 requests run: pause the engine first"):
            await updating
        await pausing
        await engine.call(update_weights={"path": "/models/new", "version": "step-2"})
        await engine.resume()
        await engine.frontend.until_ended(1)
        assert (await engine.call(get_weight_version={})).weight_version == "step-2"
        await engine.call(update_weights={})
    assert engine.runners.asked == [("reload_weights", Path("/models/new")), ("reload_weights", None)]
    assert engine.weights == [(Path("/models/new"), NEW_DIGEST)] * 2
    assert engine.frontend.tokens[1] == tokens_of(1, 30)


async def test_tensors_that_are_replaced_by_name_come_from_their_folder_and_the_engine_keeps_its_own():
    async with controlled() as engine:
        await engine.call(update_weights={"path": "/models/new", "names": ["a", "b"]})
    assert engine.runners.asked == [("reload_weights", (Path("/models/new"), ["a", "b"]))]
    assert engine.weights == [(Path("/models/first"), NEW_DIGEST)]


async def test_weights_that_are_loaded_while_it_sleeps_are_awake():
    async with controlled() as engine:
        await engine.call(sleep={"level": 2})
        await engine.call(update_weights={"path": "/models/new"})
        await engine.call(wake={})
    assert engine.runners.asked[2:] == [("wake", {"kv_cache"})]


async def test_a_refused_update_leaves_an_engine_that_runs():
    async with controlled() as engine:
        engine.runners.error = Refused("/models/new is not a folder")
        with pytest.raises(FailedPrecondition, match="/models/new is not a folder"):
            await engine.call(update_weights={"path": "/models/new"})
        assert not (await engine.call(is_sleeping={})).is_sleeping
        await engine.frontend.add(make_entry(1))
        await engine.frontend.until_ended(1)


async def lose_weights(engine: Controlled, error: Exception) -> ServiceError:
    """Have an update lose them, and a request come; what the operator reads."""
    engine.runners.error = error
    with pytest.raises(ServiceError) as caught:
        await engine.call(update_weights={"path": "/models/new", "version": "step-2"})
    await engine.frontend.add(make_entry(1))
    await engine.pass_by()
    assert (await engine.call(is_sleeping={})).is_sleeping
    assert engine.frontend.tokens.get(1, []) == []
    return caught.value


LOSSES = [
    (WeightsLost("/models/first cannot be read"), "WEIGHTS_LOST", "wake it.*first cannot be read"),
    (KeyError("rope"), "INTERNAL", "see the engine's log"),
]


@pytest.mark.parametrize(("error", "reason", "message_pattern"), LOSSES)
async def test_without_weights_requests_wait_until_they_are_woken(error, reason, message_pattern):
    async with controlled() as engine:
        failure = await lose_weights(engine, error)
        assert failure.reason == reason
        assert re.search(message_pattern, failure.message)
        engine.runners.error = Refused("/models/first cannot be read")
        with pytest.raises(FailedPrecondition, match="cannot be read"):
            await engine.call(wake={})
        assert (await engine.call(is_sleeping={})).is_sleeping
        await engine.call(wake={})
        await engine.frontend.until_ended(1)
        assert (await engine.call(get_weight_version={})).weight_version == ""
    assert engine.runners.asked == [("wake", {"weights"})]
    assert engine.frontend.tokens == {1: tokens_of(1, 5)}
    assert engine.weights == []


async def test_without_weights_others_can_be_loaded():
    async with controlled() as engine:
        await lose_weights(engine, WeightsLost("/models/first cannot be read"))
        await engine.call(update_weights={"path": "/models/new", "version": "step-3"})
        await engine.frontend.until_ended(1)
        assert not (await engine.call(is_sleeping={})).is_sleeping
    assert engine.weights == [(Path("/models/new"), NEW_DIGEST)]


async def test_a_paused_engine_that_lost_its_weights_is_paused_again_after_waking():
    async with controlled() as engine:
        await engine.pause(KEEP)
        await lose_weights(engine, WeightsLost("/models/first cannot be read"))
        with pytest.raises(FailedPrecondition, match="wake it first"):
            await engine.resume()
        await engine.call(wake={})
        assert (await engine.call(is_paused={})).is_paused
        await engine.resume()
        await engine.frontend.until_ended(1)
