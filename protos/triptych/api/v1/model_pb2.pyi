from triptych.common.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Model(_message.Message):
    __slots__ = ("name", "max_model_len", "vocab_size", "eos_token_ids", "supported_tasks", "adapters", "num_engines", "fingerprint", "has_chat_template", "default_sampling", "structured_output_keywords", "folder", "base_model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_TASKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_KEYWORDS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    supported_tasks: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    num_engines: int
    fingerprint: str
    has_chat_template: bool
    default_sampling: _sampling_pb2.SamplingParams
    structured_output_keywords: _containers.RepeatedScalarFieldContainer[str]
    folder: str
    base_model: str
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., supported_tasks: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[str]] = ..., num_engines: _Optional[int] = ..., fingerprint: _Optional[str] = ..., has_chat_template: _Optional[bool] = ..., default_sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., structured_output_keywords: _Optional[_Iterable[str]] = ..., folder: _Optional[str] = ..., base_model: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "schema_revision", "frontend_id", "uptime_ms", "features", "limits", "engines")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    version: str
    schema_revision: int
    frontend_id: str
    uptime_ms: int
    features: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    engines: _containers.RepeatedCompositeFieldContainer[EngineSummary]
    def __init__(self, version: _Optional[str] = ..., schema_revision: _Optional[int] = ..., frontend_id: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineSummary, _Mapping]]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_n", "max_logprobs", "max_stop_strings", "max_stop_string_length", "max_request_bytes", "max_logit_bias", "max_bad_words", "max_queued_requests")
    MAX_N_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    max_n: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_length: int
    max_request_bytes: int
    max_logit_bias: int
    max_bad_words: int
    max_queued_requests: int
    def __init__(self, max_n: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_length: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_bad_words: _Optional[int] = ..., max_queued_requests: _Optional[int] = ...) -> None: ...

class EngineSummary(_message.Message):
    __slots__ = ("engine_id", "endpoint", "state", "model", "num_in_flight")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    endpoint: str
    state: str
    model: str
    num_in_flight: int
    def __init__(self, engine_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., num_in_flight: _Optional[int] = ...) -> None: ...
