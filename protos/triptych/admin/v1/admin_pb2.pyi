from triptych.engine.v1 import session_pb2 as _session_pb2
from triptych.engine.v1 import utility_pb2 as _utility_pb2
from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_STATE_UNSPECIFIED: _ClassVar[ServiceState]
    SERVICE_STATE_STARTING: _ClassVar[ServiceState]
    SERVICE_STATE_SERVING: _ClassVar[ServiceState]
    SERVICE_STATE_DRAINING: _ClassVar[ServiceState]
    SERVICE_STATE_STOPPED: _ClassVar[ServiceState]

class LogLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_LEVEL_UNSPECIFIED: _ClassVar[LogLevel]
    LOG_LEVEL_DEBUG: _ClassVar[LogLevel]
    LOG_LEVEL_INFO: _ClassVar[LogLevel]
    LOG_LEVEL_WARNING: _ClassVar[LogLevel]
    LOG_LEVEL_ERROR: _ClassVar[LogLevel]
SERVICE_STATE_UNSPECIFIED: ServiceState
SERVICE_STATE_STARTING: ServiceState
SERVICE_STATE_SERVING: ServiceState
SERVICE_STATE_DRAINING: ServiceState
SERVICE_STATE_STOPPED: ServiceState
LOG_LEVEL_UNSPECIFIED: LogLevel
LOG_LEVEL_DEBUG: LogLevel
LOG_LEVEL_INFO: LogLevel
LOG_LEVEL_WARNING: LogLevel
LOG_LEVEL_ERROR: LogLevel

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("service", "instance", "pid", "version", "state", "uptime_ms", "values")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    service: str
    instance: str
    pid: int
    version: str
    state: ServiceState
    uptime_ms: int
    values: _containers.RepeatedCompositeFieldContainer[StatusValue]
    def __init__(self, service: _Optional[str] = ..., instance: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., state: _Optional[_Union[ServiceState, str]] = ..., uptime_ms: _Optional[int] = ..., values: _Optional[_Iterable[_Union[StatusValue, _Mapping]]] = ...) -> None: ...

