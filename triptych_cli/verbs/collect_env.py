"""The verb `collect-env`: what a report of a bug needs, of this machine and of links to services.

No secret is in it, and nothing is asked. It works where torch is not installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych_cli.client_channel import client_credentials, open_client_channel
from triptych_cli.services import READINESS
from triptych_cli.verbs.doctor import CHECKS
from triptych_cli.verbs.probe import describe_port
from triptych_cli.verbs.terminal import printable
from triptych_kit.errors import InvalidArgument
from triptych_kit.limits import INTERNAL, PUBLIC, LimitProfile
from triptych_kit.version import installed_version

_PACKAGES = (
    "grpcio", "protobuf", "torch", "triton", "transformers", "safetensors", "tokenizers", "huggingface-hub",
    "numpy", "uvloop", "h11", "prometheus-client", "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-grpc", "ray",
)  # fmt: skip
_OWN = re.compile(
    r"(TRIPTYCH|OTEL|GRPC|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|HF|OMP|MKL|GLOO)_\w+"
    r"|PYTHONPATH|LD_PRELOAD|LD_LIBRARY_PATH|XDG_RUNTIME_DIR|TMPDIR|(https?|no|all)_proxy",
    re.IGNORECASE,
)
_NAMES = (
    r"TOKEN(?=(?:_\d+)?(?![\w.-]))|PWD(?![\w.-])|API_?KEY|(?<![A-Z])KEY(?![A-Z])|SECRET"
    r"|PASS(?:WORD|WD|PHRASE)|CREDENTIAL|AUTH|HEADERS|COOKIE"
)
_SECRET = re.compile(_NAMES, re.IGNORECASE)
# Within a value: of a URL the user and the query, a pair such as api_key=..., and tokens of known forms.
# A password may have any character; a proxy may have a user and no scheme.
_USER = re.compile(r"(?<=://)\S+(?=@)|(?<!\S)[^\s/:]+:(?!//)\S*(?=@)")
_QUERY = re.compile(r"(?<=\?)\S+")
_PAIR = re.compile(rf"([\w.-]*(?:{_NAMES})[\w.-]*[\"']?\s*(?:[=:]\s*[\"']?|%3D))[^,;&\s]+", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|eyJ|AKIA)[\w.-]{8,}|(?<=Bearer )\S+|(?<=Basic )\S+"
)
_MASK = "***"
_CPU_FLAGS = re.compile(r"avx|amx|fma|f16c|sse4_2|asimd|sve|bf16|i8mm")
_LIMITS = ("NOFILE", "NPROC", "MEMLOCK", "STACK", "CORE", "AS")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = (
    "memory.max",
    "memory.high",
    "memory.swap.max",
    "cpu.max",
    "cpuset.cpus.effective",
    "pids.max",
)
_PROGRAM_LIMIT_S = 10.0
# Of one link: as many calls as fit into the time.
_NUM_CALLS, _CALLS_LIMIT_S = 100, 5.0
# What no peer but a proxy refuses; larger ones would keep a loaded service busy.
_LARGE_BYTES = PUBLIC.max_receive_bytes - 4096
# Some pings of the channels between our services.
_KEEPALIVE_TEST_S = 4 * INTERNAL.keepalive_time_ms / 1000 + 0.1

Report = dict[str, Any]


def run_collect_env(
    environment: Mapping[str, str], targets: Sequence[str], timeout_s: float, *, as_json: bool
) -> int:
    """Print the report. Returns 0, or 1 if a service does not answer; the report then has the reason."""
    report = collected(environment)
    if targets:
        report["links"] = {target: asyncio.run(_link(target, timeout_s)) for target in targets}
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))
    return 1 if any("error" in link for link in report.get("links", {}).values()) else 0


def collected(environment: Mapping[str, str]) -> Report:
    """The facts about this machine and this installation."""
    return {
        "triptych": {"version": installed_version(), "folder": str(Path(__file__).parents[2])},
        "python": {"version": " ".join(sys.version.split()), "executable": sys.executable},
        "packages": {name: _version_of(name) for name in _PACKAGES},
        "torch": _torch(),
        "system": _system(),
        "cpu": _cpu(),
        "memory": _memory(),
        "gpus": _gpus(),
        "container": _container(environment),
        "limits": _limits(),
        "environment": masked(environment),
        "doctor": _doctor(),
    }


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to us, without the secrets in their values."""
    return {
        name: _MASK if _SECRET.search(name) else _without_secrets(value)
        for name, value in sorted(environment.items())
        if _OWN.fullmatch(name) and value
    }


def _without_secrets(value: str) -> str:
    value = _QUERY.sub(_MASK, _USER.sub(_MASK, value))
    return _TOKEN.sub(_MASK, _PAIR.sub(rf"\g<1>{_MASK}", value))


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Report:
    """The build of torch. An installation may be broken, which is worth a report."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"cannot be imported": _one_line(error)}
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _system() -> Report:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = platform.system()
    return {
        "name": name,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def _cpu() -> Report:
    values = _pairs(_text("/proc/cpuinfo"))
    flags = (values.get("flags") or values.get("Features") or "").split()
    return {
        "model": values.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "flags": " ".join(flag for flag in flags if _CPU_FLAGS.search(flag)),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def _memory() -> Report:
    values = _pairs(_text("/proc/meminfo"))
    report: Report = {name: values.get(name) for name in ("MemTotal", "MemAvailable", "SwapTotal")}
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        report["/dev/shm"] = f"{usage.free >> 20} of {usage.total >> 20} MiB free"
    return report


def _gpus() -> Report:
    """As the driver's own program shows them, so that torch is not needed."""
    query = "--query-gpu=index,name,memory.total,driver_version,compute_cap,mig.mode.current"
    shown = _output_of("nvidia-smi", query, "--format=csv,noheader")
    devices = dict(line.split(", ", 1) for line in shown.splitlines() if ", " in line)
    return {"driver": _text("/proc/driver/nvidia/version").partition("\n")[0] or None, **devices}


