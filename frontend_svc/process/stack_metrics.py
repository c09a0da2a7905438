"""Metrics of all processes of a stack at the HTTP port of its frontend, the only one that scrapers reach.

The others listen on unix sockets of one folder, each of which has the name of its process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from triptych_kit.http.admin_http import read_page
from triptych_kit.http.pages import METRICS_PATH, MakePage, Page, refused
from triptych_kit.telemetry.metrics import TEXT_FORMAT

logger = logging.getLogger(__name__)

SOCKET_ENDING = ".http.sock"
_PARAMETER = "process"
_LIMIT_S = 5.0


class StackMetrics:
    """Pages: the metrics of a process, and the targets as Prometheus' HTTP service discovery reads them.

    own: the metrics of this frontend.  address: of the listener that has these pages.
    """

    def __init__(
        self, folder: Path, name: str, own: MakePage, *, address: Callable[[], str], has_tls: bool
    ) -> None:
        self._folder, self._name, self._own = folder, name, own
        self._address, self._scheme = address, "https" if has_tls else "http"

    async def metrics(self, target: str) -> Page:
        """Those of the process that the query names; without one, this frontend's."""
        name = parse_qs(urlsplit(target).query).get(_PARAMETER, [self._name])[-1]
        if name == self._name:
            return await self._own(target)
        if name not in self._others():
            return refused(404, f"no process {name[:80]}: there are {', '.join(self._names())}")
        try:
            socket = f"unix:{self._folder / name}{SOCKET_ENDING}"
            return Page(await read_page(socket, METRICS_PATH, limit_s=_LIMIT_S), TEXT_FORMAT)
        except OSError as error:
            logger.info("process does not answer", extra={"process": name, "reason": str(error)})
            return refused(503, f"{name} does not answer")

    async def targets(self, target: str) -> Page:
        """A group for each process, with its name as the instance."""
        groups = [
            {
                "targets": [self._address()],
                "labels": {"instance": name, "__scheme__": self._scheme, f"__param_{_PARAMETER}": name},
            }
            for name in self._names()
        ]
        return Page(json.dumps(groups).encode(), "application/json")

    def _names(self) -> list[str]:
        return sorted([self._name, *self._others()])

    def _others(self) -> list[str]:
        return [path.name.removesuffix(SOCKET_ENDING) for path in self._folder.glob(f"*{SOCKET_ENDING}")]
