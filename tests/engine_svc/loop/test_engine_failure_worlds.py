"""Random worlds of steps that fail, now and then or for somebody's fault: who may end with an error."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine_svc.core.request import FinishReason
from engine_svc.core.step import StepPlan
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.loop.test_engine import Rig, prompt_of
from tests.engine_svc.loop.test_engine_failures import FailingExecutor

MAX_TURNS = 5000


class World:
    """Requests of which up to two fail from some length on, and steps of which some fail for no reason."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self.num_requests = rng.randint(1, 13)
        offenders = rng.sample(range(self.num_requests), rng.randint(0, min(2, self.num_requests - 1)))
        self.offenders = {handle: rng.randint(1, 17) for handle in offenders}
        self.max_tokens = [rng.randint(3, 13) for _ in range(self.num_requests)]
        self._error_rate = rng.choice([0.02, 0.1, 0.3])
        self.num_alone: Counter[str] = Counter()  # failures of steps that only this one was in, in a row
        self.rig = Rig(
            executor=FailingExecutor(self._why, rng.choice(["before", "middle", "result"])),
            max_in_flight=rng.choice([1, 2]),
        )

    def run(self) -> bool:
        """Serve everybody; False where the engine took it for the device's fault."""
        rig = self.rig
        for handle, max_tokens in enumerate(self.max_tokens):
            rig.add(handle, max_tokens=max_tokens)
        try:
            for _ in range(MAX_TURNS):
                rig.engine.turn()
                rig.frontend.read()
                if len(rig.frontend.ends) == self.num_requests:
                    return True
        except RuntimeError:
            return False
        raise AssertionError("somebody is never served")

    def _why(self, plan: StepPlan) -> Exception | None:
        rows = zip(plan.request_ids, plan.num_computed_tokens, plan.num_tokens, strict=True)
        lengths = {request_id: computed + count for request_id, computed, count in rows}
        is_poisoned = any(lengths.get(f"r{handle}", 0) >= length for handle, length in self.offenders.items())
        if not is_poisoned and self._rng.random() >= self._error_rate:
            for request_id, samples in zip(plan.request_ids, plan.samples, strict=True):
                if samples:
                    del self.num_alone[request_id]
            return None
        if len(lengths) == 1:
            self.num_alone.update(plan.request_ids)
        return RuntimeError("bad step")


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_no_innocent_ends_with_an_error_unless_it_fails_twice_alone(first_seed):
    num_served = 0
    for seed in range(first_seed, first_seed + 50):
        world = World(seed)
        is_served = world.run()
        num_served += is_served
        frontend = world.rig.frontend
        for handle, reason in frontend.ends:
            tokens = expected_tokens(prompt_of(handle), handle, world.max_tokens[handle])
            if reason is FinishReason.ERROR:
                assert world.num_alone[f"r{handle}"] >= 2, (seed, handle)
                tokens = tokens[: len(frontend.tokens[handle])]
            assert frontend.tokens[handle] == tokens, (seed, handle)
        if is_served:
            assert world.rig.board.read().scheduler.num_used_blocks == 0, seed
    # Most worlds are no reason for an engine to end.
    assert num_served > 30
