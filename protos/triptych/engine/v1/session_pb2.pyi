from triptych.engine.v1 import add_pb2 as _add_pb2
from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_ROLE_UNSPECIFIED: _ClassVar[PeerRole]
    PEER_ROLE_FRONTEND: _ClassVar[PeerRole]
    PEER_ROLE_ADMIN: _ClassVar[PeerRole]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_PAUSED: _ClassVar[EngineState]
    ENGINE_STATE_ASLEEP: _ClassVar[EngineState]
    ENGINE_STATE_FAILED: _ClassVar[EngineState]

class ResumeRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESUME_REFUSAL_UNSPECIFIED: _ClassVar[ResumeRefusal]
    RESUME_REFUSAL_OTHER_EPOCH: _ClassVar[ResumeRefusal]
    RESUME_REFUSAL_NO_SESSION: _ClassVar[ResumeRefusal]
    RESUME_REFUSAL_NOT_KEPT: _ClassVar[ResumeRefusal]
    RESUME_REFUSAL_NEVER_SENT: _ClassVar[ResumeRefusal]

class ArtifactKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARTIFACT_KIND_UNSPECIFIED: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_TOKENIZER: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_TOKENIZER_CONFIG: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_CHAT_TEMPLATE: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_GENERATION_CONFIG: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_CONFIG: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_TOKENIZER_MODEL: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_PREPROCESSOR_CONFIG: _ClassVar[ArtifactKind]
    ARTIFACT_KIND_PROCESSOR_CONFIG: _ClassVar[ArtifactKind]
PEER_ROLE_UNSPECIFIED: PeerRole
PEER_ROLE_FRONTEND: PeerRole
PEER_ROLE_ADMIN: PeerRole
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_PAUSED: EngineState
ENGINE_STATE_ASLEEP: EngineState
ENGINE_STATE_FAILED: EngineState
RESUME_REFUSAL_UNSPECIFIED: ResumeRefusal
RESUME_REFUSAL_OTHER_EPOCH: ResumeRefusal
RESUME_REFUSAL_NO_SESSION: ResumeRefusal
RESUME_REFUSAL_NOT_KEPT: ResumeRefusal
RESUME_REFUSAL_NEVER_SENT: ResumeRefusal
ARTIFACT_KIND_UNSPECIFIED: ArtifactKind
ARTIFACT_KIND_TOKENIZER: ArtifactKind
ARTIFACT_KIND_TOKENIZER_CONFIG: ArtifactKind
ARTIFACT_KIND_CHAT_TEMPLATE: ArtifactKind
ARTIFACT_KIND_GENERATION_CONFIG: ArtifactKind
ARTIFACT_KIND_CONFIG: ArtifactKind
ARTIFACT_KIND_TOKENIZER_MODEL: ArtifactKind
ARTIFACT_KIND_PREPROCESSOR_CONFIG: ArtifactKind
ARTIFACT_KIND_PROCESSOR_CONFIG: ArtifactKind

class Hello(_message.Message):
    __slots__ = ("frontend_id", "session_id", "frontend_epoch", "schema_revision", "min_peer_revision", "features", "role", "resume", "feature_set")
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MIN_PEER_REVISION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SET_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    session_id: str
    frontend_epoch: int
    schema_revision: int
    min_peer_revision: int
    features: _containers.RepeatedScalarFieldContainer[str]
    role: PeerRole
    resume: ResumePoint
    feature_set: FeatureSet
    def __init__(self, frontend_id: _Optional[str] = ..., session_id: _Optional[str] = ..., frontend_epoch: _Optional[int] = ..., schema_revision: _Optional[int] = ..., min_peer_revision: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., role: _Optional[_Union[PeerRole, str]] = ..., resume: _Optional[_Union[ResumePoint, _Mapping]] = ..., feature_set: _Optional[_Union[FeatureSet, _Mapping]] = ...) -> None: ...

