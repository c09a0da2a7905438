"""The wire's half of features: how an ADD is read and what is added to steps and announcements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine_svc.core.extras import Extra, OutputExtra, Parameters
from engine_svc.core.facts import EngineFacts
from engine_svc.core.request import ContentSpan
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.tensors.source import TensorSource
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2, step_pb2
from triptych_kit.config import ConfigError
from triptych_kit.field_checks import unserved
from triptych_kit.rules import passed_on_fields

# What the core reads of an ADD, and what is for logs. Further fields need a feature that reads them.
_CORE_FIELDS = frozenset({
    "handle", "request_id", "external_request_id", "group_id", "group_index", "attempt", "prompt_token_ids",
    "output_token_ids", "sampling", "request_seed", "priority", "age_ms", "remaining_ms", "cache_salt",
    "tenant", "data_parallel_rank", "reasoning_options", "skip_reading_prefix_cache", "orphan_grace_ms",
    "resume_state", "account", "weight", "resumable", "segment",
})  # fmt: skip
_SAMPLING = "sampling."
# Parameters of the core have the names of the contract.
_CORE_SAMPLING = {parameter.name for parameter in fields(SamplingParams)} | {
    "n", "repetition_detection",
    # About text, which frontends make: without effect here.
    "include_stop_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "stream_interval", "output_kind",
}  # fmt: skip


@dataclass(slots=True)
class AddContext:
    """The surroundings of an ADD. token_ids: of the prompt, as earlier features changed it.

    tensors: None for a caller that may refer to none.
    """

    facts: EngineFacts
    tensors: TensorSource | None
    token_ids: list[int]
    spans: tuple[ContentSpan, ...] = ()
    cache_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parsed:
    """A feature's extra from an ADD; the other members are its changes to the request, if any."""

    extra: Extra
    token_ids: list[int] | None = None  # of the prompt
    spans: tuple[ContentSpan, ...] = ()  # positions whose KV depends on more than token ids
    cache_keys: tuple[str, ...] = ()  # what else all of its KV depends on
    variant: str = ""  # of the model, by its public name; see Request
    job: str = ""  # see Request
    skips_reading_prefix_cache: bool = False


class WireFeature:
    """One feature on the asyncio side. Override what it needs."""

    # Of the ADD, those of its sampling parameters with "sampling." in front. `parse` is called if one is set.
    fields: Sequence[str] = ()
    takes_tensors: bool = False
    message: str = ""  # the field of a ConnectRequest that `read` takes; it names its request by `handle`
    writes: type[OutputExtra] | None = None  # the extra that `write` takes
    # Each an `admin.served_engine.UtilityCall`, which knows the engine and so what is defined here.
    utilities: Sequence[Any] = ()

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        """None if the request does not use the feature after all. Raises InvalidArgument or Unimplemented.

        Checks everything as if no frontend had done so.
        """
        return None

    def read(self, message: Any) -> Extra:
        """What a frontend says of a request, for the scheduler's half. Raises InvalidArgument."""
        raise NotImplementedError

    def write(self, step: step_pb2.Step, row: int, extra: Any, now: float) -> None:
        """Write what goes to the client of this row. now: on the engine's clock; times are sent as ages."""
        raise NotImplementedError

    def announce(self, ready: session_pb2.Ready) -> None:
        """Add what frontends have to know. After a change, `ServedEngine.announce_again`."""

    def report(self, stats: session_pb2.Stats) -> None:
        """Add to the engine's load what frontends route by."""


