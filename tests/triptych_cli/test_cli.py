"""The command line before anything runs: verbs, help, mistakes."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine_svc.config import EngineConfig
from tests.triptych_cli.conftest import RunHere
from tests.triptych_cli.fakes import triptych
from triptych_cli.bench.config import BenchServeConfig
from triptych_cli.config import ServeConfig
from triptych_cli.first_line import show_first_line
from triptych_cli.services import SERVICES, config_of
from triptych_cli.vllm_names import SENTENCES, explained
from triptych_kit.config import flag_names


async def test_version_is_one_line() -> None:
    outcome = await triptych("--version")
    assert outcome.exit_code == 0
    assert outcome.out.startswith("triptych ")


def test_help_names_every_verb(run_here: RunHere) -> None:
    outcome = run_here("--help")
    verbs = {line.split()[0] for line in outcome.out.partition("Commands:")[2].splitlines() if line.strip()}
    assert {"serve", "frontend", "engine", "coordinator", "complete", "chat", "health", "demo"} <= verbs
    assert {"bench", "run-batch"} <= verbs


@pytest.mark.parametrize(
    ("verb", "spelling", "flags"),
    [
        ("coordinator", "--help", ["--lease-ms"]),
        ("engine", "-h", ["--max-num-seqs", "[default: 256]"]),
        ("frontend", "--help", ["--engine"]),
        ("serve", "-h", ["--ready-file", "-dp, --data-parallel-size", "--max-num-seqs", "--lease-ms"]),
    ],
)
async def test_help_of_a_verb_lists_the_options_of_its_services(
    verb: str, spelling: str, flags: list[str]
) -> None:
    outcome = await triptych(verb, spelling)
    assert (outcome.exit_code, outcome.err) == (0, "")
    for flag in flags:
        assert flag in outcome.out


@pytest.mark.parametrize("group", [(), ("admin",), ("ray",), ("bench",), ("conformance",)])
def test_the_help_of_a_verb_in_a_list_is_whole(run_here: RunHere, group: tuple[str, ...]) -> None:
    outcome = run_here(*group, "--help")
    listed = outcome.out.partition("Commands:")[2]
    assert listed
    assert [line for line in listed.splitlines() if line.endswith("...")] == []


def test_help_of_serve_has_each_flag_once_common_ones_first(run_here: RunHere) -> None:
    lines = run_here("serve", "--help").out.splitlines()
    flags = [word for line in lines for word in line.split()[:2] if word.startswith("--")]
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Usage: triptych serve [OPTIONS] [MODEL]"
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")][:2] == [
        "Arguments:",
        "Common options:",
    ]
    assert sorted(flags) == sorted(set(flags))


def test_help_of_complete_is_grouped_common_options_first(run_here: RunHere) -> None:
    help_ = run_here("complete", "--help").out
    titles = [line for line in help_.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:2] == ["Arguments:", "Options:"]
    assert help_.index("--max-tokens") < help_.index("--presence-penalty") < help_.index("--logprobs")


def test_what_is_not_text_is_refused(run_here: RunHere) -> None:
    outcome = run_here("complete", "--prompt", os.fsdecode(b"\xff"))
    assert outcome.exit_code == 2
    assert "is not UTF-8" in outcome.err


def test_help_of_serve_leaves_out_what_it_refuses(run_here: RunHere) -> None:
    outcome = run_here("serve", "--help")
    for flag in ("--announce-fd", "--coordinator ", "--admin-port"):
        assert flag not in outcome.out
    assert outcome.out.count("--config") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--max-num-seq", "4"), "did you mean --max-num-seqs?"),
        (("coordinator", "--lease", "4"), "did you mean --lease-ms?"),
        (("complete", "--temperatur", "1"), "--temperature"),
        (("serv",), "serve"),
        (
            ("serve", "--fully-sharded-loras"),
            "-loras: what adapters have is --max-loras",
        ),
        (
            ("serve", "--quantization", "awq"),
            "--quantization: 'awq' is not one of none, int8, fp8; quantized checkpoints are not read:",
        ),
        (
            ("serve", "--api-key", "x"),
            "unknown flag --api-key: set TRIPTYCH_API_KEY, or name a file of keys with --api-keys",
        ),
        (("engine", "--enforce-eager"), "unknown flag --enforce-eager: it is --no-cuda-graphs"),
        (("serve", "--ssl-keyfil", "x"), "unknown flag --ssl-keyfil; did you mean --ssl-keyfile?\n"),
        (("frontend", "--http-allowed-origins=x"), "did you mean --http-allowed-origin?\n"),
        (("frontend", "--tool-call-parser=x"), "unknown flag --tool-call-parser: it is --tool-parser"),
        (("bench", "latency"), "no such command 'latency': a running `triptych serve` is measured"),
        (("bench", "serve", "--port", "1"), "unknown flag --port: it is --base-url http://HOST:PORT of"),
        (("bench", "serve", "--endpoint=/v1/x"), "--endpoint: requests go to /v1/completions, at the"),
        (("bench", "serve", "--num-prompts=3"), "unknown flag --num-prompts: it is --num-requests"),
        (("serve", "--max-lora-rank-of-next-year=8"), "of-next-year: what adapters have is --max-loras,"),
        (("serve", "--enable-eplb"), "unknown flag --enable-eplb: experts stay in their rank\n"),
        (("serve", "--seed", "3"), "unknown flag --seed: give each request its own seed\n"),
        (("serve", "-ep"), "unknown flag -ep: it is --expert-parallel\n"),
        (("serve", "-q", "awq"), "is not one of none, int8, fp8; quantized checkpoints are not read"),
        (("serve", "-dp", "0"), "--data-parallel-size is 0"),
        (("serve", "--port", "70000"), "port is 70000"),
    ],
)
def test_a_mistake_exits_2_and_names_the_way_out(
    run_here: RunHere, arguments: tuple[str, ...], message: str
) -> None:
    outcome = run_here(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.err


def test_all_unknown_flags_are_in_one_message_each_with_its_hint(run_here: RunHere) -> None:
    hints = {
        "--api-key": ": set TRIPTYCH_API_KEY, or name a file of keys with --api-keys: ",
        "--enforce-eager": ": it is --no-cuda-graphs",
        "--no-enforce-eager": ": it is --cuda-graphs",
        "-O3": ": nothing is compiled by torch",
        "--no-enable-log-requests": ": each request has a log line of level info; --log-level warning",
        "--disable-log-request": ": each request has a log line",
        "--disable-uvicorn-access-log": ": each request has a log line",
        "--root-path": ": let the proxy remove its path",
        "--enable-server-load-tracking": ": load is always counted",
        "--guided-decoding-backend": ": each request has its grammar",
        "--tool_call_parser": ": it is --tool-parser",
        "--compilation-config.level": ": nothing is compiled",
        "--max-num-seq": "; did you mean --max-num-seqs?",
        "--zzz": "",
    }
    values = {"--api-key": "x", "--root-path": "/x", "--max-num-seq": "-1"}
    words = [word for flag in hints for word in (flag, values.get(flag)) if word is not None]
    outcome = run_here("serve", "model", "--zz", "--port", "-1", *words)
    assert outcome.exit_code == 2
    first, *lines = outcome.err.splitlines()
    assert (first, len(lines)) == ("triptych serve: unknown flags:", len(hints) + 1)
    for line, (flag, hint) in zip(lines[1:], hints.items(), strict=True):
        assert line.startswith(f"  {flag}{hint}")


@pytest.mark.parametrize("verb", ["serve", "frontend"])
def test_keys_of_vllm_in_a_file_are_explained_with_keys(run_here: RunHere, tmp_path: Path, verb: str) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("tool-call-parser: hermes\napi-key: secret123\nenforce_eager: true\nui_: 1\n")
    outcome = run_here(verb, "--config", str(file))
    assert outcome.exit_code == 2
    assert outcome.err.splitlines() == [
        f"triptych {verb}: unknown options in {file}:",
        "  tool-call-parser: it is tool_parser, chosen by the model's template unless given",
        "  api-key: set TRIPTYCH_API_KEY, or name a file of keys with api_keys: a key is no option, for flags"
        " are in the list of processes",
        "  enforce_eager: it is cuda_graphs: false",
        "  ui_; did you mean ui?",
    ]


def test_serve_takes_the_short_flags() -> None:
    shorts = {"data_parallel_size": "-dp"}
    assert {name: ServeConfig.__dataclass_fields__[name].metadata["short"] for name in shorts} == shorts
    shorts = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "quantization": "-q"}
    assert {name: EngineConfig.__dataclass_fields__[name].metadata["short"] for name in shorts} == shorts


def test_every_sentence_about_a_flag_of_vllm_is_about_an_unknown_flag() -> None:
    of_serve = flag_names(ServeConfig).union(*(flag_names(config_of(service)) for service in SERVICES))
    known = of_serve | flag_names(BenchServeConfig)
    flags = {"--" + name.replace("_", "-") for name in SENTENCES}
    assert flags & of_serve == set()
    for names in (of_serve, flag_names(BenchServeConfig)):
        assert [flag for flag in names - flags if explained(flag, names)] == []
    for flag in flags:
        named = set(re.findall("--[a-z-]+", explained(flag)))
        assert named <= known | {"--workers", "--engine-label"}, flag


def test_the_command_line_imports_no_grpc_before_a_verb_prepares_for_it() -> None:
    program = (
        "import sys, triptych_cli.cli, triptych_cli.arguments\n"
        "print('grpc' in sys.modules, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "False False\n"


def test_the_first_line_of_a_service_needs_the_standard_library_alone() -> None:
    program = "import sys, triptych_cli.first_line; print({'typer', 'yaml', 'grpc'} & sys.modules.keys())"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "is_terminal", "line"),
    [
        (["serve", "org/name", "-dp", "2"], True, "triptych serve: checking org/name ..."),
        (["serve", "--port", "1", "org/name"], True, "triptych serve: starting ..."),
        (["engine", "\udcff"], True, "triptych engine: checking ? ..."),
        (["frontend", "--engine=a:1"], True, "triptych frontend: starting ..."),
        (["serve", "--help"], True, ""),
        (["complete", "text"], True, ""),
        ([], True, ""),
        (["serve", "org/name"], False, ""),
    ],
)
def test_a_service_shows_at_once_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], is_terminal: bool, line: str
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    show_first_line(arguments)
    assert stderr.getvalue() == line
