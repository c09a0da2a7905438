"""Descriptions of the served models, and of this frontend with its engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from frontend_svc.engines.connection.client import SCHEMA_REVISION, EngineState, FrontendIdentity
from frontend_svc.engines.directory import Directory
from frontend_svc.generation.preprocess import describe
from frontend_svc.parsers.registry import reasoning_parser
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import GenerationDefaults, ServedModel
from triptych.api.v1 import model_pb2
from triptych.common.v1 import sampling_pb2
from triptych_kit.clock import Clock
from triptych_kit.rules import rules_of
from triptych_kit.server import PUBLIC
from triptych_kit.version import installed_version


def _rules(name: str) -> Any:
    return rules_of(sampling_pb2.SamplingParams, name)


_STOP = _rules("stop")


class ModelAnswers:
    """Describes the served models and the limits of requests."""

    def __init__(
        self,
        directory: Directory,
        limits: RequestLimits,
        identity: FrontendIdentity,
        clock: Clock,
        *,
        max_queued_requests: int,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._identity = identity
        self._clock = clock
        self._started_at = clock.now()
        self._max_queued_requests = max_queued_requests

    def all(self) -> model_pb2.ListModelsResponse:
        # Each is described as by the engine that was listed first.
        models = {(model.name, model.fingerprint): model for model in reversed(self._ready_models())}
        cards: list[model_pb2.Model] = []
        for name, fingerprint in sorted(models):
            card = self._described(models[name, fingerprint])
            cards += [card, *(_renamed(card, alias) for alias in self._directory.aliases_of(name))]
            cards += self._variants(models[name, fingerprint], card, models[name, fingerprint].variants)
        # Clients take the first of a list as the model.
        cards.sort(key=lambda card: (bool(card.base_model), card.name))
        return model_pb2.ListModelsResponse(models=cards)

    def one(self, name: str) -> model_pb2.Model:
        """The model `name`, which may be an alias, or the only one if that is empty. Raises NotFound."""
        model = self._directory.model(name)
        card = self._described(model)
        if model.variant(name):
            (card,) = self._variants(model, card, [name])
        return _renamed(card, name) if name else card

    def reasons(self, name: str) -> bool:
        """Whether the reasoning of the model `name` is read apart from its answer. Raises NotFound."""
        return reasoning_parser(self._directory.model(name).parsers.reasoning) is not None

    def server_info(self) -> model_pb2.GetServerInfoResponse:
        limits = self._limits
        return model_pb2.GetServerInfoResponse(
            version=installed_version(),
            schema_revision=SCHEMA_REVISION,
            frontend_id=self._identity.frontend_id,
            uptime_ms=int((self._clock.now() - self._started_at) * 1000),
            limits=model_pb2.Limits(
                max_n=limits.max_n,
                max_logprobs=limits.max_logprobs,
                max_stop_strings=_STOP.max_items,
                max_stop_string_length=_STOP.max_chars,
                max_request_bytes=PUBLIC.max_receive_bytes,
                max_logit_bias=_rules("logit_bias").max_items,
                max_bad_words=_rules("bad_words").max_items,
                max_queued_requests=self._max_queued_requests,
            ),
            engines=[
                model_pb2.EngineSummary(
                    engine_id=client.engine_id,
                    endpoint=client.address,
                    state=client.state.value,
                    model="" if client.model is None else client.model.name,
                    num_in_flight=client.requests.num_in_flight,
                )
                for client in self._directory.clients()
            ],
        )

    def _ready_models(self) -> list[ServedModel]:
        """The model of each ready engine."""
        return [
            client.model
            for client in self._directory.clients()
            if client.state is EngineState.READY and client.model is not None
        ]

    def _variants(
        self, model: ServedModel, card: model_pb2.Model, names: Iterable[str]
    ) -> list[model_pb2.Model]:
        """The cards of variants of `model`, which has `card`."""
        plain = _renamed(card, "")
        plain.base_model = card.name
        plain.ClearField("adapters")
        equals = [one for one in self._ready_models() if one.fingerprint == model.fingerprint]
        cards = []
        for name in filter(model.variant, names):
            variant = _renamed(plain, name)
            digest = model.variants[name]
            variant.num_engines = sum(
                one.name == model.name and one.variants.get(name) == digest for one in equals
            )
            cards.append(variant)
        return cards

    def _described(self, model: ServedModel) -> model_pb2.Model:
        served = [(one.name, one.fingerprint) for one in self._ready_models()]
        card = model_pb2.Model(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            supported_tasks=model.supported_tasks,
            num_engines=served.count((model.name, model.fingerprint)),
            fingerprint=model.fingerprint,
            has_chat_template=model.has_chat_template,
            folder=model.ready.model_folder,
            default_sampling=_default_sampling(model.defaults),
        )
        describe(model, card)
        return card


def _renamed(card: model_pb2.Model, name: str) -> model_pb2.Model:
    renamed = model_pb2.Model()
    renamed.CopyFrom(card)
    renamed.name = name
    return renamed


def _default_sampling(defaults: GenerationDefaults) -> sampling_pb2.SamplingParams | None:
    chosen = sampling_pb2.SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        presence_penalty=defaults.presence_penalty,
        frequency_penalty=defaults.frequency_penalty,
        repetition_penalty=defaults.repetition_penalty,
        max_tokens=defaults.max_new_tokens,
    )
    return chosen if chosen.ByteSize() else None
