"""The file of credentials: which keys and certificates there are, and the role and tenant of each.

A YAML list. An entry has a `name`, a `role`, and one of `sha256` (of a key, in hex), `key` and `certificate`
(the common name, or a DNS or URI name of a certificate that the listener's CA has signed). Optional are
`tenant`, `expires` (an ISO date or time, UTC) and the limits of the tenant. Several entries may have the same
name, so that a new key is valid before the old one is removed. An empty file has no entries.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from triptych_kit.clock import Clock, MonotonicClock
from triptych_kit.config import ConfigError
from triptych_kit.errors import Unauthenticated, Unavailable
from triptych_kit.security.files import Version, is_recent, version_of
from triptych_kit.security.identity import Identity, Role, TenantLimits

logger = logging.getLogger(__name__)

MIN_KEY_CHARACTERS = 16
MAX_WEIGHT = 1_000_000  # as in the contract of engines
_MAX_ENTRIES = 1024
_MAX_BYTES = 1024 * 1024
_LOOK_S = 1.0  # how long a removed key may still be accepted
_RETRY_MS = 1000
_NAME = re.compile(r"[A-Za-z0-9._:/@-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = tuple(field.name for field in fields(TenantLimits))
_FIELDS = ("name", "role", "sha256", "key", "certificate", "tenant", "expires", *_LIMITS)
_KEY_PREFIX = "triptych-"


@dataclass(frozen=True, slots=True)
class Entry:
    """One credential: a key by its digest, or a certificate by one of its names."""

    identity: Identity
    digest: bytes | None = None
    certificate: str | None = None
    expires_at: datetime | None = None
    is_clear: bool = False  # the key itself is in the file


class Credentials:
    """The entries of a file, which is read again when it changes, and keys that are given otherwise.

    Raises ConfigError if the file cannot be read or has an error. If that happens after a change, no entry of
    the file is valid, as any of them may have been removed: callers get Unavailable until it can be read
    again, or Unauthenticated where it is gone.
    """

    def __init__(self, path: str | None, extra: Iterable[Entry] = (), *, clock: Clock | None = None) -> None:
        self._path = path
        self._extra = tuple(extra)
        self._clock = clock or MonotonicClock()
        self._version: Version | None = version_of([path] if path else [])
        self._looked_at = self._clock.now()
        self._entries = (*self._extra, *(read_entries(path) if path else ()))
        self._fault: ConfigError | None = None

    @property
    def has_file(self) -> bool:
        return self._path is not None

    @property
    def fault(self) -> str:
        """Why the file cannot be read now; empty if it can."""
        self._current()
        return "" if self._fault is None else str(self._fault)

    def by_key(self, key: str) -> Identity:
        """The identity of a key. Raises Unauthenticated for one that is unknown or has expired."""
        presented = hashlib.sha256(key.encode()).digest()
        match: Entry | None = None
        # All are compared, so that the time of an answer is no clue to what a key begins with.
        for entry in self._current():
            if entry.digest is not None and hmac.compare_digest(entry.digest, presented):
                match = entry
        if match is None:
            self._check_known()
            raise Unauthenticated("the API key is not known", reason="UNKNOWN_KEY")
        return _unless_expired(match, "API key")

    def by_certificate(self, names: Iterable[str]) -> Identity | None:
        """The identity of a verified certificate that has these names; None if there is no entry for it."""
        known = set(names)
        for entry in self._current():
            if entry.certificate is not None and entry.certificate in known:
                return _unless_expired(entry, "certificate")
        self._check_known()
        return None

    def _check_known(self) -> None:
        """Raises Unavailable if the file may have an entry that cannot be read."""
        if self._fault is not None and not isinstance(self._fault.__cause__, FileNotFoundError):
            raise Unavailable(
                "the file of API keys cannot be read", reason="KEYS_UNREADABLE", retry_after_ms=_RETRY_MS
            )

    def _current(self) -> tuple[Entry, ...]:
        now = self._clock.now()
        if self._path is None or now - self._looked_at < _LOOK_S:
            return self._entries
        self._looked_at = now
        version = version_of([self._path])
        if version == self._version:
            return self._entries
        known, fault = self._entries, self._fault
        try:
            self._entries, self._fault = (*self._extra, *read_entries(self._path)), None
            # Two changes within a tick of the file system's clock have one version.
            self._version = None if is_recent(version) else version
        except ConfigError as error:
            self._entries, self._fault = self._extra, error
            # A lack of file descriptors is over without a change of the file.
            self._version = None if isinstance(error.__cause__, OSError) else version
        if self._fault is not None and str(self._fault) != str(fault):
            logger.error(
                "API keys cannot be read, none of the file is valid", extra={"cause": str(self._fault)}
            )
        elif self._fault is None and (fault is not None or self._entries != known):
            logger.info("API keys read again", extra={"num_entries": len(self._entries)})
        return self._entries


def read_entries(path: str) -> tuple[Entry, ...]:
    """The entries of a file. Raises ConfigError that names the entry, and no key."""
    try:
        content, mode = Path(path).read_bytes(), os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"api_keys {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"api_keys {path} has {len(content)} bytes, the limit is {_MAX_BYTES}")
    entries = parse_entries(content, f"api_keys {path}")
    if mode & 0o077 and any(entry.is_clear for entry in entries):
        fields = {"path": path, "mode": f"{mode & 0o777:04o}"}
        logger.warning("API keys in clear can be read by other users", extra=fields)
    return entries


def parse_entries(content: bytes | str, what: str) -> tuple[Entry, ...]:
    """The entries of the content of a file, which errors call `what`. Raises ConfigError."""
    try:
        document = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
        # Its own message would quote the line, which may be a key.
        raise ConfigError(f"{what} is not YAML{_mark_of(error)}") from None
    if document is None:
        return ()
    if not isinstance(document, list):
        raise ConfigError(f"{what} is not a list of entries")
    if len(document) > _MAX_ENTRIES:
        raise ConfigError(f"{what} has {len(document)} entries, the limit is {_MAX_ENTRIES}")
    entries = tuple(_entry(one, f"{what}: entry {index}") for index, one in enumerate(document, 1))
    _check_tenants(entries, what)
    return entries


def _mark_of(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def _entry(fields: Any, what: str) -> Entry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{what} is not a mapping")
    unknown = [str(name)[:32] for name in fields if name not in _FIELDS]
    if unknown:
        raise ConfigError(f"{what}: {unknown[0]} is no field; these are: {', '.join(_FIELDS)}")
    name, tenant = fields.get("name"), fields.get("tenant", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what}: name has to match {_NAME.pattern}")
    what = f"{what} ({name})"
    if not isinstance(tenant, str) or (tenant and not _NAME.fullmatch(tenant)):
        raise ConfigError(f"{what}: tenant has to match {_NAME.pattern}")
    proofs = [one for one in ("sha256", "key", "certificate") if fields.get(one) is not None]
    if len(proofs) != 1:
        raise ConfigError(f"{what} needs one of sha256, key and certificate, and has {len(proofs)}")
    role = fields.get("role")
    if role not in list(Role):
        raise ConfigError(f"{what}: role has to be one of {', '.join(Role)}")
    identity = Identity(name, frozenset((Role(role),)), tenant, _limits(fields, what))
    expires_at = _time(fields.get("expires"), what)
    proof = fields[proofs[0]]
    if not isinstance(proof, str):
        raise ConfigError(f"{what}: {proofs[0]} is not a text")
    if proofs[0] == "certificate":
        return Entry(identity, certificate=proof, expires_at=expires_at)
    if proofs[0] == "key":
        return Entry(identity, digest=digest_of(proof, what), expires_at=expires_at, is_clear=True)
    if not _SHA256.fullmatch(proof):
        raise ConfigError(f"{what}: sha256 has to be 64 digits of lower-case hex")
    return Entry(identity, digest=bytes.fromhex(proof), expires_at=expires_at)


def digest_of(key: str, what: str) -> bytes:
    """The digest of a key in clear. Raises ConfigError for one that could be guessed, or cannot be sent."""
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{what}: key has {len(key)} characters, the least is {MIN_KEY_CHARACTERS}: `triptych key new` "
            "makes one; a short one that clients have already takes an entry with its sha256 in the file of "
            "--api-keys"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{what}: key has characters that a header cannot have")
    return hashlib.sha256(key.encode()).digest()


def new_key() -> str:
    """A random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def _limits(fields: dict[str, Any], what: str) -> TenantLimits:
    limits = {}
    for name in _LIMITS:
        value = fields.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{what}: {name} has to be a whole number from 1 on")
        if name == "weight" and value is not None and value > MAX_WEIGHT:
            raise ConfigError(f"{what}: weight is {value}, must be at most {MAX_WEIGHT}")
        limits[name] = value
    return TenantLimits(**limits)


