"""Which prompts have crashed engines, and which are known not to.

What has crashed engines is shared by the frontends of one stack on one host: files in the user's runtime
folder, apart for each stack. Where there is none, each process knows its own alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from triptych_kit.errors import Internal

logger = logging.getLogger(__name__)

QUARANTINED = "QUARANTINED"
_TTL_S = 600.0
_MAX_ENTRIES = 256
_FOLDER = "quarantine"
_LOCK_FILE = "probation.lock"
_MAX_INNOCENT = 8192
_MAX_INNOCENT_BYTES = 16 * 1024 * 1024
_ID_BYTES = 4
# Prompts are compared by so many tokens at a time. Many begin alike, so no fewer than these tell them apart.
_BLOCK_TOKENS = 16
_LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Content:
    """What a request is recorded by: whose it is, and its prompt. How it is sampled is varied at will.

    account: see `Identity.account`; empty for callers without credentials.  token_ids: int32, little endian.
    """

    account: str
    model: str
    token_ids: bytes


@dataclass(slots=True)
class PoisonEntry:
    """A prompt that has crashed engines, by its beginning.

    account, model: empty where that could not be written.  left_s: for how long it is recorded.
    """

    incident_id: str
    account: str
    model: str
    num_tokens: int
    left_s: float


class InnocentPrompts:
    """The newest prompts that were answered without harm, so many and of so many bytes."""

    def __init__(self, max_prompts: int = _MAX_INNOCENT, max_bytes: int = _MAX_INNOCENT_BYTES) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[Content, None] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, content: Content) -> bool:
        return content in self._prompts

    def add(self, content: Content) -> None:
        if content in self._prompts:
            self._prompts.move_to_end(content)
            return
        self._prompts[content] = None
        self._num_bytes += len(content.token_ids)
        while len(self._prompts) > self._max_prompts or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._prompts.popitem(last=False)[0].token_ids)

    def discard(self, content: Content) -> None:
        """Forget a prompt that turned out to do harm."""
        if content in self._prompts:
            del self._prompts[content]
            self._num_bytes -= len(content.token_ids)

    def num_own_tokens(self, content: Content) -> int:
        """How much of the beginning of a prompt, in tokens, no innocent prompt begins with."""
        size = _BLOCK_TOKENS * _ID_BYTES
        shared = max(
            (
                _num_equal_blocks(content.token_ids, other.token_ids, size)
                for other in self._prompts
                if other.model == content.model
            ),
            default=0,
        )
        num_tokens = max(_LEAST_TOKENS, (shared + 1) * _BLOCK_TOKENS)
        return min(num_tokens, len(content.token_ids) // _ID_BYTES)


def _num_equal_blocks(one: bytes, other: bytes, size: int) -> int:
    count = 0
    for start in range(0, min(len(one), len(other)) - size + 1, size):
        if one[start : start + size] != other[start : start + size]:
            break
        count += 1
    return count


class PoisonRecord:
    """The prompts that were found to crash engines, for ten minutes and all processes.

    A prompt is refused if it begins as a recorded one of its account. Of an account with a key that has any,
    only prompts that are known to be innocent are served: who can vary a prompt could crash engines again and
    again. A file each, whose name has all that is compared, so that neither a lock nor a full disk matters;
    its time is that of the incident.
    """

    def __init__(self, runtime_folder: Path | None = None, *, stack: str = "") -> None:
        """stack: what the frontends of one stack have in common, such as where they find engines."""
        self.innocent = InnocentPrompts()
        self._folder = None
        if runtime_folder is not None:
            self._folder = runtime_folder / _FOLDER / _digest(stack.encode())
        self._unwritten: dict[str, float] = {}  # when they were found, by the wall clock

    def add(self, content: Content) -> str:
        """Record a request; returns its incident id."""
        incident_id = secrets.token_hex(8)
        self.innocent.discard(content)
        num_tokens = self.innocent.num_own_tokens(content)
        beginning = _digest_of_beginning(content, num_tokens)
        name = f"{_digest(content.account.encode())}.{num_tokens}.{beginning}.{incident_id}"
        if self._folder is not None:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = self._folder / name
                file.touch()
                self._make_room()
                file.write_text(json.dumps({"account": content.account, "model": content.model}))
            except OSError as error:
                logger.warning("quarantine cannot be recorded", extra={"reason": error.strerror})
        if name not in self._names():
            self._unwritten[name] = time.time()
            self._make_room()
        return incident_id

    def check_prompt(self, content_of_request: Callable[[], Content]) -> None:
        """Raise Internal for a prompt that is recorded. It is asked for only if any is."""
        for _, is_alike, incident_id, left_s in self._incidents(content_of_request):
            if is_alike:
                logger.warning("poison refused", extra={"incident_id": incident_id})
                message = "requests with this prompt have crashed engines: it is refused"
                raise quarantined(message, incident_id, left_s)

    def check_account(self, content_of_request: Callable[[], Content]) -> None:
        """Raise Internal for a prompt that is not known to be innocent, if its account has any recorded."""
        for content, _, incident_id, left_s in self._incidents(content_of_request):
            account = content.account
            if account and content not in self.innocent:
                logger.warning("prompt of a quarantined account refused", extra={"incident_id": incident_id})
                message = (
                    f"a request of {account} has crashed engines: its prompts that were not answered before "
                    "are refused"
                )
                raise quarantined(message, incident_id, left_s)

    def entries(self) -> list[PoisonEntry]:
        """What is recorded now, newest first."""
        entries = []
        for name in self._names():
            if (left_s := _TTL_S - self._age_s(name)) > 0:
                _, num_tokens, _, incident_id = name.split(".")
                entries.append(PoisonEntry(incident_id, *self._read(name), int(num_tokens), left_s))
        return sorted(entries, key=lambda entry: -entry.left_s)

    def clear(self, incident_id: str = "") -> int:
        """Forget an incident, or all; returns how many it were."""
        names = [name for name in self._names() if incident_id in ("", name.rpartition(".")[2])]
        for name in names:
            self._remove(name)
        return len(names)

    def _incidents(
        self, content_of_request: Callable[[], Content]
    ) -> Iterator[tuple[Content, bool, str, float]]:
        """The request's content with each incident of its account: whether the prompts begin alike, the
        incident's id, and for how many seconds it is remembered.
        """
        names = self._names()
        if not names:
            return
        content = content_of_request()
        account = _digest(content.account.encode())
        for name in names:
            recorded, num_tokens, beginning, incident_id = name.split(".")
            # Its age is asked of the file system: only of those of the account.
            if recorded == account and (left_s := _TTL_S - self._age_s(name)) > 0:
                is_alike = _digest_of_beginning(content, int(num_tokens)) == beginning
                yield content, is_alike, incident_id, left_s

    def _read(self, name: str) -> tuple[str, str]:
        try:
            fields = json.loads((self._folder / name).read_text()) if self._folder is not None else {}
        except (OSError, ValueError):
            fields = {}
        return str(fields.get("account", "")), str(fields.get("model", ""))

    def _make_room(self) -> None:
        newest_first = sorted(self._names(), key=self._age_s)
        for index, name in enumerate(newest_first):
            if index >= _MAX_ENTRIES or self._age_s(name) >= _TTL_S:
                # A folder that cannot be written must not keep the request from its end.
                with contextlib.suppress(OSError):
                    self._remove(name)

    def _remove(self, name: str) -> None:
        if self._unwritten.pop(name, None) is None and self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        names = list(self._unwritten)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                names += [name for name in os.listdir(self._folder) if name.count(".") == _NUM_DOTS]
        return names

    def _age_s(self, name: str) -> float:
        # By the wall clock, the only one that outlives a process.
        if name in self._unwritten:
            return time.time() - self._unwritten[name]
        assert self._folder is not None, "a name that was written comes from the folder"
        try:
            return time.time() - (self._folder / name).stat().st_mtime
        except OSError:
            return _TTL_S


_NUM_DOTS = 3


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _digest_of_beginning(content: Content, num_tokens: int) -> str:
    # Any prompt begins with none.
    beginning = content.token_ids[: num_tokens * _ID_BYTES] if num_tokens else content.token_ids
    return _digest(content.model.encode() + b"\0" + beginning)


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


def quarantined(message: str, incident_id: str, left_s: float = _TTL_S) -> Internal:
    """The client's error for a request that crashes engines, or may: `left_s` is how long it is refused."""
    return Internal(
        f"{message} for {left_s:.0f} s, incident {incident_id}",
        reason=QUARANTINED,
        metadata={"incident_id": incident_id},
    )
