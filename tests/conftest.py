"""What must be settled before any test module is imported, and what no test may leave behind."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.allowed_skips import is_allowed
from tests.debian import missing_packages

# What a driver for CUDA shows of itself. Torch, which takes long to import, is asked only where it does.
_DRIVER_TRACES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")


def _has_gpu() -> bool:
    """Whether kernels run on a GPU here: where there is a driver, torch may still be one for CPUs."""
    if not any(Path(trace).exists() for trace in _DRIVER_TRACES):
        return False
    import torch

    return torch.cuda.is_available()


# Triton decides how it runs kernels when it is first imported, which transformers does, too.
if not _has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers that run tests side by side share the cores: OpenMP's threads wait for one another without sleeping.
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _NUM_WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _NUM_WORKERS)))

# Frontends of one user share which requests have crashed engines: an earlier run's are not for this one's.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="triptych-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

# Checkpoints of tests are new ones, which no later start loads: files of hundreds of megabytes would remain.
os.environ["TRIPTYCH_ENGINE_PACKED_WEIGHTS_CACHE"] = "off"

# A shell starts background jobs with SIGINT ignored, and nohup a command with SIGHUP ignored, which every
# process that a test starts would inherit.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


# An earlier test's event loop, closed while gRPC's poller had news for it, is reported in a later one's log.
logging.getLogger("asyncio").addFilter(
    lambda record: "PollerCompletionQueue._handle_events" not in record.getMessage()
)


_other_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long tests of random runs go on."""
    parser.addoption(
        "--num-orders",
        type=int,
        default=20,
        help="orders of pauses and resumes that a lockstep group goes through",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look through it for garbage takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m MARKER`, leave out modules that do not name the marker: to import all takes half a minute."""
    marker = config.option.markexpr
    if not marker.isidentifier() or not collection_path.match("test_*.py"):
        return None
    return True if f"mark.{marker}" not in collection_path.read_text() else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the skips that no line of the list allows; all workers' reports come here."""
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The same for a module that is skipped whole."""
    _note_skip(report)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not is_allowed(report.nodeid, reason):
            _other_skips.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A suite in which something else was skipped than the list allows has failed."""
    if _other_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skips that failed the suite."""
    if _other_skips:
        terminalreporter.section("skips that tests/allowed_skips.py does not allow", red=True)
        terminalreporter.write("".join(f"{skip}\n" for skip in _other_skips))


@pytest.fixture(scope="session")
def prometheus_package() -> None:
    """Prometheus and its promtool are installed."""
    assert missing_packages(("prometheus",)) == [], "as root: apt-get install prometheus"


@pytest.fixture(scope="module", autouse=True)
def modules_out_of_collections() -> None:
    """A collection that looks through all that is imported takes up to a second, and tests make hundreds."""
    # Cheap, as it looks only at what the last file's tests made; unless these ended with an `unfreeze`.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_level_as_it_was() -> Iterator[None]:
    """A service that a test starts in this process says how much it logs; that is not for the next test."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
