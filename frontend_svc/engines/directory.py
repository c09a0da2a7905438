"""The known engines, from the configuration and the coordinator, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from frontend_svc.engines.connection.client import EngineClient, EngineState
from frontend_svc.engines.routing.account import LoadReport
from frontend_svc.engines.routing.engine_info import EngineNeed, RoutingPolicy, RoutingRequest
from frontend_svc.engines.routing.least_loaded import kv_aware
from frontend_svc.engines.routing.policies import route
from frontend_svc.output.loss import RETRY_AFTER_MS
from frontend_svc.text.model import ServedModel
from triptych_kit.channel import parse_target
from triptych_kit.clock import Clock
from triptych_kit.errors import InvalidArgument, NotFound, ResourceExhausted, ServiceError, Unavailable

logger = logging.getLogger(__name__)


class ClientFactory(Protocol):
    """Makes the client of an engine, not started yet."""

    def __call__(self, address: str, *, on_change: Callable[[EngineClient], None]) -> EngineClient: ...


class Directory:
    """Holds a client for each listed engine, and picks among those that are ready.

    An engine that is no longer listed stays in use while its stream is up, so that a coordinator that
    restarts without its state does no harm.

    A model whose last ready engine is lost is expected back for `reconnect_window_s`. `first_turn` is the
    first `turn` for `policy`. `aliases` are names of models by other names, empty for the only model.
    """

    def __init__(
        self,
        make_client: ClientFactory,
        *,
        on_change: Callable[[], None],
        clock: Clock,
        reconnect_window_s: float,
        policy: RoutingPolicy = kv_aware,
        first_turn: int = 0,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._make_client = make_client
        self._on_change = on_change
        self._clock = clock
        self.reconnect_window_s = reconnect_window_s
        self._ready_models: dict[str, ServedModel] = {}
        self._expected: dict[str, tuple[ServedModel, float]] = {}
        self._recent: dict[str, tuple[ServedModel, float]] = {}  # by address: until when it counts as one
        self._addresses: dict[str, frozenset[str]] = {}
        self._clients: dict[str, EngineClient] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._owed: set[EngineClient] = set()
        self._policy = policy
        self._turn = first_turn
        self._aliases = aliases

    def set_addresses(self, source: str, addresses: Iterable[str]) -> None:
        """Replace the list of engines of `source`."""
        self._addresses[source] = frozenset(filter(None, map(_valid_address, addresses)))
        for address in sorted(self._addresses[source]):
            if address not in self._clients:
                client = self._make_client(address, on_change=self._client_changed)
                self._clients[address] = client
                client.start()
        for client in list(self._clients.values()):
            self._drop_if_gone(client)

    def take_loads(self, loads: Mapping[str, LoadReport | None]) -> None:
        """Apply loads from a coordinator, by address; None for an engine that does not report to it."""
        for address, report in loads.items():
            client = self._clients.get(address)
            if client is None:
                continue
            if report is None:
                client.requests.account.unreport()
            else:
                client.requests.account.report(report, is_direct=False)

    def clients(self) -> list[EngineClient]:
        return list(self._clients.values())

    def num_recent(self, model: ServedModel) -> int:
        """Engines of `model` that are ready, or were within the reconnect window."""
        now = self._clock.now()
        return sum(until > now and _serves(mine, model) for mine, until in self._recent.values())

    @property
    def is_ready(self) -> bool:
        """True if at least one engine takes requests."""
        return any(client.state is EngineState.READY for client in self._clients.values())

    def models(self, needs: Iterable[EngineNeed] = ()) -> dict[str, ServedModel]:
        """The models of ready engines by name, each from the engine that was listed first.

        Engines that meet all `needs` take precedence.
        """
        models = [client.model for client in reversed(self._ready()) if client.model is not None]
        models.sort(key=lambda model: all(need.is_met(model) for need in needs))
        return {model.name: model for model in models}

    def model(self, name: str, needs: Iterable[EngineNeed] = ()) -> ServedModel:
        """The model served as `name`, or the only one for an empty name; also one that is expected back.

        The name may be that of a variant, or an alias.
        One of an engine that meets all `needs` is preferred.
        Raises NotFound, InvalidArgument for a name that none can have, or an empty one if there are several
        models, Unavailable if no engine is ready.
        """
        now = self._clock.now()
        expected = {known: model for known, (model, until) in self._expected.items() if until > now}
        models = expected | self.models(needs)
        if not models:
            raise self._nothing_ready()
        known = ", ".join(sorted({*models, *self._aliases}))
        if name not in models:
            announced = (client.model for client in self._ready() if client.model is not None)
            for model in (*announced, *expected.values()):
                if name in model.variants:
                    return model
            name = self._aliases.get(name, name)
        if name in models:
            return models[name]
        if not name.isprintable():
            raise InvalidArgument(
                f"model is {name!r}, must have only characters that can be printed",
                field="model",
                reason="INVALID_REQUEST",
            )
        if name:
            raise NotFound(
                f"model {name!r} is not served here; served: {known}",
                resource_type="model",
                resource_name=name,
            )
        if len(models) > 1:
            raise InvalidArgument(
                f"model is '', must be one of: {known}", field="model", reason="INVALID_REQUEST"
            )
        return next(iter(models.values()))

    def aliases_of(self, name: str) -> list[str]:
        """The other names of the model `name`, besides those of ready models."""
        models = self.models()
        only = {""} if len(models) == 1 else set()
        return [alias for alias, of in self._aliases.items() if of in {name, *only} and alias not in models]

    def expected_until(self, model: ServedModel) -> float | None:
        """Until when an engine of `model` is expected back; None if one is ready or the time has passed."""
        _, until = self._expected.get(model.name, (None, 0.0))
        return until if until > self._clock.now() else None

    def ready_for(
        self, model: ServedModel, *, is_exact: bool = False, needs: Iterable[EngineNeed] = ()
    ) -> list[EngineClient]:
        """The ready engines that serve `model` and meet all `needs`.

        With `is_exact`, only those that can continue a request that another engine began.
        """
        serves = _is_equal if is_exact else _serves
        return [
            client
            for client in self._ready()
            if client.model is not None
            and serves(client.model, model)
            and all(need.is_met(client.model) for need in needs)
        ]

    def pick(
        self,
        model: ServedModel,
        request: RoutingRequest,
        *,
        is_exact: bool = False,
        is_allowed: Callable[[EngineClient], bool] = lambda client: True,
    ) -> EngineClient:
        """The engine that gets all of `request` for `model`; see `ready_for` for `is_exact`.

        Raises InvalidArgument for a rank that no engine can have, ResourceExhausted if all are full,
        Unavailable if none is ready.
        """
        able = self.ready_for(model, is_exact=is_exact, needs=request.needs)
        ready = list(filter(is_allowed, able))
        clients = {
            client.address: client for client in ready if client.requests.has_room(request.num_requests)
        }
        if len(clients) == 1 and request.data_parallel_rank is None:
            # There is no choice: its load is not asked for, which changes with every request.
            self._turn += 1
            return next(iter(clients.values()))
        # In the same order on every frontend, in whatever order each learned of the engines.
        infos = [clients[address].requests.account.info() for address in sorted(clients)]
        picked = route(self._policy, infos, request, self._turn)
        self._turn += 1
        if picked is not None:
            return clients[picked.address]
        if ready and not clients:
            raise ResourceExhausted(
                f"every engine of model {model.name!r} has as many requests as it takes",
                reason="ENGINES_FULL",
                retry_after_ms=RETRY_AFTER_MS,
            )
        data_parallel_rank = request.data_parallel_rank
        if infos and data_parallel_rank is not None:
            top = max(client.dp_size for client in clients.values()) - 1
            if data_parallel_rank > top:
                raise InvalidArgument(
                    f"data_parallel_rank is {data_parallel_rank}, must be in 0..{top}",
                    field="data_parallel_rank",
                    reason="INVALID_REQUEST",
                )
            ranks = sorted({info.dp_rank for info in infos})
            raise Unavailable(
                f"no engine of data_parallel_rank {data_parallel_rank} is ready; ready ranks: {ranks}",
                reason="RANK_NOT_READY",
                retry_after_ms=RETRY_AFTER_MS,
            )
        if not able and self.ready_for(model, is_exact=is_exact):
            # None of the needs is met, or each by other engines.
            need = request.needs[0]
            raise Unavailable(
                f"no engine of model {model.name!r} that {need.description} is ready",
                reason=need.reason,
                retry_after_ms=RETRY_AFTER_MS,
            )
        raise self._nothing_ready()

    def leave(self) -> None:
        """From now on, leave adopted requests in their engines for other frontends; do not abort them."""
        for client in self._clients.values():
            client.requests.adoptions.are_left = True

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients), *self._closing)

    def _ready(self) -> list[EngineClient]:
        return [client for client in self._clients.values() if client.state is EngineState.READY]

    def _client_changed(self, client: EngineClient) -> None:
        self._drop_if_gone(client)
        self._note_models()
        self._on_change()

    def _note_models(self) -> None:
        now, ready = self._clock.now(), self.models()
        until = now + self.reconnect_window_s
        lost = {name: (model, until) for name, model in self._ready_models.items() if name not in ready}
        self._expected = {
            name: expected
            for name, expected in (self._expected | lost).items()
            if name not in ready and expected[1] > now
        }
        self._ready_models = ready
        ready_now = {client.address: client.model for client in self._ready() if client.model is not None}
        self._recent = {
            address: (model, min(known_until, until))
            for address, (model, known_until) in self._recent.items()
            if known_until > now
        } | {address: (model, math.inf) for address, model in ready_now.items()}

    def _drop_if_gone(self, client: EngineClient) -> None:
        is_listed = any(client.address in addresses for addresses in self._addresses.values())
        is_up = client.state not in (EngineState.CONNECTING, EngineState.DOWN, EngineState.CLOSED)
        if is_listed or is_up or self._clients.get(client.address) is not client:
            return
        if client.owed_s:
            # The engine may be alive and still run requests that were moved: abort them when it is back.
            if client not in self._owed:
                self._owed.add(client)
                asyncio.get_running_loop().call_later(client.owed_s, self._drop_owed, client)
            return
        del self._clients[client.address]
        logger.info("engine forgotten", extra={"engine": client.address})
        task = asyncio.ensure_future(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _drop_owed(self, client: EngineClient) -> None:
        self._owed.discard(client)
        self._drop_if_gone(client)

    def _nothing_ready(self) -> ServiceError:
        states = ", ".join(f"{client.address} {client.state.value}" for client in self._clients.values())
        return Unavailable(
            f"no engine is ready ({states or 'none is known'})",
            reason="NO_ENGINE_READY",
            retry_after_ms=RETRY_AFTER_MS,
        )


def _serves(mine: ServedModel, model: ServedModel) -> bool:
    return (
        mine.name == model.name
        and mine.text_key == model.text_key
        and mine.max_model_len >= model.max_model_len
    )


def _is_equal(mine: ServedModel, model: ServedModel) -> bool:
    return (
        _serves(mine, model)
        and mine.max_model_len == model.max_model_len
        and mine.fingerprint == model.fingerprint
    )


def _valid_address(address: str) -> str:
    try:
        return parse_target(address)
    except InvalidArgument as error:
        logger.warning("engine address cannot be used", extra={"address": address, "reason": str(error)})
        return ""
