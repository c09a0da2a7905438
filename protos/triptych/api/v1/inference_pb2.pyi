from triptych.api.v1 import generate_pb2 as _generate_pb2
from triptych.common.v1 import error_pb2 as _error_pb2
from triptych.common.v1 import output_pb2 as _output_pb2
from triptych.common.v1 import sampling_pb2 as _sampling_pb2
from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateUnaryRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _generate_pb2.GenerateRequest
    def __init__(self, request: _Optional[_Union[_generate_pb2.GenerateRequest, _Mapping]] = ...) -> None: ...

class GenerateUnaryResponse(_message.Message):
    __slots__ = ("started", "outputs", "usage")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    started: _generate_pb2.Started
    outputs: _containers.RepeatedCompositeFieldContainer[_generate_pb2.Output]
    usage: _output_pb2.Usage
    def __init__(self, started: _Optional[_Union[_generate_pb2.Started, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[_generate_pb2.Output, _Mapping]]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ...) -> None: ...

class GenerateBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_generate_pb2.GenerateRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[_generate_pb2.GenerateRequest, _Mapping]]] = ...) -> None: ...

class GenerateBatchResponse(_message.Message):
    __slots__ = ("item_index", "response", "error")
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    response: _generate_pb2.GenerateResponse
    error: _error_pb2.ErrorStatus
    def __init__(self, item_index: _Optional[int] = ..., response: _Optional[_Union[_generate_pb2.GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class GenerateSessionRequest(_message.Message):
    __slots__ = ("start", "append", "end", "cancel_turn")
    START_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TURN_FIELD_NUMBER: _ClassVar[int]
    start: _generate_pb2.GenerateRequest
    append: SessionAppend
    end: SessionEnd
    cancel_turn: SessionCancelTurn
    def __init__(self, start: _Optional[_Union[_generate_pb2.GenerateRequest, _Mapping]] = ..., append: _Optional[_Union[SessionAppend, _Mapping]] = ..., end: _Optional[_Union[SessionEnd, _Mapping]] = ..., cancel_turn: _Optional[_Union[SessionCancelTurn, _Mapping]] = ...) -> None: ...

class SessionAppend(_message.Message):
    __slots__ = ("prompt", "token_ids", "sampling")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: _generate_pb2.TokenIds
    sampling: _sampling_pb2.SamplingParams
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Union[_generate_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionCancelTurn(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateSessionResponse(_message.Message):
    __slots__ = ("response", "turn_ended")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    TURN_ENDED_FIELD_NUMBER: _ClassVar[int]
    response: _generate_pb2.GenerateResponse
    turn_ended: bool
    def __init__(self, response: _Optional[_Union[_generate_pb2.GenerateResponse, _Mapping]] = ..., turn_ended: _Optional[bool] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("resume_token", "last_position", "received")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_POSITION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    last_position: int
    received: _containers.RepeatedCompositeFieldContainer[ReceivedOutput]
    def __init__(self, resume_token: _Optional[str] = ..., last_position: _Optional[int] = ..., received: _Optional[_Iterable[_Union[ReceivedOutput, _Mapping]]] = ...) -> None: ...

class ReceivedOutput(_message.Message):
    __slots__ = ("output_index", "num_tokens", "num_characters", "is_finished")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    num_tokens: int
    num_characters: int
    is_finished: bool
    def __init__(self, output_index: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_characters: _Optional[int] = ..., is_finished: _Optional[bool] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: _generate_pb2.GenerateResponse
    def __init__(self, response: _Optional[_Union[_generate_pb2.GenerateResponse, _Mapping]] = ...) -> None: ...
