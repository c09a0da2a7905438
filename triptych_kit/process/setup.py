"""Process setup common to all services: environment, title, signals, exit, and death with the parent.

`python -m triptych_kit.process.setup PARENT_PID MODULE ARGUMENTS` is the entry point of a child, see
`child_command`. It is a program, because code between fork and exec in a parent with threads is not safe.

Imports only the standard library at its own import, because grpc reads the environment when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, NoReturn

from triptych_kit.process.stacks import write_when_asked

Role = Literal["frontend", "engine", "coordinator", "client"]

API_KEY_VARIABLE = "TRIPTYCH_API_KEY"
_PR_SET_PDEATHSIG = 1

# Event-engine listeners cost an engine's stream a third of its speed, but help a frontend's server side.
_EXPERIMENTS_OFF: dict[str, str] = {
    "engine": "-event_engine_client,-event_engine_listener,-event_engine_dns",
    "coordinator": "-event_engine_client,-event_engine_listener,-event_engine_dns",
    "frontend": "-event_engine_client",
    "client": "-event_engine_client",
}


def prepare_process(role: Role) -> None:
    """Set the environment that grpc reads at its import, unless the user has set it. Call first in `main`.

    From here on SIGUSR1 writes the stacks of all threads to stderr, and there are standard streams.
    """
    _open_missing_streams()
    os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS_OFF[role])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if role == "engine":
        prepare_torch()
    write_when_asked()


def prepare_torch() -> None:
    """Set the environment that torch reads at its import, unless the user has set it.

    Threads of OpenMP that spin while they wait take the cores of the kernels' own threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _open_missing_streams() -> None:
    """Open /dev/null for standard streams that were closed before the start.

    A file or socket that is opened later would take the descriptor, and get what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports within the block are not interrupted by the garbage collector, nor looked at by it later.

    What they make stays. Visiting it again and again takes up to a quarter of the time of importing torch.
    """
    was_enabled = gc.isenabled()
    # `freeze` keeps garbage as well: in a user's process this may be the model of an engine that has ended.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def prepare_service(role: Role) -> None:
    """`prepare_process` for a service, which ends with 0 on a signal until it installs its own handlers.

    Also as PID 1 of a container, to which the kernel delivers no unhandled signal.
    """
    prepare_process(role)
    end_at_once_on_signals(0)


def set_title(service: str, index: int | None = None, *parts: str | int) -> None:
    """Let `ps` show this process as, for example, `triptych-engine-0-rank-1` instead of its command line.

    Without an index it is the only one of its kind, or the first.
    """
    # Imported here: `prepare_process` must not depend on a package.
    import setproctitle

    words = ("triptych", service, *([] if index is None else [index]), *parts)
    setproctitle.setproctitle("-".join(map(str, words)))


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a service in order. SIGHUP, of a closed terminal, is none under nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def end_at_once_on_signals(exit_code: int) -> None:
    """Let the signals that stop a process end it without delay, with `exit_code`.

    For the time before and after the work, when nothing can be lost and a second signal should not have to
    wait.
    """

    def end(number: int, frame: object) -> NoReturn:
        os._exit(exit_code)

    for number in stop_signals():
        signal.signal(number, end)


def leave_process(exit_code: int) -> NoReturn:
    """Flush logs and output, then exit without finalizing the interpreter."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader of a pipe may be gone.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)


def runtime_folder() -> Path | None:
    """The folder for what processes of this user on this host share; None if there can be none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # There may be no temporary folder either, where all file systems are read-only.
    with contextlib.suppress(OSError):
        parent = runtime or tempfile.gettempdir()
        folder = Path(parent) / ("triptych" if runtime else f"triptych-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        # Another user may have made a folder of that name below the temporary folder.
        if folder.stat().st_uid == os.getuid():
            return folder
    return None


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, to start child processes. Options are read by `load_config`."""
    return dict(os.environ)


def api_key_in_environment() -> str | None:
    """The variable TRIPTYCH_API_KEY: the key that clients send, and that a frontend accepts."""
    return os.environ.get(API_KEY_VARIABLE) or None


def importing_environment() -> dict[str, str]:
    """The same, with which a Python process imports what this one imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def child_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs `main(arguments)` of a module in a child that dies with this process."""
    return (sys.executable, "-m", "triptych_kit.process.setup", str(os.getpid()), module, *arguments)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies; exits at once if it is dead already. Linux only.

    SIGKILL, not SIGTERM: a service that drained without its parent would hold its port and its device while
    a new parent starts the next one.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent process {parent_pid} is gone")


def release_memory() -> None:
    """Give freed memory back to the system, after a task that took much of it."""
    # Other C libraries do so by themselves.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def leave_process_group() -> None:
    """Move to an own process group, so that Ctrl-C in a terminal reaches the parent but not this process.

    Not to an own session: Linux divides the cores among sessions first, and with a few services on two busy
    cores, one with several threads waited for up to 3 s.
    """
    # A leader of a group or a session is in its own group already.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def main(argv: Sequence[str]) -> int:
    """Bind this process's life to its parent's, then run `main` of a module."""
    parent_pid, module, *arguments = argv
    die_with_parent(int(parent_pid))
    leave_process_group()
    exit_code: int = import_module(module).main(arguments)
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
