"""The supervisor over real child processes that are no services."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.triptych_cli.serve.supervised import MakeStack, Stack, greeted, program_that_may_go
from triptych_cli.serve.supervisor import GivenUp, StartTimeout
from triptych_kit.process.child import ChildDied, Output


async def test_the_coordinator_starts_first_and_all_get_its_address(make_stack: MakeStack) -> None:
    one = make_stack()
    await one.supervisor.start()
    children = one.supervisor.children
    ready = {
        f"{name} READY at {address.address} (pid {address.pid}), admin_http {address.admin_http}"
        for name, child in children.items()
        if (address := child.announcement)
    }
    assert set(one.reports) == ready
    coordinator = one.supervisor.address_of("coordinator-0")
    await one.supervisor.stop()
    assert one.events()[0] == "coordinator-0 start"
    assert sorted(one.events()[1:4]) == ["engine-0 start", "engine-1 start", "frontend-0 start"]
    starts = [line for line in one.diary.read_text().splitlines() if " start " in line]
    assert all(line.endswith(f"coordinator={coordinator}") for line in starts[1:])


async def test_frontends_alone_get_the_key_of_clients(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", "triptych-0123456789abcdef")
    one = make_stack()
    await one.supervisor.start()
    with_key = {
        name
        for name, child in one.supervisor.children.items()
        if b"triptych-0123456789abcdef" in Path(f"/proc/{child.pid}/environ").read_bytes()
    }
    await one.supervisor.stop()
    assert with_key == {"frontend-0"}


async def test_it_stops_the_frontend_then_the_engines_then_the_coordinator(make_stack: MakeStack) -> None:
    one = make_stack()
    await one.supervisor.start()
    await one.supervisor.stop()
    stops = [event for event in one.events() if event.endswith("stop")]
    assert stops[0] == "frontend-0 stop"
    assert sorted(stops[1:3]) == ["engine-0 stop", "engine-1 stop"]
    assert stops[3] == "coordinator-0 stop"
    assert not any(child.is_running for child in one.supervisor.children.values())


@pytest.mark.parametrize("flag", ["--die-at-start", "--die-before-ready"])
async def test_a_child_that_dies_before_it_is_ready_is_named_with_its_last_lines(
    make_stack: MakeStack, flag: str
) -> None:
    one = make_stack({"engine-1": (f"{flag}=3",)})
    with pytest.raises(
        ChildDied, match=r"engine-1 \(pid \d+\) exited with code 3 while it was starting"
    ) as died:
        await one.supervisor.start()
    *before, last = str(died.value).splitlines()
    assert before == ["last lines of engine-1:", "    something went wrong"]
    assert last.endswith("while it was starting: with this model")


async def test_a_child_that_dies_between_its_own_readiness_and_the_others_ends_the_start(
    make_stack: MakeStack,
) -> None:
    async def all_but_the_frontend(service: str, address: str) -> None:
        await greeted(service, address)
        if service == "frontend":
            while not any(report.startswith("engine-1 READY") for report in one.reports):
                one.reported.clear()
                await one.reported.wait()
            os.kill(one.supervisor.children["engine-1"].pid, signal.SIGKILL)
            await asyncio.Event().wait()

    one = make_stack(await_ready=all_but_the_frontend)
    with pytest.raises(ChildDied, match=r"engine-1 \(pid \d+\) was killed by SIGKILL"):
        await one.supervisor.start()


async def test_what_keeps_a_frontend_is_shown_once_all_others_are_ready(
    make_stack: MakeStack, capfd: pytest.CaptureFixture[str]
) -> None:
    async def all_but_the_frontend(service: str, address: str) -> None:
        await greeted(service, address)
        if service == "engine":
            while "frontend-0" not in one.supervisor.children or not last_lines():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "the tokenizer" not in capfd.readouterr().err
        if service == "frontend":
            await asyncio.Event().wait()

    def last_lines() -> list[str]:
        return list(one.supervisor.children["frontend-0"].last_lines)

    extra = {"frontend-0": ("--log=the tokenizer cannot be read",)}
    one = make_stack(extra, await_ready=all_but_the_frontend, output=Output.COPIED)
    starting = asyncio.ensure_future(one.supervisor.start())
    for engine in ("engine-0", "engine-1"):
        await one.until(f"{engine} READY")
    assert "[frontend-0] the tokenizer cannot be read" in capfd.readouterr().err
    starting.cancel()
    await asyncio.wait((starting,))


async def test_a_frontend_is_ready_once_each_of_its_workers_is(make_stack: MakeStack) -> None:
    second_asked, second_ready = asyncio.Event(), asyncio.Event()

    async def by_worker(service: str, address: str) -> None:
        if address == "second":
            second_asked.set()
            await second_ready.wait()
        elif address != "first":
            await greeted(service, address)

    workers = {"frontend-0": ("--worker-addresses", "first", "second")}
    one = make_stack(workers, await_ready=by_worker)
    starting = asyncio.ensure_future(one.supervisor.start())
    await one.until("engine-0 READY")
    await one.until("engine-1 READY")
    await asyncio.wait_for(second_asked.wait(), 30)
    assert not starting.done() and not any("frontend-0 READY" in report for report in one.reports)
    second_ready.set()
    await asyncio.wait_for(starting, 30)
    assert "frontend-0 READY" in one.reports[-1]


async def test_a_start_that_takes_too_long_is_given_up(make_stack: MakeStack) -> None:
    one = make_stack(startup_s=0.0)
    with pytest.raises(
        StartTimeout, match="not ready within 0 s: coordinator-0, engine-0, engine-1, frontend-0"
    ):
        await one.supervisor.start()


@pytest.mark.parametrize("name", ["coordinator-0", "engine-1", "frontend-0"])
async def test_a_child_that_dies_later_is_reported_and_starts_again_on_its_ports(
    make_stack: MakeStack, name: str
) -> None:
    one = make_stack()
    await one.supervisor.start()
    one.keep_running()
    before = one.supervisor.children[name]
    address, admin_http = one.supervisor.address_of(name), one.supervisor.admin_http_of(name)
    os.kill(before.pid, signal.SIGKILL)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.children[name].pid != before.pid
    assert one.supervisor.address_of(name) == address
    assert one.supervisor.admin_http_of(name) == admin_http
    assert f"{name} READY at {address} (pid {before.pid}), admin_http {admin_http}" in one.reports
    assert any(
        f"{name} (pid {before.pid}) was killed by SIGKILL; starts again" in line for line in one.reports
    )


@pytest.mark.parametrize("name", ["coordinator-0", "engine-1"])
async def test_a_restart_that_fails_does_not_cost_a_process_its_port(
    make_stack: MakeStack, tmp_path: Path, name: str
) -> None:
    trap = tmp_path / "trap"
    one = make_stack({name: (f"--die-once={trap}",)})
    await one.supervisor.start()
    one.keep_running()
    address = one.supervisor.address_of(name)
    trap.touch()
    os.kill(one.supervisor.children[name].pid, signal.SIGKILL)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert not trap.exists()
    assert one.supervisor.address_of(name) == address


async def test_a_process_that_the_system_refuses_to_start_for_a_moment_is_tried_again(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    program = program_that_may_go(tmp_path)
    one = make_stack(program=program)
    await one.supervisor.start()
    one.keep_running()
    others = {name: child.pid for name, child in one.supervisor.children.items() if name != "engine-0"}
    program.unlink()
    os.kill(one.supervisor.children["engine-0"].pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while "engine-0 cannot be started: No such file or directory" not in one.reports:
            one.reported.clear()
            await one.reported.wait()
        program.symlink_to(sys.executable)
        await one.restarted.wait()
    assert {name: one.supervisor.children[name].pid for name in others} == others
    assert one.supervisor.children["engine-0"].is_running


async def test_a_process_that_the_system_refuses_to_start_is_given_up_like_one_that_dies(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    program = program_that_may_go(tmp_path)
    one = make_stack(program=program, max_restarts=2)
    await one.supervisor.start()
    keeping = one.keep_running()
    program.unlink()
    os.kill(one.supervisor.children["engine-0"].pid, signal.SIGKILL)
    await one.until("ERROR engine-0 stays down after 2 restarts within 60 s: 3 deaths")
    assert not keeping.done()
    assert sum(report.startswith("engine-0 cannot be started") for report in one.reports) == 2


async def test_an_engine_that_starts_while_the_coordinator_is_down_gets_its_future_address(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    one = make_stack({"coordinator-0": (f"--die-once={trap}",)}, restart_delay_s=0.2)
    await one.supervisor.start()
    one.keep_running()
    address = one.supervisor.address_of("coordinator-0")
    trap.touch()
    for name in ("coordinator-0", "engine-1"):
        os.kill(one.supervisor.children[name].pid, signal.SIGKILL)
    # Whichever of the two is quicker: it is the engine whose second start is looked at.
    await one.until("engine-1 READY", num_reports=2)
    starts = [line for line in one.diary.read_text().splitlines() if line.startswith("engine-1 start ")]
    assert len(starts) == 2
    assert all(line.endswith(f"coordinator={address}") for line in starts)


async def kill_until_it_stays_down(one: Stack, name: str, *, max_restarts: int) -> None:
    for _ in range(max_restarts):
        one.restarted.clear()
        os.kill(one.supervisor.children[name].pid, signal.SIGKILL)
        await asyncio.wait_for(one.restarted.wait(), 30)
    one.restarted.clear()
    os.kill(one.supervisor.children[name].pid, signal.SIGKILL)


async def test_an_engine_that_keeps_dying_is_restarted_ever_later_and_then_stays_down_alone(
    make_stack: MakeStack,
) -> None:
    one = make_stack(max_restarts=3)
    await one.supervisor.start()
    others = {name: child.pid for name, child in one.supervisor.children.items() if name != "engine-0"}
    keeping = one.keep_running()
    await kill_until_it_stays_down(one, "engine-0", max_restarts=3)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert {name: child.pid for name, child in one.supervisor.children.items()} == others
    assert not keeping.done()
    delays = [line.partition("starts again in ")[2] for line in one.reports if "starts again" in line]
    assert delays == ["0.01 s (1 of 3)", "0.02 s (2 of 3)", "0.04 s (3 of 3)"]
    assert [line for line in one.reports if "ERROR" in line] == [
        "ERROR engine-0 stays down after 3 restarts within 60 s: 4 deaths, the last: was killed by SIGKILL"
    ]
    assert one.supervisor.given_up == {"engine-0": GivenUp(4, "was killed by SIGKILL")}


async def test_an_engine_that_stays_down_starts_again_when_engines_are_wanted_anew(
    make_stack: MakeStack,
) -> None:
    one = make_stack(max_restarts=1)
    await one.supervisor.start()
    one.keep_running()
    await kill_until_it_stays_down(one, "engine-0", max_restarts=1)
    await asyncio.wait_for(one.restarted.wait(), 30)
    one.restarted.clear()
    one.supervisor.want(2, starts_missing=True)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.children["engine-0"].is_running
    assert one.supervisor.given_up == {}


@pytest.mark.parametrize("name", ["coordinator-0", "frontend-0"])
async def test_where_the_last_of_a_service_keeps_dying_everything_ends(
    make_stack: MakeStack, name: str
) -> None:
    one = make_stack(max_restarts=1)
    await one.supervisor.start()
    keeping = one.keep_running()
    await kill_until_it_stays_down(one, name, max_restarts=1)
    with pytest.raises(ChildDied, match=rf"{name} .* was killed by SIGKILL after 1 restarts within 60 s"):
        await asyncio.wait_for(keeping, 30)


async def test_where_all_engines_keep_dying_everything_ends_with_the_last(make_stack: MakeStack) -> None:
    one = make_stack(max_restarts=1)
    await one.supervisor.start()
    keeping = one.keep_running()
    await kill_until_it_stays_down(one, "engine-1", max_restarts=1)
    await asyncio.wait_for(one.restarted.wait(), 30)
    await kill_until_it_stays_down(one, "engine-0", max_restarts=1)
    with pytest.raises(ChildDied, match=r"engine-0 .* was killed by SIGKILL"):
        await asyncio.wait_for(keeping, 30)


# The supervisor when another number of engines is wanted than it started with.


async def test_engines_that_are_wanted_later_are_started_and_kept_like_the_others(
    make_stack: MakeStack,
) -> None:
    one = make_stack()
    await one.supervisor.start()
    one.keep_running()
    await asyncio.sleep(0)
    one.supervisor.want(4, starts_missing=True, num_kv_blocks=640)
    await one.until("engine-2 READY")
    await one.until("engine-3 READY")
    assert set(one.asked[:4]) == {
        (name, 2, 0) for name in ("coordinator-0", "engine-0", "engine-1", "frontend-0")
    }
    assert sorted(one.asked[4:]) == [("engine-2", 4, 640), ("engine-3", 4, 640)]
    address = one.supervisor.address_of("engine-3")
    one.restarted.clear()
    os.kill(one.supervisor.children["engine-3"].pid, signal.SIGKILL)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.address_of("engine-3") == address
    assert len(one.supervisor.children) == 6


async def test_no_more_engines_are_started_than_a_machine_is_to_have(make_stack: MakeStack) -> None:
    one = make_stack(max_engines=3)
    await one.supervisor.start()
    one.keep_running()
    await asyncio.sleep(0)
    one.supervisor.want(1000, starts_missing=True)
    one.supervisor.want(1000, starts_missing=True)
    await one.until("engine-2 READY")
    assert sum(name.startswith("engine") for name in one.supervisor.children) == 3
    assert [report for report in one.reports if "1000" in report] == [
        "1000 engines are wanted, 3 are the most that are started here"
    ]


async def test_an_engine_that_ends_with_0_has_left_and_comes_back_only_when_it_is_wanted_anew(
    make_stack: MakeStack,
) -> None:
    one = make_stack()
    await one.supervisor.start()
    one.keep_running()
    left = one.supervisor.children["engine-1"].pid
    os.kill(left, signal.SIGTERM)
    await one.until(f"engine-1 (pid {left}) exited with code 0 and is not started again")
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "frontend-0"]
    one.supervisor.want(2, starts_missing=False)
    assert "engine-1" not in one.supervisor.children
    one.restarted.clear()
    one.supervisor.want(2, starts_missing=True)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.children["engine-1"].pid != left


async def test_an_engine_that_leaves_while_it_is_wanted_anew_starts_again(make_stack: MakeStack) -> None:
    one = make_stack()
    await one.supervisor.start()
    one.keep_running()
    await asyncio.sleep(0)
    one.supervisor.want(2, starts_missing=True)
    os.kill(one.supervisor.children["engine-1"].pid, signal.SIGTERM)
    await asyncio.wait_for(one.restarted.wait(), 30)
    assert one.supervisor.children["engine-1"].is_running


async def test_engines_above_the_wanted_number_are_ended_where_they_are_not_ready_and_never_restarted(
    make_stack: MakeStack,
) -> None:
    async def all_but_the_new_one(service: str, address: str) -> None:
        await greeted(service, address)
        if len(one.supervisor.children) > 4:
            one.restarted.set()
            await asyncio.Event().wait()

    one = make_stack(await_ready=all_but_the_new_one)
    await one.supervisor.start()
    one.keep_running()
    await asyncio.sleep(0)
    one.supervisor.want(3, starts_missing=True)
    await asyncio.wait_for(one.restarted.wait(), 30)
    ready = one.supervisor.children["engine-1"].pid
    one.supervisor.want(1, starts_missing=False)
    await one.until("engine-2 (pid")
    assert one.supervisor.children["engine-1"].is_running
    os.kill(ready, signal.SIGKILL)
    await one.until(f"engine-1 (pid {ready}) was killed by SIGKILL and is not started again")
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "frontend-0"]


async def test_an_engine_that_came_later_and_keeps_dying_is_given_up_alone(make_stack: MakeStack) -> None:
    one = make_stack({"engine-2": ("--die-at-start=3",)}, max_restarts=2)
    await one.supervisor.start()
    keeping = one.keep_running()
    await asyncio.sleep(0)
    one.supervisor.want(3, starts_missing=True)
    await one.until("ERROR engine-2 stays down after 2 restarts within 60 s: 3 deaths, the last: exited with")
    assert not keeping.done()
    one.supervisor.want(3, starts_missing=True)
    await asyncio.sleep(0)
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "engine-1", "frontend-0"]


async def test_an_engine_that_came_later_and_cannot_be_started_at_all_is_given_up_alone(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    program = program_that_may_go(tmp_path)
    one = make_stack(program=program, max_restarts=2)
    await one.supervisor.start()
    one.keep_running()
    await asyncio.sleep(0)
    program.unlink()
    one.supervisor.want(3, starts_missing=True)
    await one.until("engine-2 could not be started; starts again in 0.02 s (2 of 2)")
    await one.until(
        "ERROR engine-2 stays down after 2 restarts within 60 s: 3 deaths, the last: could not be started"
    )
    assert sum(report.startswith("engine-2 cannot be started: No such") for report in one.reports) == 3
    assert sorted(one.supervisor.children) == ["coordinator-0", "engine-0", "engine-1", "frontend-0"]
