"""The verbs below `triptych ray`: engines as actors on a Ray cluster. Imports no Ray until one is run."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from triptych_kit.process.setup import prepare_process

_USAGE_ERROR = 2

ray = typer.Typer(
    help="Place engines on a Ray cluster, or drain them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@ray.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def place(context: typer.Context) -> None:
    """Place engines of a model and keep them running."""
    from triptych_cli.arguments import asks_for_help
    from triptych_cli.ray.config import RayPlaceConfig, parse_place
    from triptych_kit.config import ConfigError, usage

    if asks_for_help(context.args):
        print(usage(RayPlaceConfig, "triptych ray place"))
        print("\nevery other flag is for the engines: see triptych engine --help")
        return
    try:
        placing = parse_place(context.args)
    except ConfigError as error:
        print(f"triptych ray place: {error}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR) from error
    _need_ray("place")
    prepare_process("client")
    from triptych_cli.ray.place import run_place

    raise typer.Exit(run_place(placing))


@ray.command()
def drain(
    names: Annotated[list[str], typer.Argument(help="engines by their actors' names, e.g. engine-0")],
    ray_address: Annotated[str, typer.Option(help="host:port of the Ray cluster's head")] = "auto",
    timeout_s: Annotated[
        float, typer.Option(min=0.0, help="kill engines that have not ended by then, in s")
    ] = 25.0,
) -> None:
    """Drain engines and print the exit code of each.

    Exits 1 if one is not 0.
    """
    _need_ray("drain")
    prepare_process("client")
    from triptych_cli.ray.place import run_drain

    raise typer.Exit(run_drain(ray_address, names, timeout_s))


def _need_ray(verb: str) -> None:
    if find_spec("ray") is None:
        print(f"triptych ray {verb}: Ray is not installed: pip install 'triptych[ray]'", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR)
