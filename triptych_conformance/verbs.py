"""The verbs below `triptych conformance`: check an implementation of the contract from outside."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from triptych_kit.process.setup import prepare_process

if TYPE_CHECKING:
    from triptych_conformance.report import Report

_USAGE_ERROR = 2
_MAX_PATIENCE_S = 600.0
_COMMAND_S = 120.0

conformance = typer.Typer(
    help="Check an engine or a frontend against the contract.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@conformance.callback()
def _group() -> None:
    prepare_process("client")


@conformance.command()
def engine(
    address: Annotated[str, typer.Argument(help="host:port of the engine")],
    only: Annotated[list[str] | None, typer.Option(help="a case to run; repeatable")] = None,
    patience_s: Annotated[float, typer.Option(min=0.1, max=_MAX_PATIENCE_S, help="limit of an answer")] = 5.0,
    drain: Annotated[str | None, typer.Option(help="command that drains the engine, run last")] = None,
    restart: Annotated[
        str | None, typer.Option(help="command that kills the engine and starts another at its address")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one object instead of text")] = False,
) -> None:
    """Check a running engine, rule by rule.

    The rules are those of protos/engine-session.md. Exits 0 without findings, 1 with some or if it cannot be
    reached.

    The engine should be idle. Its model is asked for a few thousand short requests.
    """
    from triptych_conformance.check_engine import ENGINE_CASES, check_engine

    _check_names(only or (), {case.name for case in ENGINE_CASES})

    checking = check_engine(
        address, patience_s=patience_s, only=only or (), drain=_runs(drain), restart=_runs(restart)
    )
    raise typer.Exit(_report(checking, as_json=as_json))


@conformance.command()
def frontend(
    frontend: Annotated[str, typer.Option(help="host:port of the frontend's public listener")],
    listen: Annotated[list[str], typer.Option(help="host:port for an engine of the kit; given twice")],
    only: Annotated[list[str] | None, typer.Option(help="a case to run; repeatable")] = None,
    patience_s: Annotated[
        float, typer.Option(min=0.1, max=_MAX_PATIENCE_S, help="limit of an answer")
    ] = 15.0,
    stop: Annotated[str | None, typer.Option(help="command that stops the frontend, run last")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one object instead of text")] = False,
) -> None:
    """Check a running frontend, rule by rule.

    It uses the two engines at --listen, which the kit plays. Exits as `engine`.

    Start the frontend with these two addresses as its only engines, before or after this command.
    """
    from triptych_conformance.check_frontend import FRONTEND_CASES, NUM_ENGINES, check_frontend

    _check_names(only or (), {case.name for case in FRONTEND_CASES})
    if len(listen) != NUM_ENGINES:
        print(
            f"triptych conformance: --listen is given {len(listen)} times, not {NUM_ENGINES}", file=sys.stderr
        )
        raise typer.Exit(_USAGE_ERROR)
    checking = check_frontend(
        listen, frontend, patience_s=patience_s, only=only or (), stop_frontend=_runs(stop)
    )
    raise typer.Exit(_report(checking, as_json=as_json))


def _runs(command: str | None) -> Callable[[], Awaitable[object]] | None:
    """Runs a command of the shell to its end; None without one."""
    from triptych_conformance.cases import expect, fail

    if command is None:
        return None

    async def run() -> None:
        process = await asyncio.create_subprocess_shell(command)
        try:
            status = await asyncio.wait_for(process.wait(), _COMMAND_S)
        except TimeoutError:
            process.kill()
            fail(f"the end of `{command}`", f"none in {_COMMAND_S:g} s")
        expect(status == 0, f"exit status 0 of `{command}`", status)

    return run


def _check_names(only: Sequence[str], names: set[str]) -> None:
    unknown = [name for name in only if name not in names]
    if unknown:
        print(f"triptych conformance: no case {unknown[0]}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR)


def _report(checking: Coroutine[None, None, Report], *, as_json: bool) -> int:
    from triptych_conformance.cases import Finding
    from triptych_kit.errors import InvalidArgument

    try:
        report = asyncio.run(checking)
    except OSError as error:
        print(f"triptych conformance: cannot listen: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except InvalidArgument as error:
        print(f"triptych conformance: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except Finding as finding:
        print(f"triptych conformance: no session could be opened: {finding}", file=sys.stderr)
        return 1
    print(report.as_json() if as_json else report.as_text())
    return 1 if report.has_findings else 0
