"""The records of all frontend processes of one host, so that a request crashes two engines at most.

Files in the user's runtime folder. Where there is none, each process knows its own suspects alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from triptych.engine.v1 import add_pb2
from triptych_kit.errors import Internal

logger = logging.getLogger(__name__)

QUARANTINED = "QUARANTINED"
_TTL_S = 600.0
_MAX_ENTRIES = 256
_FOLDER = "quarantine"
_LOCK_FILE = "probation.lock"
# Of an ADD: what differs when a client sends the same request again, or does not change what is computed.
_NO_CONTENT = (
    "handle", "request_id", "external_request_id", "group_id", "attempt", "output_token_ids",
    "request_seed", "priority", "cache_salt", "age_ms", "remaining_ms", "data_parallel_rank", "trace_context",
    "orphan_grace_ms", "resume_state",
)  # fmt: skip


def content_of(model: str, entries: Sequence[add_pb2.AddEntry], seed: int | None = None) -> str:
    """A hash of what a request has computed: model, tenant, prompt and parameters.

    entries: the ADDs of its sampling group. seed: the client's, if it gave one.
    """
    content = add_pb2.AddEntry()
    content.CopyFrom(entries[0])
    for name in _NO_CONTENT:
        content.ClearField(name)
    digest = hashlib.blake2b(content.SerializeToString(deterministic=True), digest_size=16)
    digest.update(repr((model, len(entries), seed)).encode())
    return digest.hexdigest()


class PoisonRecord:
    """The requests that were found to crash engines, by content, for ten minutes and all processes.

    An empty file each, so that neither a lock nor a full disk matters: its name has the content's hash and
    the incident id, its time is that of the incident.
    """

    def __init__(self, runtime_folder: Path | None = None) -> None:
        self._folder = None if runtime_folder is None else runtime_folder / _FOLDER

    def add(self, content: str) -> str:
        """Record a request; returns its incident id."""
        incident_id = secrets.token_hex(8)
        if self._folder is not None:
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._make_room(self._folder)
                (self._folder / f"{content}.{incident_id}").touch()
            except OSError as error:
                logger.warning("quarantine cannot be recorded", extra={"reason": error.strerror})
        return incident_id

    def check(self, content_of_request: Callable[[], str]) -> None:
        """Raise Internal if a request is recorded. Its content is asked for only if any request is."""
        names = self._names()
        if not names:
            return
        content = content_of_request()
        for name in names:
            recorded_content, _, incident_id = name.partition(".")
            if recorded_content == content and self._age_s(name) < _TTL_S:
                logger.warning("poison refused", extra={"incident_id": incident_id})
                raise quarantined("this request has crashed engines: it is refused", incident_id)

    def _make_room(self, folder: Path) -> None:
        newest_first = sorted(self._names(), key=self._age_s)
        for index, name in enumerate(newest_first):
            if index >= _MAX_ENTRIES - 1 or self._age_s(name) >= _TTL_S:
                (folder / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        try:
            return [] if self._folder is None else os.listdir(self._folder)
        except OSError:
            return []

    def _age_s(self, name: str) -> float:
        assert self._folder is not None, "a name comes from the folder"
        try:
            # By the wall clock, the only one that outlives a process.
            return time.time() - (self._folder / name).stat().st_mtime
        except OSError:
            return _TTL_S


class ProbationLocks:
    """Lets one process of the host at a time have suspects on an engine: a death then identifies one.

    The kernel releases the locks of a process that ends.
    """

    def __init__(self, runtime_folder: Path | None = None) -> None:
        self._file = None
        if runtime_folder is not None:
            try:
                self._file = (runtime_folder / _LOCK_FILE).open("ab")
            except OSError as error:
                logger.warning("suspects are not shared", extra={"reason": error.strerror})

    def take(self, address: str) -> bool:
        """Take the lock of an engine; False if another process has it. Taken again, it is still one lock."""
        return self._set(address, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self, address: str) -> None:
        self._set(address, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release all."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _set(self, address: str, operation: int) -> bool:
        if self._file is None:
            return True
        # A byte of the file for each engine.
        digest = hashlib.blake2b(address.encode(), digest_size=7)
        try:
            fcntl.lockf(self._file, operation, 1, int.from_bytes(digest.digest()))
        except BlockingIOError:
            return False
        except OSError:
            # A file system without locks.
            return True
        return True


def quarantined(message: str, incident_id: str) -> Internal:
    """The client's error for a request that crashes engines."""
    return Internal(
        f"{message}, incident {incident_id}", reason=QUARANTINED, metadata={"incident_id": incident_id}
    )
