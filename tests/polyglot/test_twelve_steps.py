"""The programs of examples/ against one stack: each prints what examples/transcript.txt has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.debian import missing_packages
from tests.processes import running, source_environment

pytestmark = pytest.mark.polyglot

EXAMPLES = Path(__file__).parents[2] / "examples"
BUILD_LIMIT_S = 900
RUN_LIMIT_S = 300


@dataclass(frozen=True)
class Language:
    """How the program in the folder `name` is built and run there; the address is appended to `run`.

    `commands` must be on the PATH, `packages` are Debian's, which are installed if they are missing.
    """

    name: str
    run: str
    build: str = "true"
    commands: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """What the machine lacks, after an attempt to install it."""
        packages = missing_packages(self.packages)
        return [command for command in self.commands if not shutil.which(command)] + packages


LANGUAGES = (
    Language("python", run=f"{sys.executable} twelve_steps.py"),
    Language(
        "go",
        build="make",
        run="build/twelve_steps",
        packages=(
            "golang-go",
            "golang-google-grpc-dev",
            # What the plugin generates cannot be marshalled by golang-github-golang-protobuf-1-3-dev.
            "golang-github-golang-protobuf-1-5-dev",
            "protobuf-compiler",
            "protoc-gen-go",
            "protoc-gen-go-grpc",
        ),
    ),
    Language(
        "cpp",
        build="make -j2",
        run="build/twelve_steps",
        packages=("g++", "pkg-config", "libgrpc++-dev", "protobuf-compiler", "protobuf-compiler-grpc"),
    ),
    Language(
        "java",
        build="make",
        run="build/twelve_steps",
        packages=(
            "default-jdk-headless",
            "protobuf-compiler",
            "protobuf-compiler-grpc-java-plugin",
            "libgrpc-java",
            # What libgrpc-java uses and does not depend on.
            "libgeronimo-annotation-1.3-spec-java",
            "libguava-java",
            "libnetty-java",
            "libperfmark-java",
            "libprotobuf-java",
        ),
    ),
    Language(
        "ruby", build="make", run="ruby twelve_steps.rb", packages=("ruby", "ruby-grpc", "ruby-grpc-tools")
    ),
)
# These need a package registry and nothing that must be compiled.
LIGHT_LANGUAGES = (
    Language(
        "node",
        build="npm ci --no-audit --no-fund",
        run="node twelve_steps.js",
        commands=("node", "npm"),
    ),
    Language("shell", run="./twelve_steps.sh", commands=(os.environ.get("BUF", "buf"),), packages=("jq",)),
)
# A language that is not among these is skipped where something is missing.
REQUIRED = os.environ.get("REQUIRE", "python node go cpp java ruby shell").split()


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """The frontend of a stack that soon asks every client to leave its connection."""
    flags = (
        "--port=0",
        "--startup-timeout-s=120",
        # gRPC can lose the large answer of step 9 if a connection ends with it: steps 1 to 11 have this time.
        "--max-connection-age-s=5",
        # A machine that compiles is slow.
        "--text-time-limit-s=60",
        "--log-level=warning",
    )
    command = (sys.executable, "-m", "triptych_cli.cli", "serve", *flags)
    with running(*command, env=source_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next((line.split("grpc://")[1] for line in process.stdout if "grpc://" in line), None)
        assert address is not None, f"the stack has ended with {process.wait()}"
        yield address.strip()
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(
    "language",
    [
        *(pytest.param(language, id=language.name) for language in LANGUAGES),
        *(pytest.param(each, id=each.name, marks=pytest.mark.network) for each in LIGHT_LANGUAGES),
        pytest.param(None, id="csharp", marks=pytest.mark.skip("csharp: no program, no package has dotnet")),
    ],
)
def test_the_program_prints_the_transcript(language: Language, target: str) -> None:
    if missing := language.missing():
        reason = f"{language.name}: missing {' '.join(missing)}"
        if language.name in REQUIRED:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    built = _run(language, language.build, BUILD_LIMIT_S)
    assert built.returncode == 0, built.stdout + built.stderr
    ran = _run(language, f"{language.run} {target}", RUN_LIMIT_S)
    assert ran.stdout.splitlines() == (EXAMPLES / "transcript.txt").read_text().splitlines(), ran.stderr
    assert ran.returncode == 0, ran.stderr


def _run(language: Language, command: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        shell=True,
        cwd=EXAMPLES / language.name,
        env=source_environment(),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