def _time(value: Any, what: str) -> datetime | None:
    if value is None:
        return None
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise ConfigError(f"{what}: expires has to be a date, or a time such as 2030-01-31T12:00:00Z")


def _check_tenants(entries: tuple[Entry, ...], what: str) -> None:
    limits: dict[str, TenantLimits] = {}
    weights: dict[str, int] = {}
    for entry in entries:
        identity = entry.identity
        # Shares are by account: without a tenant each name has one of its own.
        quotas = replace(identity.limits, weight=None)
        if limits.setdefault(identity.tenant, quotas) != quotas:
            whose = f"tenant {identity.tenant}" if identity.tenant else "entries without a tenant"
            raise ConfigError(f"{what}: {whose} have different limits")
        if weights.setdefault(identity.account, identity.weight) != identity.weight:
            whose = f"tenant {identity.tenant}" if identity.tenant else f"entries named {identity.name}"
            raise ConfigError(f"{what}: {whose} have different weights")


def _unless_expired(entry: Entry, what: str) -> Identity:
    if entry.expires_at is not None and datetime.now(UTC) >= entry.expires_at:
        raise Unauthenticated(
            f"the {what} of {entry.identity.name} expired at {entry.expires_at.isoformat()}",
            reason="EXPIRED_CREDENTIALS",
        )
    return entry.identity
