"""Pages by path, as a service shows them to its operators, and who may see them. Knows no connection.

Where callers need credentials, metrics are for every role and all else for admins. Other sites in a browser
on this host are kept out: on loopback, pages are for names of loopback alone, and a POST must come from a
page of the same host.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.metrics_core import Metric

from triptych_kit.addresses import is_loopback
from triptych_kit.errors import PermissionDenied, Unauthenticated, Unavailable
from triptych_kit.security.access import ANY_ROLE, check_role
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.identity import Role
from triptych_kit.telemetry.metrics import TEXT_FORMAT, to_text

logger = logging.getLogger(__name__)

METRICS_PATH = "/metrics"
TARGETS_PATH = "/metrics/targets"
_PATHS_OF_EVERY_ROLE = frozenset((METRICS_PATH, TARGETS_PATH))
MAX_BODY_BYTES = 256 * 1024  # of a POST
_HEADERS = (
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    ("content-security-policy", "default-src 'self'; base-uri 'none'; frame-ancestors 'none'"),
)
# A browser then asks for a password, which is the key.
_ASKS_FOR_KEY = ("www-authenticate", 'Basic realm="triptych"')


@dataclass(frozen=True, slots=True)
class Page:
    """An answer. The parts of a body that is a generator are written as they come.

    Such a generator is cancelled when the client goes away. allow: the methods of a path, where the request's
    is none of them.
    """

    body: bytes | AsyncGenerator[bytes, None]
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    allow: Sequence[str] = ()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Those of every answer."""
        asks = [_ASKS_FOR_KEY] if self.status == 401 else []
        allows = [("allow", ", ".join(self.allow))] if self.allow else []
        return [("content-type", self.content_type), *_HEADERS, *asks, *allows]


# Called with the request's target, its query included.
MakePage = Callable[[str], Awaitable[Page]]
# Called with the body of a POST, which is JSON.
TakeBody = Callable[[bytes], Awaitable[Page]]


def metrics_page(collect: Callable[[], Iterable[Metric]]) -> MakePage:
    """The page /metrics."""

    async def make(target: str) -> Page:
        return Page(to_text(collect()), TEXT_FORMAT)

    return make


class Pages:
    """Answers GET and HEAD of pages, and POST of `posts`, by path.

    on_loopback: whether they are served there alone.  open_paths: those that need no credentials.
    """

    def __init__(
        self,
        pages: Mapping[str, MakePage],
        posts: Mapping[str, TakeBody],
        authenticator: Authenticator,
        *,
        on_loopback: bool,
        open_paths: Collection[str] = (),
    ) -> None:
        self.pages, self.posts = pages, posts
        self._authenticator = authenticator
        self._on_loopback, self._open_paths = on_loopback, open_paths

    async def answer(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        certificate_names: Sequence[str],
        client: str,
    ) -> Page:
        """headers: by names in lower case.

        certificate_names, client: of the certificate of the connection, and the address behind it.
        """
        path = target.partition("?")[0]
        refusal = self._refusal(method, path, headers)
        if refusal is None:
            refusal = await self._denial(path, headers, certificate_names, client)
        if refusal is not None:
            return refusal
        try:
            if method == "POST":
                return await self.posts[path](body)
            return await self.pages[path](target)
        except Exception:
            logger.exception("page failed", extra={"path": path})
            return Page(b"internal error\n", status=500)

    def _refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Page | None:
        # Only a browser is sent here by another site under a name of that site, and it always names the host.
        host = headers.get("host")
        if self._on_loopback and host is not None and not is_loopback(name_in(host)):
            return refused(421, f"host {host} is not served: localhost or an address of loopback is")
        if path not in self.pages and path not in self.posts:
            return refused(404, f"not found; served: {' '.join(sorted({*self.pages, *self.posts}))}")
        if method == "POST" and path in self.posts:
            return _cross_site_refusal(host, headers)
        if method not in ("GET", "HEAD") or path not in self.pages:
            methods = ["GET", "HEAD"] * (path in self.pages) + ["POST"] * (path in self.posts)
            return refused(405, f"{path} is served to {' and '.join(methods)}", methods)
        return None

    async def _denial(
        self, path: str, headers: Mapping[str, str], certificate_names: Sequence[str], client: str
    ) -> Page | None:
        """The refusal of a caller that does not prove that it may see the page."""
        if path in self._open_paths or not self._authenticator.needs_credentials:
            return None
        try:
            identity = self._authenticator.identify(headers.get("authorization", ""), certificate_names)
            check_role(identity, ANY_ROLE if path in _PATHS_OF_EVERY_ROLE else frozenset((Role.ADMIN,)), path)
        except Unauthenticated as error:
            refusals = self._authenticator.refusals
            if (num_unlogged := refusals.note(client, error.reason)) is not None:
                fields = {"path": path, "reason": error.reason, "client": client}
                logger.info("page refused", extra=fields | {"num_unlogged": num_unlogged})
            await refusals.wait(client, error.reason)
            return refused(401, error.message)
        except PermissionDenied as error:
            return refused(403, error.message)
        except Unavailable as error:
            return refused(503, error.message)
        return None


def refused(status: int, reason: str, allow: Sequence[str] = ()) -> Page:
    return Page(f"{reason}\n".encode(), status=status, allow=allow)


def _cross_site_refusal(host: str | None, headers: Mapping[str, str]) -> Page | None:
    """The refusal of a POST that a page of another site may have sent."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return refused(403, f"origin {origin} is not served: it is not the host {host}")
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return refused(415, f"content-type is {content_type or 'not set'}, must be application/json")
    return None


def name_in(host: str) -> str:
    """The name or address in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