class FeatureSet(_message.Message):
    __slots__ = ("resume", "adopt", "input_segments")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    INPUT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    adopt: bool
    input_segments: bool
    def __init__(self, resume: _Optional[bool] = ..., adopt: _Optional[bool] = ..., input_segments: _Optional[bool] = ...) -> None: ...

class ResumePoint(_message.Message):
    __slots__ = ("engine_epoch", "last_seq")
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    engine_epoch: int
    last_seq: int
    def __init__(self, engine_epoch: _Optional[int] = ..., last_seq: _Optional[int] = ...) -> None: ...

class HelloAck(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "dp_rank", "dp_size", "features", "state", "resume_ok", "ack_interval_messages", "ack_interval_ms", "replay_window_ms", "replay_window_bytes", "max_frame_bytes", "max_inflight_adds", "schema_revision", "min_peer_revision", "host_probe", "feature_set", "resume_refusal")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESUME_OK_FIELD_NUMBER: _ClassVar[int]
    ACK_INTERVAL_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ACK_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_ADDS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MIN_PEER_REVISION_FIELD_NUMBER: _ClassVar[int]
    HOST_PROBE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SET_FIELD_NUMBER: _ClassVar[int]
    RESUME_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    dp_rank: int
    dp_size: int
    features: _containers.RepeatedScalarFieldContainer[str]
    state: EngineState
    resume_ok: bool
    ack_interval_messages: int
    ack_interval_ms: int
    replay_window_ms: int
    replay_window_bytes: int
    max_frame_bytes: int
    max_inflight_adds: int
    schema_revision: int
    min_peer_revision: int
    host_probe: str
    feature_set: FeatureSet
    resume_refusal: ResumeRefusal
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[EngineState, str]] = ..., resume_ok: _Optional[bool] = ..., ack_interval_messages: _Optional[int] = ..., ack_interval_ms: _Optional[int] = ..., replay_window_ms: _Optional[int] = ..., replay_window_bytes: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., max_inflight_adds: _Optional[int] = ..., schema_revision: _Optional[int] = ..., min_peer_revision: _Optional[int] = ..., host_probe: _Optional[str] = ..., feature_set: _Optional[_Union[FeatureSet, _Mapping]] = ..., resume_refusal: _Optional[_Union[ResumeRefusal, str]] = ...) -> None: ...

