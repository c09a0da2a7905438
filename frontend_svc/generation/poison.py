"""Which prompts have crashed engines or may have, and which are known not to.

What is recorded is shared by the frontends of one stack on one host: files in the user's runtime folder,
apart for each stack. Where there is none, each process knows its own alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.engine.v1 import add_pb2
from triptych_kit.errors import Internal
from triptych_kit.security.files import Version, is_recent, version_of

logger = logging.getLogger(__name__)

QUARANTINED = "QUARANTINED"
_TTL_S = 600.0
# A file from further in the future than this was written before the clock was set back.
_MAX_AHEAD_S = 60.0
_MAX_ENTRIES = 256  # of each kind
_FOLDER = "quarantine"
_LOCK_FILE = "probation.lock"
_MAX_INNOCENT = 8192
_MAX_INNOCENT_BYTES = 16 * 1024 * 1024
_ID_BYTES = 4
# Prompts are compared by so many tokens at a time. Many begin alike, so no fewer than these tell them apart.
_BLOCK_TOKENS = 16
_LEAST_TOKENS = 64


# What differs between requests that an engine treats alike.
_INCIDENTAL_FIELDS = (
    "handle", "request_id", "external_request_id", "group_id", "group_index", "attempt", "prompt_token_ids",
    "output_token_ids", "request_seed", "priority", "age_ms", "remaining_ms", "cache_salt", "tenant",
    "job_id", "is_last_step", "data_parallel_rank", "trace_context", "orphan_grace_ms", "resume_state",
    "account", "weight",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Content:
    """What a request is known by: whose it is, its prompt, and how it is continued.

    account: see `Identity.account`; empty for callers that are not distinguished.  token_ids: int32, little
    endian.  parameters: equal for requests that an engine treats alike, but for their seeds.
    """

    account: str
    model: str
    token_ids: bytes
    parameters: bytes = b""

    @property
    def owner(self) -> str:
        """What answers for it: its account, without one its prompt. Safe in names of files."""
        if self.account:
            return _digest(b"account\0" + self.account.encode())
        return _digest_of_beginning(self, self.num_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // _ID_BYTES


def content_of(account: str, model: str, entries: Sequence[add_pb2.AddEntry]) -> Content:
    """The content of a request that is sent to engines as `entries`."""
    first = add_pb2.AddEntry()
    first.CopyFrom(entries[0])
    for name in _INCIDENTAL_FIELDS:
        first.ClearField(name)
    parameters = len(entries).to_bytes(4, "little") + first.SerializeToString(deterministic=True)
    return Content(account, model, entries[0].prompt_token_ids, parameters)


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
    """The newest contents that were answered without harm, up to a number and a size in bytes."""

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
        self._num_bytes += _size(content)
        while len(self._prompts) > self._max_prompts or self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(self._prompts.popitem(last=False)[0])

    def discard(self, content: Content) -> None:
        """Forget a content that may do harm."""
        if content in self._prompts:
            del self._prompts[content]
            self._num_bytes -= _size(content)

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
        return min(num_tokens, content.num_tokens)


def _size(content: Content) -> int:
    return len(content.token_ids) + len(content.parameters)


def _num_equal_blocks(one: bytes, other: bytes, size: int) -> int:
    count = 0
    for start in range(0, min(len(one), len(other)) - size + 1, size):
        if one[start : start + size] != other[start : start + size]:
            break
        count += 1
    return count


_SUSPECT, _POISON = "suspect", "poison"
_NAME = re.compile(
    r"(?P<kind>suspect|poison)\.(?P<account>[0-9a-f]{24})\.(?P<num_tokens>[0-9]{1,9})"
    r"\.(?P<beginning>[0-9a-f]{24})\.(?P<found_at>[0-9]{1,12})\.(?P<incident_id>[0-9a-f]{16})"
)


@dataclass(frozen=True, slots=True)
class _Incident:
    """A prompt that was present at deaths of engines. All that is compared is in the name of its file.

    found_at: by the wall clock, the only one that outlives a process.
    """

    name: str
    kind: str
    account: str
    num_tokens: int
    beginning: str
    found_at: int
    incident_id: str

    def left_s(self, now: float) -> float:
        """For how long it is remembered; 0 if no longer."""
        age_s = now - self.found_at
        return max(0.0, _TTL_S - age_s) if age_s >= -_MAX_AHEAD_S else 0.0

    def is_alike(self, content: Content) -> bool:
        """Whether a prompt of the same account is that of this suspect, or begins as this poison."""
        is_whole = self.kind == _SUSPECT or not self.num_tokens
        if is_whole and content.num_tokens != self.num_tokens:
            return False
        return _digest_of_beginning(content, self.num_tokens) == self.beginning


def _incident_of(name: str) -> _Incident | None:
    """None for the name of another file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    fields = match.groupdict()
    num_tokens, found_at = int(fields.pop("num_tokens")), int(fields.pop("found_at"))
    return _Incident(name, num_tokens=num_tokens, found_at=found_at, **fields)


