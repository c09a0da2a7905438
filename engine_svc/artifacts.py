"""The files of a model folder that a frontend needs, with their digests. Knows no weights and no wire."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1024 * 1024


class ArtifactKind(enum.Enum):
    """Which file it is; the value is its name in the folder."""

    TOKENIZER = "tokenizer.json"
    TOKENIZER_CONFIG = "tokenizer_config.json"
    CHAT_TEMPLATE = "chat_template.jinja"
    GENERATION_CONFIG = "generation_config.json"
    CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file. It is read again for each caller: digest and size are those it had at the start."""

    kind: ArtifactKind
    path: Path
    sha256: str
    size_bytes: int

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Its bytes with their offsets, a mebibyte at a time; an empty file has one empty chunk."""
        offset = 0
        with self.path.open("rb") as file:
            while (chunk := file.read(CHUNK_BYTES)) or offset == 0:
                yield offset, chunk
                offset += len(chunk)
                if not chunk:
                    return


def find_artifacts(folder: Path) -> tuple[Artifact, ...]:
    """Those that the folder has, in the order of their kinds."""
    found = []
    for kind in ArtifactKind:
        path = folder / kind.value
        if path.is_file():
            content = path.read_bytes()
            found.append(Artifact(kind, path, hashlib.sha256(content).hexdigest(), len(content)))
    return tuple(found)
