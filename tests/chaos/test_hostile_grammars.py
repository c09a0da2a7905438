"""Constraints that explode end with a status of their own, at a frontend and straight at an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.rig.hostile_grammars import HARMLESS, Sender
from tests.chaos.served import ServedStack

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio]

_LIMIT_S = 60.0


async def test_constraints_that_explode_end_alone(tmp_path: Path) -> None:
    async with ServedStack(tmp_path, ("--kv-cache-memory=32M",)) as stack:
        before = stack.pids()
        sender = Sender(stack.address, stack.process("engine")["address"])
        for to, status in (("frontend", "INVALID_ARGUMENT"), ("engine", "INVALID_ARGUMENT")):
            command = {"to": to, "round": 0, "limit_s": _LIMIT_S, "is_plain": False}
            for name in ("exploding patterns", "longest text"):
                answer = await sender.answer({"name": name, **command})
                assert answer["statuses"] == {status: 3}, answer
                assert "allowed" in answer["examples"][status]
            answer = await sender.answer({"name": HARMLESS, **command})
            assert answer["statuses"]["OK"] >= 1  # xgrammar is an extra
        assert stack.pids() == before
