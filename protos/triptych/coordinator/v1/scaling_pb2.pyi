from triptych.common.v1 import error_pb2 as _error_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OperationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_STATE_UNSPECIFIED: _ClassVar[OperationState]
    OPERATION_STATE_PREPARING: _ClassVar[OperationState]
    OPERATION_STATE_COMMITTING: _ClassVar[OperationState]
    OPERATION_STATE_DONE: _ClassVar[OperationState]
    OPERATION_STATE_FAILED: _ClassVar[OperationState]
    OPERATION_STATE_CANCELLED: _ClassVar[OperationState]
OPERATION_STATE_UNSPECIFIED: OperationState
OPERATION_STATE_PREPARING: OperationState
OPERATION_STATE_COMMITTING: OperationState
OPERATION_STATE_DONE: OperationState
OPERATION_STATE_FAILED: OperationState
OPERATION_STATE_CANCELLED: OperationState

class Operation(_message.Message):
    __slots__ = ("operation_id", "state", "dp_group", "old_size", "new_size", "generation", "num_engines_ready", "error", "age_ms", "num_engines_needed")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DP_GROUP_FIELD_NUMBER: _ClassVar[int]
    OLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NEW_SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_READY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_NEEDED_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    state: OperationState
    dp_group: str
    old_size: int
    new_size: int
    generation: int
    num_engines_ready: int
    error: _error_pb2.ErrorStatus
    age_ms: int
    num_engines_needed: int
    def __init__(self, operation_id: _Optional[str] = ..., state: _Optional[_Union[OperationState, str]] = ..., dp_group: _Optional[str] = ..., old_size: _Optional[int] = ..., new_size: _Optional[int] = ..., generation: _Optional[int] = ..., num_engines_ready: _Optional[int] = ..., error: _Optional[_Union[_error_pb2.ErrorStatus, _Mapping]] = ..., age_ms: _Optional[int] = ..., num_engines_needed: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("dp_group", "new_size", "timeout_ms")
    DP_GROUP_FIELD_NUMBER: _ClassVar[int]
    NEW_SIZE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    dp_group: str
    new_size: int
    timeout_ms: int
    def __init__(self, dp_group: _Optional[str] = ..., new_size: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class GetOperationRequest(_message.Message):
    __slots__ = ("operation_id",)
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    def __init__(self, operation_id: _Optional[str] = ...) -> None: ...

class GetOperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class WatchOperationRequest(_message.Message):
    __slots__ = ("operation_id",)
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    def __init__(self, operation_id: _Optional[str] = ...) -> None: ...

class WatchOperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class ListOperationsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListOperationsResponse(_message.Message):
    __slots__ = ("operations",)
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class CancelOperationRequest(_message.Message):
    __slots__ = ("operation_id",)
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    def __init__(self, operation_id: _Optional[str] = ...) -> None: ...

class CancelOperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ("engine_id", "deadline_ms")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    deadline_ms: int
    def __init__(self, engine_id: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("num_in_flight",)
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    num_in_flight: int
    def __init__(self, num_in_flight: _Optional[int] = ...) -> None: ...

class EvictEngineRequest(_message.Message):
    __slots__ = ("engine_id", "reason")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    reason: str
    def __init__(self, engine_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvictEngineResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class WatchGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchGroupsResponse(_message.Message):
    __slots__ = ("groups", "coordinator_epoch")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupState]
    coordinator_epoch: int
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupState, _Mapping]]] = ..., coordinator_epoch: _Optional[int] = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("dp_group", "size", "wanted_size", "operation_id", "num_kv_blocks")
    DP_GROUP_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WANTED_SIZE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    dp_group: str
    size: int
    wanted_size: int
    operation_id: str
    num_kv_blocks: int
    def __init__(self, dp_group: _Optional[str] = ..., size: _Optional[int] = ..., wanted_size: _Optional[int] = ..., operation_id: _Optional[str] = ..., num_kv_blocks: _Optional[int] = ...) -> None: ...
