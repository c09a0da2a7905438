from triptych.api.v1 import chat_message_pb2 as _chat_message_pb2
from triptych.api.v1 import generate_pb2 as _generate_pb2
from triptych.common.v1 import output_pb2 as _output_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatUnaryRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _chat_message_pb2.ChatRequest
    def __init__(self, request: _Optional[_Union[_chat_message_pb2.ChatRequest, _Mapping]] = ...) -> None: ...

class ChatUnaryResponse(_message.Message):
    __slots__ = ("started", "outputs", "usage")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    started: _generate_pb2.Started
    outputs: _containers.RepeatedCompositeFieldContainer[_chat_message_pb2.ChatOutput]
    usage: _output_pb2.Usage
    def __init__(self, started: _Optional[_Union[_generate_pb2.Started, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[_chat_message_pb2.ChatOutput, _Mapping]]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ...) -> None: ...
