"""Stacks that grow and shrink under streams: no client sees anything of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.checkpoint import make_mixture
from benchmarks.rig.streams import make_cases
from tests.chaos.scaling import broken_promises, record_undisturbed, scale_under_load
from tests.chaos.served import ServedStack
from tests.chaos.stacks import keep_logs
from triptych_kit.channel import open_channel

pytestmark = pytest.mark.chaos

_SIZES = (4, 2)
_NUM_STREAMS = 8
_NUM_TOKENS = 48
# A machine that runs other tests is slower: only what comes much later than it should is a failure.
_SLOWER = 10.0


@pytest.mark.parametrize("kind", ["engines that stand alone", "engines that share experts"])
async def test_a_stack_grows_and_shrinks_under_streams_and_loses_nothing(kind: str, tmp_path: Path) -> None:
    flags = ["--data-parallel-size=2"]
    shares_experts = kind == "engines that share experts"
    if shares_experts:
        make_mixture(tmp_path / "mixture", seed=1)
        flags += ["--expert-parallel", str(tmp_path / "mixture")]
    cases = make_cases(2 * _NUM_STREAMS, num_tokens=_NUM_TOKENS)
    folder = tmp_path / "stack"
    folder.mkdir()
    async with ServedStack(folder, flags) as stack, open_channel(stack.address, profile="public") as channel:
        oracle, calibration = await record_undisturbed(channel, cases)
        # Experts are summed up over other ranks than before: ids are the same, logprobs may differ in a bit.
        run = await scale_under_load(
            stack,
            channel,
            cases,
            oracle,
            sizes=_SIZES,
            num_streams=_NUM_STREAMS,
            is_exact=not shares_experts,
        )
    served = {id_: round(after, 2) for id_, after in run.served_after_s.items()}
    print(f"\n{kind}: {len(run.records)} streams, first tokens after READY {served}, {run.endings}")
    broken = broken_promises(run, replace(calibration, scale=_SLOWER * calibration.scale))
    if broken:
        print("logs:", keep_logs(folder, "scaling"))
    assert broken == []
    assert len(run.served_after_s) == run.num_left == 2
    # Those that came were sent the least of what the others had found.
    origins = [one["options"].get("num_kv_blocks") for one in stack.log_records("starting")]
    least = min(one["num_kv_blocks"] for one in stack.log_records("READY"))
    assert [each for each in origins if each] == [f"{least} (flag)"] * 2
