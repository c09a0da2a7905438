from triptych.common.v1 import error_pb2 as _error_pb2
from triptych.coordinator.v1 import command_pb2 as _command_pb2
from triptych.coordinator.v1 import member_pb2 as _member_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineSessionRequest(_message.Message):
    __slots__ = ("register", "report", "command_result", "goodbye")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_RESULT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    register: _member_pb2.EngineRegistration
    report: EngineReport
    command_result: _command_pb2.CommandResult
    goodbye: EngineGoodbye
    def __init__(self, register: _Optional[_Union[_member_pb2.EngineRegistration, _Mapping]] = ..., report: _Optional[_Union[EngineReport, _Mapping]] = ..., command_result: _Optional[_Union[_command_pb2.CommandResult, _Mapping]] = ..., goodbye: _Optional[_Union[EngineGoodbye, _Mapping]] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("seq", "load", "state", "wave", "step_number", "wave_complete", "start_wave_needed", "scaling_notice", "generation")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAVE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    START_WAVE_NEEDED_FIELD_NUMBER: _ClassVar[int]
    SCALING_NOTICE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    seq: int
    load: _member_pb2.EngineLoad
    state: _member_pb2.MemberState
    wave: int
    step_number: int
    wave_complete: bool
    start_wave_needed: bool
    scaling_notice: _command_pb2.ScalingNotice
    generation: int
    def __init__(self, seq: _Optional[int] = ..., load: _Optional[_Union[_member_pb2.EngineLoad, _Mapping]] = ..., state: _Optional[_Union[_member_pb2.MemberState, str]] = ..., wave: _Optional[int] = ..., step_number: _Optional[int] = ..., wave_complete: _Optional[bool] = ..., start_wave_needed: _Optional[bool] = ..., scaling_notice: _Optional[_Union[_command_pb2.ScalingNotice, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class EngineGoodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class EngineSessionResponse(_message.Message):
    __slots__ = ("registered", "command")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    command: _command_pb2.Command
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., command: _Optional[_Union[_command_pb2.Command, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("lease_ms", "renew_after_ms", "coordinator_epoch")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    RENEW_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    renew_after_ms: int
    coordinator_epoch: int
    def __init__(self, lease_ms: _Optional[int] = ..., renew_after_ms: _Optional[int] = ..., coordinator_epoch: _Optional[int] = ...) -> None: ...

class FrontendSessionRequest(_message.Message):
    __slots__ = ("register", "in_flight", "first_request_while_paused", "ack")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    FIRST_REQUEST_WHILE_PAUSED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    register: FrontendRegistration
    in_flight: FrontendInFlight
    first_request_while_paused: FirstRequestWhilePaused
    ack: FrontendAck
    def __init__(self, register: _Optional[_Union[FrontendRegistration, _Mapping]] = ..., in_flight: _Optional[_Union[FrontendInFlight, _Mapping]] = ..., first_request_while_paused: _Optional[_Union[FirstRequestWhilePaused, _Mapping]] = ..., ack: _Optional[_Union[FrontendAck, _Mapping]] = ...) -> None: ...

class FrontendRegistration(_message.Message):
    __slots__ = ("frontend_id", "frontend_epoch", "endpoint", "known_version", "known_coordinator_epoch")
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    frontend_epoch: int
    endpoint: str
    known_version: int
    known_coordinator_epoch: int
    def __init__(self, frontend_id: _Optional[str] = ..., frontend_epoch: _Optional[int] = ..., endpoint: _Optional[str] = ..., known_version: _Optional[int] = ..., known_coordinator_epoch: _Optional[int] = ...) -> None: ...

class FrontendInFlight(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class FirstRequestWhilePaused(_message.Message):
    __slots__ = ("dp_group", "engine_id", "wave")
    DP_GROUP_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    dp_group: str
    engine_id: str
    wave: int
    def __init__(self, dp_group: _Optional[str] = ..., engine_id: _Optional[str] = ..., wave: _Optional[int] = ...) -> None: ...

class FrontendAck(_message.Message):
    __slots__ = ("nonce", "version", "error")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    version: int
    error: _error_pb2.ErrorStatus
    def __init__(self, nonce: _Optional[int] = ..., version: _Optional[int] = ..., error: _Optional[_Union[_error_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class FrontendSessionResponse(_message.Message):
    __slots__ = ("version", "nonce", "snapshot", "delta")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    version: int
    nonce: int
    snapshot: _member_pb2.Topology
    delta: TopologyDelta
    def __init__(self, version: _Optional[int] = ..., nonce: _Optional[int] = ..., snapshot: _Optional[_Union[_member_pb2.Topology, _Mapping]] = ..., delta: _Optional[_Union[TopologyDelta, _Mapping]] = ...) -> None: ...

class TopologyDelta(_message.Message):
    __slots__ = ("added", "updated", "removed_engine_ids", "loads", "waves")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedCompositeFieldContainer[_member_pb2.EngineMember]
    updated: _containers.RepeatedCompositeFieldContainer[_member_pb2.EngineMember]
    removed_engine_ids: _containers.RepeatedScalarFieldContainer[str]
    loads: _containers.RepeatedCompositeFieldContainer[_member_pb2.EngineLoad]
    waves: _containers.RepeatedCompositeFieldContainer[_member_pb2.WaveState]
    def __init__(self, added: _Optional[_Iterable[_Union[_member_pb2.EngineMember, _Mapping]]] = ..., updated: _Optional[_Iterable[_Union[_member_pb2.EngineMember, _Mapping]]] = ..., removed_engine_ids: _Optional[_Iterable[str]] = ..., loads: _Optional[_Iterable[_Union[_member_pb2.EngineLoad, _Mapping]]] = ..., waves: _Optional[_Iterable[_Union[_member_pb2.WaveState, _Mapping]]] = ...) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTopologyResponse(_message.Message):
    __slots__ = ("topology",)
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    topology: _member_pb2.Topology
    def __init__(self, topology: _Optional[_Union[_member_pb2.Topology, _Mapping]] = ...) -> None: ...
