"""The verbs `key new` and `key init`: keys, and their entries in a file of credentials."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from service_kit.config import ConfigError
from service_kit.process import api_key_in_environment

key = typer.Typer(help="Make API keys.", no_args_is_help=True, rich_markup_mode=None)

_USAGE_ERROR = 2
# Who needs a key in a stack whose services are on hosts of their own, and its role.
_MEMBERS = {"client": "client", "admin": "admin", "frontend": "frontend", "engine": "engine"}


@key.command("new")
def new(
    name: Annotated[str, typer.Option(help="who has the key, in logs")] = "client",
    role: Annotated[str, typer.Option(help="client, frontend, engine, coordinator or admin")] = "client",
    tenant: Annotated[str, typer.Option(help="tenant of its requests")] = "",
) -> None:
    """Print a new key and, on stderr, its entry for the file of --api-keys, which has no secret."""
    from service_kit.security.credentials import new_key, parse_entries

    made = new_key()
    entry = _entry(made, name, role, tenant)
    try:
        parse_entries(entry, "the entry")
    except ConfigError as error:
        print(f"triptych key new: {error}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR) from error
    print(made)
    print(entry, end="", file=sys.stderr)


@key.command("init")
def init(
    folder: Annotated[Path, typer.Argument(help="folder that gets keys.yaml, and a file for each key")],
) -> None:
    """Make the keys of a stack, unless the folder has them: client.key, frontend.key and so on, keys.yaml.

    The client's is that of the variable TRIPTYCH_API_KEY, if it is set.
    """
    from service_kit.addresses import private_files
    from service_kit.security.credentials import digest_of, new_key

    listed, given = folder / "keys.yaml", api_key_in_environment()
    if listed.exists():
        return
    keys = {name: new_key() for name in _MEMBERS}
    try:
        if given is not None:
            digest_of(given, "TRIPTYCH_API_KEY")
            keys["client"] = given
        with private_files():
            for name, made in keys.items():
                (folder / f"{name}.key").write_text(made + "\n", encoding="ascii")
            unfinished = folder / f"keys.yaml.{os.getpid()}"
            entries = [_entry(made, name, _MEMBERS[name], "") for name, made in keys.items()]
            unfinished.write_text("".join(entries), encoding="ascii")
        unfinished.replace(listed)
    except (OSError, ConfigError) as error:
        print(f"triptych key init: {error}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR) from error


def _entry(made: str, name: str, role: str, tenant: str) -> str:
    digest = hashlib.sha256(made.encode()).hexdigest()
    whose = f", tenant: {tenant}" if tenant else ""
    return f"- {{name: {name}, role: {role}{whose}, sha256: {digest}}}\n"
