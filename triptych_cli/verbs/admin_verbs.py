"""The verbs below `triptych admin ADDRESS`: operator calls to one service at its admin listener."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from triptych_kit.process.setup import prepare_process

if TYPE_CHECKING:
    from triptych.engine.v1 import utility_pb2
    from triptych_cli.serve.ready_file import RunningServe
    from triptych_cli.verbs.admin import AdminTarget

_CACERT = "--cacert"
_MAX_SIZE = 1024
_MAX_S = 86_400.0  # of any wait: a day
_MODE_HELP = "what becomes of running requests: abort, wait or keep"

Json = Annotated[bool, typer.Option("--json", help="print one object")]


class _Admin(TyperGroup):
    """Takes --cacert also behind the name of a verb, as all other verbs do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        index = next((number for number, one in enumerate(args) if one.split("=")[0] == _CACERT), 0)
        if index:
            count = 1 if "=" in args[index] else 2
            args = [*args[index : index + count], *args[:index], *args[index + count :]]
        return list(super().parse_args(ctx, args))


admin = typer.Typer(
    cls=_Admin,
    help="Look at or change one running service.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@admin.callback(invoke_without_command=True)
def _address(
    context: typer.Context,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="an admin listener, or a service of a running serve, such as engine-0"
        ),
    ],
    timeout_s: Annotated[float, typer.Option(min=0.001, max=_MAX_S, help="timeout in s")] = 60.0,
    cacert: Annotated[
        str | None, typer.Option(_CACERT, help="file of the CA of the service's certificate")
    ] = None,
    as_json: Json = False,
) -> None:
    prepare_process("client")
    if cacert is not None:
        from triptych_cli.client_channel import trust
        from triptych_kit.config import ConfigError

        try:
            trust(cacert)
        except ConfigError as error:
            raise typer.BadParameter(str(error), param_hint=_CACERT) from error
    if context.invoked_subcommand is None:
        raise typer.BadParameter(f"{address} without a command: write `triptych admin engine-0 status`")
    context.obj = (address, timeout_s, as_json)


@admin.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """Print the status of the service, one value per line."""
    from triptych_cli.verbs.admin import run_status

    raise typer.Exit(run_status(_target(context, as_json=as_json)))


@admin.command()
def drain(
    context: typer.Context,
    deadline_s: Annotated[
        float, typer.Option(min=0.0, max=_MAX_S, help="time for its requests, then they move; 0: no limit")
    ] = 0.0,
    keep_running: Annotated[bool, typer.Option("--keep-running", help="until SIGTERM, then it ends")] = False,
) -> None:
    """Drain the service and show the progress.

    It refuses new requests, finishes the running ones, and ends.
    """
    from triptych_cli.verbs.admin import run_drain

    raise typer.Exit(run_drain(_target(context), deadline_s, keep_running=keep_running))


@admin.command()
def quarantine(
    context: typer.Context,
    clear: Annotated[str, typer.Option(help="id of an incident whose prompt is to be served again")] = "",
    clear_all: Annotated[bool, typer.Option("--clear-all", help="have all prompts served again")] = False,
    as_json: Json = False,
) -> None:
    """List or clear the prompts that have crashed engines.

    A frontend refuses them for ten minutes.
    """
    from triptych_cli.verbs.admin import run_quarantine

    cleared = clear if clear or clear_all else None
    raise typer.Exit(run_quarantine(_target(context, as_json=as_json), cleared=cleared))


@admin.command()
def pause(
    context: typer.Context,
    mode: Annotated[str, typer.Option(help=_MODE_HELP)] = "keep",
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="forget the prefix cache")] = False,
) -> None:
    """Hold an engine's requests until `resume`.

    Returns when nothing runs any more.
    """
    from triptych.engine.v1 import utility_pb2

    call = utility_pb2.PauseCall(mode=_mode(mode), clear_cache=clear_cache)
    _make(context, utility_pb2.UtilityCall(pause=call))


@admin.command()
def resume(context: typer.Context) -> None:
    """End a pause: held requests continue."""
    from triptych.engine.v1 import utility_pb2

    _make(context, utility_pb2.UtilityCall(resume=utility_pb2.ResumeCall()))


@admin.command()
def sleep(
    context: typer.Context,
    level: Annotated[int, typer.Option(min=0, max=2, help="0: no steps; 1: no KV cache; 2: no weights")] = 1,
    mode: Annotated[str, typer.Option(help=_MODE_HELP)] = "abort",
) -> None:
    """Make an engine release memory until `wake`."""
    from triptych.engine.v1 import utility_pb2

    call = utility_pb2.SleepCall(level=level, mode=_mode(mode))
    _make(context, utility_pb2.UtilityCall(sleep=call))


