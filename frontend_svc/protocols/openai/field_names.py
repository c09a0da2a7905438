"""The fields of a body that the fields of a request are made of, so that errors name the former."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from google.protobuf.message import Message

from triptych.api.v1 import chat_message_pb2
from triptych.common.v1 import sampling_pb2

NameOf: TypeAlias = "Callable[[str], str]"

_INDEX = re.compile(r"\[\d+\]")
# Of messages in a request that bodies have flat.
_PATHS: Mapping[type[Message], str] = {
    sampling_pb2.SamplingParams: "sampling.",
    chat_message_pb2.ChatTemplateOptions: "template_options.",
}


class FieldNames:
    """Fields of a body by paths of a request, as the translation notes them.

    The longest known beginning of a path decides, where [] stands for any index. What follows it is kept,
    except behind `wholes`, whose parts are no fields of the body.
    """

    def __init__(
        self, names: Mapping[str, str] | None = None, wholes: Mapping[str, str] | None = None
    ) -> None:
        self._names = {"sampling": "", "template_options": "", **(names or {})}
        self._wholes = dict(wholes or {})

    def note(self, path: str, field: str) -> None:
        """Note that `field` of the body becomes the part of the request at `path`."""
        self._names[path] = field

    def note_whole(self, path: str, field: str) -> None:
        """The same, where parts of it have no names in the body."""
        self._wholes[path] = field

    def note_set(self, message: Message, name: str, field: str) -> None:
        """Note the field of the body that a field of a message of the request was set from."""
        self._names[_PATHS.get(type(message), "") + name] = field

    def __call__(self, path: str) -> str:
        for head in _beginnings(path):
            for known in (head, _INDEX.sub("[]", head)):
                if known in self._wholes:
                    return _indexed(self._wholes[known], head)
                if known in self._names:
                    return (_indexed(self._names[known], head) + path[len(head) :]).lstrip(".")
        return path


def as_it_is(path: str) -> str:
    return path


def in_turn(first: NameOf, second: NameOf) -> NameOf:
    """Names of a body that becomes another one, whose fields become those of a request."""
    return lambda path: second(first(path))


def _beginnings(path: str) -> Iterator[str]:
    yield path
    for end in range(len(path) - 1, 0, -1):
        if path[end] in ".[":
            yield path[:end]


def _indexed(name: str, path: str) -> str:
    """The name with the indexes of a path in its empty brackets."""
    for index in _INDEX.findall(path):
        name = name.replace("[]", index, 1)
    return name
