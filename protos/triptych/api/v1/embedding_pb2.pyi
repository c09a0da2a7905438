from triptych.api.v1 import generate_pb2 as _generate_pb2
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

class PoolingInput(_message.Message):
    __slots__ = ("prompt", "token_ids")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: _generate_pb2.TokenIds
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Union[_generate_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "pooling", "request_id", "truncate_prompt_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    pooling: _sampling_pb2.PoolingParams
    request_id: str
    truncate_prompt_tokens: int
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., pooling: _Optional[_Union[_sampling_pb2.PoolingParams, _Mapping]] = ..., request_id: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "usage", "request_id")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    usage: _output_pb2.Usage
    request_id: str
    def __init__(self, embeddings: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "queries", "documents", "request_id", "truncate_prompt_tokens", "use_activation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    queries: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    documents: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    request_id: str
    truncate_prompt_tokens: int
    use_activation: bool
    def __init__(self, model: _Optional[str] = ..., queries: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., documents: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., request_id: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., use_activation: _Optional[bool] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "usage", "request_id")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    usage: _output_pb2.Usage
    request_id: str
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("model", "query", "documents", "top_n", "request_id", "truncate_prompt_tokens", "use_activation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    query: PoolingInput
    documents: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    top_n: int
    request_id: str
    truncate_prompt_tokens: int
    use_activation: bool
    def __init__(self, model: _Optional[str] = ..., query: _Optional[_Union[PoolingInput, _Mapping]] = ..., documents: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., top_n: _Optional[int] = ..., request_id: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., use_activation: _Optional[bool] = ...) -> None: ...

class RerankResponse(_message.Message):
    __slots__ = ("results", "usage", "request_id")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RerankResult]
    usage: _output_pb2.Usage
    request_id: str
    def __init__(self, results: _Optional[_Iterable[_Union[RerankResult, _Mapping]]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class RerankResult(_message.Message):
    __slots__ = ("document_index", "score")
    DOCUMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    document_index: int
    score: float
    def __init__(self, document_index: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class ClassifyRequest(_message.Message):
    __slots__ = ("model", "inputs", "per_token", "request_id", "truncate_prompt_tokens", "use_activation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    per_token: bool
    request_id: str
    truncate_prompt_tokens: int
    use_activation: bool
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., per_token: _Optional[bool] = ..., request_id: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., use_activation: _Optional[bool] = ...) -> None: ...

class ClassifyResponse(_message.Message):
    __slots__ = ("results", "labels", "usage", "request_id")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Tensor]
    labels: _containers.RepeatedScalarFieldContainer[str]
    usage: _output_pb2.Usage
    request_id: str
    def __init__(self, results: _Optional[_Iterable[_Union[_tensor_pb2.Tensor, _Mapping]]] = ..., labels: _Optional[_Iterable[str]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...
