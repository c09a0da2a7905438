"""Prepares extras of requests in threads beside the steps, before their rows enter. Knows no ranks.

Accounts share the threads. The order of preparations may differ between ranks: an engine waits for all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine_svc.core.errors import RequestFailed, describe_failure
from engine_svc.core.extras import Extras
from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.feature import RunnerFeature
from triptych_kit.shares import FairQueue, SlowAccounts

# Called in the preparing thread, with the number of a preparation and why it failed, if it did.
OnPrepared = Callable[[int, RequestFailed | None], object]
_Prepare = Callable[["_Preparation"], RequestFailed | None]

# Threads of a lane whose call of `prepare` did not return and whose request has ended. With more of them,
# preparations queued after them are only ended by the engine's limit.
MAX_ABANDONED = 4
_END_WAIT_S = 1.0


@dataclass(slots=True, eq=False)
class _Preparation:
    """Preparation of one request. prepared: replaces its extras once complete, and is kept until it ends."""

    number: int
    extras: Extras
    account: str
    weight: int
    lane: _Lane
    prepared: Extras = field(default_factory=dict)
    is_queued: bool = False
    is_prepared: bool = False
    is_dropped: bool = False


class _Lane:
    """Preparations in turns of their accounts, in one thread, which is started by the first.

    lock: that of all lanes of a preparer, which may move a preparation from one to another.
    passed_on: takes over a preparation whose turn has come, or refuses it; called with the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        prepare: _Prepare,
        on_prepared: OnPrepared,
        on_done: Callable[[_Preparation, float], None],
        release: Callable[[_Preparation], None],
        passed_on: Callable[[_Preparation], bool] = lambda preparation: False,
    ) -> None:
        self._prepare = prepare
        self._on_prepared = on_prepared
        self._on_done = on_done
        self._release = release
        self._passed_on = passed_on
        self._queue: FairQueue[_Preparation] = FairQueue()
        self._lock = lock
        self._is_wanted = threading.Condition(lock)
        self._is_stopped = False
        self._running: _Preparation | None = None  # in the present thread
        self._thread: threading.Thread | None = None
        self._num_abandoned = 0

    @property
    def running_account(self) -> str | None:
        """Whose preparation is in the thread."""
        return None if self._running is None else self._running.account

    def add(self, preparation: _Preparation) -> None:
        """Queue it. The caller has the lock."""
        preparation.lane, preparation.is_queued = self, True
        self._queue.add(preparation, preparation.account, preparation.weight)
        if self._thread is None:
            self._start_thread()
        self._is_wanted.notify()

    def drop(self, preparation: _Preparation) -> None:
        """Forget it. If it is being prepared, its thread is left behind, releases it, and another continues.

        The caller has the lock.
        """
        preparation.is_dropped = True
        if preparation.is_queued:
            self._queue.remove(preparation, preparation.account)
        elif preparation is self._running and self._num_abandoned < MAX_ABANDONED:
            self._num_abandoned += 1
            self._running = None
            self._start_thread()

    def stop(self) -> None:
        """End the thread, unless it hangs: it is a daemon."""
        with self._lock:
            self._is_stopped = True
            self._is_wanted.notify_all()
        if self._thread is not None:
            self._thread.join(_END_WAIT_S)

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="preparer", daemon=True)
        self._thread.start()

    def _next(self) -> _Preparation | None:
        """The next preparation, which runs then; None once the lane is stopped and has no more."""
        with self._lock:
            while True:
                preparation = self._queue.take()
                if preparation is None:
                    if self._is_stopped:
                        return None
                    self._is_wanted.wait()
                    continue
                preparation.is_queued = False
                if not self._passed_on(preparation):
                    self._running = preparation
                    return preparation

    def _run(self) -> None:
        this = threading.current_thread()
        while (preparation := self._next()) is not None:
            began_at = time.monotonic()
            failure = self._prepare(preparation)
            took_s = time.monotonic() - began_at
            with self._lock:
                preparation.is_prepared, is_dropped = True, preparation.is_dropped
                self._queue.charge(preparation.account, took_s)
                self._on_done(preparation, took_s)
                is_left_behind = self._thread is not this
                if is_left_behind:
                    self._num_abandoned -= 1
                else:
                    self._running = None
            if is_dropped:
                self._release(preparation)
            if is_left_behind:
                return
            if not is_dropped:
                self._on_prepared(preparation.number, failure)


