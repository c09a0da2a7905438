"""The targets of requests, in the one form that servers here read."""

from __future__ import annotations

import re

import h11

_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#@]+)(.*)")


def in_origin_form(request: h11.Request) -> h11.Request:
    """A request with the path alone as its target, where that has the absolute form.

    Every server must take both; the authority of such a target counts in place of the host header.
    Source: RFC 9112, 3.2.2.
    """
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        return request
    authority, rest = absolute.groups()
    others = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"host"]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=[(b"host", authority), *others],
        http_version=request.http_version,
    )
