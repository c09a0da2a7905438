"""Adapters: other weights of a model, by the name in `adapter` or in place of the model's."""

from __future__ import annotations

import functools

from frontend_svc.engines.routing.engine_info import EngineNeed
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import model_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import NotFound

_REASON = "ADAPTER_NOT_READY"
# Waiting requests are compared by their needs, which are the same objects where they are equal.
_MAX_NEEDS = 4096


class Adapter(RequestOption):
    """The ADD has the name and the digest, and goes to an engine whose name stands for this digest."""

    fields = ("adapter",)

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        variant = model.variant(request.model)
        if request.adapter and variant and request.adapter != variant:
            violations.add("adapter", request.adapter, f"must be unset or {variant!r}, which model names")

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        """Raises NotFound for a name that no engine of the model has announced."""
        name = request.adapter or prompt.model.variant(request.model)
        if name:
            _use(name, prompt, entry)
            if not request.adapter:
                prompt.client_fields["adapter"] = "model"

    def prepare_pooling(self, model_name: str, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if name := prompt.model.variant(model_name):
            _use(name, prompt, entry)

    def need(self, request: AnyRequest) -> EngineNeed | None:
        return _need_of_any(request.adapter) if request.adapter else None

    def describe(self, model: ServedModel, card: model_pb2.Model) -> None:
        card.adapters.extend(sorted(model.variants))


def _use(name: str, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
    digest = prompt.model.variants.get(name)
    if digest is None:
        raise NotFound(
            f"adapter {name!r} of model {prompt.model.name!r} is not served here",
            resource_type="adapter",
            resource_name=name,
            metadata={"fields": "adapter"},
        )
    entry.adapter, entry.adapter_digest = name, digest
    prompt.served_as, prompt.slot = name, digest
    prompt.needs.append(_need_of(name, digest))


@functools.lru_cache(_MAX_NEEDS)
def _need_of(name: str, digest: str) -> EngineNeed:
    return EngineNeed(f"has adapter {name!r}", _REASON, lambda model: model.variants.get(name) == digest)


@functools.lru_cache(_MAX_NEEDS)
def _need_of_any(name: str) -> EngineNeed:
    return EngineNeed(f"has adapter {name!r}", _REASON, lambda model: name in model.variants)
