"""How many different adapters are loaded, and in a step; which request waits for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from engine_svc.config import EngineConfig
from engine_svc.core.errors import RequestFailed
from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.step import StepPlan
from engine_svc.features.adapters.extras import BLOCKER, AdapterUse, Pins, adapter_of, cache_key_of
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature

# How many later requests with an adapter may go before one that has no slot, or whose adapter is being
# loaded; those that enter a step while it is loaded count for both.
MAX_OVERTAKING = 56
MAX_OVERTAKING_OF_LOADING = 24
_WAIT_BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0)


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    if not config.enable_lora:
        return None
    return AdapterLimits(config.max_loras, config.num_cpu_loras, context)


def replay_options(config: EngineConfig) -> dict[str, int] | None:
    return {"max_adapters": config.max_loras} if config.enable_lora else None


def replayed(options: Mapping[str, int]) -> SchedulerFeature:
    return AdaptersOfSteps(options["max_adapters"])


class StepAdapters:
    """A budget: at most so many different adapters in a step, while more are in use than that.

    A request whose adapter finds no slot is passed over, until `MAX_OVERTAKING` others have overtaken it:
    then no further one is admitted before it.
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._adapters: dict[Request, str] = {}  # of requests that have not ended
        self._num_requests: Counter[str] = Counter()  # the same, by adapter
        self._binds = False  # whether it is asked
        self._rows: Counter[str] = Counter()  # of this step, by adapter
        self._passed_over: list[Request] = []  # in this step
        self._is_barred = False  # one of these was overtaken often enough
        self._candidate: Request | None = None  # that may enter in this step
        self._num_overtaken: dict[Request, int] = {}

    def add(self, request: Request) -> None:
        """A request that has not ended. One without an adapter counts for nothing."""
        adapter = adapter_of(request.extra_keys)
        if adapter is not None:
            self._adapters[request] = adapter
            self._num_requests[adapter] += 1
            request.num_budgets += self._binds
            self._note_use()

    def remove(self, request: Request) -> None:
        self._num_overtaken.pop(request, None)
        adapter = self._adapters.pop(request, None)
        if adapter is not None:
            request.num_budgets -= self._binds
            _take_one(self._num_requests, adapter)
            self._note_use()

    def count_overtaken(self, request: Request) -> None:
        """A later one went before this one."""
        self._num_overtaken[request] = self._num_overtaken.get(request, 0) + 1

    def begin_step(self) -> None:
        self._rows.clear()
        self._passed_over.clear()
        self._is_barred = False
        self._candidate = None

    def admits(self, request: Request) -> bool:
        if request not in self._adapters:
            return True
        if self._is_barred:
            return False
        if not self._has_slot(request):
            self._passed_over.append(request)
            self._is_barred = self._num_overtaken.get(request, 0) >= MAX_OVERTAKING
            return False
        self._candidate = request
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens if self._has_slot(request) else 0

    def take(self, request: Request, num_tokens: int) -> None:
        adapter = self._adapters.get(request)
        if adapter is not None:
            self._rows[adapter] += 1
        if request is self._candidate:
            self._candidate = None
            self._num_overtaken.pop(request, None)
            for each in self._passed_over:
                self.count_overtaken(each)
                self._is_barred |= self._num_overtaken[each] >= MAX_OVERTAKING

    def give_back(self, request: Request, num_tokens: int) -> None:
        adapter = self._adapters.get(request)
        if adapter is not None:
            _take_one(self._rows, adapter)

    def _has_slot(self, request: Request) -> bool:
        adapter = self._adapters.get(request)
        return adapter is None or adapter in self._rows or len(self._rows) < self._max_adapters

    def _note_use(self) -> None:
        """Requests cost nothing while all of their adapters fit into a step."""
        binds = len(self._num_requests) > self._max_adapters
        if binds != self._binds:
            self._binds = binds
            for request in self._adapters:
                request.num_budgets += 1 if binds else -1


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


