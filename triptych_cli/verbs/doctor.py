"""The verb `doctor`: what this machine has, and lacks, to serve a model."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from enum import Enum
from importlib import metadata
from pathlib import Path

from engine_svc.runner.memory.host_memory import free_host_bytes
from triptych_cli.serve.port_owner import find_port_owner
from triptych_kit.config import read_environment

_LEAST_PYTHON = (3, 11)
_PACKAGES = ("grpcio", "torch", "transformers", "safetensors", "tokenizers", "huggingface-hub")
_COMPILERS = ("c++", "g++", "clang++")
# The ports of `serve`, and the flags that choose others.
_PORTS = {8000: "--port", 50051: "--grpc-port"}
_GIB = 1 << 30
_COLOURS = {"ok": 32, "note": 33, "lacks": 31}


class Verdict(Enum):
    """The meaning of a finding for serving."""

    OK = "ok"
    NOTE = "note"  # it can be served, slower or with another flag
    LACKS = "lacks"


Finding = tuple[Verdict, str]


def run_doctor() -> int:
    """Print the findings, a line each. Returns 0, or 1 if something is lacking."""
    num_lacking = 0
    for name, check in CHECKS.items():
        verdict, text = check()
        num_lacking += verdict is Verdict.LACKS
        print(f"{_coloured(f'{verdict.value:<6}', _COLOURS[verdict.value])} {name:<9} {text}", flush=True)
    print("ready to serve" if not num_lacking else f"{num_lacking} of {len(CHECKS)} are lacking")
    return 1 if num_lacking else 0


def _coloured(word: str, colour: int) -> str:
    """A word in a colour on a terminal, unless NO_COLOR is set (no-color.org)."""
    if not sys.stdout.isatty() or read_environment("NO_COLOR") or read_environment("TERM") == "dumb":
        return word
    return f"\x1b[{colour}m{word}\x1b[0m"


def check_python() -> Finding:
    is_new = sys.version_info >= _LEAST_PYTHON
    least = "" if is_new else f", at least {'.'.join(map(str, _LEAST_PYTHON))} is needed"
    return (Verdict.OK if is_new else Verdict.LACKS), sys.version.split()[0] + least


def check_packages() -> Finding:
    installed, missing = [], []
    for package in _PACKAGES:
        try:
            installed.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Verdict.LACKS, f"{', '.join(missing)} not installed: pip install 'triptych[all]'"
    return Verdict.OK, ", ".join(installed)


def check_torch() -> Finding:
    """Whether torch can be imported: an installation may be broken, or for another system."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Verdict.LACKS, f"cannot be imported: {' '.join(str(error).split())}"
    return Verdict.OK, f"{torch.__version__}, {torch.get_num_threads()} threads"


def check_cuda() -> Finding:
    try:
        from engine_svc.build.start_check import find_cuda_devices
    except ImportError:
        return Verdict.NOTE, "not known without the packages of an engine"
    devices, reason = find_cuda_devices()
    if not devices:
        return Verdict.NOTE, f"none ({reason}): engines run on the CPU"
    return Verdict.OK, ", ".join(f"{size / _GIB:.1f} GiB" for size in devices)


def check_kernels() -> Finding:
    """The widest instruction set of the native CPU kernels."""
    try:
        from triptych_kernels.cpu.loader import ISAS, find_isa
    except (ImportError, OSError):
        return Verdict.NOTE, "not known without torch"
    isa = find_isa(ISAS[0])
    if isa is None:
        return Verdict.NOTE, "none that run here, the slower reference does: see the compiler, and reinstall"
    return Verdict.OK, isa.name


def check_compiler() -> Finding:
    compiler = next(filter(None, map(shutil.which, (read_environment("CXX") or "c++", *_COMPILERS))), None)
    if compiler is None:
        return Verdict.NOTE, "none: native CPU kernels cannot be built from source"
    return Verdict.OK, compiler


def check_memory() -> Finding:
    try:
        free, _ = free_host_bytes()
    except ImportError:
        return Verdict.LACKS, "not known without psutil: pip install 'triptych[all]'"
    return Verdict.OK, f"{free / _GIB:.1f} GiB free, {len(os.sched_getaffinity(0))} CPUs"


def check_cache() -> Finding:
    """The folder into which models of the hub are downloaded."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Verdict.LACKS, "huggingface-hub cannot be imported"
    folder = Path(HF_HUB_CACHE)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Verdict.LACKS, f"{folder} is not writable: set HF_HOME to another folder"
    return Verdict.OK, f"{folder}, {free / _GIB:.1f} GiB free"


def check_ports() -> Finding:
    owners = {port: find_port_owner("127.0.0.1", port) for port in _PORTS}
    used = [
        f"{port} is in use by {owner}: serve with {_PORTS[port]}"
        for port, owner in owners.items()
        if owner is not None
    ]
    if used:
        return Verdict.NOTE, "; ".join(used)
    return Verdict.OK, f"{' and '.join(map(str, _PORTS))} are free"


CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": check_python,
    "packages": check_packages,
    "torch": check_torch,
    "CUDA": check_cuda,
    "kernels": check_kernels,
    "compiler": check_compiler,
    "memory": check_memory,
    "cache": check_cache,
    "ports": check_ports,
}
