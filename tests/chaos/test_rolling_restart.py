"""Every process restarted under streams, one after the other, and no client sees an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence

import pytest

from benchmarks.rig.faults import terminate
from benchmarks.rig.processes import ServiceProcess
from benchmarks.rig.streams import Case, Load, make_cases
from tests.chaos.scenarios import STANDARD
from tests.chaos.stacks import Stack, Stacks, keep_logs

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]

_NUM_STREAMS, _NUM_TOKENS = 16, 128
_STEP_S = 1.0
_EXIT_LIMIT_S = 30.0
# A frontend that is about to go is sent nothing new; it still takes what is on its way, for its drain lag.
_ENDPOINT_LAG_S = 0.3


class Flow:
    """So many streams at any time, each followed by the next, over the frontends in rotation."""

    def __init__(self, stack: Stack, load: Load, cases: Sequence[Case]) -> None:
        self.load = load
        self.rotation = list(range(len(stack.frontends)))
        self._stack = stack
        self._cases = itertools.cycle(cases)
        self._turn = itertools.count()
        self._is_over = False

    @contextlib.asynccontextmanager
    async def running(self, num_streams: int) -> AsyncIterator[None]:
        """Keep the streams coming for as long as the block lasts, then wait for the last."""
        slots = [asyncio.ensure_future(self._run_slot()) for _ in range(num_streams)]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*slots)

    async def _run_slot(self) -> None:
        while not self._is_over:
            frontend = self.rotation[next(self._turn) % len(self.rotation)]
            (record,) = self.load.send(self._stack.channel(frontend), [next(self._cases)])
            await self.load.ended(record)


async def test_a_rolling_restart_of_everything_loses_nothing(stacks: Stacks) -> None:
    stack = await stacks.get(STANDARD)
    cases = make_cases(_NUM_STREAMS, num_tokens=_NUM_TOKENS)
    oracle = await stacks.oracle(stack, cases)
    starts = {name: process.num_starts for name, process in stack.fleet.processes.items()}
    flow = Flow(stack, Load(label=stacks.label()), cases)
    exit_statuses = {}
    async with flow.running(_NUM_STREAMS):
        for process in list(stack.fleet.processes.values()):
            await asyncio.sleep(_STEP_S)
            exit_statuses[process.name] = await _restart(stack, flow, process)
    violations = oracle.violations(flow.load.records)
    print(f"\nX6 rolling restart: {len(flow.load.records)} streams, {exit_statuses}")
    if violations:
        print("logs:", keep_logs(stack.folder, "rolling-restart"))
    assert [str(violation) for violation in violations[:10]] == []
    assert set(exit_statuses.values()) == {0}
    assert {name: process.num_starts for name, process in stack.fleet.processes.items()} == {
        name: count + 1 for name, count in starts.items()
    }
    assert len(flow.load.records) >= 2 * _NUM_STREAMS
    assert await stacks.leaks() == []


async def _restart(stack: Stack, flow: Flow, process: ServiceProcess) -> int:
    if process.plan.service == "frontend":
        flow.rotation.remove(process.plan.index)
        await asyncio.sleep(_ENDPOINT_LAG_S)
    await terminate(process)
    status = await process.ended(_EXIT_LIMIT_S)
    await process.start()
    await process.ready()
    await stack.fleet.until_routed()
    if process.plan.service == "frontend":
        flow.rotation.append(process.plan.index)
    return status
