"""The verb `serve`: runs a whole stack on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from engine_svc.build.start_check import check_start
from engine_svc.config import EngineConfig
from engine_svc.core.facts import LoadProgress
from engine_svc.model.loading.gguf.file import forget_model
from engine_svc.model.loading.gguf.folder import is_from_file
from engine_svc.model.loading.hub import find_model, is_hub_id
from engine_svc.process.load_display import LoadDisplay
from frontend_svc.build import read_tokenizer_override
from frontend_svc.engines.artifacts import is_slow_tokenizer, read_tokenizer
from triptych_cli.arguments import Serving
from triptych_cli.config import MAX_ENGINES, ServeConfig
from triptych_cli.engines.factory import make_engine_client
from triptych_cli.serve.group_follower import follow_group
from triptych_cli.serve.loopback import ensure_loopback
from triptych_cli.serve.port_owner import find_port_owner
from triptych_cli.serve.readiness import await_ready
from triptych_cli.serve.ready_file import remove_ready_file, runtime_file, write_ready_file
from triptych_cli.serve.sockets import socket_folder
from triptych_cli.serve.supervisor import ProcessPlan, StackPlan, StartTimeout, Supervisor, parts_of
from triptych_cli.serve.terminal import banner, describe_engine, show_progress
from triptych_cli.services import command_of
from triptych_kit.clock import MonotonicClock
from triptych_kit.config import ConfigError
from triptych_kit.listeners import Listener
from triptych_kit.process.child import ChildDied
from triptych_kit.process.setup import leave_process
from triptych_kit.process.supervision import SupervisorLimits, run_until_signal
from triptych_kit.security.options import SecurityOptions
from triptych_kit.security.setup import check_files
from triptych_kit.security.tls import CertificateFiles, hosts_in
from triptych_kit.telemetry.logs import LogStream, setup_logs, write_log_line

_USAGE_ERROR = 2
_FRONTEND = "frontend-0"
_ENGINE = "engine-0"
_COORDINATOR = "coordinator-0"


def run_serve(serving: Serving, environment: Mapping[str, str]) -> int:
    """Serve until a signal, then exit: 0; 1 if the last of a service keeps dying; 2 if it cannot start.

    Returns 2 if nothing was started.
    """
    ensure_loopback()
    config = serving.config
    try:
        _check_ports(serving.listeners)
        for options in serving.security:
            check_files(options)
        _check_model(serving)
    except (ValueError, OSError) as error:
        write_log_line(f"triptych serve: {error}")
        return _USAGE_ERROR
    except KeyboardInterrupt:
        write_log_line("triptych serve: interrupted while the model was downloaded")
        return 128 + signal.SIGINT
    remove_ready_file(config.ready_file)
    return asyncio.run(_serve(serving, environment))


def _check_ports(listeners: Iterable[Listener]) -> None:
    """Raise ConfigError for a port that is in use, or a host that is not on this machine."""
    for one in listeners:
        try:
            owner = find_port_owner(one.host, one.port)
        except OSError as error:
            raise ConfigError(str(error)) from error
        if owner is not None:
            raise ConfigError(f"port {one.port} is in use by {owner}: {one.flag} takes another")


def _check_model(serving: Serving) -> None:
    """Raise ValueError or OSError for an engine that could not start; downloads a model of the hub before."""
    engine = serving.engine
    if engine is None:
        return
    num_engines = serving.config.data_parallel_size
    check_start(engine, num_engines=num_engines)
    folder = _downloaded(engine, serving)
    if str(folder) != engine.model:
        check_start(replace(engine, model=str(folder)), num_engines=num_engines)
    forget_model()
    # Reading a large vocabulary takes seconds.
    if serving.tokenizer or not is_from_file(folder):
        _check_tokenizer(serving.tokenizer, folder)


def _check_tokenizer(tokenizer: str | None, folder: Path) -> None:
    """Raise ConfigError for a tokenizer that frontends could not read. One that they convert is not tried."""
    try:
        content = read_tokenizer_override(tokenizer or str(folder)) or b""
    except FileNotFoundError as error:
        lacking = f"{folder} has no tokenizer.json: name one with --tokenizer"
        raise ConfigError(
            f"--tokenizer {tokenizer} has no tokenizer.json" if tokenizer else lacking
        ) from error
    if is_slow_tokenizer(content):
        return
    try:
        read_tokenizer(content)
    except ValueError as error:
        whose = f"--tokenizer {tokenizer}" if tokenizer else f"the tokenizer.json of {folder}"
        raise ConfigError(f"{whose} cannot be read: {error}") from error


def _downloaded(engine: EngineConfig, serving: Serving) -> Path:
    """The folder of the model. Here once, so that engines find it, and with a bar on a terminal."""
    if is_hub_id(engine.model):
        level = "warning" if _is_quiet(serving) else engine.log_level
        setup_logs("serve", instance="0", log_format=engine.log_format, log_level=level)
    display = LoadDisplay(sys.stderr, MonotonicClock())
    try:
        return find_model(
            engine.model,
            revision=engine.revision,
            progress=lambda phase, done, total: display.show(LoadProgress(phase, done, total)),
        )
    finally:
        display.close()


def _is_quiet(serving: Serving) -> bool:
    """Whether messages of level info are not shown: on a terminal, unless they were asked for."""
    asks_for_level = any(
        flag.partition("=")[0] == "--log-level" for flags in serving.flags.values() for flag in flags
    )
    return sys.stderr.isatty() and not serving.config.verbose and not asks_for_level


def plan_stack(serving: Serving, sockets: Path) -> StackPlan:
    """The processes of a stack and their flags, except those that need the coordinator's address.

    sockets: the folder of the sockets at which services listen that only this machine uses.
    """
    config = serving.config
    frontends = make_engine_client(
        is_async=True,
        is_multiprocess=True,
        data_parallel_size=config.data_parallel_size,
        has_external_balancer=config.data_parallel_external_lb,
    )

    def plan(service: str, index: int = 0) -> ProcessPlan:
        return ProcessPlan(service, index, command_of(service))

    def flags(plan: ProcessPlan, num_engines: int, num_kv_blocks: int) -> tuple[str, ...]:
        extra = [*_extra_flags(plan, config, num_engines), *_socket_flags(plan, serving, sockets)]
        if plan.service == "frontend":
            extra += frontends[plan.index]
        # The other engines' number: no measurement is needed, and the longest sequence fits.
        if plan.service == "engine" and num_kv_blocks and not serving.sizes_cache:
            extra.append(f"--num-kv-blocks={num_kv_blocks}")
        return (*serving.flags.get(plan.service, ()), *extra)

    return StackPlan(
        coordinator=plan("coordinator"),
        others=(
            *(plan("engine", rank) for rank in range(config.data_parallel_size)),
            *(plan("frontend", index) for index in range(len(frontends))),
        ),
        flags=flags,
        ports={plan("frontend", index).name: config.grpc_port_of(index) for index in range(len(frontends))},
        engine=lambda rank: plan("engine", rank),
        max_engines=MAX_ENGINES,
    )


def limits_of(config: ServeConfig) -> SupervisorLimits:
    # After its drain deadline a service still needs time to shut down.
    return SupervisorLimits(startup_s=config.startup_timeout_s, stop_s=config.drain_deadline_s + 5.0)


def _extra_flags(plan: ProcessPlan, config: ServeConfig, num_engines: int) -> list[str]:
    flags = [f"--drain-deadline-s={config.drain_deadline_s}"]
    if config.admin_http_port:
        flags.append(f"--admin-http-port={config.admin_http_port_of(plan.service, plan.index)}")
    if plan.service == "frontend":
        flags.append(f"--host={config.host}")
        if config.http:
            flags.append(f"--http-port={config.http_port_of(plan.index)}")
    if plan.service == "engine":
        # Ranks that share experts stay ranks of a group even if only one of them is wanted.
        size = max(num_engines, config.data_parallel_size)
        flags += [f"--data-parallel-rank={plan.index}", f"--data-parallel-size={size}"]
    return flags


def _socket_flags(plan: ProcessPlan, serving: Serving, sockets: Path) -> list[str]:
    """Where a service listens instead of at ports that were not asked for."""

    def at(kind: str) -> str:
        return str(sockets / f"{plan.name}{kind}.sock")

    flags = [f"--admin-uds={at('.admin')}"]
    if plan.service == "frontend":
        # Its page is for a browser of this machine, and a scraper finds the metrics of all processes there.
        return [*flags, f"--metrics-sockets={sockets}"]
    flags.append(f"--uds={at('')}")
    own_flags = {flag.partition("=")[0] for flag in serving.flags.get(plan.service, ())}
    if not serving.config.admin_http_port and "--admin-http-host" not in own_flags:
        flags.append(f"--admin-http-uds={at('.http')}")
    return flags


async def _serve(serving: Serving, environment: Mapping[str, str]) -> NoReturn:
    with socket_folder() as sockets:
        exit_code = await _serve_at(serving, plan_stack(serving, sockets), environment)
    # At once: while the interpreter is finalized, a second signal would end it with another code.
    leave_process(exit_code)


async def _serve_at(serving: Serving, stack: StackPlan, environment: Mapping[str, str]) -> int:
    config = serving.config
    supervisor = Supervisor(
        stack,
        environment,
        await_ready=await_ready,
        report=_report,
        on_change=lambda: _write_ready_file(config, supervisor),
        limits=limits_of(config),
    )

    async def stop(number: signal.Signals | None) -> None:
        if number is signal.SIGINT and not config.verbose:
            # A person has asked for it, and need not read how each process ends.
            supervisor.hide_info()
        if number is not None:
            _report("stopping")
        for path in (config.ready_file, runtime_file()):
            remove_ready_file(path)
        await supervisor.stop()
        if number is not None:
            _report("stopped")

    if _is_quiet(serving):
        supervisor.hide_info()

    return await run_until_signal(
        _run(serving, stack, supervisor),
        stop=stop,
        hurry=supervisor.hurry,
        failures=(ChildDied, StartTimeout),
        on_failure=_report_failure,
    )


async def _run(serving: Serving, stack: StackPlan, supervisor: Supervisor) -> None:
    await _start(stack, supervisor)
    _write_ready_file(serving.config, supervisor)
    LogStream(sys.stdout).write(await _banner(serving, stack, supervisor) + "\n")
    following = asyncio.ensure_future(
        follow_group(
            serving.group, lambda: supervisor.admin_address_of(_COORDINATOR), supervisor.want, _report
        )
    )
    try:
        await supervisor.keep_running()
    finally:
        following.cancel()
        await asyncio.wait((following,))


async def _start(stack: StackPlan, supervisor: Supervisor) -> None:
    """Start everything, with a bar on a terminal."""
    if not sys.stderr.isatty():
        await supervisor.start()
        return
    names = [plan.name for plan in stack.others if plan.service == "engine"]
    progress = asyncio.ensure_future(show_progress([partial(supervisor.address_of, name) for name in names]))
    try:
        await supervisor.start()
    finally:
        progress.cancel()
        await asyncio.wait((progress,))


async def _banner(serving: Serving, stack: StackPlan, supervisor: Supervisor) -> str:
    tls = serving.tls
    return banner(
        serving.model,
        list(map(supervisor.address_of, stack.ports)),
        await describe_engine(supervisor.address_of(_ENGINE)),
        {name: supervisor.admin_address_of(name) for name in supervisor.children},
        {name: supervisor.admin_http_of(name) for name in supervisor.children},
        None if serving.engine is None else serving.engine.kv_cache_memory,
        supervisor.http_of(_FRONTEND),
        tls_hosts=None if tls is None else await asyncio.to_thread(_hosts_of, tls),
        verifies_clients=tls is not None and tls.ssl_ca_certs is not None,
        has_keys=serving.has_keys,
    )


def _hosts_of(tls: SecurityOptions) -> list[str]:
    """Those that the certificate of listeners is for; none where it has been replaced by what is none."""
    with contextlib.suppress(ConfigError):
        return hosts_in(CertificateFiles(tls.ssl_certfile or "", tls.ssl_keyfile or ""))
    return []


def _write_ready_file(config: ServeConfig, supervisor: Supervisor) -> None:
    record = {
        "grpc": supervisor.address_of(_FRONTEND),
        "http": supervisor.http_of(_FRONTEND) or None,
        "processes": [
            {
                "service": parts_of(name)[0],
                "index": parts_of(name)[1],
                "pid": child.pid,
                "address": supervisor.address_of(name),
                "admin_address": supervisor.admin_address_of(name),
                "admin_http": supervisor.admin_http_of(name),
            }
            for name, child in supervisor.children.items()
        ],
        "given_up": {
            name: {"num_deaths": given_up.num_deaths, "last_cause": given_up.last_cause}
            for name, given_up in supervisor.given_up.items()
        },
    }
    for path in (config.ready_file, runtime_file()):
        try:
            write_ready_file(path, record)
        except OSError as error:
            _report(f"{path} cannot be written: {error.strerror}")


def _report_failure(error: Exception) -> int:
    _report(str(error))
    is_refused = isinstance(error, ChildDied) and error.was_starting and error.exit_code == _USAGE_ERROR
    return _USAGE_ERROR if is_refused else 1


def _report(line: str) -> None:
    write_log_line(f"[serve] {line}")
