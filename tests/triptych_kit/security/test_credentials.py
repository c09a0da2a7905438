import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from triptych_kit.clock import FakeClock, MonotonicClock
from triptych_kit.config import ConfigError
from triptych_kit.errors import Unauthenticated, Unavailable
from triptych_kit.security.credentials import (
    Credentials,
    Entry,
    digest_of,
    new_key,
    parse_entries,
    read_entries,
)
from triptych_kit.security.files import is_recent, version_of
from triptych_kit.security.identity import Identity, Role, TenantLimits

KEY = "triptych-0123456789abcdef"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("proof", "mode", "is_warned"),
    [(f"key: {KEY}", 0o640, True), (f"key: {KEY}", 0o600, False), (f"sha256: '{'0' * 64}'", 0o644, False)],
)
def test_a_file_with_keys_in_clear_is_for_its_owner(tmp_path, caplog, proof, mode, is_warned):
    path = write(tmp_path / "keys", f"- {{name: a, {proof}, role: client}}")
    Path(path).chmod(mode)
    Credentials(path)
    found = [
        vars(record)["mode"] for record in caplog.records if "can be read by other users" in record.message
    ]
    assert found == ([f"{mode:04o}"] if is_warned else [])


def test_a_key_in_clear_and_by_its_digest(tmp_path):
    other = new_key()
    path = write(
        tmp_path / "keys.yaml",
        f"""
        - {{name: alice, key: {KEY}, role: client, tenant: team-a, max_requests: 2}}
        - {{name: bob, sha256: {digest(other)}, role: admin}}
        """,
    )
    credentials = Credentials(path)
    alice, bob = credentials.by_key(KEY), credentials.by_key(other)
    assert (alice.name, alice.roles, alice.tenant) == ("alice", {Role.CLIENT}, "team-a")
    assert alice.limits == TenantLimits(max_requests=2)
    assert (bob.name, bob.roles, bob.tenant, bob.limits) == ("bob", {Role.ADMIN}, "", TenantLimits())
    for unknown in ("", KEY[:-1], KEY + "x", digest(other), "\u00fc"):
        with pytest.raises(Unauthenticated) as caught:
            credentials.by_key(unknown)
        assert caught.value.reason == "UNKNOWN_KEY"
        assert unknown == "" or unknown not in caught.value.message


def test_two_keys_of_one_name_are_valid_at_once_and_a_removed_one_is_refused(tmp_path):
    old, new = new_key(), new_key()
    clock = FakeClock()
    path = write(tmp_path / "keys", f"- {{name: a, key: {old}, role: client}}")
    credentials = Credentials(path, clock=clock)
    write(
        tmp_path / "keys", f"- {{name: a, key: {old}, role: client}}\n- {{name: a, key: {new}, role: client}}"
    )
    clock.advance(1.1)
    assert credentials.by_key(old) == credentials.by_key(new)
    write(tmp_path / "keys", f"- {{name: a, key: {new}, role: client}}")
    clock.advance(1.1)
    assert credentials.by_key(new).name == "a"
    with pytest.raises(Unauthenticated, match="not known"):
        credentials.by_key(old)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


UNREADABLE = (Unavailable, "KEYS_UNREADABLE")
UNKNOWN = (Unauthenticated, "UNKNOWN_KEY")
FAULTS: dict[str, tuple[Callable[[Path], object], tuple[type[Exception], str], bool]] = {
    "emptied": (lambda path: path.write_text(""), UNKNOWN, False),
    "a comment alone": (lambda path: path.write_text("# none\n"), UNKNOWN, False),
    "a list without entries": (lambda path: path.write_text("[]"), UNKNOWN, False),
    "removed": (lambda path: path.unlink(), UNKNOWN, True),
    "replaced by a folder": (replaced_by_folder, UNREADABLE, True),
    "no YAML": (lambda path: path.write_text(f"- {{name: a, key: {KEY}, role: client"), UNREADABLE, True),
    "an entry that is none": (
        lambda path: path.write_text(f"- {{name: a, key: {KEY}, role: clown}}"),
        UNREADABLE,
        True,
    ),
    "no text": (lambda path: path.write_bytes(b"\xff\x00"), UNREADABLE, True),
    "too large": (lambda path: path.write_text("#" * 1_048_577), UNREADABLE, True),
}