class PoisonRecord:
    """The prompts that may have crashed engines and those that have, for ten minutes and all processes.

    Suspects are those that were at a death, and were not cleared: they run alone, and so does all of their
    account, if it has a key, that is not known to be innocent: a prompt can be varied at will. A prompt is
    refused if it begins as one that has crashed engines, and with a key so is the rest of its account. A file
    each, whose name has all that is compared, so that neither a lock nor a full disk matters.
    """

    def __init__(self, runtime_folder: Path | None = None, *, stack: str = "") -> None:
        """stack: what the frontends of one stack have in common, such as where they find engines."""
        self.innocent = InnocentPrompts()
        self._folder = None
        if runtime_folder is not None:
            self._folder = runtime_folder / _FOLDER / _digest(stack.encode())
        self._unwritten: set[str] = set()
        self._listed: list[_Incident | None] = []
        self._version: Version | None = None  # of the folder, when it was listed

    def note_poison(self, contents: Sequence[Content]) -> str:
        """Record requests of one owner that have crashed engines; returns the incident id.

        Of several prompts none is known to be the cause: the account alone is recorded, which they have.
        """
        for content in contents:
            self.innocent.discard(content)
            self.note_cleared(content)
        content = contents[0]
        if any(other.token_ids != content.token_ids for other in contents):
            content = replace(content, token_ids=b"")
        return self._write(_POISON, content, self.innocent.num_own_tokens(content))

    def note_suspect(self, content: Content) -> None:
        """Record a request that may have crashed an engine."""
        self.innocent.discard(content)
        if not any(one.kind == _SUSPECT and one.is_alike(content) for one in self._incidents_of(content)):
            self._write(_SUSPECT, content, content.num_tokens)

    def note_cleared(self, content: Content) -> None:
        """A request that was alone has crashed nothing."""
        for one in self._incidents_of(content):
            if one.kind == _SUSPECT and one.is_alike(content):
                self._remove(one.name)

    def check(self, content: Content, *, is_unknown: bool = True) -> bool:
        """Whether a request is to run alone. Raises Internal if it is refused.

        is_unknown: False for one that has had output, for which its account does not matter.
        """
        incidents = self._incidents_of(content)
        if not incidents:
            return False
        is_unknown = is_unknown and content not in self.innocent
        # Without a key, another prompt may be another client's.
        answers_for_all = is_unknown and bool(content.account)
        poison = [one for one in incidents if one.kind == _POISON]
        alike = next((one for one in poison if one.is_alike(content)), None)
        if alike is not None:
            raise _refusal("requests with this prompt have crashed engines: it is refused", alike)
        if poison and answers_for_all:
            what = "its prompts that were not answered before are refused"
            raise _refusal(f"requests of {content.account} have crashed engines: {what}", poison[0])
        return is_unknown and any(answers_for_all or one.is_alike(content) for one in incidents)

    def entries(self) -> list[PoisonEntry]:
        """The prompts that are refused now, newest first."""
        entries = [
            PoisonEntry(one.incident_id, *self._read(one.name), one.num_tokens, one.left_s(time.time()))
            for one in self._incidents()
            if one.kind == _POISON
        ]
        return sorted(entries, key=lambda entry: -entry.left_s)

    def clear(self, incident_id: str = "") -> int:
        """Forget a prompt that is refused, or all and all suspects; returns how many were refused."""
        chosen = [one for one in self._incidents() if incident_id in ("", one.incident_id)]
        for one in chosen:
            self._remove(one.name)
        return sum(one.kind == _POISON for one in chosen)

    def _write(self, kind: str, content: Content, num_tokens: int) -> str:
        incident_id, beginning = secrets.token_hex(8), _digest_of_beginning(content, num_tokens)
        account = _digest(content.account.encode())
        name = f"{kind}.{account}.{num_tokens}.{beginning}.{int(time.time())}.{incident_id}"
        self._unwritten.add(name)
        if self._folder is not None:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = self._folder / name
                file.touch()
                self._unwritten.discard(name)
                file.write_text(json.dumps({"account": content.account, "model": content.model}))
            except OSError as error:
                logger.warning("quarantine cannot be recorded", extra={"reason": error.strerror})
        alike = sorted((one for one in self._incidents() if one.kind == kind), key=lambda one: one.found_at)
        for one in alike[:-_MAX_ENTRIES]:
            self._remove(one.name)
        return incident_id

    def _incidents_of(self, content: Content) -> list[_Incident]:
        incidents = self._incidents()
        if not incidents:
            return []
        account = _digest(content.account.encode())
        return [one for one in incidents if one.account == account]

    def _incidents(self) -> list[_Incident]:
        """All that is remembered; what is not is removed."""
        incidents, now = [], time.time()
        for incident in filter(None, (*map(_incident_of, self._unwritten), *self._written())):
            if incident.left_s(now):
                incidents.append(incident)
            else:
                self._remove(incident.name)
        return incidents

    def _written(self) -> list[_Incident | None]:
        if self._folder is None:
            return []
        version = version_of([str(self._folder)])
        if version != self._version:
            try:
                self._listed = [_incident_of(name) for name in os.listdir(self._folder)]
            except OSError:
                self._listed = []
            # Two changes within a tick of the file system's clock have one version.
            self._version = None if is_recent(version) else version
        return self._listed

    def _read(self, name: str) -> tuple[str, str]:
        try:
            fields = json.loads((self._folder / name).read_text()) if self._folder is not None else {}
        except (OSError, ValueError):
            fields = {}
        return str(fields.get("account", "")), str(fields.get("model", ""))

    def _remove(self, name: str) -> None:
        self._unwritten.discard(name)
        if self._folder is not None:
            # A folder that cannot be written must not keep a request from its end.
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _digest_of_beginning(content: Content, num_tokens: int) -> str:
    return _digest(content.model.encode() + b"\0" + content.token_ids[: num_tokens * _ID_BYTES])


