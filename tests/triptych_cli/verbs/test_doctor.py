"""The verb `doctor`: a line for each thing that serving needs, and 1 if one is lacking."""

from __future__ import annotations

import socket

import pytest

from triptych_cli.verbs import doctor
from triptych_cli.verbs.doctor import CHECKS, Verdict, run_doctor


def test_a_machine_that_has_all_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor() == 0
    *findings, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in findings] == list(CHECKS)
    assert not [line for line in findings if line.startswith("lacks")]
    assert last == "ready to serve"


def test_what_is_lacking_is_named_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("grpcio", "no-such-package"))
    assert run_doctor() == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("lacks  packages  no-such-package not installed") for line in lines)
    assert lines[-1] == f"1 of {len(CHECKS)} are lacking"


def test_a_port_that_is_taken_is_no_lack_as_another_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "_PORTS", {0: "--port", port: "--grpc-port"})
        verdict, text = doctor.check_ports()
    assert verdict is Verdict.NOTE
    assert text.startswith(f"{port} is in use by pid")
    assert text.endswith("serve with --grpc-port")


def test_a_machine_without_a_compiler_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.check_compiler()[0] is Verdict.NOTE


@pytest.mark.parametrize(
    ("no_colour", "start"), [("", "\x1b[32mok    \x1b[0m python"), ("1", "ok     python")]
)
def test_verdicts_have_colours_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_colour: str, start: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(doctor, "CHECKS", {"python": doctor.check_python})
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    run_doctor()
    assert capsys.readouterr().out.startswith(start)
