"""The verbs `key new` and `key init`: what they make is what services read."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from triptych_cli.verbs.key_verbs import key
from triptych_kit.errors import Unauthenticated
from triptych_kit.security.credentials import Credentials, read_entries
from triptych_kit.security.identity import Role, TenantLimits

MEMBERS = {
    "client": Role.CLIENT,
    "admin": Role.ADMIN,
    "metrics": Role.COORDINATOR,
    "frontend": Role.FRONTEND,
    "engine": Role.ENGINE,
}
GIVEN = "a-key-that-clients-have"


def run(*arguments: str, client: str | None = None) -> Result:
    """Run a verb, with the key of clients in the environment or without."""
    return CliRunner().invoke(key, list(arguments), env={"TRIPTYCH_API_KEY": client})


def key_of(folder: Path, member: str) -> str:
    return (folder / f"{member}.key").read_text().strip()


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_new_prints_a_key_and_its_entry_without_the_key(tmp_path: Path) -> None:
    outcome = run("new", "--name", "alice", "--role", "admin", "--tenant", "team-a")
    made = outcome.stdout.strip()
    assert outcome.exit_code == 0
    assert made not in outcome.stderr
    listed = tmp_path / "keys.yaml"
    listed.write_text(outcome.stderr)
    identity = Credentials(str(listed)).by_key(made)
    assert (identity.name, identity.roles, identity.tenant) == ("alice", frozenset({Role.ADMIN}), "team-a")


def test_new_gives_the_entry_its_limits_and_its_end(tmp_path: Path) -> None:
    listed = tmp_path / "keys.yaml"
    outcome = run(
        *("new", "--name=alice", "--tenant=team-a", "--expires=2100-01-31", "--max-requests=3"),
        *("--requests-per-minute=60", "--tokens-per-minute=1000", "--file", str(listed)),
    )
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    (entry,) = read_entries(str(listed))
    assert entry.identity.limits == TenantLimits(3, 60, 1000)
    assert entry.expires_at == datetime(2100, 1, 31, tzinfo=UTC)
    # The limits are of the tenant: another key of it has the same.
    other = run("new", "--name=bob", "--tenant=team-a", "--file", str(listed))
    assert (other.exit_code, "tenant team-a have different limits" in other.stderr) == (2, True)


@pytest.mark.parametrize("wrong", [("--role", "owner"), ("--name", "a b"), ("--tenant", "}")])
def test_new_refuses_what_no_entry_may_have(wrong: tuple[str, str]) -> None:
    outcome = run("new", *wrong)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("triptych key new: the entry")


def test_new_adds_the_entry_to_a_file_that_stays_as_it_was_where_it_has_an_error(tmp_path: Path) -> None:
    run("init", str(tmp_path))
    listed = tmp_path / "keys.yaml"
    outcome = run("new", "--name", "alice", "--tenant", "team-a", "--file", str(listed))
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    credentials = Credentials(str(listed))
    assert credentials.by_key(outcome.stdout.strip()).name == "alice"
    assert credentials.by_key(key_of(tmp_path, "client")).name == "client"
    assert stat.S_IMODE(listed.stat().st_mode) == 0o600
    listed.write_text("- {name: broken}\n")
    outcome = run("new", "--file", str(listed))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert listed.read_text() == "- {name: broken}\n"


def test_new_makes_the_file_that_is_not_there_and_names_a_folder_that_is_not(tmp_path: Path) -> None:
    listed = tmp_path / "keys.yaml"
    outcome = run("new", "--name", "alice", "--file", str(listed))
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert Credentials(str(listed)).by_key(outcome.stdout.strip()).name == "alice"
    assert stat.S_IMODE(listed.stat().st_mode) == 0o600
    outcome = run("new", "--file", str(tmp_path / "none" / "keys.yaml"))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr == f"triptych key new: {tmp_path}/none/keys.yaml: No such file or directory\n"


def test_init_makes_a_key_for_each_member_once(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    outcome = run("init", str(folder))
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    credentials = Credentials(str(folder / "keys.yaml"))
    made = {member: key_of(folder, member) for member in MEMBERS}
    assert {member: credentials.by_key(one).roles for member, one in made.items()} == {
        member: {role} for member, role in MEMBERS.items()
    }
    assert [one for one in made.values() if one in outcome.stdout] == []
    assert set(contents(folder)) == {"keys.yaml", *(f"{member}.key" for member in MEMBERS)}
    before = contents(folder)
    again = run("init", str(folder))
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")
    assert contents(folder) == before


def test_keys_are_for_their_user_and_that_of_metrics_for_its_group(tmp_path: Path) -> None:
    run("init", str(tmp_path))
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes.pop("metrics.key") == 0o640
    assert set(modes.values()) == {0o600}


def test_init_takes_the_key_of_clients_from_the_environment_and_replaces_it(tmp_path: Path) -> None:
    run("init", str(tmp_path), client=GIVEN)
    assert key_of(tmp_path, "client") == GIVEN
    listed = tmp_path / "keys.yaml"
    first = "- {name: client, role: client, "
    listed.write_text(listed.read_text().replace(first, f"{first}tenant: team-a, "))
    before = contents(tmp_path)
    outcome = run("init", str(tmp_path), client=GIVEN + "-2")
    assert outcome.exit_code == 0
    credentials = Credentials(str(listed))
    # What was added to the entry stays.
    assert credentials.by_key(GIVEN + "-2").tenant == "team-a"
    with pytest.raises(Unauthenticated):
        credentials.by_key(GIVEN)
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"client.key", "keys.yaml"}


def test_init_finishes_a_replacement_that_was_cut_off(tmp_path: Path) -> None:
    run("init", str(tmp_path), client=GIVEN)
    (tmp_path / "client.key").write_text("the-one-of-before\n")
    run("init", str(tmp_path), client=GIVEN)
    assert key_of(tmp_path, "client") == GIVEN


def test_init_changes_nothing_where_it_cannot_tell_which_entry_is_the_clients(tmp_path: Path) -> None:
    run("init", str(tmp_path))
    (tmp_path / "client.key").write_text("another-key-altogether\n")
    before = contents(tmp_path)
    outcome = run("init", str(tmp_path), client=GIVEN)
    assert outcome.exit_code == 2
    assert "has no entry with the digest of client.key" in outcome.stderr
    assert contents(tmp_path) == before


def test_init_refuses_a_key_that_could_be_guessed(tmp_path: Path) -> None:
    outcome = run("init", str(tmp_path), client="secret")
    assert outcome.exit_code == 2
    assert "TRIPTYCH_API_KEY" in outcome.stderr
    assert "secret" not in outcome.stderr
    assert contents(tmp_path) == {}