@admin.command()
def wake(
    context: typer.Context,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="weights, kv_cache or scheduling; repeatable")
    ] = None,
) -> None:
    """Make an engine reload its memory, or parts of it."""
    from triptych.engine.v1 import utility_pb2

    _make(context, utility_pb2.UtilityCall(wake=utility_pb2.WakeCall(tags=tags or [])))


@admin.command("reset-prefix-cache")
def reset_prefix_cache(
    context: typer.Context,
    reset_running: Annotated[
        bool, typer.Option("--reset-running", help="recompute the tokens of running requests")
    ] = False,
) -> None:
    """Clear an engine's caches."""
    from triptych.engine.v1 import utility_pb2

    call = utility_pb2.ResetPrefixCacheCall(reset_running=reset_running)
    _make(context, utility_pb2.UtilityCall(reset_prefix_cache=call))


@admin.command()
def profile(
    context: typer.Context,
    action: Annotated[str, typer.Argument(help="start or stop")],
    prefix: Annotated[str, typer.Option(help="beginning of the file's name, with start")] = "",
) -> None:
    """Record an engine's steps into a file.

    At most 100 steps; the file is below the engine's --profile-dir.
    """
    from triptych.engine.v1 import utility_pb2

    if action not in ("start", "stop"):
        raise typer.BadParameter(f"action is {action!r}, it has to be start or stop")
    call = utility_pb2.ProfileCall(start=action == "start", prefix=prefix)
    _make(context, utility_pb2.UtilityCall(profile=call))


@admin.command()
def config(context: typer.Context, as_json: Json = False) -> None:
    """Print an engine's options and their origins."""
    from triptych.engine.v1 import utility_pb2

    _make(context, utility_pb2.UtilityCall(get_config=utility_pb2.GetConfigCall()), as_json=as_json)


@admin.command("load-adapter")
def load_adapter(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="what requests call it")],
    path: Annotated[str, typer.Argument(help="its folder as the engine sees it, below --lora-dir")],
    replace: Annotated[bool, typer.Option("--replace", help="in place of another of this name")] = False,
    as_json: Json = False,
) -> None:
    """Load a LoRA adapter into an engine."""
    from triptych.engine.v1 import utility_pb2

    call = utility_pb2.AddAdapterCall(name=name, path=path, replace=replace)
    _make(context, utility_pb2.UtilityCall(add_adapter=call), as_json=as_json)


@admin.command("unload-adapter")
def unload_adapter(
    context: typer.Context, name: Annotated[str, typer.Argument(help="as `adapters` shows it")]
) -> None:
    """Make an engine forget an adapter.

    Running requests keep it.
    """
    from triptych.engine.v1 import utility_pb2

    _make(context, utility_pb2.UtilityCall(remove_adapter=utility_pb2.RemoveAdapterCall(name=name)))


@admin.command("pin-adapter")
def pin_adapter(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="as `adapters` shows it")],
    as_json: Json = False,
) -> None:
    """Keep an adapter in an engine's memory."""
    from triptych.engine.v1 import utility_pb2

    call = utility_pb2.UtilityCall(pin_adapter=utility_pb2.PinAdapterCall(name=name))
    _make(context, call, as_json=as_json)


@admin.command("unpin-adapter")
def unpin_adapter(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="as `adapters` shows it")],
    as_json: Json = False,
) -> None:
    """Let a pinned adapter leave an engine's memory again."""
    from triptych.engine.v1 import utility_pb2

    call = utility_pb2.UtilityCall(unpin_adapter=utility_pb2.UnpinAdapterCall(name=name))
    _make(context, call, as_json=as_json)


@admin.command()
def adapters(context: typer.Context, as_json: Json = False) -> None:
    """Print an engine's adapters, one per line."""
    from triptych.engine.v1 import utility_pb2

    _make(context, utility_pb2.UtilityCall(list_adapters=utility_pb2.ListAdaptersCall()), as_json=as_json)


@admin.command()
def pins(context: typer.Context, as_json: Json = False) -> None:
    """Print an engine's pins of KV blocks, one per line."""
    from triptych.engine.v1 import utility_pb2

    _make(context, utility_pb2.UtilityCall(list_pins=utility_pb2.ListPinsCall()), as_json=as_json)


@admin.command()
def release(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[PIN]", help="a pin as `pins` shows it")] = "",
    job: Annotated[str, typer.Option(help="all pins of this job instead")] = "",
    release_all: Annotated[bool, typer.Option("--all", help="all pins instead")] = False,
    as_json: Json = False,
) -> None:
    """Let an engine evict pinned KV blocks again."""
    from triptych.engine.v1 import utility_pb2

    if sum(map(bool, (name, job, release_all))) != 1:
        raise typer.BadParameter("write a pin, --job JOB or --all")
    if release_all:
        call = utility_pb2.UtilityCall(flush_pins=utility_pb2.FlushPinsCall())
    elif job:
        call = utility_pb2.UtilityCall(release_pins=utility_pb2.ReleasePinsCall(job_id=job))
    else:
        call = utility_pb2.UtilityCall(release_pins=utility_pb2.ReleasePinsCall(pin_id=name))
    _make(context, call, as_json=as_json)