_SHARED, _ALONE = fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_EX | fcntl.LOCK_NB


class ProbationLocks:
    """Keeps requests of other processes of the host away from suspects: a death then identifies one.

    An engine has two locks: processes that have requests without output there share the one, and the other is
    that of a process that keeps others away. The kernel releases the locks of a process that ends.
    """

    def __init__(self, runtime_folder: Path | None = None) -> None:
        self._file = None
        if runtime_folder is not None:
            try:
                self._file = (runtime_folder / _LOCK_FILE).open("a+b")
            except OSError as error:
                logger.warning("suspects are not shared", extra={"reason": error.strerror})

    def is_kept(self, address: str) -> bool:
        """Whether another process keeps requests away from an engine. Not to be asked of one that is kept."""
        is_free = self._set(f"kept {address}", _SHARED)
        self._set(f"kept {address}", fcntl.LOCK_UN)
        return not is_free

    def share(self, address: str) -> bool:
        """Have requests without output on an engine; False if another process has it alone."""
        return self._set(f"used {address}", _SHARED)

    def unshare(self, address: str) -> None:
        self._set(f"used {address}", fcntl.LOCK_UN)

    def keep(self, address: str) -> bool:
        """Keep requests of other processes away from an engine; False if another does so."""
        return self._set(f"kept {address}", _ALONE)

    def have_alone(self, address: str, owner: str) -> bool:
        """Have an engine alone, for an owner who has no other; False if another process prevents it."""
        return (
            self._set(f"kept {address}", _ALONE)
            and self._set(f"owner {owner}", _ALONE)
            and self._set(f"used {address}", _ALONE)
        )

    def are_alone(self, address: str) -> bool:
        """Whether no other process has requests without output on an engine."""
        return self._set(f"used {address}", _ALONE)

    def release(self, address: str) -> None:
        """Let requests of other processes go to an engine again."""
        self._set(f"kept {address}", fcntl.LOCK_UN)

    def release_owner(self, owner: str) -> None:
        """Let the owner have an engine alone in another process."""
        self._set(f"owner {owner}", fcntl.LOCK_UN)

    def close(self) -> None:
        """Release all."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _set(self, name: str, operation: int) -> bool:
        if self._file is None:
            return True
        try:
            # A byte of the file for each.
            fcntl.lockf(self._file, operation, 1, _offset(name))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            # A file system without locks.
            return True
        return True


@functools.lru_cache(maxsize=4096)
def _offset(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


def quarantined(message: str, incident_id: str, left_s: float = _TTL_S) -> Internal:
    """The client's error for a request that crashes engines, or may: `left_s` is how long it is refused."""
    return Internal(
        f"{message} for {left_s:.0f} s, incident {incident_id}",
        reason=QUARANTINED,
        metadata={"incident_id": incident_id},
    )


def _refusal(message: str, incident: _Incident) -> Internal:
    logger.warning("poison refused", extra={"incident_id": incident.incident_id})
    return quarantined(message, incident.incident_id, incident.left_s(time.time()))