@pytest.mark.parametrize(("change", "refusal", "is_fault"), FAULTS.values(), ids=list(FAULTS))
def test_no_key_of_a_file_outlives_what_the_file_was(tmp_path, caplog, change, refusal, is_fault):
    """Which of its keys were to be removed cannot be known of a file that cannot be read."""
    caplog.set_level("INFO")
    clock, own = FakeClock(), new_key()
    text = f"- {{name: a, key: {KEY}, role: client}}\n- {{name: c, certificate: c.example, role: client}}"
    path = write(tmp_path / "keys", text)
    other = Entry(Identity("own", frozenset((Role.CLIENT,))), digest=digest_of(own, "own"))
    credentials = Credentials(path, [other], clock=clock)
    change(Path(path))
    for _ in range(3):
        clock.advance(1.1)
        with pytest.raises(refusal[0]) as caught:
            credentials.by_key(KEY)
        assert caught.value.reason == refusal[1]
        assert credentials.by_key(own).name == "own"
        assert bool(credentials.fault) is is_fault
        if refusal is UNREADABLE:
            with pytest.raises(Unavailable):
                credentials.by_certificate(["c.example"])
        else:
            assert credentials.by_certificate(["c.example"]) is None
    message = "API keys cannot be read, none of the file is valid" if is_fault else "API keys read again"
    assert [record.getMessage() for record in caplog.records] == [message]
    assert KEY not in caplog.text
    if Path(path).is_dir():
        Path(path).rmdir()
    write(Path(path), text)
    clock.advance(1.1)
    assert credentials.by_key(KEY).name == "a"
    assert credentials.fault == ""


def test_a_file_may_be_empty_at_the_start(tmp_path):
    with pytest.raises(Unauthenticated, match="not known"):
        Credentials(write(tmp_path / "keys", "")).by_key(KEY)


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_file_that_can_be_read_again_is(tmp_path, monkeypatch, caplog, is_changed: bool):
    clock, new = FakeClock(), new_key()
    path = write(tmp_path / "keys", f"- {{name: a, key: {KEY}, role: client}}")
    credentials = Credentials(path, clock=clock)
    write(tmp_path / "keys", f"- {{name: a, key: {new}, role: client}}")
    with monkeypatch.context() as patched:
        # As without permission, which a test that runs as root has.
        patched.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(13, "Permission denied")))
        for _ in range(3):
            clock.advance(1.1)
            with pytest.raises(Unavailable):
                credentials.by_key(KEY)
    assert len(caplog.records) == 1
    if is_changed:
        (tmp_path / "keys").chmod(0o640)
    clock.advance(1.1)
    assert credentials.by_key(new).name == "a"
    with pytest.raises(Unauthenticated, match="not known"):
        credentials.by_key(KEY)


def test_a_version_counts_as_recent_while_a_further_change_may_have_the_same(tmp_path):
    path = write(tmp_path / "keys", "")
    assert is_recent(version_of([path]))
    (mtime_ns, ctime_ns, *rest), old_ns = version_of([path])[0], 3_000_000_000
    assert not is_recent(((mtime_ns - old_ns, ctime_ns - old_ns, rest[0], rest[1]),))


def test_a_key_expires(tmp_path):
    past, future = datetime.now(UTC) - timedelta(seconds=1), datetime.now(UTC) + timedelta(days=1)
    other = new_key()
    path = write(
        tmp_path / "keys",
        f"- {{name: a, key: {KEY}, role: client, expires: {past.isoformat()}}}\n"
        f"- {{name: b, key: {other}, role: client, expires: {future.date()}}}",
    )
    credentials = Credentials(path, clock=MonotonicClock())
    with pytest.raises(Unauthenticated) as caught:
        credentials.by_key(KEY)
    assert caught.value.reason == "EXPIRED_CREDENTIALS"
    assert caught.value.message == f"the API key of a expired at {past.isoformat()}"
    if future.date() > datetime.now(UTC).date():
        assert credentials.by_key(other).name == "b"


