"""A hub of models on a port of its own, which speaks as much of the hub's HTTP as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class FakeHub:
    """What the hub has, and what was asked of it."""

    files: dict[str, bytes]  # of the model org/tiny
    gated: bool = False  # as for a token that has not accepted a licence
    sizes: dict[str, int] = field(default_factory=dict)  # sent instead of the true ones
    status: int = 200  # answered to everything, if it is another
    url: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)  # by request

    @property
    def downloaded(self) -> set[str]:
        marker = f"GET /org/tiny/resolve/{COMMIT}/"
        return {line.removeprefix(marker) for line in self.requests if line.startswith(marker)}


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub, answering at `hub.url` until the end."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: FakeHub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self._note()
        if self.served.status != 200:
            self._refuse(self.served.status, "", "out of order")
        elif path == "/api/models/org/private":
            # What the hub says to those it does not know, whether or not the model exists.
            self._refuse(401, "RepoNotFound", "Invalid username or password.")
        elif path == "/api/models/org/forbidden":
            self._refuse(403, "", "The token lacks permissions.")
        elif not path.startswith(("/api/models/org/tiny", "/org/tiny/resolve/")):
            self._refuse(404, "RepoNotFound", "Repository not found")
        elif path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
            self._send_json([{"type": "file", "oid": _oid(name), **entry} for name, entry in self._entries()])
        elif path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            siblings = [{"rfilename": name, "size": entry["size"]} for name, entry in self._entries()]
            self._send_json({"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/api/models/"):
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        elif self.served.gated:
            self._refuse(403, "GatedRepo", "Access to model org/tiny is restricted")
        else:
            self._send_file(path.rpartition("/")[2])

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _note(self) -> None:
        request = f"{self.command} {self.path}"
        self.served.requests.append(request)
        self.served.tokens[request] = self.headers.get("authorization", "")

    def _entries(self) -> list[tuple[str, dict[str, object]]]:
        return [
            (name, {"path": name, "size": self.served.sizes.get(name, len(content))})
            for name, content in self.served.files.items()
        ]

    def _send_file(self, name: str) -> None:
        content = self.served.files[name]
        self._send(
            content, 200, {"ETag": f'"{_oid(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        )

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(b"{}", status, {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()