@admin.command()
def scale(
    context: typer.Context,
    size: Annotated[int, typer.Argument(min=1, max=_MAX_SIZE, help="wanted number of engines")],
    group: Annotated[str, typer.Option(help="the group; needed if there are several")] = "",
    timeout: Annotated[
        float, typer.Option(min=0.001, max=_MAX_S, help="cancel it after this time in s")
    ] = 600.0,
) -> None:
    """Change the number of engines of a group.

    Shows the progress, and exits 1 if it fails.
    """
    from triptych_cli.verbs.admin import run_scale

    raise typer.Exit(run_scale(_target(context), group, size, timeout))


@admin.command()
def operations(context: typer.Context, as_json: Json = False) -> None:
    """Print a coordinator's scaling operations.

    Those that run, and the last that ended.
    """
    from triptych_cli.verbs.admin import run_operations

    raise typer.Exit(run_operations(_target(context, as_json=as_json)))


@admin.command("cancel-operation")
def cancel_operation(
    context: typer.Context, operation_id: Annotated[str, typer.Argument(help="as `operations` shows it")]
) -> None:
    """Cancel a scaling operation.

    Refused once an engine has been ordered to leave.
    """
    from triptych_cli.verbs.admin import run_cancel

    raise typer.Exit(run_cancel(_target(context), operation_id))


@admin.command("drain-engine")
def drain_engine(
    context: typer.Context,
    engine_id: Annotated[str, typer.Argument(help="as the engine's own `status` shows it")],
    deadline_s: Annotated[
        float, typer.Option(min=0.0, max=_MAX_S, help="time for its requests, then they move; 0: no limit")
    ] = 0.0,
) -> None:
    """Drain one engine through a coordinator.

    It ends when its requests are done or have moved.
    """
    from triptych_cli.verbs.admin import run_drain_engine

    raise typer.Exit(run_drain_engine(_target(context), engine_id, deadline_s))


@admin.command("evict-engine")
def evict_engine(
    context: typer.Context,
    engine_id: Annotated[str, typer.Argument(help="as the engine's own `status` shows it")],
    reason: Annotated[str, typer.Option(help="why, for the coordinator's log")] = "",
) -> None:
    """Evict one engine at a coordinator at once.

    Its process cannot register again.
    """
    from triptych_cli.verbs.admin import run_evict_engine

    raise typer.Exit(run_evict_engine(_target(context), engine_id, reason))


def _target(context: typer.Context, *, as_json: bool = False) -> AdminTarget:
    from triptych_cli.serve.ready_file import running_serves
    from triptych_cli.verbs.admin import AdminTarget

    address, timeout_s, is_json = context.obj
    serves = running_serves()
    if ":" not in address:
        address = _address_of(address, serves)
    given_up: dict[str, str] = {}
    for serve in serves:
        if address in serve.admin_addresses.values():
            given_up |= serve.given_up
    return AdminTarget(address=address, timeout_s=timeout_s, as_json=as_json or is_json, given_up=given_up)


def _address_of(name: str, serves: Sequence[RunningServe]) -> str:
    """The admin address of a service by its name; the command ends with an error if it has none."""
    addresses = [serve.admin_addresses[name] for serve in serves if name in serve.admin_addresses]
    if len(addresses) > 1:
        shown = ", ".join(addresses)
        raise typer.BadParameter(
            f"{len(addresses)} running `triptych serve` have {name}: give the admin address of one, {shown}"
        )
    if addresses:
        return addresses[0]
    for serve in serves:
        if name in serve.given_up:
            print(f"{name} stays down: {serve.given_up[name]}", file=sys.stderr)
            raise typer.Exit(1)
    known = ", ".join(sorted({one for serve in serves for one in serve.admin_addresses})) or "none is running"
    raise typer.BadParameter(f"{name} is no address and no service of a running serve: {known}")


def _mode(name: str) -> utility_pb2.PauseMode:
    from triptych.engine.v1 import utility_pb2

    modes = {
        "abort": utility_pb2.PAUSE_MODE_ABORT,
        "wait": utility_pb2.PAUSE_MODE_WAIT,
        "keep": utility_pb2.PAUSE_MODE_KEEP,
    }
    if name not in modes:
        raise typer.BadParameter(f"mode is {name!r}, it has to be {', '.join(modes)}")
    return modes[name]


def _make(context: typer.Context, call: utility_pb2.UtilityCall, *, as_json: bool = False) -> None:
    from triptych_cli.verbs.admin import run_call

    raise typer.Exit(run_call(_target(context, as_json=as_json), call))
