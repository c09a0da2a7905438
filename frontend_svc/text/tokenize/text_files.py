"""The files of a model that define how text becomes token ids. Knows no tokenizer library and no wire."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

_MAX_SHOWN_DIGITS = 16


class TextRefused(ValueError):
    """A text or conversation that cannot be processed with a model's files; has a message for the client.

    field: the part of the request that is refused, if it is not all of the text or conversation.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class TextFiles:
    """The files a text worker needs to tokenize and render for one model. Empty bytes: no such file.

    `tokenizer` is a tokenizer.json, `tokenizer_config` a tokenizer_config.json and `chat_template` a Jinja
    template, which takes precedence over the one in `tokenizer_config`.
    """

    tokenizer: bytes
    tokenizer_config: bytes = b""
    chat_template: bytes = b""

    @functools.cached_property
    def key(self) -> str:
        """A digest over all files: equal keys mean equal files."""
        digest = hashlib.sha256()
        for content in self.parts:
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.hexdigest()

    @property
    def parts(self) -> tuple[bytes, bytes, bytes]:
        """The contents in the order of the fields, as they are sent to a worker."""
        return self.tokenizer, self.tokenizer_config, self.chat_template

    def by_name(self) -> list[tuple[str, bytes]]:
        """The files that exist, with their names in a model's folder."""
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        return [(name, content) for name, content in zip(names, self.parts, strict=True) if content]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file by name. Cached: a tokenizer has tens of MB."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.by_name()}

    def __repr__(self) -> str:
        sizes = ", ".join(str(len(content)) for content in self.parts)
        return f"TextFiles({self.key[:_MAX_SHOWN_DIGITS]}, {sizes} bytes)"
