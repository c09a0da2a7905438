"""The identity of a caller: its roles and its tenant, bound to the task that serves its call."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from triptych_kit.errors import PermissionDenied


class Role(StrEnum):
    """The role of a caller; `triptych_kit.security.access` has the calls that each may make."""

    CLIENT = "client"
    FRONTEND = "frontend"
    ENGINE = "engine"
    COORDINATOR = "coordinator"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant at one frontend process; None is without a limit.

    Tokens are those of prompts and of the longest requested outputs. weight: its share of what others want as
    well, relative to those of other tenants; None is 1.
    """

    max_requests: int | None = None  # open at the same time
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. `name` is stable when its key or certificate is renewed, and empty without credentials.

    is_shared: its key is that of all clients, which it does not distinguish.
    """

    name: str
    roles: frozenset[Role]
    tenant: str = ""
    limits: TenantLimits = TenantLimits()
    is_shared: bool = False

    @property
    def account(self) -> str:
        """Whose share a call uses, and whose faults it adds to: the tenant, without one the caller's key.

        No tenant is named like a key. Empty for callers that are not distinguished.
        """
        if self.tenant or not self.name or self.is_shared:
            return self.tenant
        return f"key {self.name}"

    @property
    def weight(self) -> int:
        return self.limits.weight or 1


# The caller of a listener that needs no credentials, and of a unix socket, which the file system protects.
UNRESTRICTED = Identity("", frozenset(Role))

_current: ContextVar[Identity] = ContextVar("identity", default=UNRESTRICTED)


def bind_identity(identity: Identity) -> None:
    """Set the identity of the call that this task serves."""
    _current.set(identity)


def current_identity() -> Identity:
    """The identity of the call that this task serves."""
    return _current.get()


def check_owner(owner: Identity, what: str) -> None:
    """Raise PermissionDenied if `what` belongs to another identity than that of the call of this task."""
    identity = current_identity()
    if identity is not UNRESTRICTED and identity.name != owner.name:
        raise PermissionDenied(f"{what} belongs to another identity", reason="NOT_THE_OWNER")
