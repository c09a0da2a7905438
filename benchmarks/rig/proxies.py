"""nginx and HAProxy with the files of deploy/, on free ports in front of frontends, reloaded at will."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.rig.processes import free_port

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
_START_LIMIT_S = 10.0
_STOP_LIMIT_S = 10.0
_POLL_S = 0.05
_GRPC_PORT, _HTTP_PORT = 50051, 8000


class ProxyFailed(Exception):
    """A proxy did not start, refused its file, or ended."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A frontend behind a proxy: where it serves gRPC, and where HTTP."""

    grpc: str
    http: str


class Proxy:
    """One proxy. `grpc` and `http` are where clients reach it."""

    def __init__(
        self, name: str, folder: Path, backends: Sequence[Backend], *, idle: str | None = None
    ) -> None:
        """Write its file into `folder`. idle: replaces the long limits of silence, e.g. "30s"."""
        self.name = name
        self.num_reloads = 0
        self.grpc, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._folder = folder
        self._file = folder / KINDS[name].file
        self._pid_file = folder / "pid"
        self._log = folder / "log"
        self._process: asyncio.subprocess.Process | None = None
        folder.mkdir(parents=True)
        text = _with_backends((DEPLOY / KINDS[name].file).read_text(), backends)
        for port, address in ((_GRPC_PORT, self.grpc), (_HTTP_PORT, self.http)):
            text = _replaced(text, rf"(listen |bind :){port}\b", _listens_on(address))
        # It keeps its user: a test does not have the rights to change it.
        text = _replaced(text, r"(?m)^\s*(user|group) .*\n", "")
        text = re.sub(r"/var/log/nginx/error\.log|/run/haproxy/admin\.sock", str(folder / "control"), text)
        if idle:
            # The limit of an old process stays.
            text = _replaced(text, r"(?<!_shutdown_timeout )(?<!hard-stop-after )1h", idle)
        self._file.write_text(text)

    async def start(self) -> None:
        """Start it, and wait until it listens. Raises ProxyFailed."""
        self._process = await self._run(KINDS[self.name].start)
        for address in (self.grpc, self.http):
            await until_listening(address)

    async def reload(self) -> None:
        """Let new processes take over; those before them end with their streams."""
        kind = KINDS[self.name]
        if kind.check:
            # A file that is refused would not be noticed.
            checking = await self._run(kind.check)
            await asyncio.wait_for(checking.wait(), _START_LIMIT_S)
            if checking.returncode:
                raise ProxyFailed(f"{self.name} refuses its file: {self._log.read_text()[-2000:]}")
        self._running().send_signal(kind.reload)
        self.num_reloads += 1

    @property
    def num_processes(self) -> int:
        """Count of the present workers and of those that still have streams, without their supervisor."""
        return len(psutil.Process(self._running().pid).children(recursive=True))

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        family = [psutil.Process(self._process.pid)]
        family += family[0].children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_LIMIT_S)
        except TimeoutError:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await self._process.wait()

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            raise ProxyFailed(f"{self.name} does not run: {self._log.read_text()[-2000:]}")
        return self._process

    async def _run(self, words: Sequence[str]) -> asyncio.subprocess.Process:
        facts = {"file": self._file, "folder": self._folder, "pid": self._pid_file}
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(word.format(**facts) for word in words), stdout=log, stderr=log
            )


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a proxy is run: its file in deploy/, and commands; `reload` is a signal to what `start` runs."""

    file: str
    start: tuple[str, ...]
    check: tuple[str, ...]
    reload: signal.Signals


_NGINX = ("nginx", "-p", "{folder}", "-c", "{file}")
KINDS = {
    "nginx": _Kind(
        "nginx.conf",
        (*_NGINX, "-g", "daemon off; pid {pid};"),
        (*_NGINX, "-t", "-q", "-g", "pid {folder}/checked;"),
        # What `nginx -s reload` sends.
        signal.SIGHUP,
    ),
    "haproxy": _Kind(
        "haproxy.cfg",
        ("haproxy", "-W", "-f", "{file}", "-p", "{pid}"),
        ("haproxy", "-c", "-q", "-f", "{file}"),
        signal.SIGUSR2,
    ),
}


def is_installed(name: str) -> bool:
    return shutil.which(name) is not None


def _with_backends(text: str, backends: Sequence[Backend]) -> str:
    """The file with these frontends in place of its two examples."""
    lines = []
    for line in text.splitlines():
        found = re.search(r"\bfrontend-(\d):", line)
        if found is None or int(found[1]) < len(backends):
            for index, backend in enumerate(backends):
                line = line.replace(f"frontend-{index}:{_GRPC_PORT}", backend.grpc)
                line = line.replace(f"frontend-{index}:{_HTTP_PORT}", backend.http)
                if f" {backend.grpc} " in line:
                    line = line.replace(f"port {_HTTP_PORT}", f"port {backend.http.rpartition(':')[2]}")
            lines.append(line)
    return "\n".join(lines) + "\n"


def _listens_on(address: str) -> str:
    return rf"\g<1>{address}"


def _replaced(text: str, pattern: str, value: str) -> str:
    # A listener's word is followed by an address instead of a port alone.
    changed, count = re.subn(pattern, value, text)
    if not count:
        raise ProxyFailed(f"the file has no {pattern}")
    return changed.replace("bind :127", "bind 127")


async def until_listening(address: str) -> None:
    """Wait until connections are accepted; TimeoutError after some seconds."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_START_LIMIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(_POLL_S)
            else:
                writer.close()
                await writer.wait_closed()
                return
