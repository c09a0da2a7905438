"""The RPCs that each role may call. A method without a rule is refused wherever credentials are needed."""

from __future__ import annotations

from collections.abc import Mapping

from triptych_kit.errors import PermissionDenied
from triptych_kit.security.identity import Identity, Role

ANY_ROLE = frozenset(Role)
CLIENTS = frozenset((Role.CLIENT, Role.ADMIN))
_FRONTENDS = frozenset((Role.FRONTEND,))
_ENGINES = frozenset((Role.ENGINE,))
_ADMINS = frozenset((Role.ADMIN,))
_OBSERVERS = frozenset((Role.FRONTEND, Role.ADMIN))

# By service or method; a rule for a method goes before the one for its service.
RULES: Mapping[str, frozenset[Role]] = {
    "triptych.api.v1.ChatService": CLIENTS,
    "triptych.api.v1.EmbeddingService": CLIENTS,
    "triptych.api.v1.InferenceService": CLIENTS,
    "triptych.api.v1.ModelService": CLIENTS,
    "triptych.api.v1.RequestService": CLIENTS,
    "triptych.api.v1.TokenizerService": CLIENTS,
    "triptych.engine.v1.EngineCoreService": _FRONTENDS,
    "triptych.engine.v1.EngineCoreService/GetEngineInfo": _OBSERVERS,
    "triptych.engine.v1.EngineCoreService/GetLoad": _OBSERVERS,
    "triptych.engine.v1.EngineCoreService/SubscribeKvEvents": _OBSERVERS,
    "triptych.engine.v1.KvService": _ENGINES,
    "triptych.coordinator.v1.CoordinatorService/EngineSession": _ENGINES,
    "triptych.coordinator.v1.CoordinatorService/FrontendSession": _FRONTENDS,
    "triptych.coordinator.v1.CoordinatorService/GetTopology": _OBSERVERS,
    "triptych.coordinator.v1.ScalingService": _ADMINS,
    "triptych.admin.v1.AdminService": _ADMINS,
    # Engines serve it to frontends, for their page of the scheduler.
    "triptych.admin.v1.AdminService/WatchScheduler": _OBSERVERS,
    "grpc.health.v1.Health": ANY_ROLE,
    "grpc.reflection.v1.ServerReflection": ANY_ROLE,
    "grpc.reflection.v1alpha.ServerReflection": ANY_ROLE,
}
# Load balancers and probes have no credentials. They learn whether a name is served, and nothing else.
OPEN_METHODS = frozenset(("grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"))
# Calls that change a service or show its insides; each is logged with its caller.
AUDITED = ("triptych.admin.v1.AdminService", "triptych.coordinator.v1.ScalingService")


def roles_for(method: str) -> frozenset[Role]:
    """The roles that may call `package.Service/Method`; none for a method without a rule."""
    return RULES.get(method) or RULES.get(method.partition("/")[0]) or frozenset()


def check_access(identity: Identity, method: str) -> None:
    """Raise PermissionDenied if `identity` may not call `package.Service/Method`."""
    check_role(identity, roles_for(method), method)


def check_role(identity: Identity, allowed: frozenset[Role], what: str) -> None:
    """Raise PermissionDenied unless `identity` has one of the roles."""
    if identity.roles & allowed:
        return
    own = ", ".join(sorted(identity.roles))
    needed = " or ".join(sorted(allowed)) or "none: it has no rule"
    raise PermissionDenied(
        f"{what} is not allowed to {identity.name or 'this caller'}: its role is {own}, needed is {needed}",
        reason="ROLE_NOT_ALLOWED",
    )
