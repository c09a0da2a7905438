"""The policy `fair`: accounts that compete share the engine by their weights.

Source: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024 (virtual token counters).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from math import inf
from operator import attrgetter

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies.fcfs import FirstComeFirstServed
from engine_svc.scheduler.policy import OrderKey, Policy
from engine_svc.scheduler.waiting_queue import OrderedQueue, ReadyQueue

# Tokens that a running request counts ahead of those computed for it. Without them accounts would get rows in
# turns: all to the one that is behind, until what these compute has put it far ahead.
_TOKENS_AHEAD = 128
# An account that has rows displaces others where these have an eighth more than their share, and at least one
# row: smaller differences settle as requests end.
_SLACK = 8
# Steps in which a request claims no row and no part of a step after a budget of a feature has refused it. Not
# until it is admitted: where prompts of others fill a step, it is not asked.
_STEPS_REFUSED = 4
# Accounts without requests whose counters are remembered.
_MAX_ABSENT = 256

_account_of = attrgetter("account")


class Fair(Policy):
    """Next is a request of the account that was served least for its weight; within an account, as `fcfs`.

    While rows or blocks are scarce, an account below its share of the rows displaces the newest requests of
    those above theirs. Prompts of several accounts divide the tokens of a step. With one account this is
    `fcfs`.
    """

    displaces = True

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._order = FirstComeFirstServed(config)
        self._accounts = _Accounts()
        self._prefills = _PrefillShares(config, self._accounts)
        # A prompt that has to enter whole cannot be given a part of a step.
        self.prefill_budgets = (self._prefills,) if config.enable_chunked_prefill else ()

    def ready_queue(self) -> ReadyQueue:
        return self._accounts

    def order_key(self, request: Request) -> OrderKey:
        return self._order.order_key(request)

    def requeue_key(self, request: Request) -> OrderKey:
        return self._order.requeue_key(request)

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        self._accounts.settle()
        if self._accounts.compete and self.prefill_budgets:
            self._prefills.divide(running, num_waiting)
        return list(running)

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The newest of the account that is most above its share of the rows; the first only when alone."""
        victim = running[-1]
        if self._accounts.compete:
            rows = _Rows(self._accounts, running)
            for request in running[-2:0:-1]:
                if rows.excess(request.account) > rows.excess(victim.account):
                    victim = request
        return victim

    def displaced(self, running: Sequence[Request], kv_cache: KVCache) -> Sequence[Request]:
        """Makes room for the requests that are next, while their accounts are below their shares of the rows.

        An account never displaces what the owner could claim back. The first request is spared.
        """
        accounts = self._accounts
        accounts.settle()
        if not accounts.compete:
            return ()
        rows = _Rows(accounts, running)
        num_free_rows = self._config.max_num_seqs - len(running)
        num_free_blocks = kv_cache.num_free_blocks
        num_tokens = self._config.max_num_batched_tokens - len(running)
        victims: list[Request] = []
        claimants: list[_Account] = []
        for account, request in accounts.claimants(rows.due):
            num_blocks = kv_cache.max_blocks_for(request.num_uncached_tokens, request.num_encoder_tokens)
            picked: list[Request] = []
            while num_free_rows < 1 or num_free_blocks < num_blocks:
                victim = rows.displace_for(account)
                if victim is None:
                    break
                picked.append(victim)
                num_free_rows += 1
                num_free_blocks += kv_cache.cost_of_release(victim)[1]
            else:
                rows.add(account.name, 1)
                num_free_rows -= 1
                num_free_blocks -= num_blocks
                num_tokens -= request.num_uncached_tokens
                victims += picked
                claimants += [account] if picked else []
                if num_tokens > 0:
                    continue
            break
        for account in claimants:
            account.has_room = True
        return victims

    def on_enter(self, request: Request) -> None:
        self._accounts.enter(request)

    def on_leave(self, request: Request) -> None:
        self._accounts.leave(request)

    def on_plan(self, plan: StepPlan, rows: Sequence[Request]) -> None:
        """Count the tokens of the step."""
        self._accounts.step_number = plan.step_number
        if not self._accounts.counts:
            return
        tokens = Counter(map(_account_of, rows))
        if plan.total_num_tokens > len(rows):
            for request, start, num_tokens in zip(
                rows, plan.num_computed_tokens, plan.num_tokens, strict=True
            ):
                # What a preempted request computes again was counted before.
                num_new = min(num_tokens, max(0, start + num_tokens - request.num_lost_tokens))
                tokens[request.account] += num_new - 1
        self._accounts.count(tokens)


