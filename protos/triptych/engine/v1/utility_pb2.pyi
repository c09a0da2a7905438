from triptych.common.v1 import error_pb2 as _error_pb2
from triptych.engine.v1 import session_pb2 as _session_pb2
from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode

class UtilityCall(_message.Message):
    __slots__ = ("call_id", "timeout_ms", "get_supported_tasks", "pause", "resume", "is_paused", "sleep", "wake", "is_sleeping", "reset_prefix_cache", "reset_multimodal_cache", "reset_encoder_cache", "add_adapter", "remove_adapter", "list_adapters", "pin_adapter", "profile", "execute_dummy_batch", "collective", "get_weight_version", "set_weight_version", "update_weights", "get_config", "get_statistics", "save_sharded_state", "flush_pins", "unpin_adapter", "pin_blocks", "release_pins", "list_pins")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    GET_SUPPORTED_TASKS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    IS_SLEEPING_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    RESET_MULTIMODAL_CACHE_FIELD_NUMBER: _ClassVar[int]
    RESET_ENCODER_CACHE_FIELD_NUMBER: _ClassVar[int]
    ADD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REMOVE_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LIST_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PIN_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_DUMMY_BATCH_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    GET_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SET_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GET_CONFIG_FIELD_NUMBER: _ClassVar[int]
    GET_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    SAVE_SHARDED_STATE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_PINS_FIELD_NUMBER: _ClassVar[int]
    UNPIN_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_PINS_FIELD_NUMBER: _ClassVar[int]
    LIST_PINS_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    timeout_ms: int
    get_supported_tasks: GetSupportedTasksCall
    pause: PauseCall
    resume: ResumeCall
    is_paused: IsPausedCall
    sleep: SleepCall
    wake: WakeCall
    is_sleeping: IsSleepingCall
    reset_prefix_cache: ResetPrefixCacheCall
    reset_multimodal_cache: ResetMultimodalCacheCall
    reset_encoder_cache: ResetEncoderCacheCall
    add_adapter: AddAdapterCall
    remove_adapter: RemoveAdapterCall
    list_adapters: ListAdaptersCall
    pin_adapter: PinAdapterCall
    profile: ProfileCall
    execute_dummy_batch: ExecuteDummyBatchCall
    collective: CollectiveCall
    get_weight_version: GetWeightVersionCall
    set_weight_version: SetWeightVersionCall
    update_weights: UpdateWeightsCall
    get_config: GetConfigCall
    get_statistics: GetStatisticsCall
    save_sharded_state: SaveShardedStateCall
    flush_pins: FlushPinsCall
    unpin_adapter: UnpinAdapterCall
    pin_blocks: PinBlocksCall
    release_pins: ReleasePinsCall
    list_pins: ListPinsCall
    def __init__(self, call_id: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., get_supported_tasks: _Optional[_Union[GetSupportedTasksCall, _Mapping]] = ..., pause: _Optional[_Union[PauseCall, _Mapping]] = ..., resume: _Optional[_Union[ResumeCall, _Mapping]] = ..., is_paused: _Optional[_Union[IsPausedCall, _Mapping]] = ..., sleep: _Optional[_Union[SleepCall, _Mapping]] = ..., wake: _Optional[_Union[WakeCall, _Mapping]] = ..., is_sleeping: _Optional[_Union[IsSleepingCall, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[ResetPrefixCacheCall, _Mapping]] = ..., reset_multimodal_cache: _Optional[_Union[ResetMultimodalCacheCall, _Mapping]] = ..., reset_encoder_cache: _Optional[_Union[ResetEncoderCacheCall, _Mapping]] = ..., add_adapter: _Optional[_Union[AddAdapterCall, _Mapping]] = ..., remove_adapter: _Optional[_Union[RemoveAdapterCall, _Mapping]] = ..., list_adapters: _Optional[_Union[ListAdaptersCall, _Mapping]] = ..., pin_adapter: _Optional[_Union[PinAdapterCall, _Mapping]] = ..., profile: _Optional[_Union[ProfileCall, _Mapping]] = ..., execute_dummy_batch: _Optional[_Union[ExecuteDummyBatchCall, _Mapping]] = ..., collective: _Optional[_Union[CollectiveCall, _Mapping]] = ..., get_weight_version: _Optional[_Union[GetWeightVersionCall, _Mapping]] = ..., set_weight_version: _Optional[_Union[SetWeightVersionCall, _Mapping]] = ..., update_weights: _Optional[_Union[UpdateWeightsCall, _Mapping]] = ..., get_config: _Optional[_Union[GetConfigCall, _Mapping]] = ..., get_statistics: _Optional[_Union[GetStatisticsCall, _Mapping]] = ..., save_sharded_state: _Optional[_Union[SaveShardedStateCall, _Mapping]] = ..., flush_pins: _Optional[_Union[FlushPinsCall, _Mapping]] = ..., unpin_adapter: _Optional[_Union[UnpinAdapterCall, _Mapping]] = ..., pin_blocks: _Optional[_Union[PinBlocksCall, _Mapping]] = ..., release_pins: _Optional[_Union[ReleasePinsCall, _Mapping]] = ..., list_pins: _Optional[_Union[ListPinsCall, _Mapping]] = ...) -> None: ...

class UtilityResult(_message.Message):
    __slots__ = ("call_id", "failure", "done", "supported_tasks", "is_paused", "is_sleeping", "adapters", "weight_version", "config", "statistics", "collective", "reset_prefix_cache", "pins", "num_released_blocks")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_TASKS_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    IS_SLEEPING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    failure: _error_pb2.ErrorStatus
    done: UtilityDone
    supported_tasks: SupportedTasks
    is_paused: bool
    is_sleeping: bool
    adapters: LoadedAdapters
    weight_version: str
    config: EngineOptions
    statistics: _session_pb2.Stats
    collective: CollectiveResult
    reset_prefix_cache: bool
    pins: Pins
    num_released_blocks: int
    def __init__(self, call_id: _Optional[int] = ..., failure: _Optional[_Union[_error_pb2.ErrorStatus, _Mapping]] = ..., done: _Optional[_Union[UtilityDone, _Mapping]] = ..., supported_tasks: _Optional[_Union[SupportedTasks, _Mapping]] = ..., is_paused: _Optional[bool] = ..., is_sleeping: _Optional[bool] = ..., adapters: _Optional[_Union[LoadedAdapters, _Mapping]] = ..., weight_version: _Optional[str] = ..., config: _Optional[_Union[EngineOptions, _Mapping]] = ..., statistics: _Optional[_Union[_session_pb2.Stats, _Mapping]] = ..., collective: _Optional[_Union[CollectiveResult, _Mapping]] = ..., reset_prefix_cache: _Optional[bool] = ..., pins: _Optional[_Union[Pins, _Mapping]] = ..., num_released_blocks: _Optional[int] = ...) -> None: ...

class UtilityDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSupportedTasksCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseCall(_message.Message):
    __slots__ = ("mode", "clear_cache")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    clear_cache: bool
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ..., clear_cache: _Optional[bool] = ...) -> None: ...

class ResumeCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IsPausedCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepCall(_message.Message):
    __slots__ = ("level", "mode")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    level: int
    mode: PauseMode
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class WakeCall(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class IsSleepingCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheCall(_message.Message):
    __slots__ = ("reset_running", "reset_connector")
    RESET_RUNNING_FIELD_NUMBER: _ClassVar[int]
    RESET_CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    reset_running: bool
    reset_connector: bool
    def __init__(self, reset_running: _Optional[bool] = ..., reset_connector: _Optional[bool] = ...) -> None: ...

class ResetMultimodalCacheCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetEncoderCacheCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddAdapterCall(_message.Message):
    __slots__ = ("name", "path", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: _Optional[bool] = ...) -> None: ...

class RemoveAdapterCall(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListAdaptersCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinAdapterCall(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinAdapterCall(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ProfileCall(_message.Message):
    __slots__ = ("start", "prefix")
    START_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    start: bool
    prefix: str
    def __init__(self, start: _Optional[bool] = ..., prefix: _Optional[str] = ...) -> None: ...

class ExecuteDummyBatchCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CollectiveCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: _containers.RepeatedCompositeFieldContainer[CollectiveArgument]
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[_Iterable[_Union[CollectiveArgument, _Mapping]]] = ...) -> None: ...

class CollectiveArgument(_message.Message):
    __slots__ = ("name", "text", "integer", "number", "flag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    integer: int
    number: float
    flag: bool
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., integer: _Optional[int] = ..., number: _Optional[float] = ..., flag: _Optional[bool] = ...) -> None: ...

class CollectiveResult(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ranks: _Optional[_Iterable[str]] = ...) -> None: ...

class GetWeightVersionCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetWeightVersionCall(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class UpdateWeightsCall(_message.Message):
    __slots__ = ("path", "names", "version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    names: _containers.RepeatedScalarFieldContainer[str]
    version: str
    def __init__(self, path: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ...) -> None: ...

class GetConfigCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatisticsCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveShardedStateCall(_message.Message):
    __slots__ = ("path", "pattern", "max_size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    MAX_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    pattern: str
    max_size_bytes: int
    def __init__(self, path: _Optional[str] = ..., pattern: _Optional[str] = ..., max_size_bytes: _Optional[int] = ...) -> None: ...

class FlushPinsCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinBlocksCall(_message.Message):
    __slots__ = ("token_ids", "ttl_s", "job_id", "cache_salt", "tenant")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ttl_s: float
    job_id: str
    cache_salt: str
    tenant: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., ttl_s: _Optional[float] = ..., job_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReleasePinsCall(_message.Message):
    __slots__ = ("pin_id", "job_id")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    job_id: str
    def __init__(self, pin_id: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class ListPinsCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pins(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinnedBlocks]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinnedBlocks, _Mapping]]] = ...) -> None: ...

class PinnedBlocks(_message.Message):
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

class SupportedTasks(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tasks: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadedAdapters(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[LoadedAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[LoadedAdapter, _Mapping]]] = ...) -> None: ...

class LoadedAdapter(_message.Message):
    __slots__ = ("name", "rank", "pinned", "digest", "in_slot")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IN_SLOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    pinned: bool
    digest: str
    in_slot: bool
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., pinned: _Optional[bool] = ..., digest: _Optional[str] = ..., in_slot: _Optional[bool] = ...) -> None: ...

class EngineOptions(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedCompositeFieldContainer[EngineOption]
    def __init__(self, options: _Optional[_Iterable[_Union[EngineOption, _Mapping]]] = ...) -> None: ...

class EngineOption(_message.Message):
    __slots__ = ("name", "value", "origin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    origin: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., origin: _Optional[str] = ...) -> None: ...
