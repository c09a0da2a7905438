"""The verbs below `triptych conformance`: check an implementation of the contract from outside."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated

import typer

from service_kit.process import prepare_process

if TYPE_CHECKING:
    from launcher.conformance.report import Report

_USAGE_ERROR = 2
_MAX_PATIENCE_S = 600.0

conformance = typer.Typer(
    help="Check an engine against the contract, protos/engine-session.md, rule by rule.",
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
    as_json: Annotated[bool, typer.Option("--json", help="print one object instead of text")] = False,
) -> None:
    """Check a running engine; exits 0 without findings, 1 with some or if it cannot be reached.

    The engine should be idle. Its model is asked for a few thousand short requests.
    """
    from launcher.conformance.check_engine import ENGINE_CASES, check_engine

    names = {case.name for case in ENGINE_CASES}
    unknown = [name for name in only or () if name not in names]
    if unknown:
        print(f"triptych conformance engine: no case {unknown[0]}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR)

    async def run_drain() -> None:
        process = await asyncio.create_subprocess_shell(drain or "")
        await process.wait()

    checking = check_engine(
        address, patience_s=patience_s, only=only or (), drain=run_drain if drain else None
    )
    raise typer.Exit(_report(checking, as_json=as_json))


def _report(checking: Coroutine[None, None, Report], *, as_json: bool) -> int:
    from launcher.conformance.cases import Finding
    from service_kit.errors import InvalidArgument

    try:
        report = asyncio.run(checking)
    except InvalidArgument as error:
        print(f"triptych conformance: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except Finding as finding:
        print(f"triptych conformance: no session could be opened: {finding}", file=sys.stderr)
        return 1
    print(report.as_json() if as_json else report.as_text())
    return 1 if report.has_findings else 0