@dataclass(slots=True, eq=False)
class _Account:
    """An account and what it has in the engine.

    weight, newest_at: those of its newest request, by arrival.
    counter: tokens computed for it while others competed with it, divided by its weight.
    has_room: room was made for it, and none of its requests has entered since.
    num_prefill_tokens: left to its prompts in this step; None: not limited.
    """

    name: str
    weight: int = 0
    newest_at: float = -inf
    counter: float = 0.0
    num_rows: int = 0
    ready: OrderedQueue = field(default_factory=OrderedQueue)
    has_room: bool = False
    num_prefill_tokens: int | None = None

    def due(self, num_rows: int) -> float:
        """The counter if it had so many rows; the account with the least is next."""
        return self.counter + _TOKENS_AHEAD * num_rows / self.weight


class _Accounts:
    """The accounts that have requests which could run, in the order in which they came.

    A `ReadyQueue` in the order of the counters. Nothing is saved up by an account none of whose requests
    waits: with its next one it begins with no less than the least of those that wait, or than the most of all
    where none does and so none was kept waiting by another.
    """

    def __init__(self) -> None:
        self.present: dict[str, _Account] = {}
        self.sum_weights = 0  # of those
        self.step_number = 0  # of the last plan
        self._waiting: dict[str, _Account] = {}  # of those, with requests that wait
        self._left: dict[_Account, None] = {}  # that may have nothing any more
        self._absent: dict[str, _Account] = {}  # whose counters are above those of others
        self._num_ready = 0

    @property
    def compete(self) -> bool:
        return len(self.present) > 1

    @property
    def counts(self) -> bool:
        """Whether a counter will be compared with another."""
        return len(self.present) > 1 or bool(self._absent)

    def __len__(self) -> int:
        return self._num_ready

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(account.ready for account in self._waiting.values())

    def add(self, request: Request) -> None:
        name = request.account
        account = self.present.get(name)
        if account is None:
            account = self._absent.pop(name, None) or _Account(name)
            self.present[name] = account
            self.sum_weights += account.weight
        if name not in self._waiting:
            others = (self._waiting or self.present).values()
            floor = (min if self._waiting else max)(other.counter for other in others)
            account.counter = max(account.counter, floor)
            self._waiting[name] = account
        # One that was preempted, or waited for something else, may have a weight of before.
        if request.arrival_at >= account.newest_at:
            self.sum_weights += request.weight - account.weight
            account.weight, account.newest_at = request.weight, request.arrival_at
        account.ready.add(request)
        self._num_ready += 1

    def remove(self, request: Request) -> None:
        account = self._waiting[request.account]
        account.ready.remove(request)
        self._num_ready -= 1
        if not account.ready:
            del self._waiting[account.name]
            account.has_room = False
            self._left[account] = None

    def enter(self, request: Request) -> None:
        """A waiting request is about to run."""
        account = self.present[request.account]
        account.num_rows += 1
        account.has_room = False

    def leave(self, request: Request) -> None:
        """A request no longer runs."""
        account = self.present[request.account]
        account.num_rows -= 1
        if not account.num_rows:
            self._left[account] = None

    def candidates(self) -> Iterator[Request]:
        for _, request in self.in_turns(lambda account: account.due(account.num_rows)):
            yield request

    def claimants(self, due: Callable[[_Account], float]) -> Iterator[tuple[_Account, Request]]:
        """Those of `in_turns` that most likely may enter."""
        for account, request in self.in_turns(due):
            refused = request.refused_in_step
            if not refused or self.step_number - refused >= _STEPS_REFUSED:
                yield account, request

    def in_turns(self, due: Callable[[_Account], float]) -> Iterator[tuple[_Account, Request]]:
        """The waiting requests, the next always of the account with the least `due`.

        due: asked again for the account whose request was the last, before the next.
        """
        accounts = list(self._waiting.values())
        # Of accounts that are due equally, the one that came first is next.
        heap = [(due(account), index) for index, account in enumerate(accounts)]
        heapify(heap)
        queues: dict[int, Iterator[Request]] = {}
        while heap:
            index = heap[0][1]
            account = accounts[index]
            if index not in queues:
                queues[index] = account.ready.candidates()
            request = None if account.num_prefill_tokens == 0 else next(queues[index], None)
            if request is None:
                heappop(heap)
            else:
                yield account, request
                heapreplace(heap, (due(account), index))

    def count(self, num_tokens: Mapping[str, int]) -> None:
        """Add tokens that a step computes, by account."""
        for name, num in num_tokens.items():
            account = self.present[name]
            account.counter += num / account.weight
        if not self.compete:
            self._forget()

    def settle(self) -> None:
        """Let accounts go that have nothing at the beginning of a step."""
        if not self._left:
            return
        for account in self._left:
            if not (account.num_rows or account.ready):
                del self.present[account.name]
                self.sum_weights -= account.weight
                self._absent[account.name] = account
        self._left.clear()
        self._forget()

    def _forget(self) -> None:
        """Forget absent accounts that would begin as any other, and the least of too many."""
        least = min((account.counter for account in self.present.values()), default=inf)
        above = [account for account in self._absent.values() if account.counter > least]
        above.sort(key=lambda account: account.counter)
        self._absent = {account.name: account for account in above[-_MAX_ABSENT:]}