def _container(environment: Mapping[str, str]) -> Report:
    own = _text("/proc/self/cgroup")
    kinds = {
        "docker": Path("/.dockerenv").exists() or "docker" in own,
        "podman": Path("/run/.containerenv").exists(),
        "kubernetes": "KUBERNETES_SERVICE_HOST" in environment or "kubepods" in own,
    }
    folder = _CONTROL_GROUP / own.rpartition("::")[2].strip("/\n ")
    files = {name: _text(folder / name) or _text(_CONTROL_GROUP / name) for name in _GROUP_FILES}
    present = [kind for kind, is_found in kinds.items() if is_found]
    return {"kind": ", ".join(present) or None, **{name: text for name, text in files.items() if text}}


def _limits() -> Report:
    def shown(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)

    numbers = {name: getattr(resource, f"RLIMIT_{name}") for name in _LIMITS}
    return {name: " of ".join(map(shown, resource.getrlimit(number))) for name, number in numbers.items()}


def _doctor() -> Report:
    report = {}
    for name, check in CHECKS.items():
        verdict, text = check()
        report[name] = f"{verdict.value}: {text}"
    return report


async def _link(target: str, timeout_s: float) -> Report:
    """How a service answers: which it is, how fast, how much at a time, and whether it answers pings."""
    try:
        async with open_client_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            started_at = time.perf_counter()
            await _health(stub, "", timeout_s)
            connected_ms = (time.perf_counter() - started_at) * 1000
            statuses = {kind: await _health(stub, name, timeout_s) for kind, name in READINESS.items()}
            kind = next((kind for kind, status in statuses.items() if status != "NOT_FOUND"), "other")
            limits = PUBLIC if kind in ("frontend", "other") else INTERNAL
            return {
                "service": kind,
                "status": statuses.get(kind, "SERVING"),
                "first_call_ms": round(connected_ms, 3),
                "rtt_ms": await _round_trips(stub, timeout_s),
                **await _large_message(stub, limits, timeout_s),
                "keepalive": await _keepalive(target, limits),
            }
    except InvalidArgument as error:
        return {"error": error.message}
    except grpc.RpcError as error:
        return {"error": describe_port(target, client_credentials()) or _status_of(error)}


async def _health(stub: health_pb2_grpc.HealthStub, service: str, timeout_s: float) -> str:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return "NOT_FOUND"
        raise
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def _round_trips(stub: health_pb2_grpc.HealthStub, timeout_s: float) -> Report:
    times_ms: list[float] = []
    end_at = time.perf_counter() + _CALLS_LIMIT_S
    while len(times_ms) < _NUM_CALLS and (started_at := time.perf_counter()) < end_at:
        await _health(stub, "", timeout_s)
        times_ms.append((time.perf_counter() - started_at) * 1000)
    times_ms.sort()
    p99 = times_ms[-(-99 * len(times_ms) // 100) - 1]
    values = {"min": times_ms[0], "median": median(times_ms), "p99": p99}
    return {"calls": len(times_ms), **{name: round(value, 3) for name, value in values.items()}}


async def _large_message(stub: health_pb2_grpc.HealthStub, limits: LimitProfile, timeout_s: float) -> Report:
    """Send one message of the size that clients may send: a proxy may refuse it."""
    started_at = time.perf_counter()
    try:
        await _health(stub, "x" * _LARGE_BYTES, timeout_s)
        large = f"{_LARGE_BYTES} bytes passed in {(time.perf_counter() - started_at) * 1000:.0f} ms"
    except grpc.RpcError as error:
        large = f"{_LARGE_BYTES} bytes: {_status_of(error)}"
    return {"max_message_bytes": limits.max_receive_bytes, "large_message": large}


async def _keepalive(target: str, limits: LimitProfile) -> str:
    """Between our services pings are frequent enough to be tested: a call stays open over some of them."""
    configured = f"ping after {limits.keepalive_time_ms} ms, answer within {limits.keepalive_timeout_ms} ms"
    if limits is not INTERNAL:
        return configured
    async with open_client_channel(target, profile="internal") as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            await call.read()
            await asyncio.wait_for(call.read(), _KEEPALIVE_TEST_S)
        except TimeoutError:
            return f"{configured}: answered for {_KEEPALIVE_TEST_S:g} s"
        except grpc.RpcError as error:
            return f"{configured}: {_status_of(error)}"
        finally:
            call.cancel()
    return f"{configured}: the stream ended"


def _status_of(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {_one_line(error.details())}"


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _pairs(text: str) -> dict[str, str]:
    """The first of each name of lines `name: value`."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        pairs.setdefault(name.strip(), value.strip())
    return pairs


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _lines(report: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    width = max((len(name) for name, value in report.items() if not isinstance(value, dict)), default=0)
    for name, value in report.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield printable(f"{indent}{name:<{width}}  {'none' if value in (None, '') else value}")