class ParametersOfAdd(WireFeature):
    """Reads parameters that only a stage of the runner needs. The contract's rules are their only checks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.fields = [f"sampling.{name}" for name in names]

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        sampling = entry.sampling
        values = [(name, float(getattr(sampling, name))) for name in self._names if sampling.HasField(name)]
        return Parsed(Parameters(tuple(values)))


def stage_parameters() -> list[str]:
    """Names of the parameters that frontends pass on and the core does not read."""
    passed_on = passed_on_fields(sampling_pb2.SamplingParams)
    return [name for name in passed_on if name not in _CORE_SAMPLING]


class WireFeatures:
    """The features of an engine, in the order of application.

    Raises ConfigError for one whose `parse` would never be called.
    """

    def __init__(self, features: Sequence[WireFeature] = ()) -> None:
        for feature in features:
            _check_fields(feature)
        self._features = tuple(features)
        self._writers = {feature.writes: feature for feature in features if feature.writes is not None}
        self._readers = {feature.message: feature for feature in features if feature.message}
        self._readers_of: dict[str, list[int]] = {}  # the features that read a field, by their index
        for index, feature in enumerate(features):
            for name in feature.fields:
                self._readers_of.setdefault(name, []).append(index)
        self.sampling_fields = _CORE_SAMPLING | {
            name.removeprefix(_SAMPLING) for name in self._readers_of if name.startswith(_SAMPLING)
        }

    def served(self, sampling: sampling_pb2.SamplingParams) -> dict[str, Any]:
        """Set sampling parameters by name. Raises Unimplemented for one that nothing reads."""
        # Listed once: each access to a message costs time, and most requests set few parameters.
        values = {descriptor.name: value for descriptor, value in sampling.ListFields()}
        for name, value in values.items():
            if name not in self.sampling_fields or (name == "n" and value != 1):
                raise unserved(name)
        return values

    @property
    def take_tensors(self) -> bool:
        """Whether any feature takes tensors."""
        return any(feature.takes_tensors for feature in self._features)

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> list[Parsed]:
        """The parts of the features that an ADD uses. Raises Unimplemented for a field that none reads."""
        used: set[int] = set()
        for descriptor, _ in entry.ListFields():
            readers = self._readers_of.get(descriptor.name)
            if readers is not None:
                used.update(readers)
            elif descriptor.name not in _CORE_FIELDS:
                raise unserved(descriptor.name)
        if entry.HasField("sampling"):
            for descriptor, _ in entry.sampling.ListFields():
                used.update(self._readers_of.get(_SAMPLING + descriptor.name, ()))
        parts = []
        for index in sorted(used):
            parsed = self._features[index].parse(entry, context)
            if parsed is not None:
                context.spans += parsed.spans
                context.cache_keys += parsed.cache_keys
                if parsed.token_ids is not None:
                    context.token_ids = parsed.token_ids
                parts.append(parsed)
        return parts

    def read(self, request: engine_pb2.ConnectRequest) -> tuple[int, Extra] | None:
        """The handle and the content of a message about a request; None if no feature reads it."""
        kind = request.WhichOneof("message") or ""
        reader = self._readers.get(kind)
        if reader is None:
            return None
        message = getattr(request, kind)
        return message.handle, reader.read(message)

    def write(self, step: step_pb2.Step, row: int, extra: OutputExtra, now: float) -> None:
        self._writers[type(extra)].write(step, row, extra, now)

    @property
    def utilities(self) -> list[Any]:
        """The utility calls of all features, beside those of every engine."""
        return [call for feature in self._features for call in feature.utilities]

    def announce(self, ready: session_pb2.Ready) -> None:
        for feature in self._features:
            feature.announce(ready)

    def report(self, stats: session_pb2.Stats) -> None:
        for feature in self._features:
            feature.report(stats)


def _check_fields(feature: WireFeature) -> None:
    kind = type(feature)
    name = f"the feature {kind.__module__}.{kind.__qualname__}"
    if kind.parse is not WireFeature.parse and not feature.fields:
        raise ConfigError(
            f"{name} has no `fields`, and its `parse` is called for an ADD that sets one of them alone"
        )
    for field in feature.fields:
        message = sampling_pb2.SamplingParams if field.startswith(_SAMPLING) else add_pb2.AddEntry
        if field.removeprefix(_SAMPLING) not in message.DESCRIPTOR.fields_by_name:
            raise ConfigError(f"{name} reads {field!r}, which is no field of {message.DESCRIPTOR.full_name}")


def to_us(seconds: float) -> int:
    """A duration on the wire, in microseconds."""
    return max(0, round(seconds * 1e6))
