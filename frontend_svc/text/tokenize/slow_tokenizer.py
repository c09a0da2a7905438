"""Converts a tokenizer.model into a tokenizer.json, for models that have only the former. Knows no engine.

The libraries that read such files are large and not imported here: a child process converts one model and
ends. It needs the extra `slow-tokenizers`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych_kit.process.child import Child, Output
from triptych_kit.process.setup import importing_environment

CONVERT_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "triptych_cli.convert_tokenizer")
# Exit code of a converter whose libraries are not installed.
MISSING_EXTRA = 3

_TIME_LIMIT_S = 120.0
_MAX_SHOWN_CHARS = 300
_MAX_CONVERTED = 16


class SlowTokenizerError(ValueError):
    """A tokenizer.model cannot be converted; has a message for the operator."""


class SlowTokenizers:
    """Cache of converted tokenizers and of failed conversions, by the digest of the source files.

    Connecting to an engine is retried often, and a conversion takes seconds: only one that exceeded its time
    limit is repeated.

    command: the converter; it gets a folder with the files and writes a tokenizer.json into it.
    """

    def __init__(
        self, *, command: Sequence[str] = CONVERT_COMMAND, time_limit_s: float = _TIME_LIMIT_S
    ) -> None:
        self._command = command
        self._time_limit_s = time_limit_s
        self._converted: dict[str, bytes | SlowTokenizerError] = {}
        # One at a time: each conversion needs hundreds of megabytes.
        self._lock = asyncio.Lock()

    async def convert(self, files: Mapping[str, bytes]) -> bytes:
        """The tokenizer.json of `files`, which are keyed by name. Raises SlowTokenizerError."""
        loop = asyncio.get_running_loop()
        key = await loop.run_in_executor(None, _digest, files)
        async with self._lock:
            if key not in self._converted:
                while len(self._converted) >= _MAX_CONVERTED:
                    self._converted.pop(next(iter(self._converted)))
                self._converted[key] = await self._convert(files)
            result = self._converted[key]
        if isinstance(result, SlowTokenizerError):
            raise SlowTokenizerError(str(result))
        return result

    async def _convert(self, files: Mapping[str, bytes]) -> bytes | SlowTokenizerError:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory(prefix="triptych-tokenizer-") as name:
            folder = Path(name)
            await loop.run_in_executor(None, _write, folder, files)
            if (message := await self._run(folder)) is not None:
                return SlowTokenizerError(message)
            try:
                return await loop.run_in_executor(None, (folder / "tokenizer.json").read_bytes)
            except OSError:
                return SlowTokenizerError("tokenizer.model was not converted: no output file")

    async def _run(self, folder: Path) -> str | None:
        """Convert the files in `folder`; returns an error message, or None."""
        # All needed files are in the folder.
        environment = {**importing_environment(), "HF_HUB_OFFLINE": "1"}
        command = (*self._command, str(folder))
        child = Child("converter", command, environment, output=Output.KEPT, start_new_session=True)
        try:
            async with asyncio.timeout(self._time_limit_s):
                await child.wait()
        except TimeoutError as error:
            raise SlowTokenizerError(
                f"converting tokenizer.model took longer than the limit of {self._time_limit_s:g} s"
            ) from error
        finally:
            child.kill()
            await child.wait()
        if child.exit_code == MISSING_EXTRA:
            return (
                "the model has a tokenizer.model and no tokenizer.json: converting it needs the extra "
                "slow-tokenizers, pip install 'triptych[slow-tokenizers]'"
            )
        message = "\n".join(child.last_lines).strip()[-_MAX_SHOWN_CHARS:]
        return f"tokenizer.model cannot be converted: {message}" if child.exit_code else None


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()