class AdaptersOfSteps(SchedulerFeature):
    """What decides about steps, also in a replay: the budget, and which requests overtake a load."""

    def __init__(self, max_adapters: int) -> None:
        self.budget: StepAdapters = StepAdapters(max_adapters)
        self._num_added = 0
        self._numbers: dict[str, int] = {}  # of requests with an adapter, in the order in which they came
        self._unprepared: dict[Request, int] = {}  # the same; dropped when a later one enters a step

    def on_add(self, request: Request) -> None:
        self.budget.add(request)
        if adapter_of(request.extra_keys) is not None:
            self._num_added += 1
            self._numbers[request.request_id] = self._unprepared[request] = self._num_added

    def on_plan(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            if (number := self._numbers.get(admitted.request_id)) is not None:
                self._count_overtaken(number)

    def on_finish(self, request: Request) -> None:
        self.budget.remove(request)
        self._numbers.pop(request.request_id, None)
        self._unprepared.pop(request, None)

    def _count_overtaken(self, number: int) -> None:
        """The request of this number has entered a step before all earlier ones that are still prepared."""
        prepared = []
        for request, earlier in self._unprepared.items():
            if earlier >= number:
                break
            if BLOCKER in request.blockers:
                self.budget.count_overtaken(request)
            else:
                prepared.append(request)
        for request in prepared:
            del self._unprepared[request]


@dataclass(slots=True)
class _Loading:
    """The loading of an adapter for a request.

    num_overtaking: requests that came later and may be prepared earlier, as their adapters are in memory.
    """

    since: float
    num_overtaking: int = 0


class AdapterLimits(AdaptersOfSteps):
    """Also lets requests have their adapter loaded in order, while there is room for it in memory."""

    def __init__(self, max_adapters: int, max_loaded: int, context: SchedulerContext) -> None:
        super().__init__(max_adapters)
        self._max_loaded = max_loaded
        self._loaded: Counter[str] = Counter()  # requests whose adapter may be in memory, by adapter
        self._adapters: dict[Request, str] = {}  # of these
        self._pins = Pins()
        self._pinned: set[str] = set()  # the same by key: these stay in memory without a request
        self._waiting: dict[Request, None] = {}  # the oldest first
        self._clock = context.clock
        self._requests = context.metrics.counts(
            "triptych_engine_adapter_requests_total",
            "Requests with an adapter, by its name.",
            labels=("adapter",),
        )
        self._wait_s = context.metrics.histogram(
            "triptych_engine_adapter_wait_seconds",
            "Time from a request's arrival until there is room in memory for its adapter.",
            _WAIT_BUCKETS,
        ).of()
        self._loads = context.metrics.counts(
            "triptych_engine_adapter_loads_total",
            "Adapters that were read for a request, as no other had it; result: ok or failed.",
            labels=("result",),
            zeros=[("ok",), ("failed",)],
        )
        self._load_s = context.metrics.histogram(
            "triptych_engine_adapter_load_seconds",
            "Time to read an adapter in all ranks, or to find it in memory; other requests run meanwhile.",
            _WAIT_BUCKETS,
        ).of()
        self._loading: dict[str, _Loading] = {}  # by id of the request
        self._names: dict[Request, str] = {}  # of adapters
        context.metrics.gauge(
            "triptych_engine_adapter_requests_info",
            "Seconds of the engine, with the names of adapters of running and of waiting requests.",
            lambda: {(str(max_adapters), *self._names_by_state()): self._clock.now()},
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            aliases=("vllm:lora_requests_info",),
        )

    def on_add(self, request: Request) -> None:
        super().on_add(request)
        use: AdapterUse | None = request.extras.get(AdapterUse)
        if use is not None:
            self._requests.add(use.name)
            self._names[request] = use.name
            if use.pins is not self._pins:
                self._pins = self._pins.newest(use.pins)
                self._pinned = {cache_key_of(digest) for digest in self._pins.digests}

    def holds_preparation(self, request: Request) -> bool:
        adapter = adapter_of(request.extra_keys)
        if adapter is None or request in self._adapters:
            return False
        is_next = next(iter(self._waiting), request) is request
        oldest = next(iter(self._loading.values()), None)
        is_barred = oldest is not None and oldest.num_overtaking >= MAX_OVERTAKING_OF_LOADING
        is_loaded = adapter in self._loaded
        if not is_next or is_barred or not (is_loaded or self._has_room(adapter)):
            self._waiting[request] = None
            return True
        self._waiting.pop(request, None)
        for loading in self._loading.values():
            loading.num_overtaking += 1
        if not is_loaded:
            self._loading[request.request_id] = _Loading(self._clock.now())
        self._loaded[adapter] += 1
        self._adapters[request] = adapter
        self._wait_s.observe(self._clock.now() - request.arrival_at)
        return False

    def _names_by_state(self) -> tuple[str, str]:
        names: dict[bool, set[str]] = {True: set(), False: set()}
        # Copied in one go: this is another thread.
        for request, name in self._names.copy().items():
            names[request.status is RequestStatus.RUNNING].add(name)
        return ",".join(sorted(names[True])), ",".join(sorted(names[False]))

    def _has_room(self, adapter: str) -> bool:
        return len({*self._loaded, *self._pinned, adapter}) <= self._max_loaded

    def on_prepared(self, request_id: str, failure: RequestFailed | None) -> None:
        loading = self._loading.pop(request_id, None)
        if loading is not None:
            self._loads.add("ok" if failure is None else "failed")
            self._load_s.observe(self._clock.now() - loading.since)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        self._loading.pop(request.request_id, None)
        self._names.pop(request, None)
        self._waiting.pop(request, None)
        adapter = self._adapters.pop(request, None)
        if adapter is not None:
            _take_one(self._loaded, adapter)