class Preparer:
    """Prepares in turns of accounts and keeps the results, as rows come and go with preemptions.

    What is at hand needs none: the first step of a request would wait for two switches to other threads.
    What may take long has a thread of its own, so that all else does not wait for it. An account is slow that
    has had a long one in the last minute: while others prepare something, all of its preparations go there.
    Where one of a slow account is in that thread, what may take long of one that is not goes to the other.
    The queues have no limit of their own: the engine limits how many requests wait.
    """

    num_preparing = 1

    def __init__(
        self, features: Sequence[RunnerFeature], on_prepared: OnPrepared, *, is_last_stage: bool = True
    ) -> None:
        """is_last_stage: False for a rank that leaves to the last stage what it has no feature for."""
        self._is_last_stage = is_last_stage
        self._features = {feature.prepares: feature for feature in features if feature.prepares is not None}
        self._lock = threading.Lock()
        self._accounts = SlowAccounts()
        self._on_prepared = on_prepared
        calls = (self._prepare, on_prepared, self._note_time, self._release)
        self._slow = _Lane(self._lock, *calls)
        self._quick = _Lane(self._lock, *calls, self._passed_on)
        # By id of the request, from `prepare` until it is dropped.
        self._preparations: dict[str, _Preparation] = {}

    def prepare(self, number: int, request_id: str, extras: Extras, account: str, weight: int) -> None:
        """Prepare the extras of a request; answered through `on_prepared`. Returns at once."""
        at_hand = self._at_hand(extras)
        if at_hand is not None:
            self._preparations[request_id] = _Preparation(
                number, extras, account, weight, self._quick, at_hand, is_prepared=True
            )
            self._on_prepared(number, None)
            return
        pairs = [(self._features.get(kind), extra) for kind, extra in extras.items()]
        is_slow = any(feature is not None and feature.is_slow_to_prepare(extra) for feature, extra in pairs)
        now = time.monotonic()
        with self._lock:
            self._accounts.see(account, now)
            lane = self._slow if is_slow and not self._may_be_quick(account, now) else self._quick
            preparation = self._preparations[request_id] = _Preparation(number, extras, account, weight, lane)
            lane.add(preparation)

    def drop_prepared(self, request_id: str) -> None:
        """Forget a request."""
        preparation = self._preparations.pop(request_id, None)
        if preparation is None:
            return
        with self._lock:
            preparation.lane.drop(preparation)
            is_prepared = preparation.is_prepared
        if is_prepared:
            self._release(preparation)

    def with_prepared(self, admitted: AdmittedRequest) -> AdmittedRequest:
        """The request with what was prepared in the place of its extras; most have nothing to prepare."""
        preparation = self._preparations.get(admitted.request_id)
        if preparation is None:
            return admitted
        return replace(admitted, extras=admitted.extras | preparation.prepared)

    def stop_preparing(self) -> None:
        """End the threads that do not hang, and what features have for them."""
        for lane in (self._quick, self._slow):
            lane.stop()
        for feature in self._features.values():
            feature.stop_preparing()

    def _at_hand(self, extras: Extras) -> Extras | None:
        """What takes the place of a request's only extra, if that needs no thread."""
        if len(extras) != 1:
            return None
        ((kind, extra),) = extras.items()
        feature = self._features.get(kind)
        prepared = None if feature is None else feature.prepare_at_once(extra)
        return None if prepared is None else {kind: prepared}

    def _may_be_quick(self, account: str, now: float) -> bool:
        holder = self._slow.running_account
        if holder is None or holder == account:
            return False
        return self._accounts.is_slow(holder, now) and not self._accounts.is_slow(account, now)

    def _note_time(self, preparation: _Preparation, took_s: float) -> None:
        self._accounts.note(preparation.account, took_s, time.monotonic())

    def _passed_on(self, preparation: _Preparation) -> bool:
        """Have the slow lane prepare it where its account would keep others from the quick one."""
        now = time.monotonic()
        if not self._accounts.is_slow(preparation.account, now) or not any(self._accounts.others_seen(now)):
            return False
        self._slow.add(preparation)
        return True

    def _release(self, preparation: _Preparation) -> None:
        # A thread that waits for its next preparation still has the last one.
        released, preparation.prepared = preparation.prepared, {}
        for kind, prepared in released.items():
            self._features[kind].release(prepared)

    def _prepare(self, preparation: _Preparation) -> RequestFailed | None:
        for kind, extra in preparation.extras.items():
            feature = self._features.get(kind)
            if feature is None and not self._is_last_stage:
                continue
            if feature is None:
                return RequestFailed("INTERNAL", f"no feature of this rank prepares {kind.__name__}")
            try:
                preparation.prepared[kind] = feature.prepare(extra)
            except RequestFailed as failure:
                return failure
            except Exception as error:  # noqa: BLE001  Every error is this request's.
                return RequestFailed("INTERNAL", describe_failure(type(feature).__name__, error))
        return None
