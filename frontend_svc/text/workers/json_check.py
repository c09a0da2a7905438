"""Checks the size of a JSON text before it is parsed: as objects it may take fifty times its bytes."""

from __future__ import annotations

import re

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def check_json(content: bytes, *, max_fields: int, max_numbers: int) -> str:
    """What is too much in `content`; empty if nothing is. Does not say whether it is JSON.

    Fields are texts, objects and lists; numbers are all other values.
    """
    # No more are replaced than may be there, so that a text of tiny strings takes no longer.
    rest, num_texts = _STRING.subn(b"", content, max_fields + 1)
    num_fields = num_texts + rest.count(b"{") + rest.count(b"[")
    if num_fields > max_fields:
        return f"the body has more than {max_fields} texts, objects and lists"
    # Each but the last of an object or a list is followed by a comma.
    if rest.count(b",") > max_fields + max_numbers:
        return f"the body has more than {max_numbers} numbers"
    return ""
