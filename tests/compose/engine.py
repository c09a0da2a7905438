"""What builds images and runs containers: Docker, or a script in its stead where no Docker runs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import running

_COMMAND_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """Runs commands of containers. program: `docker`, or a script of the verbs build, compose and podman."""

    program: str

    def build(self, target: str, tag: str, folder: Path, arguments: dict[str, str]) -> None:
        """Build one target of the Dockerfile in `folder`."""
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        self._run([self.program, "build", "--target", target, *options, "-t", tag, str(folder)])

    def compose(
        self, file: Path, project: str, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> str:
        """Run a compose command over the file, as a project of its own. variables: of the file."""
        head = [self.program, "compose"]
        head += ["-f", str(file)] if self._is_docker else [str(file)]
        return self._run([*head, "-p", project, *arguments], variables)

    def run(self, *arguments: str) -> str:
        return self._run([*self._head, *arguments])

    def running(self, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """A command with its stdin and stdout as pipes."""
        return running(*self._head, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.run("inspect", container))
        return found[0]

    def size_above(self, image: str, base: str) -> int:
        """Bytes of the layers that an image has above its base."""
        if self._is_docker:
            # What builds there keeps the base to itself.
            self.run("pull", "--quiet", base)
        return self._size_of(image) - self._size_of(base)

    def _size_of(self, image: str) -> int:
        if self._is_docker:
            # Its store for containerd counts what is compressed as well, in the size of the whole.
            layers = self.run("history", "--human=false", "--format", "{{.Size}}", image)
            return sum(map(int, layers.split()))
        return int(self.run("image", "inspect", "--format", "{{.Size}}", image).strip())

    @property
    def _is_docker(self) -> bool:
        return Path(self.program).name == "docker"

    @property
    def _head(self) -> list[str]:
        return [self.program] if self._is_docker else [self.program, "podman"]

    def _run(self, command: list[str], variables: Mapping[str, str] | None = None) -> str:
        environment = {**os.environ, **(variables or {})}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return done.stdout
