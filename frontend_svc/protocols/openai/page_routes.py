"""The pages of the admin HTTP listener at the port of the HTTP API, where that is on loopback."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from frontend_svc.protocols.openai.authorization import CERTIFICATE_NAMES
from triptych_kit.http.pages import MAX_BODY_BYTES, Page, Pages, refused

# What a proxy in front of this port adds: its clients are not on this host.
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


class PageRoutes:
    """Answers by `pages`, which have rules of their own about who may see them."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.paths = frozenset((*pages.pages, *pages.posts))
        by_method = {"GET": pages.pages, "POST": pages.posts}
        self.routes = [
            Route(path, self._answer, methods=[method])
            for method, by_path in by_method.items()
            for path in by_path
        ]

    async def _answer(self, request: Request) -> Response:
        page = await self._page_of(request)
        headers = dict(page.headers)
        if isinstance(page.body, bytes):
            return Response(page.body, page.status, headers)
        return StreamingResponse(page.body, page.status, headers)

    async def _page_of(self, request: Request) -> Page:
        if any(name in request.headers for name in _FORWARDED):
            return refused(403, f"{request.url.path} is served to this host alone, not through a proxy")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return refused(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        target = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
        names: Any = request.scope.get("extensions", {}).get(CERTIFICATE_NAMES, [])
        client = request.client.host if request.client is not None else ""
        return await self._pages.answer(request.method, target, request.headers, bytes(body), names, client)
