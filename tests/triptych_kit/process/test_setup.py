from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.processes import running
from triptych_kit.process.setup import (
    importing,
    importing_environment,
    process_environment,
    runtime_folder,
)

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("GRPC_EXPERIMENTS", "GRPC_VERBOSITY", "GRPC_ENABLE_FORK_SUPPORT")


def prepared(role: str, **given: str) -> dict[str, str]:
    """The environment of a fresh process after `prepare_process`, and whether it has grpc imported."""
    program = (
        "import json, os, sys\n"
        "from triptych_kit.process.setup import prepare_process\n"
        f"prepare_process({role!r})\n"
        "print(json.dumps({**os.environ, 'imported': str('grpc' in sys.modules)}))"
    )
    unset = (*NAMES, "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in unset} | given
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, check=True, text=True
    ).stdout
    variables: dict[str, str] = json.loads(output)
    return variables


@pytest.mark.parametrize(
    ("role", "given", "expected"),
    [("engine", {}, "passive"), ("engine", {"OMP_WAIT_POLICY": "active"}, "active"), ("frontend", {}, None)],
)
def test_threads_of_openmp_sleep_in_engines_unless_the_user_says_otherwise(
    role: str, given: dict[str, str], expected: str | None
) -> None:
    assert prepared(role, **given).get("OMP_WAIT_POLICY") == expected


ALL_OFF = "-event_engine_client,-event_engine_listener,-event_engine_dns"


@pytest.mark.parametrize(
    ("role", "experiments"),
    [
        ("engine", ALL_OFF),
        ("coordinator", ALL_OFF),
        ("frontend", "-event_engine_client"),
        ("client", "-event_engine_client"),
    ],
)
def test_each_role_sets_what_grpc_reads_at_its_import(role: str, experiments: str) -> None:
    variables = prepared(role)
    assert [variables[name] for name in NAMES] == [experiments, "ERROR", "0"]
    assert variables["imported"] == "False"


def test_what_the_user_has_set_stays() -> None:
    assert prepared("engine", GRPC_VERBOSITY="DEBUG")["GRPC_VERBOSITY"] == "DEBUG"


PREPARED_SERVICE = (
    "import signal, sys, time\n"
    "from triptych_kit.process.setup import prepare_service\n"
    "prepare_service('engine')\n"
    "print('importing', flush=True)\n"
    "time.sleep(120)"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_a_service_before_it_serves(number: signal.Signals) -> None:
    # As the kernel treats the first process of a container: what it does not handle does not reach it.
    with run("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PREPARED_SERVICE) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


def test_a_closed_terminal_does_not_stop_a_service_under_nohup() -> None:
    with run("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PREPARED_SERVICE) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("role", ["frontend", "engine", "coordinator", "client"])
def test_a_process_writes_its_stacks_when_it_is_asked_to_and_runs_on(role: str) -> None:
    program = (
        "import os, signal\n"
        "from triptych_kit.process.setup import prepare_process\n"
        f"prepare_process({role!r})\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print('runs on')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout == "runs on\n"
    assert "most recent call first" in done.stderr
    without_stderr = ["sh", "-c", 'exec "$0" "$@" 2>&-', *command]
    done = subprocess.run(without_stderr, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout == "runs on\n"


def test_standard_streams_that_were_closed_do_not_become_other_files() -> None:
    program = (
        "import os, sys\n"
        "from triptych_kit.process.setup import prepare_process\n"
        "prepare_process('client')\n"
        "print('to nothing'); print('to nothing', file=sys.stderr)\n"
        "fds = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]\n"
        "raise SystemExit(0 if fds == [0, 1, 2] and min(os.pipe()) > 2 and sys.stdin.read() == '' else 1)"
    )
    command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_without_any_temporary_folder_there_is_no_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert runtime_folder() is None


def test_signals_of_a_client_are_left_as_they_were() -> None:
    program = (
        "import signal\n"
        "from triptych_kit.process.setup import prepare_process\n"
        "prepare_process('client')\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout == "True\nTrue\n"


def test_a_copy_of_the_environment_changes_nothing() -> None:
    copy = process_environment()
    copy["TRIPTYCH_TEST_ONLY"] = "1"
    assert "TRIPTYCH_TEST_ONLY" not in process_environment()
    assert copy["PATH"] == os.environ["PATH"]


def test_a_child_can_import_what_its_parent_imports() -> None:
    program = "import sys, pytest; print(sys.path)"
    command = [sys.executable, "-P", "-c", program]
    output = subprocess.run(command, env=importing_environment(), capture_output=True, check=True, text=True)
    assert str(ROOT) in output.stdout


def run(program: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A Python process with its stdin and stdout as pipes."""
    return running(
        *(sys.executable, "-c", program), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("call", "title"),
    [
        ("set_title('coordinator')", "triptych-coordinator"),
        ("set_title('frontend', None)", "triptych-frontend"),
        ("set_title('engine', 0)", "triptych-engine-0"),
        ("set_title('engine', 2, 'rank', 1)", "triptych-engine-2-rank-1"),
    ],
)
def test_a_title_is_what_ps_shows(call: str, title: str) -> None:
    program = f"from triptych_kit.process.setup import set_title; {call}; print('set', flush=True); input()"
    with run(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.communicate("\n")
    assert shown.rstrip(b"\0") == title.encode()


def test_a_title_does_not_change_the_environment() -> None:
    program = (
        "import os; from triptych_kit.process.setup import set_title; before = dict(os.environ); "
        "set_title('engine', 0); print(before == dict(os.environ))"
    )
    with run(program) as process:
        assert process.communicate()[0] == "True\n"


def test_a_process_that_leaves_has_said_everything_and_tidies_up_nothing() -> None:
    program = (
        "import atexit; from triptych_kit.process.setup import leave_process; print('said'); "
        "atexit.register(print, 'tidied up'); leave_process(3)"
    )
    with run(program) as process:
        assert process.communicate()[0] == "said\n"
    assert process.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_after_its_work_a_signal_ends_a_process_at_once_with_the_code_of_its_work(number):
    program = (
        "import sys; from triptych_kit.process.setup import end_at_once_on_signals\n"
        "end_at_once_on_signals(7)\n"
        "print('set', flush=True)\n"
        "try: input()\n"
        "finally: print('took its time')"
    )
    with run(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        process.send_signal(number)
        assert process.wait(30) == 7
        assert process.stdout.read() == ""


def test_a_process_that_leaves_its_group_stays_in_its_session() -> None:
    program = (
        "import os; from triptych_kit.process.setup import leave_process_group; leave_process_group(); "
        "leave_process_group(); print(os.getpgrp() == os.getpid(), os.getsid(0))"
    )
    # A process in a session of its own is scheduled as a group against all others.
    with run(program) as process:
        assert process.communicate()[0] == f"True {os.getsid(0)}\n"


def test_a_session_leader_need_not_leave_its_group() -> None:
    program = (
        "from triptych_kit.process.setup import leave_process_group; leave_process_group(); print('left')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, start_new_session=True, capture_output=True, text=True, check=True
    )
    assert done.stdout == "left\n"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_imports_leave_the_garbage_collector_on_or_off(is_enabled: bool) -> None:
    set_collector = gc.enable if is_enabled else gc.disable
    set_collector()
    try:
        with importing(), importing():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_from_before_an_import_is_collected() -> None:
    garbage = weakref.ref(_Cycle())
    with importing():
        pass
    gc.collect()
    assert garbage() is None
