"""Runs the tests on a copy of the tree, each time in a fork of a process that has the libraries imported.

    python -m tests.mutation.worker        in the copy; one JSON order a line in, one JSON answer a line out

Nothing of the code under test is imported here, so every fork sees the files as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

KILLED, SURVIVED, TIME_LIMIT = "killed", "survived", "time limit"
MAX_MEMORY_BYTES = 4 << 30
_PYTEST_OPTIONS = ("-x", "-q", "--tb=line", "-p", "no:cacheprovider")
# A mutant that waits for something uses no CPU time; the clock may run this much longer.
_CLOCK_PER_CPU = 10


class FirstFailure:
    """Remembers what failed first."""

    def __init__(self) -> None:
        self.test: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or what it needs, failed."""
        if report.failed and self.test is None:
            self.test = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file of tests could not even be imported."""
        if report.failed and self.test is None:
            self.test = f"{report.nodeid} (import)"


def main() -> None:
    """Answer orders until there are no more."""
    # What pytest prints goes elsewhere: standard output is for answers.
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    _load_pytest()
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    if "import" in order:
        for name in order["import"]:
            # What cannot be imported by itself is imported by who needs it.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        return {}
    with _mutated(order["path"], order["text"]):
        return _run_in_fork(order["stages"], order["limits_s"], keeps_bytecode=order["path"] is None)


def _load_pytest() -> None:
    # The plugins, by way of pytest: it wants to be the one that imports them.
    with tempfile.TemporaryDirectory(dir=".") as empty:
        pytest.main([*_PYTEST_OPTIONS, empty])


@contextlib.contextmanager
def _mutated(path: str | None, text: str) -> Iterator[None]:
    if path is None:
        yield
        return
    file = Path(path)
    original = file.read_text(encoding="utf-8")
    # Its bytecode is recognised by size and second, which a mutant may share with the original.
    for bytecode in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        bytecode.unlink()
    file.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(original, encoding="utf-8")


def _run_in_fork(stages: list[list[str]], limits_s: list[float], *, keeps_bytecode: bool) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        sys.dont_write_bytecode = not keeps_bytecode
        _run_stages(stages, limits_s, writer)
    os.close(writer)
    deadline = time.monotonic() + _CLOCK_PER_CPU * sum(limits_s)
    events, is_late = _read_until_end(reader, deadline)
    if is_late:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return _judge(events, status, is_late=is_late)


def _read_until_end(reader: int, deadline: float) -> tuple[list[dict[str, Any]], bool]:
    written, is_late = b"", False
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(reader, 1 << 16) if ready else b""
        if not chunk:
            is_late = not ready
            break
        written += chunk
    os.close(reader)
    return [json.loads(line) for line in written.splitlines()], is_late


def _judge(events: list[dict[str, Any]], status: int, *, is_late: bool) -> dict[str, Any]:
    cpu_s = [event["cpu_s"] for event in events if "cpu_s" in event]
    if events and "modules" in events[-1]:
        return {"outcome": SURVIVED, "stage": None, "test": None, "cpu_s": cpu_s, **events[-1]}
    if events and "test" in events[-1]:
        return {"outcome": KILLED, "stage": len(cpu_s) - 1, "test": events[-1]["test"]}
    if is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return {"outcome": TIME_LIMIT, "stage": len(cpu_s), "test": None}
    return {"outcome": KILLED, "stage": len(cpu_s), "test": f"the process ended with status {status}"}


def _run_stages(stages: list[list[str]], limits_s: list[float], writer: int) -> NoReturn:
    """The life of a fork: tell of each stage when it is over, and end with the first that fails."""
    os.setpgid(0, 0)
    os.dup2(1, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    before = set(sys.modules)
    with os.fdopen(writer, "w", buffering=1) as events:
        _make_hypothesis_brief()
        for paths, limit_s in zip(stages, limits_s, strict=True):
            begun = time.process_time()
            _limit_cpu(begun + limit_s)
            failure = FirstFailure()
            code = pytest.main([*_PYTEST_OPTIONS, *paths], plugins=[failure])
            event: dict[str, Any] = {"cpu_s": round(time.process_time() - begun, 2)}
            if code != pytest.ExitCode.OK:
                event["test"] = failure.test or f"pytest ended with {code!r}"
            print(json.dumps(event), file=events)
            if code != pytest.ExitCode.OK:
                os._exit(1)
        print(json.dumps({"modules": _imported_since(before)}), file=events)
    os._exit(0)


def _limit_cpu(cpu_s: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s), hard))


def _make_hypothesis_brief() -> None:
    # The same examples for every mutant, and no search for a smaller one that fails.
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")


def _imported_since(before: set[str]) -> dict[str, str]:
    """The files of the modules that are new."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name: file for name, file in files.items() if file is not None and name not in before}


if __name__ == "__main__":
    main()