class StatusValue(_message.Message):
    __slots__ = ("key", "number", "text")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    key: str
    number: float
    text: str
    def __init__(self, key: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "trace_id", "span_id", "parent_span_id", "service", "pid", "start_unix_ns", "end_unix_ns", "attributes", "events", "ok")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    service: str
    pid: int
    start_unix_ns: int
    end_unix_ns: int
    attributes: _containers.RepeatedCompositeFieldContainer[SpanAttribute]
    events: _containers.RepeatedCompositeFieldContainer[SpanEvent]
    ok: bool
    def __init__(self, name: _Optional[str] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., parent_span_id: _Optional[str] = ..., service: _Optional[str] = ..., pid: _Optional[int] = ..., start_unix_ns: _Optional[int] = ..., end_unix_ns: _Optional[int] = ..., attributes: _Optional[_Iterable[_Union[SpanAttribute, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[SpanEvent, _Mapping]]] = ..., ok: _Optional[bool] = ...) -> None: ...

class SpanAttribute(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class SpanEvent(_message.Message):
    __slots__ = ("name", "unix_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    unix_ns: int
    def __init__(self, name: _Optional[str] = ..., unix_ns: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level", "logger")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    level: LogLevel
    logger: str
    def __init__(self, level: _Optional[_Union[LogLevel, str]] = ..., logger: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("previous_level",)
    PREVIOUS_LEVEL_FIELD_NUMBER: _ClassVar[int]
    previous_level: LogLevel
    def __init__(self, previous_level: _Optional[_Union[LogLevel, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms", "keep_running")
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    KEEP_RUNNING_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    keep_running: bool
    def __init__(self, deadline_ms: _Optional[int] = ..., keep_running: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_in_flight", "state")
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    num_in_flight: int
    state: ServiceState
    def __init__(self, num_in_flight: _Optional[int] = ..., state: _Optional[_Union[ServiceState, str]] = ...) -> None: ...

class WatchSchedulerRequest(_message.Message):
    __slots__ = ("interval_ms", "max_requests", "max_blocks")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    max_requests: int
    max_blocks: int
    def __init__(self, interval_ms: _Optional[int] = ..., max_requests: _Optional[int] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class WatchSchedulerResponse(_message.Message):
    __slots__ = ("stats", "requests", "cached_block_ids", "steps")
    STATS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    stats: _session_pb2.Stats
    requests: _containers.RepeatedCompositeFieldContainer[ScheduledRequest]
    cached_block_ids: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedCompositeFieldContainer[ScheduledStep]
    def __init__(self, stats: _Optional[_Union[_session_pb2.Stats, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[ScheduledRequest, _Mapping]]] = ..., cached_block_ids: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[_Union[ScheduledStep, _Mapping]]] = ...) -> None: ...

class ScheduledStep(_message.Message):
    __slots__ = ("step_number", "num_tokens", "num_requests", "duration_ms")
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    step_number: int
    num_tokens: int
    num_requests: int
    duration_ms: float
    def __init__(self, step_number: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_requests: _Optional[int] = ..., duration_ms: _Optional[float] = ...) -> None: ...

class ScheduledRequest(_message.Message):
    __slots__ = ("request_id", "status", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_blocks", "num_preemptions", "priority", "age_ms", "blockers", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    status: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    priority: int
    age_ms: int
    blockers: _containers.RepeatedScalarFieldContainer[str]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., status: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., priority: _Optional[int] = ..., age_ms: _Optional[int] = ..., blockers: _Optional[_Iterable[str]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class UtilityRequest(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: _utility_pb2.UtilityCall
    def __init__(self, call: _Optional[_Union[_utility_pb2.UtilityCall, _Mapping]] = ...) -> None: ...

class UtilityResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: _utility_pb2.UtilityResult
    def __init__(self, result: _Optional[_Union[_utility_pb2.UtilityResult, _Mapping]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: _Optional[bool] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _utility_pb2.LoadedAdapter
    def __init__(self, adapter: _Optional[_Union[_utility_pb2.LoadedAdapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_utility_pb2.LoadedAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_utility_pb2.LoadedAdapter, _Mapping]]] = ...) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PinAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _utility_pb2.LoadedAdapter
    def __init__(self, adapter: _Optional[_Union[_utility_pb2.LoadedAdapter, _Mapping]] = ...) -> None: ...

class UnpinAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _utility_pb2.LoadedAdapter
    def __init__(self, adapter: _Optional[_Union[_utility_pb2.LoadedAdapter, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("token_ids", "ttl_s", "job_id", "cache_salt", "adapter", "tenant")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ttl_s: float
    job_id: str
    cache_salt: str
    adapter: str
    tenant: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., ttl_s: _Optional[float] = ..., job_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: PinInfo
    def __init__(self, pin: _Optional[_Union[PinInfo, _Mapping]] = ...) -> None: ...

class PinInfo(_message.Message):
    __slots__ = ("pin_id", "num_blocks", "remaining_ms", "job_id", "tenant")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    num_blocks: int
    remaining_ms: int
    job_id: str
    tenant: str
    def __init__(self, pin_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., job_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("pin_id", "job_id")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    job_id: str
    def __init__(self, pin_id: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinInfo]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinInfo, _Mapping]]] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[QuarantinedPrompt]
    def __init__(self, prompts: _Optional[_Iterable[_Union[QuarantinedPrompt, _Mapping]]] = ...) -> None: ...

class QuarantinedPrompt(_message.Message):
    __slots__ = ("incident_id", "account", "model", "num_tokens", "remaining_ms")
    INCIDENT_ID_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    incident_id: str
    account: str
    model: str
    num_tokens: int
    remaining_ms: int
    def __init__(self, incident_id: _Optional[str] = ..., account: _Optional[str] = ..., model: _Optional[str] = ..., num_tokens: _Optional[int] = ..., remaining_ms: _Optional[int] = ...) -> None: ...

class ClearQuarantineRequest(_message.Message):
    __slots__ = ("incident_id",)
    INCIDENT_ID_FIELD_NUMBER: _ClassVar[int]
    incident_id: str
    def __init__(self, incident_id: _Optional[str] = ...) -> None: ...

class ClearQuarantineResponse(_message.Message):
    __slots__ = ("num_cleared",)
    NUM_CLEARED_FIELD_NUMBER: _ClassVar[int]
    num_cleared: int
    def __init__(self, num_cleared: _Optional[int] = ...) -> None: ...
