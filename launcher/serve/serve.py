"""The verb `serve`: runs a whole stack on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

from launcher.arguments import Serving
from launcher.config import MAX_ENGINES, ServeConfig
from launcher.engines.factory import make_engine_client
from launcher.serve.group_follower import follow_group
from launcher.serve.loopback import ensure_loopback
from launcher.serve.port_owner import find_port_owner
from launcher.serve.readiness import await_ready
from launcher.serve.ready_file import remove_ready_file, runtime_file, write_ready_file
from launcher.serve.supervisor import ProcessPlan, StackPlan, StartTimeout, Supervisor, parts_of
from launcher.services import command_of
from service_kit.child import ChildDied
from service_kit.logs import LogStream, write_log_line
from service_kit.process import end_at_once_on_signals
from service_kit.supervision import SupervisorLimits, run_until_signal
from service_kit.version import installed_version

_USAGE_ERROR = 2
_FRONTEND = "frontend-0"
_COORDINATOR = "coordinator-0"
_EXAMPLE = '{"prompt": "Once upon a time", "sampling": {"max_tokens": "40"}}'


def run_serve(serving: Serving, environment: Mapping[str, str]) -> int:
    """Serve until a signal. Returns 0; 1 if the last of a service keeps dying; 2 if a port is taken."""
    ensure_loopback()
    config, stack = serving.config, plan_stack(serving)
    for port in stack.ports.values():
        try:
            owner = find_port_owner(config.host, port)
        except OSError as error:
            write_log_line(f"triptych serve: cannot listen on {config.host}: {error.strerror}")
            return _USAGE_ERROR
        if owner is not None:
            write_log_line(f"triptych serve: port {port} is in use by {owner}")
            return _USAGE_ERROR
    remove_ready_file(config.ready_file)
    return asyncio.run(_serve(serving, stack, environment))


def plan_stack(serving: Serving) -> StackPlan:
    """The processes of a stack and their flags, except those that need the coordinator's address."""
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
        extra = _extra_flags(plan, config, num_engines)
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
        ports={
            plan("frontend", index).name: config.port + index if config.port else 0
            for index in range(len(frontends))
        },
        engine=lambda rank: plan("engine", rank),
        max_engines=MAX_ENGINES,
    )


def limits_of(config: ServeConfig) -> SupervisorLimits:
    # After its drain deadline a service still needs time to shut down.
    return SupervisorLimits(startup_s=config.startup_timeout_s, stop_s=config.drain_deadline_s + 5.0)


def _extra_flags(plan: ProcessPlan, config: ServeConfig, num_engines: int) -> list[str]:
    flags = [f"--drain-deadline-s={config.drain_deadline_s}"]
    if plan.service == "frontend":
        flags.append(f"--host={config.host}")
    if plan.service == "engine":
        # Ranks that share experts stay ranks of a group even if only one of them is wanted.
        size = max(num_engines, config.data_parallel_size)
        flags += [f"--data-parallel-rank={plan.index}", f"--data-parallel-size={size}"]
    return flags


async def _serve(serving: Serving, stack: StackPlan, environment: Mapping[str, str]) -> int:
    config = serving.config
    supervisor = Supervisor(
        stack,
        environment,
        await_ready=await_ready,
        report=_report,
        on_change=lambda: _write_ready_file(config, supervisor),
        limits=limits_of(config),
    )

    async def stop() -> None:
        _report("stopping")
        for path in (config.ready_file, runtime_file()):
            remove_ready_file(path)
        await supervisor.stop()

    exit_code = await run_until_signal(
        _run(serving, stack, supervisor),
        stop=stop,
        hurry=supervisor.hurry,
        failures=(ChildDied, StartTimeout),
        on_failure=_report_failure,
    )
    end_at_once_on_signals(exit_code)
    return exit_code


async def _run(serving: Serving, stack: StackPlan, supervisor: Supervisor) -> None:
    await supervisor.start()
    _write_ready_file(serving.config, supervisor)
    LogStream(sys.stdout).write(banner(serving.model, list(map(supervisor.address_of, stack.ports))) + "\n")
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


def _write_ready_file(config: ServeConfig, supervisor: Supervisor) -> None:
    record = {
        "grpc": supervisor.address_of(_FRONTEND),
        "http": None,
        "processes": [
            {
                "service": parts_of(name)[0],
                "index": parts_of(name)[1],
                "pid": child.pid,
                "address": supervisor.address_of(name),
                "admin_address": supervisor.admin_address_of(name),
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


def banner(model: str, addresses: Sequence[str]) -> str:
    """The text printed once everything is ready."""
    address = addresses[0]
    return "\n".join(
        (
            f"triptych {installed_version()} serves {model}",
            *(f"  gRPC    grpc://{one}" for one in addresses),
            "  try     buf curl --protocol grpc --http2-prior-knowledge"
            f" -d '{_EXAMPLE}' http://{address}/triptych.api.v1.InferenceService/Generate",
            f"  or      triptych complete --url grpc://{address} --prompt 'Once upon a time'",
        )
    )


def _report_failure(error: Exception) -> int:
    _report(str(error))
    return 1


def _report(line: str) -> None:
    write_log_line(f"[serve] {line}")
