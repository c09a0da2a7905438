from triptych.common.v1 import error_pb2 as _error_pb2
from triptych.engine.v1 import add_pb2 as _add_pb2
from triptych.engine.v1 import kv_pb2 as _kv_pb2
from triptych.engine.v1 import session_pb2 as _session_pb2
from triptych.engine.v1 import step_pb2 as _step_pb2
from triptych.engine.v1 import utility_pb2 as _utility_pb2
from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_REASON_UNSPECIFIED: _ClassVar[AbortReason]
    ABORT_REASON_CLIENT: _ClassVar[AbortReason]
    ABORT_REASON_DEADLINE: _ClassVar[AbortReason]
    ABORT_REASON_STOP_STRING: _ClassVar[AbortReason]
    ABORT_REASON_SLOW_CONSUMER: _ClassVar[AbortReason]
    ABORT_REASON_MIGRATED: _ClassVar[AbortReason]
ABORT_REASON_UNSPECIFIED: AbortReason
ABORT_REASON_CLIENT: AbortReason
ABORT_REASON_DEADLINE: AbortReason
ABORT_REASON_STOP_STRING: AbortReason
ABORT_REASON_SLOW_CONSUMER: AbortReason
ABORT_REASON_MIGRATED: AbortReason

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "add", "abort", "utility", "ack", "goodbye", "adopt", "host_proof", "finish_hint", "cancel_turn")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    UTILITY_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    HOST_PROOF_FIELD_NUMBER: _ClassVar[int]
    FINISH_HINT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TURN_FIELD_NUMBER: _ClassVar[int]
    hello: _session_pb2.Hello
    add: _add_pb2.Add
    abort: Abort
    utility: _utility_pb2.UtilityCall
    ack: Ack
    goodbye: Goodbye
    adopt: Adopt
    host_proof: _session_pb2.HostProof
    finish_hint: _session_pb2.FinishHint
    cancel_turn: CancelTurn
    def __init__(self, hello: _Optional[_Union[_session_pb2.Hello, _Mapping]] = ..., add: _Optional[_Union[_add_pb2.Add, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., utility: _Optional[_Union[_utility_pb2.UtilityCall, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., host_proof: _Optional[_Union[_session_pb2.HostProof, _Mapping]] = ..., finish_hint: _Optional[_Union[_session_pb2.FinishHint, _Mapping]] = ..., cancel_turn: _Optional[_Union[CancelTurn, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("seq", "hello_ack", "ready", "step", "add_rejected", "utility_result", "stats", "draining", "dead", "heartbeat", "already_finished", "adopted")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HELLO_ACK_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ADD_REJECTED_FIELD_NUMBER: _ClassVar[int]
    UTILITY_RESULT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ALREADY_FINISHED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hello_ack: _session_pb2.HelloAck
    ready: _session_pb2.Ready
    step: _step_pb2.Step
    add_rejected: AddRejected
    utility_result: _utility_pb2.UtilityResult
    stats: _session_pb2.Stats
    draining: Draining
    dead: Dead
    heartbeat: _session_pb2.Heartbeat
    already_finished: AlreadyFinished
    adopted: Adopted
    def __init__(self, seq: _Optional[int] = ..., hello_ack: _Optional[_Union[_session_pb2.HelloAck, _Mapping]] = ..., ready: _Optional[_Union[_session_pb2.Ready, _Mapping]] = ..., step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., add_rejected: _Optional[_Union[AddRejected, _Mapping]] = ..., utility_result: _Optional[_Union[_utility_pb2.UtilityResult, _Mapping]] = ..., stats: _Optional[_Union[_session_pb2.Stats, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., dead: _Optional[_Union[Dead, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., already_finished: _Optional[_Union[AlreadyFinished, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handles", "attempts", "reason")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    reason: AbortReason
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[AbortReason, str]] = ...) -> None: ...

class CancelTurn(_message.Message):
    __slots__ = ("handle", "segment")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    segment: int
    def __init__(self, handle: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("last_seq",)
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    last_seq: int
    def __init__(self, last_seq: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason", "leaves_adoptable")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVES_ADOPTABLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    leaves_adoptable: bool
    def __init__(self, reason: _Optional[str] = ..., leaves_adoptable: _Optional[bool] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AdoptEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AdoptEntry, _Mapping]]] = ...) -> None: ...

class AdoptEntry(_message.Message):
    __slots__ = ("handle", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("handle", "attempt", "prompt_token_ids", "resume_state")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_STATE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    prompt_token_ids: bytes
    resume_state: bytes
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., resume_state: _Optional[bytes] = ...) -> None: ...

class AddRejected(_message.Message):
    __slots__ = ("handle", "attempt", "status", "retry_after_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    status: _error_pb2.ErrorStatus
    retry_after_ms: int
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., status: _Optional[_Union[_error_pb2.ErrorStatus, _Mapping]] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class AlreadyFinished(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("deadline_ms", "reason")
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    reason: str
    def __init__(self, deadline_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Dead(_message.Message):
    __slots__ = ("reason", "exit_code", "handles")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    exit_code: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reason: _Optional[str] = ..., exit_code: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ...) -> None: ...

class GetArtifactsRequest(_message.Message):
    __slots__ = ("kinds", "known_sha256")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SHA256_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[_session_pb2.ArtifactKind]
    known_sha256: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kinds: _Optional[_Iterable[_Union[_session_pb2.ArtifactKind, str]]] = ..., known_sha256: _Optional[_Iterable[str]] = ...) -> None: ...

class GetArtifactsResponse(_message.Message):
    __slots__ = ("artifact", "offset", "chunk")
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    artifact: _session_pb2.Artifact
    offset: int
    chunk: bytes
    def __init__(self, artifact: _Optional[_Union[_session_pb2.Artifact, _Mapping]] = ..., offset: _Optional[int] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class UploadBlobRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: UploadBlobHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[UploadBlobHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class UploadBlobHeader(_message.Message):
    __slots__ = ("sha256", "size_bytes", "ttl_ms")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    ttl_ms: int
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class UploadBlobResponse(_message.Message):
    __slots__ = ("sha256", "ttl_ms")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    ttl_ms: int
    def __init__(self, sha256: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class GetEngineInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineInfoResponse(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "dp_rank", "dp_size", "state", "ready", "load_progress", "version")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    dp_rank: int
    dp_size: int
    state: _session_pb2.EngineState
    ready: _session_pb2.Ready
    load_progress: _session_pb2.LoadProgress
    version: str
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., state: _Optional[_Union[_session_pb2.EngineState, str]] = ..., ready: _Optional[_Union[_session_pb2.Ready, _Mapping]] = ..., load_progress: _Optional[_Union[_session_pb2.LoadProgress, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("state", "stats", "num_sessions")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    state: _session_pb2.EngineState
    stats: _session_pb2.Stats
    num_sessions: int
    def __init__(self, state: _Optional[_Union[_session_pb2.EngineState, str]] = ..., stats: _Optional[_Union[_session_pb2.Stats, _Mapping]] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("cursor",)
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    cursor: _kv_pb2.KvCursor
    def __init__(self, cursor: _Optional[_Union[_kv_pb2.KvCursor, _Mapping]] = ...) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("cursor", "snapshot", "batch")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    cursor: _kv_pb2.KvCursor
    snapshot: _kv_pb2.KvSnapshotChunk
    batch: _kv_pb2.KvEventBatch
    def __init__(self, cursor: _Optional[_Union[_kv_pb2.KvCursor, _Mapping]] = ..., snapshot: _Optional[_Union[_kv_pb2.KvSnapshotChunk, _Mapping]] = ..., batch: _Optional[_Union[_kv_pb2.KvEventBatch, _Mapping]] = ...) -> None: ...
