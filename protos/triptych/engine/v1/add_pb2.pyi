from triptych.common.v1 import sampling_pb2 as _sampling_pb2
from triptych.common.v1 import tensor_pb2 as _tensor_pb2
from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MediaModality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_MODALITY_UNSPECIFIED: _ClassVar[MediaModality]
    MEDIA_MODALITY_IMAGE: _ClassVar[MediaModality]
    MEDIA_MODALITY_AUDIO: _ClassVar[MediaModality]
    MEDIA_MODALITY_VIDEO: _ClassVar[MediaModality]

class KvTransferRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TRANSFER_ROLE_UNSPECIFIED: _ClassVar[KvTransferRole]
    KV_TRANSFER_ROLE_PRODUCER: _ClassVar[KvTransferRole]
    KV_TRANSFER_ROLE_CONSUMER: _ClassVar[KvTransferRole]
MEDIA_MODALITY_UNSPECIFIED: MediaModality
MEDIA_MODALITY_IMAGE: MediaModality
MEDIA_MODALITY_AUDIO: MediaModality
MEDIA_MODALITY_VIDEO: MediaModality
KV_TRANSFER_ROLE_UNSPECIFIED: KvTransferRole
KV_TRANSFER_ROLE_PRODUCER: KvTransferRole
KV_TRANSFER_ROLE_CONSUMER: KvTransferRole

class Add(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AddEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AddEntry, _Mapping]]] = ...) -> None: ...

class AddEntry(_message.Message):
    __slots__ = ("handle", "request_id", "external_request_id", "group_id", "group_index", "attempt", "prompt_token_ids", "output_token_ids", "prompt_embeds", "is_token", "sampling", "pooling", "request_seed", "priority", "age_ms", "remaining_ms", "cache_salt", "tenant", "adapter", "media", "job_id", "is_last_step", "tool_name", "resumable", "data_parallel_rank", "reasoning_ended", "reasoning_parser", "reasoning_options", "kv_transfer", "trace_context", "skip_reading_prefix_cache", "stream_interval", "bad_words", "orphan_grace_ms", "resume_state", "account", "weight", "adapter_digest", "second_text_start", "return_hidden_states", "return_routed_experts", "segment")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    IS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SEED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    REASONING_ENDED_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    RESUME_STATE_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_START_FIELD_NUMBER: _ClassVar[int]
    RETURN_HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    external_request_id: str
    group_id: str
    group_index: int
    attempt: int
    prompt_token_ids: bytes
    output_token_ids: bytes
    prompt_embeds: _tensor_pb2.Tensor
    is_token: bytes
    sampling: _sampling_pb2.SamplingParams
    pooling: _sampling_pb2.PoolingParams
    request_seed: int
    priority: int
    age_ms: int
    remaining_ms: int
    cache_salt: str
    tenant: str
    adapter: str
    media: _containers.RepeatedCompositeFieldContainer[MediaItem]
    job_id: str
    is_last_step: bool
    tool_name: str
    resumable: bool
    data_parallel_rank: int
    reasoning_ended: bool
    reasoning_parser: str
    reasoning_options: ReasoningOptions
    kv_transfer: KvTransfer
    trace_context: TraceContext
    skip_reading_prefix_cache: bool
    stream_interval: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    orphan_grace_ms: int
    resume_state: bytes
    account: str
    weight: int
    adapter_digest: str
    second_text_start: int
    return_hidden_states: bool
    return_routed_experts: bool
    segment: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., external_request_id: _Optional[str] = ..., group_id: _Optional[str] = ..., group_index: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., output_token_ids: _Optional[bytes] = ..., prompt_embeds: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., is_token: _Optional[bytes] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., pooling: _Optional[_Union[_sampling_pb2.PoolingParams, _Mapping]] = ..., request_seed: _Optional[int] = ..., priority: _Optional[int] = ..., age_ms: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., media: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., job_id: _Optional[str] = ..., is_last_step: _Optional[bool] = ..., tool_name: _Optional[str] = ..., resumable: _Optional[bool] = ..., data_parallel_rank: _Optional[int] = ..., reasoning_ended: _Optional[bool] = ..., reasoning_parser: _Optional[str] = ..., reasoning_options: _Optional[_Union[ReasoningOptions, _Mapping]] = ..., kv_transfer: _Optional[_Union[KvTransfer, _Mapping]] = ..., trace_context: _Optional[_Union[TraceContext, _Mapping]] = ..., skip_reading_prefix_cache: _Optional[bool] = ..., stream_interval: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., orphan_grace_ms: _Optional[int] = ..., resume_state: _Optional[bytes] = ..., account: _Optional[str] = ..., weight: _Optional[int] = ..., adapter_digest: _Optional[str] = ..., second_text_start: _Optional[int] = ..., return_hidden_states: _Optional[bool] = ..., return_routed_experts: _Optional[bool] = ..., segment: _Optional[int] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("traceparent", "tracestate")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    tracestate: str
    def __init__(self, traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class ReasoningOptions(_message.Message):
    __slots__ = ("start_token_ids", "end_token_ids")
    START_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    start_token_ids: _containers.RepeatedScalarFieldContainer[int]
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start_token_ids: _Optional[_Iterable[int]] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MediaItem(_message.Message):
    __slots__ = ("modality", "hash", "placeholder_offset", "placeholder_length", "is_embed", "tensors")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IS_EMBED_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    modality: MediaModality
    hash: str
    placeholder_offset: int
    placeholder_length: int
    is_embed: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    def __init__(self, modality: _Optional[_Union[MediaModality, str]] = ..., hash: _Optional[str] = ..., placeholder_offset: _Optional[int] = ..., placeholder_length: _Optional[int] = ..., is_embed: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ...) -> None: ...

class NamedTensor(_message.Message):
    __slots__ = ("name", "tensor")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensor: _tensor_pb2.Tensor
    def __init__(self, name: _Optional[str] = ..., tensor: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ...) -> None: ...

class KvTransfer(_message.Message):
    __slots__ = ("role", "peer_endpoint", "peer_request_id", "first_block", "num_blocks")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PEER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PEER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    role: KvTransferRole
    peer_endpoint: str
    peer_request_id: str
    first_block: int
    num_blocks: int
    def __init__(self, role: _Optional[_Union[KvTransferRole, str]] = ..., peer_endpoint: _Optional[str] = ..., peer_request_id: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...
