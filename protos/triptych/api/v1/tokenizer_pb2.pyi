from triptych.api.v1 import chat_message_pb2 as _chat_message_pb2
from triptych.api.v1 import tokenize_pb2 as _tokenize_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyChatTemplateRequest(_message.Message):
    __slots__ = ("model", "messages", "tools", "template_options", "tokenize")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[_chat_message_pb2.ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[_chat_message_pb2.Tool]
    template_options: _chat_message_pb2.ChatTemplateOptions
    tokenize: bool
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_chat_message_pb2.ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[_chat_message_pb2.Tool, _Mapping]]] = ..., template_options: _Optional[_Union[_chat_message_pb2.ChatTemplateOptions, _Mapping]] = ..., tokenize: _Optional[bool] = ...) -> None: ...

class ApplyChatTemplateResponse(_message.Message):
    __slots__ = ("prompt", "token_ids")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("file_name", "sha256", "size_bytes", "offset", "chunk")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    sha256: str
    size_bytes: int
    offset: int
    chunk: bytes
    def __init__(self, file_name: _Optional[str] = ..., sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., chunk: _Optional[bytes] = ...) -> None: ...
