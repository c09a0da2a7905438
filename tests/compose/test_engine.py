"""What is asked of Docker, which does not run everywhere that these tests do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.engine import ContainerEngine

# Knows of a base only what was pulled, as Docker does when BuildKit built on it.
DOCKER = """#!/bin/sh
here=$(dirname "$0")
case "$1 $*" in
  "pull "*) touch "$here/pulled" ;;
  "history "*base) test -e "$here/pulled" && printf '60\\n0\\n40\\n' ;;
  "history "*app) printf '7\\n0\\n60\\n0\\n40\\n' ;;
  *) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path) -> ContainerEngine:
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    return ContainerEngine(str(program))


def test_the_size_above_a_base_is_that_of_the_layers(docker: ContainerEngine) -> None:
    assert docker.size_above("app", "base") == 7
