"""For pytest: from here on there is a GPU. `make test-gpu ARGS="-p tests.fake_gpu.plugin"` needs no other.

Kernels run in Triton's interpreter, all streams are one, and a recording is done op by op. It tells nothing
of speed, of peaks of memory, of races between streams, and of what a compiler or a driver makes of a kernel.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before anything imports triton.
os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch._dynamo  # Asks for devices when it is first used, and has to find none.
from torch.utils._python_dispatch import _disable_current_modes

from tests.fake_gpu.device import DEVICE, GpuCalls, GpuOps, GpuTensor, behind

_TOTAL_BYTES = 2 * 1024**3
_GUARD = Path(__file__).with_name("guard.cpp")


class Stream:
    """A name for the order in which all is done anyhow, so no stream has to wait for another."""

    current: Stream

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""


Stream.current = Stream()


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


class Event:
    """Over when the device has done what it was given before."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded_at = 0.0
        self._num_given = 0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_at = time.perf_counter()
        self._num_given = DEVICE.num_given

    def synchronize(self) -> None:
        DEVICE.refuse_in_recording("event synchronization")
        DEVICE.finish(self._num_given)

    def elapsed_time(self, later: Event) -> float:
        return (later._recorded_at - self._recorded_at) * 1e3


class Graph:
    """What was recorded, done again op by op."""

    def __init__(self) -> None:
        self.work: list[Any] = []

    def replay(self) -> None:
        for do in self.work:
            DEVICE.give(do)


@contextmanager
def record_graph(graph: Graph, pool: object = None, stream: Stream | None = None) -> Iterator[None]:
    with on_stream(stream or Stream()), DEVICE.record() as work:
        yield
    graph.work = work


def _refuse_to_wait(mode: str) -> None:
    DEVICE.refuses_to_wait = mode == "error"


def _synchronize() -> None:
    DEVICE.refuse_in_recording("device synchronization")
    DEVICE.finish()


def _memory() -> tuple[int, int]:
    return _TOTAL_BYTES - DEVICE.num_bytes, _TOTAL_BYTES


_STAND_INS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: _synchronize(),
    "_sleep": lambda cycles: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "CPU memory",
    "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "graph": record_graph,
    "graph_pool_handle": lambda: (0, 1),
    "current_stream": lambda device=None: Stream.current,
    "stream": on_stream,
    "mem_get_info": lambda device=None: _memory(),
    "memory_allocated": lambda device=None: DEVICE.num_bytes,
    "max_memory_allocated": lambda device=None: DEVICE.num_bytes,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "set_sync_debug_mode": _refuse_to_wait,
}


def _install() -> None:
    """Let there be a GPU, for this thread and every later one."""
    _register_guard()
    for name, stand_in in _STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    # Neither is made for tensors of a class of their own.
    torch.inference_mode = _no_grad  # type: ignore[assignment, misc]
    torch._has_compatible_shallow_copy_type = lambda one, other: False  # type: ignore[assignment]
    _launch_on_memory()
    _enter_in_every_thread()


def _register_guard() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        torch_folder = Path(torch.__file__).parent
        compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
        command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(_GUARD)]
        subprocess.run([*command, "-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10"], check=True)
        torch.ops.load_library(str(library))


def _no_grad(mode: object = True) -> Any:
    return torch.no_grad()(mode) if callable(mode) else torch.no_grad()


def _launch_on_memory() -> None:
    """Give kernels the memory behind their operands. A recording keeps the launch."""
    from triton.runtime.interpreter import GridExecutor

    from tests.kernels.triton.interpreter import complete_interpreter

    complete_interpreter()
    launch_really = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        operands = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if not all(isinstance(one, GpuTensor) for one in operands):
            raise ValueError("a pointer argument cannot be accessed from Triton: it is of the host")
        real_args, real_kwargs = tuple(map(behind, args)), {name: behind(one) for name, one in kwargs.items()}

        def do() -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                launch_really(self, *real_args, **real_kwargs)

        DEVICE.give(do)

    GridExecutor.__call__ = launch


def _enter_in_every_thread() -> None:
    modes: list[AbstractContextManager[Any]] = [GpuCalls(), GpuOps()]
    for mode in modes:
        mode.__enter__()
    run_really = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with GpuCalls(), GpuOps():
            run_really(self)

    threading.Thread.run = run  # type: ignore[method-assign]


# Not in a hook: when the first is called, what is decorated with `inference_mode` is imported already.
_install()
