from triptych.common.v1 import output_pb2 as _output_pb2
from triptych.common.v1 import sampling_pb2 as _sampling_pb2
from triptych.common.v1 import tensor_pb2 as _tensor_pb2
from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "token_ids", "embeds", "sampling", "request_id", "priority", "cache_salt", "session_id", "job_id", "is_last_step", "adapter", "data_parallel_rank", "media", "truncate_prompt_tokens", "add_special_tokens", "return_prompt_token_ids", "orphan_grace_ms", "return_hidden_states", "return_routed_experts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    RETURN_HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    token_ids: TokenIds
    embeds: PromptEmbeds
    sampling: _sampling_pb2.SamplingParams
    request_id: str
    priority: int
    cache_salt: str
    session_id: str
    job_id: str
    is_last_step: bool
    adapter: str
    data_parallel_rank: int
    media: _containers.RepeatedCompositeFieldContainer[Media]
    truncate_prompt_tokens: int
    add_special_tokens: bool
    return_prompt_token_ids: bool
    orphan_grace_ms: int
    return_hidden_states: bool
    return_routed_experts: bool
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., embeds: _Optional[_Union[PromptEmbeds, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., session_id: _Optional[str] = ..., job_id: _Optional[str] = ..., is_last_step: _Optional[bool] = ..., adapter: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., media: _Optional[_Iterable[_Union[Media, _Mapping]]] = ..., truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ..., return_prompt_token_ids: _Optional[bool] = ..., orphan_grace_ms: _Optional[int] = ..., return_hidden_states: _Optional[bool] = ..., return_routed_experts: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptEmbeds(_message.Message):
    __slots__ = ("embeds", "token_ids", "is_token")
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    embeds: _tensor_pb2.Tensor
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_token: bytes
    def __init__(self, embeds: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., is_token: _Optional[bytes] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("mime_type", "data", "url", "blob", "uuid")
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    mime_type: str
    data: bytes
    url: str
    blob: _tensor_pb2.BlobReference
    uuid: str
    def __init__(self, mime_type: _Optional[str] = ..., data: _Optional[bytes] = ..., url: _Optional[str] = ..., blob: _Optional[_Union[_tensor_pb2.BlobReference, _Mapping]] = ..., uuid: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("position", "started", "delta", "finished")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    position: int
    started: Started
    delta: Delta
    finished: Finished
    def __init__(self, position: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "num_prompt_tokens", "num_cached_tokens", "prompt_token_ids", "prompt_logprobs", "resume_token", "model", "fingerprint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _output_pb2.Logprobs
    resume_token: str
    model: str
    fingerprint: str
    def __init__(self, request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ..., resume_token: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("output_index", "text", "token_ids", "logprobs")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _output_pb2.Logprobs
    def __init__(self, output_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("output_index", "reason", "stop_match", "usage", "cumulative_logprob", "error_message", "stats", "is_incomplete", "error_fields", "forward_outputs")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    IS_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    reason: _output_pb2.FinishReason
    stop_match: _output_pb2.StopMatch
    usage: _output_pb2.Usage
    cumulative_logprob: float
    error_message: str
    stats: _output_pb2.OutputStats
    is_incomplete: bool
    error_fields: _containers.RepeatedScalarFieldContainer[str]
    forward_outputs: ForwardOutputs
    def __init__(self, output_index: _Optional[int] = ..., reason: _Optional[_Union[_output_pb2.FinishReason, str]] = ..., stop_match: _Optional[_Union[_output_pb2.StopMatch, _Mapping]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ..., error_message: _Optional[str] = ..., stats: _Optional[_Union[_output_pb2.OutputStats, _Mapping]] = ..., is_incomplete: _Optional[bool] = ..., error_fields: _Optional[_Iterable[str]] = ..., forward_outputs: _Optional[_Union[ForwardOutputs, _Mapping]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("output_index", "text", "token_ids", "logprobs", "reason", "stop_match", "cumulative_logprob", "error_message", "stats", "is_incomplete", "error_fields", "forward_outputs")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCH_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    IS_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _output_pb2.Logprobs
    reason: _output_pb2.FinishReason
    stop_match: _output_pb2.StopMatch
    cumulative_logprob: float
    error_message: str
    stats: _output_pb2.OutputStats
    is_incomplete: bool
    error_fields: _containers.RepeatedScalarFieldContainer[str]
    forward_outputs: ForwardOutputs
    def __init__(self, output_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ..., reason: _Optional[_Union[_output_pb2.FinishReason, str]] = ..., stop_match: _Optional[_Union[_output_pb2.StopMatch, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ..., error_message: _Optional[str] = ..., stats: _Optional[_Union[_output_pb2.OutputStats, _Mapping]] = ..., is_incomplete: _Optional[bool] = ..., error_fields: _Optional[_Iterable[str]] = ..., forward_outputs: _Optional[_Union[ForwardOutputs, _Mapping]] = ...) -> None: ...

class ForwardOutputs(_message.Message):
    __slots__ = ("first_position", "hidden_states", "routed_experts")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    hidden_states: _tensor_pb2.Tensor
    routed_experts: _tensor_pb2.Tensor
    def __init__(self, first_position: _Optional[int] = ..., hidden_states: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
