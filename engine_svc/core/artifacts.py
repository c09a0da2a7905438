"""The files of a model folder that frontends need, with their digests. Knows no weights and no wire."""

from __future__ import annotations

import enum
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1024 * 1024  # of one message of a download


class ArtifactKind(enum.Enum):
    """The kind of file; the value is its name in the folder."""

    TOKENIZER = "tokenizer.json"
    TOKENIZER_CONFIG = "tokenizer_config.json"
    CHAT_TEMPLATE = "chat_template.jinja"
    GENERATION_CONFIG = "generation_config.json"
    CONFIG = "config.json"
    TOKENIZER_MODEL = "tokenizer.model"
    PREPROCESSOR_CONFIG = "preprocessor_config.json"
    PROCESSOR_CONFIG = "processor_config.json"


_PLAIN_KINDS = (ArtifactKind.CHAT_TEMPLATE, ArtifactKind.TOKENIZER_MODEL)  # those that are not JSON


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file as it was at start-up: later changes on disk must not contradict the digest."""

    kind: ArtifactKind
    sha256: str
    content: bytes = field(repr=False)

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """The content with offsets, a mebibyte at a time; an empty file has one empty chunk."""
        for offset in range(0, max(1, len(self.content)), CHUNK_BYTES):
            yield offset, self.content[offset : offset + CHUNK_BYTES]


def read_artifacts(folder: Path) -> tuple[Artifact, ...]:
    """The artifacts that the folder has, in the order of their kinds."""
    read = []
    for kind in ArtifactKind:
        path = folder / kind.value
        if path.is_file():
            content = path.read_bytes()
            read.append(Artifact(kind, hashlib.sha256(content).hexdigest(), content))
    return tuple(read)


def check_artifacts(artifacts: tuple[Artifact, ...]) -> None:
    """Raise ValueError for a file that no frontend could use; log a warning if there is no tokenizer."""
    if not {artifact.kind for artifact in artifacts} & {ArtifactKind.TOKENIZER, ArtifactKind.TOKENIZER_MODEL}:
        logger.warning("the model folder has no tokenizer.json: frontends need --tokenizer to use it")
    for artifact in artifacts:
        check_content(artifact.kind, artifact.content)


def check_content(kind: ArtifactKind, content: bytes) -> None:
    """Raise ValueError for a file that no frontend could use. Empty files are taken for missing ones."""
    name, is_tokenizer = f"the model folder's {kind.value}", kind is ArtifactKind.TOKENIZER
    try:
        if kind is ArtifactKind.CHAT_TEMPLATE:
            content.decode()
        if kind in _PLAIN_KINDS or not (content or is_tokenizer):
            return
        described = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name} is not {'UTF-8' if kind in _PLAIN_KINDS else 'JSON'}: {error}") from error
    if not isinstance(described, dict):
        raise ValueError(f"{name} is not a JSON object")
    if is_tokenizer and "model" not in described:
        raise ValueError(f"{name} is not a tokenizer: it has no model")
