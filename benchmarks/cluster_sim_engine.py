"""An engine as a queue: batches, chunked prompts, a KV pool, cached prefixes. Knows no clock and no wire."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How fast and how large an engine is: about a 30 B model on one GPU."""

    step_s: float = 0.025
    running_s: float = 2e-4  # more for each request in the batch
    prompt_token_s: float = 6e-5
    context_token_s: float = 2e-7  # more for each token of KV that a step reads
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_blocks: int = 12_288
    block_size: int = 16


@dataclass(slots=True)
class SimulatedRequest:
    """One request on its way through a frontend and an engine."""

    request_id: int
    frontend: int
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_id: int
    num_prefix_tokens: int
    num_generated: int = 0
    num_hit_tokens: int = 0
    first_token_at: float | None = None
    engine: int = -1
    attempt: int = 0


@dataclass(slots=True)
class StepResult:
    """What a step ended with."""

    first_tokens: list[SimulatedRequest] = field(default_factory=list)
    finished: list[SimulatedRequest] = field(default_factory=list)


class SimulatedEngine:
    """Runs steps of prompts in chunks and of one token for each running request.

    KV is counted in tokens and reserved as contexts grow; where it is short the newest request is preempted
    and computed again. Cached prefixes live in what requests leave free, oldest out first.
    """

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.step_number = 0
        self.num_preemptions = 0
        self.num_prefix_tokens = 0
        self.num_hit_tokens = 0
        self.waiting: deque[SimulatedRequest] = deque()
        self.num_waiting_tokens = 0
        self._orders = itertools.count()
        self._running: dict[int, SimulatedRequest] = {}  # by order of admission
        self._prompts_left: dict[int, int] = {}  # prompts under way: order -> tokens to compute
        self._done_this_step: list[int] = []
        self._ends: list[tuple[int, int]] = []  # step number, order
        self._started_at: dict[int, int] = {}  # order -> step of its first token
        self._context_tokens = 0
        self._pool_tokens = shape.num_blocks * shape.block_size
        self._prefixes: OrderedDict[int, int] = OrderedDict()
        self._prefix_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self.waiting)

    @property
    def num_requests(self) -> int:
        """All of them."""
        return len(self._running) + len(self.waiting)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return min(self.shape.num_blocks, -(-self._context_tokens // self.shape.block_size))

    def requests(self) -> list[SimulatedRequest]:
        """All requests here, with the tokens that they have got so far."""
        for order, request in self._running.items():
            self._count_generated(order, request)
        return [*self._running.values(), *self.waiting]

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)
        self.num_waiting_tokens += _to_compute(request)

    def begin_step(self) -> float:
        """Decide what the next step computes; returns how long it takes, in seconds."""
        shape = self.shape
        self._preempt_until_it_fits()
        num_decoding = len(self._running) - len(self._prompts_left)
        left = shape.max_num_batched_tokens - num_decoding
        num_computed = 0
        for order, num_left in list(self._prompts_left.items()):
            num_computed += self._compute(order, num_left, left - num_computed)
        while self._can_admit(left - num_computed):
            order = self._admit()
            num_computed += self._compute(order, self._prompts_left[order], left - num_computed)
        return (
            shape.step_s
            + shape.running_s * len(self._running)
            + shape.prompt_token_s * num_computed
            + shape.context_token_s * self._context_tokens
        )

    def end_step(self) -> StepResult:
        """Yield the step's tokens."""
        self.step_number += 1
        result = StepResult()
        self._context_tokens += len(self._running) - len(self._prompts_left) - len(self._done_this_step)
        for order in self._done_this_step:
            request = self._running[order]
            if not request.num_generated:
                result.first_tokens.append(request)
            self._started_at[order] = self.step_number
            self._keep_prefix(request)
            self._context_tokens += 1
            num_left = request.num_output_tokens - request.num_generated
            heapq.heappush(self._ends, (self.step_number + num_left - 1, order))
        self._done_this_step.clear()
        while self._ends and self._ends[0][0] <= self.step_number:
            _, order = heapq.heappop(self._ends)
            if order in self._started_at:
                result.finished.append(self._release(order))
        return result

    def _can_admit(self, num_left: int) -> bool:
        if not self.waiting or num_left <= 0 or len(self._running) >= self.shape.max_num_seqs:
            return False
        request = self.waiting[0]
        needed = request.num_prompt_tokens + request.num_generated
        # A request that is alone is let in whatever it needs, or it would wait for ever.
        return not self._running or self._context_tokens + needed <= self._pool_tokens

    def _admit(self) -> int:
        request = self.waiting.popleft()
        self.num_waiting_tokens -= _to_compute(request)
        order = next(self._orders)
        self._running[order] = request
        self._context_tokens += request.num_prompt_tokens + request.num_generated
        num_hit = min(self._prefixes.get(request.prefix_id, 0), request.num_prefix_tokens)
        if num_hit:
            self._prefixes.move_to_end(request.prefix_id)
        self.num_prefix_tokens += request.num_prefix_tokens
        self.num_hit_tokens += num_hit
        request.num_hit_tokens = num_hit
        self._prompts_left[order] = _to_compute(request) - num_hit
        return order

    def _compute(self, order: int, num_left: int, budget: int) -> int:
        num_tokens = max(0, min(num_left, budget))
        if num_tokens == num_left:
            del self._prompts_left[order]
            self._done_this_step.append(order)
        else:
            self._prompts_left[order] = num_left - num_tokens
        return num_tokens

    def _release(self, order: int) -> SimulatedRequest:
        request = self._running[order]
        self._count_generated(order, request)
        del self._running[order]
        self._started_at.pop(order, None)
        self._prompts_left.pop(order, None)
        self._context_tokens -= request.num_prompt_tokens + request.num_generated
        return request

    def _count_generated(self, order: int, request: SimulatedRequest) -> None:
        started_at = self._started_at.get(order)
        if started_at is not None:
            request.num_generated += self.step_number - started_at + 1
            self._started_at[order] = self.step_number + 1

    def _preempt_until_it_fits(self) -> None:
        while self._context_tokens + len(self._running) > self._pool_tokens and len(self._running) > 1:
            order = next(reversed(self._running))
            request = self._release(order)
            self.waiting.appendleft(request)
            self.num_waiting_tokens += _to_compute(request)
            self.num_preemptions += 1
        while self._prefixes and self._context_tokens + self._prefix_tokens > self._pool_tokens:
            _, num_tokens = self._prefixes.popitem(last=False)
            self._prefix_tokens -= num_tokens

    def _keep_prefix(self, request: SimulatedRequest) -> None:
        held = self._prefixes.pop(request.prefix_id, 0)
        self._prefixes[request.prefix_id] = max(held, request.num_prefix_tokens)
        self._prefix_tokens += self._prefixes[request.prefix_id] - held


def _to_compute(request: SimulatedRequest) -> int:
    """Tokens to compute before the next one is sampled, cached ones included."""
    return request.num_prompt_tokens + request.num_generated