class _Rows:
    """The rows of accounts as a step may change them, beside their shares."""

    def __init__(self, accounts: _Accounts, running: Sequence[Request]) -> None:
        self._accounts = accounts.present
        self._sum_weights = accounts.sum_weights
        self._running = running
        self._num_rows = {account.name: account.num_rows for account in accounts.present.values()}
        self._total = len(running)
        self._by_owner: dict[str, list[Request]] | None = None  # what may be displaced, the newest last

    def add(self, name: str, num_rows: int) -> None:
        self._num_rows[name] += num_rows
        self._total += num_rows

    def due(self, account: _Account) -> float:
        return account.due(self._num_rows[account.name])

    def excess(self, name: str) -> int:
        """Rows above the account's share, times the sum of all weights."""
        return self._num_rows[name] * self._sum_weights - self._total * self._accounts[name].weight

    def displace_for(self, account: _Account) -> Request | None:
        """The newest request of the account that is most above its share; None if `account` may claim none.

        The rows are counted as if it had left.
        """
        has_rows = self._num_rows[account.name] > 0
        if account.has_room or (has_rows and self.excess(account.name) + self._sum_weights > 0):
            return None
        if self._by_owner is None:
            self._by_owner = defaultdict(list)
            for request in self._running[1:]:
                self._by_owner[request.account].append(request)
        owner, most = "", 0
        for name, requests in self._by_owner.items():
            excess = self.excess(name)
            # An account without rows gets one of any that has more than its share, which keeps one.
            share = self._total * self._accounts[name].weight
            least = max(self._sum_weights, share // _SLACK) if has_rows else 1
            if requests and self._num_rows[name] > 1 and excess >= least and excess > most:
                owner, most = name, excess
        if not most:
            return None
        self.add(owner, -1)
        return self._by_owner[owner].pop()


class _PrefillShares:
    """A budget by which prompts of several accounts divide the tokens of a step by weight.

    What an account does not need of its part the others have. Prompts of all leave a token to each decode.
    """

    def __init__(self, config: SchedulerConfig, accounts: _Accounts) -> None:
        self._config = config
        self._accounts = accounts
        self._limited: list[_Account] = []
        self._taken: dict[Request, int] = {}

    def begin_step(self) -> None:
        for account in self._limited:
            account.num_prefill_tokens = None
        self._limited = []
        self._taken = {}

    def divide(self, running: Sequence[Request], num_waiting: int) -> None:
        """Divide the tokens that decodes leave. num_waiting: requests that may be admitted."""
        prefills = [request for request in running if not request.last_row_sampled]
        if not (prefills or num_waiting):
            return
        limit = self._config.max_num_batched_tokens
        longest = self._config.long_prefill_token_threshold or limit
        wanted = Counter[str]()
        for request in prefills:
            wanted[request.account] += min(request.num_tokens - request.num_computed_tokens, longest)
        num_rows = Counter(map(_account_of, running)) if num_waiting else Counter[str]()
        next_in_turn = self._accounts.claimants(lambda account: account.due(num_rows[account.name]))
        for account, request in islice(next_in_turn, num_waiting):
            wanted[account.name] += min(request.num_uncached_tokens, longest)
            num_rows[account.name] += 1
        demanding = [self._accounts.present[name] for name in wanted if wanted[name]]
        num_left = limit - len(running) + len(prefills)
        num_left -= sum(len(request.draft_token_ids) for request in running)
        sum_weights = sum(account.weight for account in demanding)
        # Those that want less than their part come first, so that the others divide the rest.
        for account in sorted(demanding, key=lambda account: wanted[account.name] / account.weight):
            part = max(1, min(wanted[account.name], num_left * account.weight // sum_weights))
            account.num_prefill_tokens = part
            num_left -= part
            sum_weights -= account.weight
        self._limited = demanding

    def admits(self, request: Request) -> bool:
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        if not self._limited:
            return num_tokens
        left = self._accounts.present[request.account].num_prefill_tokens
        is_prefill = _num_pending(request) > 1
        return num_tokens if left is None or not is_prefill else min(num_tokens, left)

    def take(self, request: Request, num_tokens: int) -> None:
        if not self._limited or _num_pending(request) + num_tokens <= 1:
            return
        account = self._accounts.present[request.account]
        if account.num_prefill_tokens is not None:
            account.num_prefill_tokens -= num_tokens
            self._taken[request] = num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        account = self._accounts.present[request.account]
        if account.num_prefill_tokens is not None:
            account.num_prefill_tokens += self._taken.pop(request, 0)


def _num_pending(request: Request) -> int:
    """Known tokens that are not computed: 1 in a decode, also with drafts."""
    return request.num_tokens + request.num_placeholders - request.num_computed_tokens
