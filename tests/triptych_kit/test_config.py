from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from triptych_kit.config import ConfigError, flag_names, load_config, option, switch_names, usage
from triptych_kit.values import ValueType, parse_size, parse_text, parse_yaml, value_type


@dataclass(frozen=True)
class FakeConfig:
    """Every kind of option there is."""

    model: str = option("tiny", help="model folder", positional=True)
    max_num_seqs: int = option(256, help="requests that run at once", short="s")
    kv_cache_memory: int | None = option(None, help="bytes of KV cache", size=True)
    share: float = option(0.5, help="share of memory")
    reflection: bool = option(True, help="serve reflection")
    dtype: str = option("auto", help="type of the weights", choices=("auto", "float32"))
    log_format: Literal["text", "json"] = option("text", help="form of log lines")
    engine: tuple[str, ...] = option((), help="engine address")

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}, at least 1 is needed")


@dataclass(frozen=True)
class Strict:
    """One option without a default."""

    coordinator_address: str = option(help="where the coordinator listens")


def load(*argv: str, **env: str) -> FakeConfig:
    return load_config(FakeConfig, argv, service="engine", env=env).config


def test_defaults_are_those_of_the_dataclass() -> None:
    loaded = load_config(FakeConfig, [], service="engine", env={})
    assert loaded.config == FakeConfig()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.changed() == {}


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max_num_seqs: 3\nshare: 0.1\ndtype: float32\n")
    env = {"TRIPTYCH_ENGINE_MAX_NUM_SEQS": "2", "TRIPTYCH_ENGINE_SHARE": "0.2"}
    loaded = load_config(
        FakeConfig, ["--config", str(file), "--max-num-seqs", "1"], service="engine", env=env
    )
    assert (loaded.config.max_num_seqs, loaded.config.share, loaded.config.dtype) == (1, 0.2, "float32")
    assert loaded.origins == {
        "model": "default",
        "max_num_seqs": "flag",
        "kv_cache_memory": "default",
        "share": "env TRIPTYCH_ENGINE_SHARE",
        "reflection": "default",
        "dtype": f"file {file}",
        "log_format": "default",
        "engine": "default",
    }
    assert loaded.changed()["share"] == "0.2 (env TRIPTYCH_ENGINE_SHARE)"


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "max-num-seqs: 7\nengine: [a:1, b:2]\nreflection: false\nkv_cache_memory: 2MiB\nshare: 1\n"
    )
    config = load(TRIPTYCH_ENGINE_CONFIG=str(file))
    assert config == FakeConfig(
        max_num_seqs=7, engine=("a:1", "b:2"), reflection=False, kv_cache_memory=2 * 1024**2, share=1.0
    )


@pytest.mark.parametrize("argv", [["--max-num-seqs", "8"], ["--max-num-seqs=8"], ["-s", "8"], ["-s=8"]])
def test_spellings_of_a_flag(argv: list[str]) -> None:
    assert load(*argv).max_num_seqs == 8


def test_the_last_of_a_repeated_flag_counts_but_lists_grow() -> None:
    config = load("--max-num-seqs", "8", "--engine", "a:1", "--max-num-seqs", "9", "--engine", "b:2")
    assert (config.max_num_seqs, config.engine) == (9, ("a:1", "b:2"))


def test_lists_in_the_environment_are_separated_by_commas() -> None:
    assert load(TRIPTYCH_ENGINE_ENGINE="a:1, b:2").engine == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--reflection"], True),
        (["--no-reflection"], False),
        (["--reflection=false"], False),
        (["--no-reflection", "--reflection"], True),
    ],
)
def test_switches(argv: list[str], expected: bool) -> None:
    assert load(*argv).reflection is expected


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("TRUE", True), ("off", False), ("no", False)])
def test_switches_in_the_environment(text: str, expected: bool) -> None:
    assert load(TRIPTYCH_ENGINE_REFLECTION=text).reflection is expected


def test_an_optional_value_can_be_taken_back() -> None:
    assert load("--kv-cache-memory=none", TRIPTYCH_ENGINE_KV_CACHE_MEMORY="2G").kv_cache_memory is None


