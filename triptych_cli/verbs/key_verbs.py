"""The verbs `key new` and `key init`: keys, and their entries in a file of credentials."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from triptych_kit.config import ConfigError
from triptych_kit.process.setup import api_key_in_environment

key = typer.Typer(help="Make API keys.", no_args_is_help=True, rich_markup_mode=None)

_USAGE_ERROR = 2
# Who needs a key in a stack whose services are on hosts of their own, and its role. A scraper of metrics gets
# the role that may read them and call nothing.
_MEMBERS = {
    "client": "client",
    "admin": "admin",
    "metrics": "coordinator",
    "frontend": "frontend",
    "engine": "engine",
}
_LIST = "keys.yaml"


@key.command("new")
def new(
    name: Annotated[str, typer.Option(help="who has the key, in logs")] = "client",
    role: Annotated[str, typer.Option(help="client, frontend, engine, coordinator or admin")] = "client",
    tenant: Annotated[str, typer.Option(help="tenant of its requests")] = "",
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="day from which it is refused, UTC")
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="most requests of its tenant at once, in each frontend")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="most requests of its tenant a minute")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="most tokens of its tenant a minute")
    ] = None,
    weight: Annotated[
        int | None, typer.Option(min=1, help="its tenant's share beside others, which have 1")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="file of --api-keys that gets the entry, made if it is not there")
    ] = None,
) -> None:
    """Print a new key and, on stderr, its entry for the file of --api-keys, which has no secret."""
    from triptych_kit.addresses import private_files
    from triptych_kit.security.credentials import new_key, parse_entries

    made = new_key()
    fields = {
        "tenant": tenant or None,
        "expires": expires and expires.date(),
        "max_requests": max_requests,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "weight": weight,
    }
    entry = _entry(made, name, role, fields)
    try:
        parse_entries(entry, "the entry")
        if file is not None:
            before = file.read_text(encoding="utf-8").rstrip("\n") if file.exists() else ""
            # A list without entries, as some write it.
            before = "" if before.strip() == "[]" else before
            listed = f"{before}\n{entry}".lstrip("\n")
            parse_entries(listed, str(file))
            with private_files():
                _write_list(file, listed)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        cause = f"{file}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"triptych key new: {cause}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR) from error
    print(made)
    if file is None:
        print(entry, end="", file=sys.stderr)


@key.command("init")
def init(
    folder: Annotated[Path, typer.Argument(help="folder that gets keys.yaml, and a file for each key")],
) -> None:
    """Make the keys of a stack, unless the folder has them: client.key, frontend.key and so on, keys.yaml.

    The client's is that of the variable TRIPTYCH_API_KEY, if it is set; another value later replaces it.
    """
    from triptych_kit.addresses import private_files
    from triptych_kit.security.credentials import digest_of

    client_key = api_key_in_environment()
    try:
        if client_key is not None:
            digest_of(client_key, "TRIPTYCH_API_KEY")
        folder.mkdir(mode=0o700, exist_ok=True)
        with private_files():
            if not (folder / _LIST).exists():
                _make_all(folder, client_key)
            elif client_key is not None:
                _replace_client(folder, client_key)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        print(f"triptych key init: {error}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR) from error


def _make_all(folder: Path, client: str | None) -> None:
    from triptych_kit.security.credentials import new_key

    keys = {name: new_key() for name in _MEMBERS}
    if client is not None:
        keys["client"] = client
    for name, made in keys.items():
        _key_file(folder, name).write_text(made + "\n", encoding="ascii")
    # Scrapers run as users of their own, which share the group with the services.
    _key_file(folder, "metrics").chmod(0o640)
    # The list is last: with it the folder is complete.
    entries = [_entry(made, name, _MEMBERS[name], {}) for name, made in keys.items()]
    _write_list(folder / _LIST, "".join(entries))
    print(f"made {_LIST} and the keys of {', '.join(keys)} in {folder}")


def _replace_client(folder: Path, key: str) -> None:
    """Change the digest in the client's entry, which may have got limits or a tenant, and nothing else."""
    before = _key_file(folder, "client").read_text(encoding="ascii").strip()
    listed = (folder / _LIST).read_text(encoding="utf-8")
    if _digest(key) not in listed:
        if _digest(before) not in listed:
            raise ConfigError(f"{folder / _LIST} has no entry with the digest of client.key to replace")
        _write_list(folder / _LIST, listed.replace(_digest(before), _digest(key)))
    if before != key:
        _key_file(folder, "client").write_text(key + "\n", encoding="ascii")
        print(f"replaced the key of client in {folder}")


def _write_list(file: Path, content: str) -> None:
    # Services that read the list again never see a part of it.
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(file)


def _key_file(folder: Path, member: str) -> Path:
    return folder / f"{member}.key"


def _entry(made: str, name: str, role: str, fields: Mapping[str, object]) -> str:
    more = "".join(f", {field}: {value}" for field, value in fields.items() if value is not None)
    return f"- {{name: {name}, role: {role}{more}, sha256: {_digest(made)}}}\n"


def _digest(of: str) -> str:
    return hashlib.sha256(of.encode()).hexdigest()
