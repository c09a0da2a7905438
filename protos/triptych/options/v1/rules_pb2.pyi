from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Limit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIMIT_UNSPECIFIED: _ClassVar[Limit]
    LIMIT_VOCABULARY: _ClassVar[Limit]
    LIMIT_MODEL_LENGTH: _ClassVar[Limit]
    LIMIT_MAX_N: _ClassVar[Limit]
    LIMIT_MAX_LOGPROBS: _ClassVar[Limit]
LIMIT_UNSPECIFIED: Limit
LIMIT_VOCABULARY: Limit
LIMIT_MODEL_LENGTH: Limit
LIMIT_MAX_N: Limit
LIMIT_MAX_LOGPROBS: Limit
RULES_FIELD_NUMBER: _ClassVar[int]
rules: _descriptor.FieldDescriptor

class Rules(_message.Message):
    __slots__ = ("unset", "minimum", "above_minimum", "maximum", "maximum_limit", "also", "finite", "defined", "min_items", "max_items", "max_items_limit", "unit", "column", "in_vocabulary", "min_chars", "max_chars", "max_bytes", "printable", "no_nul", "where", "in_parent_name", "specified", "totals", "passed_on", "raised_to", "lowered_to", "max_results")
    UNSET_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    ABOVE_MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    DEFINED_FIELD_NUMBER: _ClassVar[int]
    MIN_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_LIMIT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    IN_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    MIN_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRINTABLE_FIELD_NUMBER: _ClassVar[int]
    NO_NUL_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    IN_PARENT_NAME_FIELD_NUMBER: _ClassVar[int]
    SPECIFIED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    PASSED_ON_FIELD_NUMBER: _ClassVar[int]
    RAISED_TO_FIELD_NUMBER: _ClassVar[int]
    LOWERED_TO_FIELD_NUMBER: _ClassVar[int]
    MAX_RESULTS_FIELD_NUMBER: _ClassVar[int]
    unset: str
    minimum: float
    above_minimum: bool
    maximum: float
    maximum_limit: Limit
    also: float
    finite: bool
    defined: bool
    min_items: int
    max_items: int
    max_items_limit: Limit
    unit: str
    column: bool
    in_vocabulary: bool
    min_chars: int
    max_chars: int
    max_bytes: int
    printable: bool
    no_nul: bool
    where: str
    in_parent_name: bool
    specified: bool
    totals: _containers.RepeatedCompositeFieldContainer[Total]
    passed_on: bool
    raised_to: float
    lowered_to: float
    max_results: int
    def __init__(self, unset: _Optional[str] = ..., minimum: _Optional[float] = ..., above_minimum: _Optional[bool] = ..., maximum: _Optional[float] = ..., maximum_limit: _Optional[_Union[Limit, str]] = ..., also: _Optional[float] = ..., finite: _Optional[bool] = ..., defined: _Optional[bool] = ..., min_items: _Optional[int] = ..., max_items: _Optional[int] = ..., max_items_limit: _Optional[_Union[Limit, str]] = ..., unit: _Optional[str] = ..., column: _Optional[bool] = ..., in_vocabulary: _Optional[bool] = ..., min_chars: _Optional[int] = ..., max_chars: _Optional[int] = ..., max_bytes: _Optional[int] = ..., printable: _Optional[bool] = ..., no_nul: _Optional[bool] = ..., where: _Optional[str] = ..., in_parent_name: _Optional[bool] = ..., specified: _Optional[bool] = ..., totals: _Optional[_Iterable[_Union[Total, _Mapping]]] = ..., passed_on: _Optional[bool] = ..., raised_to: _Optional[float] = ..., lowered_to: _Optional[float] = ..., max_results: _Optional[int] = ...) -> None: ...

class Total(_message.Message):
    __slots__ = ("paths", "maximum", "unit")
    PATHS_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedScalarFieldContainer[str]
    maximum: int
    unit: str
    def __init__(self, paths: _Optional[_Iterable[str]] = ..., maximum: _Optional[int] = ..., unit: _Optional[str] = ...) -> None: ...