def test_a_positional_argument_may_stand_anywhere() -> None:
    assert load("--share", "0.1", "/models/x", "--no-reflection").model == "/models/x"


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--max-num-sequences", "1"], {}, "unknown flag --max-num-sequences; did you mean --max-num-seqs?"),
        (["--zzz"], {}, "unknown flag --zzz"),
        (["--zzz", "1", "--yyy=2"], {}, "unknown flags:\n  --zzz\n  --yyy"),
        ([], {"TRIPTYCH_ENGINE_MAX_NUM_SEQ": "1"}, "did you mean TRIPTYCH_ENGINE_MAX_NUM_SEQS?"),
        (["--max-num-seqs"], {}, "--max-num-seqs needs a value"),
        (["--max-num-seqs", "--reflection"], {}, "--max-num-seqs needs a value"),
        (["--max-num-seqs", "many"], {}, "--max-num-seqs: 'many' is not a whole number"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs is 0, at least 1 is needed"),
        (["--share", "half"], {}, "--share: 'half' is not a number"),
        (["--kv-cache-memory", "2Q"], {}, "'2Q' is not a size such as 4096, 16k, 2M or 1.5GiB"),
        (["--dtype", "int3"], {}, "--dtype: 'int3' is not one of auto, float32"),
        (["--log-format", "xml"], {}, "--log-format: 'xml' is not one of text, json"),
        (["--no-reflection=true"], {}, "--no-reflection takes no value"),
        (
            [],
            {"TRIPTYCH_ENGINE_REFLECTION": "maybe"},
            "TRIPTYCH_ENGINE_REFLECTION: 'maybe' is not true or false",
        ),
        (["one", "two"], {}, "unexpected argument 'two'"),
        (["--config", "/nowhere.yaml"], {}, "cannot read /nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_said(argv: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(FakeConfig, argv, service="engine", env=env)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_sqs: 1", "/engine.yaml; did you mean max_num_seqs?"),
        ("zzz: 1\nmax_num_sqs: 1", "engine.yaml:\n  zzz\n  max_num_sqs; did you mean max_num_seqs?"),
        ("max_num_seqs: true", "max_num_seqs in "),
        ("max_num_seqs: 1.5", "1.5 is not a whole number"),
        ("share: true", "True is not a number"),
        ("engine: {a: 1}", "is not a list"),
        ("- 1", "must hold one mapping of options"),
        ("a: [", "cannot read"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "option max-num-seqs is given twice"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load("--config", str(file))
    assert message in str(caught.value)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("# nothing yet\n")
    assert load("--config", str(file)) == FakeConfig()


def test_a_required_option_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--coordinator-address is required"):
        load_config(Strict, [], service="frontend", env={})


def test_variables_of_other_services_are_not_read() -> None:
    assert load(TRIPTYCH_FRONTEND_SHARE="0.9", HOME="/root") == FakeConfig()


def test_flag_names_are_what_a_launcher_routes_by() -> None:
    names = flag_names(FakeConfig)
    assert {"--max-num-seqs", "-s", "--reflection", "--no-reflection", "--engine", "--model"} <= names
    assert switch_names(FakeConfig) == {"--reflection", "--no-reflection"}


def test_usage_shows_every_option_with_its_default() -> None:
    text = usage(FakeConfig, "triptych engine")
    assert text.startswith("Usage: triptych engine [OPTIONS] [MODEL]")
    for part in (
        "-s, --max-num-seqs <int>",
        "requests that run at once  [default: 256]",
        "--kv-cache-memory <size>",
        "--[no-]reflection",
        "--dtype <auto|float32>",
        "engine address  [repeatable]",
        "--config <file>",
    ):
        assert part in text
    assert "where the coordinator listens [required]" in " ".join(usage(Strict, "x").split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("16k", 16_000),
        ("16K", 16_384),
        ("2m", 2_000_000),
        ("2M", 2 * 1024**2),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("1.5 GiB", 3 * 512 * 1024**2),
        ("25.6k", 25_600),
        ("2kB", 2_000),
        ("2MB", 2_000_000),
        ("1T", 1024**4),
        ("7B", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.0001k", "2iB", "1e3", "2 M B", "\u0663", "1,000"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_size(text)


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, ValueType(int)),
        (str | None, ValueType(str, is_optional=True)),
        (tuple[int, ...], ValueType(int, is_list=True)),
    ],
)
def test_annotations(annotation: Any, expected: ValueType) -> None:
    assert value_type(annotation) == expected


@pytest.mark.parametrize("annotation", [list[int], int | str, dict[str, int], bytes, tuple[int, int]])
def test_annotations_an_option_cannot_have(annotation: Any) -> None:
    with pytest.raises(TypeError, match="an option cannot have the type"):
        value_type(annotation)


def test_a_number_in_yaml_can_be_a_name() -> None:
    assert parse_yaml(7, ValueType(str)) == "7"


def test_an_object_in_yaml_is_json_of_an_option_that_takes_text() -> None:
    assert parse_yaml({"a": [1]}, ValueType(str)) == '{"a": [1]}'


def test_text_in_yaml_is_read_as_on_a_command_line() -> None:
    assert parse_yaml("1, 2", ValueType(int, is_list=True)) == (1, 2)
    assert parse_yaml(["1", 2], ValueType(int, is_list=True)) == (1, 2)


def test_infinity_is_a_float_python_knows() -> None:
    assert parse_text("inf", ValueType(float)) == float("inf")


def test_what_is_not_a_number_is_no_value_of_an_option() -> None:
    # It is neither below a limit nor above it, so that no check of a range would find it.
    with pytest.raises(ValueError, match="'nan' is not a number"):
        parse_text("nan", ValueType(float))
    with pytest.raises(ValueError, match="nan is not a number"):
        parse_yaml(float("nan"), ValueType(float))
