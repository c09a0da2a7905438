from triptych.common.v1 import output_pb2 as _output_pb2
from triptych.common.v1 import tensor_pb2 as _tensor_pb2
from triptych.engine.v1 import add_pb2 as _add_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_EVENT_KIND_UNSPECIFIED: _ClassVar[StepEventKind]
    STEP_EVENT_KIND_QUEUED: _ClassVar[StepEventKind]
    STEP_EVENT_KIND_SCHEDULED: _ClassVar[StepEventKind]
    STEP_EVENT_KIND_PREEMPTED: _ClassVar[StepEventKind]
    STEP_EVENT_KIND_RESUMED: _ClassVar[StepEventKind]
STEP_EVENT_KIND_UNSPECIFIED: StepEventKind
STEP_EVENT_KIND_QUEUED: StepEventKind
STEP_EVENT_KIND_SCHEDULED: StepEventKind
STEP_EVENT_KIND_PREEMPTED: StepEventKind
STEP_EVENT_KIND_RESUMED: StepEventKind

class Step(_message.Message):
    __slots__ = ("step_number", "handles", "num_tokens", "num_tokens_wide", "token_ids", "sampled_logprobs", "sampled_ranks", "top_logprobs", "finished", "first", "events", "extras", "parts", "age_us")
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_WIDE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    step_number: int
    handles: bytes
    num_tokens: bytes
    num_tokens_wide: bytes
    token_ids: bytes
    sampled_logprobs: bytes
    sampled_ranks: bytes
    top_logprobs: StepTopLogprobs
    finished: _containers.RepeatedCompositeFieldContainer[StepFinished]
    first: _containers.RepeatedCompositeFieldContainer[StepFirst]
    events: _containers.RepeatedCompositeFieldContainer[StepEvent]
    extras: _containers.RepeatedCompositeFieldContainer[StepExtra]
    parts: _containers.RepeatedCompositeFieldContainer[StepParts]
    age_us: int
    def __init__(self, step_number: _Optional[int] = ..., handles: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_tokens_wide: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., sampled_logprobs: _Optional[bytes] = ..., sampled_ranks: _Optional[bytes] = ..., top_logprobs: _Optional[_Union[StepTopLogprobs, _Mapping]] = ..., finished: _Optional[_Iterable[_Union[StepFinished, _Mapping]]] = ..., first: _Optional[_Iterable[_Union[StepFirst, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[StepEvent, _Mapping]]] = ..., extras: _Optional[_Iterable[_Union[StepExtra, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[StepParts, _Mapping]]] = ..., age_us: _Optional[int] = ...) -> None: ...

class StepParts(_message.Message):
    __slots__ = ("row", "num_tokens")
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    row: int
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row: _Optional[int] = ..., num_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class StepTopLogprobs(_message.Message):
    __slots__ = ("k", "token_ids", "logprobs")
    K_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    k: int
    token_ids: bytes
    logprobs: bytes
    def __init__(self, k: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class StepFinished(_message.Message):
    __slots__ = ("row", "reason", "stop_token_id", "eos_token_id", "message", "code", "details", "drafts", "error_fields", "turn_ended")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELDS_FIELD_NUMBER: _ClassVar[int]
    TURN_ENDED_FIELD_NUMBER: _ClassVar[int]
    row: int
    reason: _output_pb2.FinishReason
    stop_token_id: int
    eos_token_id: int
    message: str
    code: int
    details: bytes
    drafts: DraftUse
    error_fields: _containers.RepeatedScalarFieldContainer[str]
    turn_ended: bool
    def __init__(self, row: _Optional[int] = ..., reason: _Optional[_Union[_output_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., eos_token_id: _Optional[int] = ..., message: _Optional[str] = ..., code: _Optional[int] = ..., details: _Optional[bytes] = ..., drafts: _Optional[_Union[DraftUse, _Mapping]] = ..., error_fields: _Optional[_Iterable[str]] = ..., turn_ended: _Optional[bool] = ...) -> None: ...

class DraftUse(_message.Message):
    __slots__ = ("num_proposed", "num_accepted")
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    num_proposed: int
    num_accepted: int
    def __init__(self, num_proposed: _Optional[int] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class StepFirst(_message.Message):
    __slots__ = ("row", "num_cached_tokens", "prefill_stats")
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STATS_FIELD_NUMBER: _ClassVar[int]
    row: int
    num_cached_tokens: int
    prefill_stats: PrefillStats
    def __init__(self, row: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., prefill_stats: _Optional[_Union[PrefillStats, _Mapping]] = ...) -> None: ...

class PrefillStats(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_computed_tokens", "num_external_tokens", "num_chunks", "queue_us", "prefill_us")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_external_tokens: int
    num_chunks: int
    queue_us: int
    prefill_us: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_external_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ..., queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ...) -> None: ...

class StepEvent(_message.Message):
    __slots__ = ("row", "kind", "age_us")
    ROW_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    row: int
    kind: StepEventKind
    age_us: int
    def __init__(self, row: _Optional[int] = ..., kind: _Optional[_Union[StepEventKind, str]] = ..., age_us: _Optional[int] = ...) -> None: ...

class StepExtra(_message.Message):
    __slots__ = ("row", "prompt_logprobs", "pooling_output", "kv_transfer", "hidden_states", "routed_experts", "nan_count", "first_position")
    ROW_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    row: int
    prompt_logprobs: PromptLogprobs
    pooling_output: _tensor_pb2.Tensor
    kv_transfer: _add_pb2.KvTransfer
    hidden_states: _tensor_pb2.Tensor
    routed_experts: _tensor_pb2.Tensor
    nan_count: int
    first_position: int
    def __init__(self, row: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., pooling_output: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., kv_transfer: _Optional[_Union[_add_pb2.KvTransfer, _Mapping]] = ..., hidden_states: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., nan_count: _Optional[int] = ..., first_position: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs", "ranks", "top")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: bytes
    ranks: bytes
    top: StepTopLogprobs
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top: _Optional[_Union[StepTopLogprobs, _Mapping]] = ...) -> None: ...