class HostProof(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class FinishHint(_message.Message):
    __slots__ = ("handle", "tool_name")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tool_name: str
    def __init__(self, handle: _Optional[int] = ..., tool_name: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("model_name", "fingerprint", "artifacts", "max_model_len", "block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "vocab_size", "eos_token_ids", "adapters", "supported_tasks", "world_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "default_sampling", "hidden_size", "takes_prompt_embeds", "structured_output_backends", "structured_output_keywords", "model_folder", "served_adapters", "media")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_TASKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TAKES_PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_BACKENDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_KEYWORDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FOLDER_FIELD_NUMBER: _ClassVar[int]
    SERVED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    fingerprint: Fingerprint
    artifacts: _containers.RepeatedCompositeFieldContainer[Artifact]
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    supported_tasks: _containers.RepeatedScalarFieldContainer[str]
    world_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    default_sampling: SamplingDefaults
    hidden_size: int
    takes_prompt_embeds: bool
    structured_output_backends: _containers.RepeatedScalarFieldContainer[str]
    structured_output_keywords: _containers.RepeatedScalarFieldContainer[str]
    model_folder: str
    served_adapters: _containers.RepeatedCompositeFieldContainer[ServedAdapter]
    media: MediaSupport
    def __init__(self, model_name: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., artifacts: _Optional[_Iterable[_Union[Artifact, _Mapping]]] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[str]] = ..., supported_tasks: _Optional[_Iterable[str]] = ..., world_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., default_sampling: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., hidden_size: _Optional[int] = ..., takes_prompt_embeds: _Optional[bool] = ..., structured_output_backends: _Optional[_Iterable[str]] = ..., structured_output_keywords: _Optional[_Iterable[str]] = ..., model_folder: _Optional[str] = ..., served_adapters: _Optional[_Iterable[_Union[ServedAdapter, _Mapping]]] = ..., media: _Optional[_Union[MediaSupport, _Mapping]] = ...) -> None: ...

class MediaSupport(_message.Message):
    __slots__ = ("family", "modalities", "max_item_tokens", "max_items")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    family: str
    modalities: _containers.RepeatedScalarFieldContainer[_add_pb2.MediaModality]
    max_item_tokens: int
    max_items: int
    def __init__(self, family: _Optional[str] = ..., modalities: _Optional[_Iterable[_Union[_add_pb2.MediaModality, str]]] = ..., max_item_tokens: _Optional[int] = ..., max_items: _Optional[int] = ...) -> None: ...

class ServedAdapter(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("digest", "weights_sha256", "dtype", "tokenizer_sha256", "vocab_size", "rope", "kernel_mode", "max_model_len", "schema_revision", "results")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    weights_sha256: str
    dtype: str
    tokenizer_sha256: str
    vocab_size: int
    rope: str
    kernel_mode: str
    max_model_len: int
    schema_revision: int
    results: str
    def __init__(self, digest: _Optional[str] = ..., weights_sha256: _Optional[str] = ..., dtype: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., vocab_size: _Optional[int] = ..., rope: _Optional[str] = ..., kernel_mode: _Optional[str] = ..., max_model_len: _Optional[int] = ..., schema_revision: _Optional[int] = ..., results: _Optional[str] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("kind", "sha256", "size_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: ArtifactKind
    sha256: str
    size_bytes: int
    def __init__(self, kind: _Optional[_Union[ArtifactKind, str]] = ..., sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_waiting_tokens", "num_used_blocks", "num_total_blocks", "num_pinned_blocks", "num_prefix_queries", "num_prefix_hits", "num_drafts", "num_accepted_drafts", "num_preemptions", "num_chunked_prefills", "step_number", "max_rows", "num_prompt_tokens", "num_generated_tokens", "num_finished", "num_draft_rows", "num_accepted_drafts_by_position", "slot_digests", "num_pins")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKED_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    SLOT_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_total_blocks: int
    num_pinned_blocks: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_drafts: int
    num_accepted_drafts: int
    num_preemptions: int
    num_chunked_prefills: int
    step_number: int
    max_rows: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_draft_rows: int
    num_accepted_drafts_by_position: _containers.RepeatedScalarFieldContainer[int]
    slot_digests: _containers.RepeatedScalarFieldContainer[str]
    num_pins: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., num_prefix_queries: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_accepted_drafts: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_chunked_prefills: _Optional[int] = ..., step_number: _Optional[int] = ..., max_rows: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_draft_rows: _Optional[int] = ..., num_accepted_drafts_by_position: _Optional[_Iterable[int]] = ..., slot_digests: _Optional[_Iterable[str]] = ..., num_pins: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step_number", "step_started_age_ms", "step_budget_ms", "has_work", "state", "last_seq", "load_progress")
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_STARTED_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    HAS_WORK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    step_number: int
    step_started_age_ms: int
    step_budget_ms: int
    has_work: bool
    state: EngineState
    last_seq: int
    load_progress: LoadProgress
    def __init__(self, step_number: _Optional[int] = ..., step_started_age_ms: _Optional[int] = ..., step_budget_ms: _Optional[int] = ..., has_work: _Optional[bool] = ..., state: _Optional[_Union[EngineState, str]] = ..., last_seq: _Optional[int] = ..., load_progress: _Optional[_Union[LoadProgress, _Mapping]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("phase", "done", "total")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    phase: str
    done: int
    total: int
    def __init__(self, phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...
