"""Tokenizers that come as a tokenizer.model alone, made into a tokenizer.json. Knows no engine.

The libraries that read such files are large, and none of them is imported here: a child process converts,
once a file, and ends. It needs the extra `slow-tokenizers`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from service_kit.process import process_environment, signal_child

CONVERT_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "launcher.convert_tokenizer")
# The exit code of a converter without its libraries.
MISSING_EXTRA = 3

_TIME_LIMIT_S = 120.0
_MAX_SHOWN_CHARS = 300
_MAX_CONVERTED = 16


class SlowTokenizerError(ValueError):
    """A tokenizer.model cannot be converted, in words for the operator."""


class SlowTokenizers:
    """Converted tokenizers, and what cannot be converted, by the digest of what they were made of.

    Engines are tried again and again, and a conversion takes seconds: only one that ran into its time limit
    is done a second time.

    `command` is what converts: it gets a folder with the files and leaves a tokenizer.json in it.
    """

    def __init__(
        self, *, command: Sequence[str] = CONVERT_COMMAND, time_limit_s: float = _TIME_LIMIT_S
    ) -> None:
        self._command = command
        self._time_limit_s = time_limit_s
        self._converted: dict[str, bytes | SlowTokenizerError] = {}
        # One at a time: each conversion takes hundreds of megabytes.
        self._lock = asyncio.Lock()

    async def convert(self, files: Mapping[str, bytes]) -> bytes:
        """The tokenizer.json of `files`, by their names in a model's folder. Raises SlowTokenizerError."""
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
                return SlowTokenizerError("tokenizer.model was not converted: nothing came out")

    async def _run(self, folder: Path) -> str | None:
        """What is wrong with the files in `folder`; None when they were converted."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            str(folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._time_limit_s):
                _, output = await process.communicate()
        except TimeoutError as error:
            raise SlowTokenizerError(
                f"converting tokenizer.model took longer than the limit of {self._time_limit_s:g} s"
            ) from error
        finally:
            signal_child(process, signal.SIGKILL)
            await process.wait()
        if process.returncode == MISSING_EXTRA:
            return (
                "the model has a tokenizer.model and no tokenizer.json: converting it needs the extra "
                "slow-tokenizers, pip install 'triptych[slow-tokenizers]'"
            )
        message = output.decode(errors="replace").strip()[-_MAX_SHOWN_CHARS:]
        return f"tokenizer.model cannot be converted: {message}" if process.returncode else None


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _environment() -> dict[str, str]:
    environment = process_environment()
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Everything that is needed is in the folder.
    environment["HF_HUB_OFFLINE"] = "1"
    return environment
