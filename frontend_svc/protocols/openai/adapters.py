"""vLLM's routes that load and unload adapters while the server runs."""

from __future__ import annotations

import logging
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from frontend_svc.generation.answers.adapters import AdapterAnswers
from frontend_svc.protocols.openai.bodies import Base
from frontend_svc.protocols.openai.call import Handler, body_of
from frontend_svc.protocols.openai.field_names import FieldNames
from triptych_kit.security.access import check_role
from triptych_kit.security.identity import Role, current_identity
from triptych_kit.telemetry.logs import AUDIT_LOGGER

_audit_logger = logging.getLogger(AUDIT_LOGGER)

_ADMINS = frozenset((Role.ADMIN,))
# As the frontend and engines name fields that are wrong.
_NAMES = FieldNames(
    {
        f"{prefix}{name}": f"lora_{name}"
        for prefix in ("", "add_adapter.", "remove_adapter.")
        for name in ("name", "path")
    }
)


class LoadBody(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = frozenset({"is_3d_lora_weight"})

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str = ""  # where several models are served


class UnloadBody(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str
    base_model_name: str = ""


class AdapterRoutes:
    """For callers with the role admin, where callers have roles."""

    def __init__(self, adapters: AdapterAnswers) -> None:
        self._adapters = adapters
        self.posts: dict[str, Handler] = {
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }

    async def _load(self, request: Request) -> Response:
        _check_admin(request)
        body, _ = await body_of(request, LoadBody)
        request.state.name_of = _NAMES
        await self._adapters.load(
            body.lora_name, body.lora_path, model=body.base_model_name, replaces=body.load_inplace
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        _check_admin(request)
        body, _ = await body_of(request, UnloadBody)
        request.state.name_of = _NAMES
        await self._adapters.unload(body.lora_name, model=body.base_model_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_admin(request: Request) -> None:
    """Raise PermissionDenied unless the caller is an admin; the call of one is logged with its name."""
    method, identity = f"POST {request.url.path}", current_identity()
    check_role(identity, _ADMINS, method)
    _audit_logger.info("admin call", extra={"method": method, "identity": identity.name})
