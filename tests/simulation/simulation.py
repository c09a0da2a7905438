"""One random life of an engine core: arrivals, aborts, pauses, blockers, steps in flight."""

from __future__ import annotations

import random
from collections import deque

from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.block_pool import BlockPool
from engine_svc.cache.kv_cache import KVCache
from engine_svc.request import FinishReason, Request, RequestOutput, RequestStatus
from engine_svc.sampling_params import SamplingParams
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.scheduler import Scheduler
from engine_svc.step import StepPlan, StepResult
from tests.simulation.invariants import TableWatch, check_blocks, check_hashes, check_plan, check_queues
from tests.simulation.paged_runner import VOCAB_SIZE, PagedRunner, digests, next_token

EOS = 2
MAX_STEPS = 3000


class Simulation:
    """A workload drawn from a seed, run to its end with every invariant checked after every step."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 4, 8])
        self.overlaps = rng.random() < 0.3
        self.num_drafts = 0 if self.overlaps else rng.choice([0, 0, 1, 3])
        max_model_len = rng.choice([24, 48])
        chunked = rng.random() < 0.8
        self.config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=rng.choice([7, 16, 40]) if chunked else max_model_len,
            max_num_seqs=rng.choice([2, 5, 10]),
            policy=rng.choice(["fcfs", "priority"]),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 5]),
            reserve_full_prompt=rng.random() < 0.5,
            num_speculative_tokens=self.num_drafts,
            async_scheduling=self.overlaps,
        )
        num_blocks = -(-max_model_len // self.block_size) * rng.choice([1, 2, 4]) + 1
        self.pool = BlockPool(num_blocks, enable_prefix_caching=rng.random() < 0.8)
        cache = KVCache(self.pool, BlockHasher(self.block_size), max_model_len=max_model_len)
        self.scheduler = Scheduler(self.config, cache)
        self.runner = PagedRunner(self.block_size, self.num_drafts, rng)
        self.now = 0.0
        self.num_steps = 0
        self.requests: list[Request] = []
        self.streams: dict[str, list[int]] = {}
        self.finals: dict[str, FinishReason] = {}
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._watch = TableWatch()
        self._shared_prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(max_model_len)]

    def run(self, num_requests: int) -> None:
        """Serve so many requests to their end, with accidents on the way."""
        while len(self.requests) < num_requests or self.scheduler.num_unfinished:
            self.now += 1.0
            if len(self.requests) < num_requests and self.rng.random() < 0.5:
                self._add()
            else:
                self._have_an_accident(resume=len(self.requests) == num_requests)
            self._step()
            self._check()
            self.num_steps += 1
            assert self.num_steps < MAX_STEPS, "no progress"
        while self._in_flight:
            self._finish_oldest()
        self._check()

    def expected_stream(self, request: Request) -> list[int]:
        """What the request must yield when nothing interferes."""
        tokens = request.token_ids[: request.num_prompt_tokens]
        while True:
            tokens.append(next_token(digests(tokens)[-1]))
            num_output = len(tokens) - request.num_prompt_tokens
            is_end = tokens[-1] == EOS and not request.sampling.ignore_eos
            if is_end or tokens[-1] in request.sampling.stop_token_ids:
                return tokens[request.num_prompt_tokens :]
            if num_output == request.sampling.max_tokens or len(tokens) == self.config.max_model_len:
                return tokens[request.num_prompt_tokens :]

    def _add(self) -> None:
        rng = self.rng
        num_shared = rng.randint(0, self.config.max_model_len // 2)
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, self.config.max_model_len // 3))]
        prompt = self._shared_prompt[:num_shared] + own
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 20),
            ignore_eos=rng.random() < 0.5,
            eos_token_id=EOS,
            stop_token_ids=frozenset({5}) if rng.random() < 0.3 else frozenset(),
            skip_reading_prefix_cache=rng.random() < 0.1,
        )
        request = Request(
            f"r{len(self.requests)}",
            list(prompt),
            len(prompt),
            sampling,
            priority=rng.randint(0, 3),
            arrival_at=self.now,
            cache_salt=rng.choice(["", "", "tenant"]),
            blockers={"something"} if rng.random() < 0.1 else set(),
        )
        self.requests.append(request)
        self.streams[request.request_id] = []
        if rng.random() < 0.2:
            self._let_another_engine_begin(request)
        if self.scheduler.refusal(request) is None:
            self.scheduler.add(request)
        else:
            self.requests.pop()

    def _let_another_engine_begin(self, request: Request) -> None:
        expected = self.expected_stream(request)
        given = expected[: self.rng.randint(0, len(expected) - 1)]
        request.token_ids.extend(given)
        self.streams[request.request_id] = list(given)

    def _have_an_accident(self, *, resume: bool) -> None:
        draw = self.rng.random()
        if draw < 0.04:
            chosen = [request.request_id for request in self.requests if self.rng.random() < 0.2]
            self._take(self.scheduler.abort(chosen, self.now))
        elif draw < 0.08:
            self.scheduler.set_pause(self.rng.choice(list(PauseState)))
        elif draw < 0.1:
            self.scheduler.reset_prefix_cache(self.now, reset_running=self.rng.random() < 0.5)
        elif draw < 0.3 or resume:
            self.scheduler.set_pause(PauseState.NONE)
            for request in self.requests:
                self.scheduler.unblock(request.request_id, "something")

    def _step(self) -> None:
        had_work = self.scheduler.has_work
        plan = self.scheduler.schedule(self.now)
        check_plan(plan, self.config)
        if plan.request_ids:
            self._in_flight.append((plan, self.runner.run(plan)))
        else:
            assert not had_work or self._in_flight or plan.preempted, "work, but nothing to do"
        depth = 2 if self.overlaps else 1
        if len(self._in_flight) == depth or (self._in_flight and not plan.request_ids):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        plan, result = self._in_flight.popleft()
        self._take(self.scheduler.update(plan, result, self.now))

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finals, "an output behind the final one"
            self.streams[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finals[output.request_id] = output.finish_reason

    def _check(self) -> None:
        unfinished = [request for request in self.requests if request.status is not RequestStatus.FINISHED]
        check_blocks(self.pool, unfinished)
        check_hashes(self.pool, unfinished)
        check_queues(self.scheduler, unfinished)
        self._watch.check(unfinished)
