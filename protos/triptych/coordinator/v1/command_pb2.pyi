from triptych.common.v1 import error_pb2 as _error_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScalingNoticeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALING_NOTICE_KIND_UNSPECIFIED: _ClassVar[ScalingNoticeKind]
    SCALING_NOTICE_KIND_WEIGHTS_READY: _ClassVar[ScalingNoticeKind]
SCALING_NOTICE_KIND_UNSPECIFIED: ScalingNoticeKind
SCALING_NOTICE_KIND_WEIGHTS_READY: ScalingNoticeKind

class Command(_message.Message):
    __slots__ = ("command_id", "start_wave", "prepare_scale", "commit_scale", "abort_scale", "drain", "update_interval")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    START_WAVE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_SCALE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SCALE_FIELD_NUMBER: _ClassVar[int]
    ABORT_SCALE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    UPDATE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    start_wave: StartWave
    prepare_scale: PrepareScale
    commit_scale: CommitScale
    abort_scale: AbortScale
    drain: DrainCommand
    update_interval: UpdateInterval
    def __init__(self, command_id: _Optional[int] = ..., start_wave: _Optional[_Union[StartWave, _Mapping]] = ..., prepare_scale: _Optional[_Union[PrepareScale, _Mapping]] = ..., commit_scale: _Optional[_Union[CommitScale, _Mapping]] = ..., abort_scale: _Optional[_Union[AbortScale, _Mapping]] = ..., drain: _Optional[_Union[DrainCommand, _Mapping]] = ..., update_interval: _Optional[_Union[UpdateInterval, _Mapping]] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("command_id", "ack", "nack")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    ack: CommandAck
    nack: _error_pb2.ErrorStatus
    def __init__(self, command_id: _Optional[int] = ..., ack: _Optional[_Union[CommandAck, _Mapping]] = ..., nack: _Optional[_Union[_error_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class CommandAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartWave(_message.Message):
    __slots__ = ("wave", "exclude")
    WAVE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    wave: int
    exclude: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, wave: _Optional[int] = ..., exclude: _Optional[_Iterable[str]] = ...) -> None: ...

class PrepareScale(_message.Message):
    __slots__ = ("generation", "new_size", "rank", "leave", "rendezvous")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NEW_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    new_size: int
    rank: int
    leave: bool
    rendezvous: Rendezvous
    def __init__(self, generation: _Optional[int] = ..., new_size: _Optional[int] = ..., rank: _Optional[int] = ..., leave: _Optional[bool] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ...) -> None: ...

class CommitScale(_message.Message):
    __slots__ = ("generation", "lost_generation")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    lost_generation: int
    def __init__(self, generation: _Optional[int] = ..., lost_generation: _Optional[int] = ...) -> None: ...

class AbortScale(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class DrainCommand(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class UpdateInterval(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("master_address", "store_port", "dp_size", "generation", "parallel_config_hash")
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    master_address: str
    store_port: int
    dp_size: int
    generation: int
    parallel_config_hash: str
    def __init__(self, master_address: _Optional[str] = ..., store_port: _Optional[int] = ..., dp_size: _Optional[int] = ..., generation: _Optional[int] = ..., parallel_config_hash: _Optional[str] = ...) -> None: ...

class ScalingNotice(_message.Message):
    __slots__ = ("kind",)
    KIND_FIELD_NUMBER: _ClassVar[int]
    kind: ScalingNoticeKind
    def __init__(self, kind: _Optional[_Union[ScalingNoticeKind, str]] = ...) -> None: ...
