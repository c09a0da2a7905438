"""Prepares extras of requests in threads beside the steps, before their rows enter. Knows no ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from engine_svc.core.errors import RequestFailed, describe_failure
from engine_svc.core.extras import Extras
from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.feature import RunnerFeature

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
    lane: _Lane
    prepared: Extras = field(default_factory=dict)
    is_dropped: bool = False


class _Lane:
    """Preparations in order, in one thread, which is started by the first."""

    def __init__(self, prepare: _Prepare, on_prepared: OnPrepared) -> None:
        self._prepare = prepare
        self._on_prepared = on_prepared
        self._queue: SimpleQueue[_Preparation | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running: _Preparation | None = None  # in the present thread
        self._thread: threading.Thread | None = None
        self._num_abandoned = 0

    def add(self, preparation: _Preparation) -> None:
        with self._lock:
            if self._thread is None:
                self._start_thread()
        self._queue.put(preparation)

    def drop(self, preparation: _Preparation) -> None:
        """Forget it. If it is being prepared, its thread is left behind and another continues."""
        with self._lock:
            preparation.is_dropped = True
            if preparation is self._running and self._num_abandoned < MAX_ABANDONED:
                self._num_abandoned += 1
                self._running = None
                self._start_thread()

    def stop(self) -> None:
        """End the thread, unless it hangs: it is a daemon."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_END_WAIT_S)

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="preparer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        this = threading.current_thread()
        while (preparation := self._queue.get()) is not None:
            with self._lock:
                if preparation.is_dropped:
                    continue
                self._running = preparation
            failure = self._prepare(preparation)
            with self._lock:
                if self._thread is not this:
                    self._num_abandoned -= 1
                    return
                self._running = None
            if not preparation.is_dropped:
                self._on_prepared(preparation.number, failure)


class Preparer:
    """Prepares in the order of the calls and keeps the results, as rows come and go with preemptions.

    What may take long has a thread of its own, so that all else does not wait for it. The queues have no
    limit of their own: the engine limits how many requests wait.
    """

    num_preparing = 1

    def __init__(self, features: Sequence[RunnerFeature], on_prepared: OnPrepared) -> None:
        self._features = {feature.prepares: feature for feature in features if feature.prepares is not None}
        self._quick = _Lane(self._prepare, on_prepared)
        self._slow = _Lane(self._prepare, on_prepared)
        # By id of the request, from `prepare` until it is dropped.
        self._preparations: dict[str, _Preparation] = {}

    def prepare(self, number: int, request_id: str, extras: Extras) -> None:
        """Prepare the extras of a request; answered through `on_prepared`. Returns at once."""
        pairs = [(self._features.get(kind), extra) for kind, extra in extras.items()]
        is_slow = any(feature is not None and feature.is_slow_to_prepare(extra) for feature, extra in pairs)
        preparation = _Preparation(number, extras, self._slow if is_slow else self._quick)
        self._preparations[request_id] = preparation
        preparation.lane.add(preparation)

    def drop_prepared(self, request_id: str) -> None:
        """Forget a request."""
        preparation = self._preparations.pop(request_id, None)
        if preparation is not None:
            preparation.lane.drop(preparation)

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

    def _prepare(self, preparation: _Preparation) -> RequestFailed | None:
        for kind, extra in preparation.extras.items():
            feature = self._features.get(kind)
            if feature is None:
                return RequestFailed("INTERNAL", f"no feature of this rank prepares {kind.__name__}")
            try:
                preparation.prepared[kind] = feature.prepare(extra)
            except RequestFailed as failure:
                return failure
            except Exception as error:  # noqa: BLE001  Every error is this request's.
                return RequestFailed("INTERNAL", describe_failure(type(feature).__name__, error))
        return None