ENTRY = "name: a, role: client"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{a: 1}", "is not a list of entries"),
        ("- 1", "entry 1 is not a mapping"),
        (f"- {{{ENTRY}, key: {KEY}, rolle: x}}", "entry 1: rolle is no field; these are: name, role,"),
        (f"- {{role: client, key: {KEY}}}", "entry 1: name has to match"),
        (f"- {{name: 'a b', role: client, key: {KEY}}}", "entry 1: name has to match"),
        (f"- {{name: a, role: king, key: {KEY}}}", "entry 1 (a): role has to be one of client, frontend"),
        (f"- {{{ENTRY}}}", "entry 1 (a) needs one of sha256, key and certificate, and has 0"),
        (f"- {{{ENTRY}, key: {KEY}, certificate: x}}", "entry 1 (a) needs one of sha256, key and certi"),
        (f"- {{{ENTRY}, key: short}}", "entry 1 (a): key has 5 characters, the least is 16"),
        (f"- {{{ENTRY}, key: {KEY}\u00fc}}", "entry 1 (a): key has characters that a header cannot have"),
        (f"- {{{ENTRY}, key: 1234567890123456789}}", "entry 1 (a): key is not a text"),
        (f"- {{{ENTRY}, sha256: abc}}", "entry 1 (a): sha256 has to be 64 digits of lower-case hex"),
        (f"- {{{ENTRY}, key: {KEY}, max_requests: 0}}", "entry 1 (a): max_requests has to be a whole num"),
        (f"- {{{ENTRY}, key: {KEY}, tokens_per_minute: true}}", "tokens_per_minute has to be a whole"),
        (f"- {{{ENTRY}, key: {KEY}, expires: soon}}", "entry 1 (a): expires has to be a date, or a time"),
        (f"- {{{ENTRY}, key: {KEY}, tenant: [x]}}", "entry 1 (a): tenant has to match"),
        (
            f"- {{{ENTRY}, key: {KEY}, weight: 1000001}}",
            "entry 1 (a): weight is 1000001, must be at most 1000000",
        ),
        (f"- {{{ENTRY}, key: {KEY}, max_requests: 1}}\n- {{{ENTRY}, certificate: x}}", "different limits"),
        (
            f"- {{{ENTRY}, key: {KEY}, weight: 2}}\n- {{{ENTRY}, certificate: x}}",
            "different weights",
        ),
        (f"- {{{ENTRY}, key: {KEY}", "is not YAML, line 1"),
        (f"- {{{ENTRY}, key: {KEY}, expires: 2030-02-31}}", "is not YAML"),
        (f"- {{{ENTRY}, key: {KEY}, max_requests: {'9' * 5000}}}", "is not YAML"),
        ("- [" * 20_000, "is not YAML"),
        ("- {name: a}\n" * 1025, "has 1025 entries, the limit is 1024"),
        ("#" * 1_048_577, "has 1048577 bytes, the limit is 1048576"),
    ],
)
def test_what_is_no_file_of_credentials(tmp_path, text: str, error: str):
    with pytest.raises(ConfigError) as caught:
        read_entries(write(tmp_path / "keys", text))
    assert error in str(caught.value)
    assert KEY not in str(caught.value)


def test_keys_without_a_tenant_have_weights_of_their_own(tmp_path):
    text = f"- {{{ENTRY}, key: {KEY}, weight: 2}}\n- {{name: b, role: client, certificate: x, weight: 3}}"
    entries = read_entries(write(tmp_path / "keys", text))
    assert [entry.identity.weight for entry in entries] == [2, 3]


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="keys cannot be read: No such file or directory"):
        read_entries(str(tmp_path / "keys"))


def test_no_key_has_the_account_of_a_tenant_that_is_named_like_it():
    client = frozenset((Role.CLIENT,))
    accounts = [Identity("legal", client).account, Identity("x", client, "legal").account]
    assert accounts == ["key legal", "legal"]
    with pytest.raises(ConfigError):
        parse_entries(f"[{{name: a, key: {KEY}, role: client, tenant: key legal}}]", "keys")


def test_the_clients_of_a_shared_key_are_not_distinguished():
    assert Identity("TRIPTYCH_API_KEY", frozenset((Role.CLIENT,)), is_shared=True).account == ""
