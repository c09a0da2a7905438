from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_LOADING: _ClassVar[MemberState]
    MEMBER_STATE_READY: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_FAILED: _ClassVar[MemberState]
    MEMBER_STATE_UNREPORTED: _ClassVar[MemberState]
    MEMBER_STATE_GONE: _ClassVar[MemberState]
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_LOADING: MemberState
MEMBER_STATE_READY: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_FAILED: MemberState
MEMBER_STATE_UNREPORTED: MemberState
MEMBER_STATE_GONE: MemberState

class EngineRegistration(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "dp_group", "dp_rank", "dp_size", "endpoint", "fingerprint", "model_name", "capacity", "labels", "lockstep", "parallel_config_hash", "wave", "host", "store_port", "highest_coordinator_epoch")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DP_GROUP_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LOCKSTEP_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    dp_group: str
    dp_rank: int
    dp_size: int
    endpoint: str
    fingerprint: str
    model_name: str
    capacity: EngineCapacity
    labels: _containers.RepeatedCompositeFieldContainer[Label]
    lockstep: bool
    parallel_config_hash: str
    wave: int
    host: str
    store_port: int
    highest_coordinator_epoch: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., dp_group: _Optional[str] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., endpoint: _Optional[str] = ..., fingerprint: _Optional[str] = ..., model_name: _Optional[str] = ..., capacity: _Optional[_Union[EngineCapacity, _Mapping]] = ..., labels: _Optional[_Iterable[_Union[Label, _Mapping]]] = ..., lockstep: _Optional[bool] = ..., parallel_config_hash: _Optional[str] = ..., wave: _Optional[int] = ..., host: _Optional[str] = ..., store_port: _Optional[int] = ..., highest_coordinator_epoch: _Optional[int] = ...) -> None: ...

class EngineCapacity(_message.Message):
    __slots__ = ("num_kv_blocks", "block_size", "max_num_seqs", "max_model_len")
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    def __init__(self, num_kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "step_number", "num_running", "num_waiting", "num_waiting_tokens", "num_used_blocks", "num_total_blocks")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    step_number: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_total_blocks: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., step_number: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ...) -> None: ...

class EngineMember(_message.Message):
    __slots__ = ("registration", "state", "load")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    registration: EngineRegistration
    state: MemberState
    load: EngineLoad
    def __init__(self, registration: _Optional[_Union[EngineRegistration, _Mapping]] = ..., state: _Optional[_Union[MemberState, str]] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ...) -> None: ...

class WaveState(_message.Message):
    __slots__ = ("dp_group", "wave", "engines_running", "generation")
    DP_GROUP_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_RUNNING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    dp_group: str
    wave: int
    engines_running: bool
    generation: int
    def __init__(self, dp_group: _Optional[str] = ..., wave: _Optional[int] = ..., engines_running: _Optional[bool] = ..., generation: _Optional[int] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("version", "engines", "waves", "coordinator_epoch", "frontends", "lease_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    version: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineMember]
    waves: _containers.RepeatedCompositeFieldContainer[WaveState]
    coordinator_epoch: int
    frontends: _containers.RepeatedCompositeFieldContainer[FrontendMember]
    lease_ms: int
    def __init__(self, version: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineMember, _Mapping]]] = ..., waves: _Optional[_Iterable[_Union[WaveState, _Mapping]]] = ..., coordinator_epoch: _Optional[int] = ..., frontends: _Optional[_Iterable[_Union[FrontendMember, _Mapping]]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class FrontendMember(_message.Message):
    __slots__ = ("frontend_id", "endpoint", "num_in_flight")
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    endpoint: str
    num_in_flight: int
    def __init__(self, frontend_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., num_in_flight: _Optional[int] = ...) -> None: ...
