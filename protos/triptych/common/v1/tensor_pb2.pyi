from triptych.options.v1 import rules_pb2 as _rules_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_FP32: _ClassVar[DType]
    D_TYPE_FP16: _ClassVar[DType]
    D_TYPE_BF16: _ClassVar[DType]
    D_TYPE_FP8: _ClassVar[DType]
    D_TYPE_INT64: _ClassVar[DType]
    D_TYPE_INT32: _ClassVar[DType]
    D_TYPE_UINT8: _ClassVar[DType]
    D_TYPE_INT8: _ClassVar[DType]
    D_TYPE_BOOL: _ClassVar[DType]
D_TYPE_UNSPECIFIED: DType
D_TYPE_FP32: DType
D_TYPE_FP16: DType
D_TYPE_BF16: DType
D_TYPE_FP8: DType
D_TYPE_INT64: DType
D_TYPE_INT32: DType
D_TYPE_UINT8: DType
D_TYPE_INT8: DType
D_TYPE_BOOL: DType

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "inline", "blob", "shm", "remote")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    inline: bytes
    blob: BlobReference
    shm: SharedMemoryReference
    remote: RemoteReference
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., inline: _Optional[bytes] = ..., blob: _Optional[_Union[BlobReference, _Mapping]] = ..., shm: _Optional[_Union[SharedMemoryReference, _Mapping]] = ..., remote: _Optional[_Union[RemoteReference, _Mapping]] = ...) -> None: ...

class BlobReference(_message.Message):
    __slots__ = ("sha256", "size")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size: int
    def __init__(self, sha256: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class SharedMemoryReference(_message.Message):
    __slots__ = ("name", "offset", "size", "owner")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    size: int
    owner: str
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class RemoteReference(_message.Message):
    __slots__ = ("transport", "location")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    transport: str
    location: bytes
    def __init__(self, transport: _Optional[str] = ..., location: _Optional[bytes] = ...) -> None: ...
