"""Writes the blocking client from the asyncio one: `python -m tools.blocking_client`.

Where the two wait in different ways, they call `triptych_client/aio_waiting.py` or `waiting.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "triptych_client"
# Each file that is written, by its source.
FILES = {"aio.py": "client.py", "aio_session.py": "session.py", "aio_stream.py": "stream.py"}
_RULES = (
    (
        r"The asyncio client: .*\.",
        "The blocking client: one channel to a frontend, shared by any number of threads.",
    ),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(iter|next|enter|exit)__\b", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\bclose\(grace=None\)", "close()"),
    (r"\bgrpc\.aio\.", "grpc."),
    (r"\btriptych_client\.aio_", "triptych_client."),
)


def blocking(name: str) -> str:
    """The blocking form of the file `name` of the asyncio client."""
    text = (FOLDER / name).read_text()
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    docstring, rest = text.split("\n\n", 1)
    text = f"{docstring}\n\n# Written by tools/blocking_client.py from {name}.\n\n{rest}"
    file = ["--stdin-filename", str(FOLDER / FILES[name]), "-"]
    for command in (["check", "--fix", "--quiet", "--select", "I,F401"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, *file]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    for source, target in FILES.items():
        (FOLDER / target).write_text(blocking(source))
