"""The file that says that a verb is ready."""

from __future__ import annotations

import json
from pathlib import Path

from triptych_cli.serve.ready_file import remove_ready_file, write_ready_file


def test_the_ready_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_ready_file(str(path), {"grpc": "h:1"})
    assert json.loads(path.read_text()) == {"grpc": "h:1"}
    remove_ready_file(str(path))
    assert list(tmp_path.iterdir()) == []
    remove_ready_file(str(path))
    write_ready_file(None, {})
    remove_ready_file(None)
