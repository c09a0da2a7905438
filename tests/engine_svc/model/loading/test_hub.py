"""Models by their names: folders without a socket, and the hub with all its ways to say no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.hub import find_model, is_hub_id
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.engine_svc.model.loading.fake_hub import COMMIT, FakeHub, folder_files, serve
from tests.engine_svc.model.loading.gguf.gguf_bytes import tiny_llama, u32

_ROOT = Path(__file__).parents[4]
# What the library reads is read at its import: each look-up has a process of its own.
_SCRIPT = """
import json, socket, sys

def refuse(*args, **options):
    raise AssertionError("a socket was opened")

options = json.loads(sys.argv[2])
if options.pop("without_sockets", False):
    socket.socket.__init__ = refuse

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.hub import find_model

progress_events = []
try:
    found = find_model(sys.argv[1], progress=lambda *event: progress_events.append(event), **options)
    has_hub = "huggingface_hub" in sys.modules
    print(json.dumps({"folder": str(found), "progress_events": progress_events, "has_hub": has_hub}))
except CheckpointError as error:
    print(json.dumps({"refusal": str(error)}))
"""


@dataclass(slots=True)
class Found:
    """What a process found."""

    folder: Path | None
    refusal: str
    progress_events: list[list[object]]
    has_hub: bool
    errors: str


def find(
    name: str | Path, home: Path, hub: FakeHub | None = None, env: dict[str, str] | None = None, **options
):
    """`find_model` in a process whose hub and cache are the test's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    paths = os.pathsep.join(str(_ROOT / part) for part in (".", "protos", "kernels"))
    finished = subprocess.run(
        (sys.executable, "-c", _SCRIPT, str(name), json.dumps(options)),
        env={
            **kept,
            "PYTHONPATH": paths,
            "HF_HOME": str(home),
            # A port that nothing listens on, where there is no hub.
            "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    folder = answer.get("folder")
    return Found(
        Path(folder) if folder else None,
        answer.get("refusal", ""),
        answer.get("progress_events", []),
        answer.get("has_hub", False),
        finished.stderr,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint("llama", folder)
    unwanted = ("pytorch_model.bin", "consolidated.safetensors", "README.md", "training.pt", "run_me.py")
    others = {"chat_template.jinja": b"{{ x }}", "tokenizer.model": b"pieces"}
    return {**folder_files(folder), **others, **dict.fromkeys(unwanted, b"x" * 64)}


WANTED = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "chat_template.jinja",
    "tokenizer.model",
}


def test_a_folder_is_found_without_a_socket_and_without_the_hubs_library(tmp_path):
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    found = find(folder, tmp_path, without_sockets=True)
    assert found.folder == folder
    assert not found.has_hub


def test_the_socket_guard_would_notice_a_look_up(tmp_path):
    with pytest.raises(AssertionError, match="a socket was opened"):
        find("org/tiny", tmp_path, without_sockets=True)


@pytest.mark.parametrize("name", ["/no/such/folder", "./org/model", "a/b/c", "model", "../org/model", "org/"])
def test_what_is_no_folder_and_no_hub_id_is_refused(name):
    assert not is_hub_id(name)
    with pytest.raises(CheckpointError, match=f"{name} is not a folder"):
        find_model(name, progress=lambda *event: None)


@pytest.mark.parametrize("name", ["org/a--b", "org/a..b", "org/a.git"])
def test_names_that_the_hub_cannot_have_are_refused_without_asking(tmp_path, name):
    found = find(name, tmp_path, offline=True)
    assert found.refusal.startswith(f"{name} is neither a folder here nor a name of the hub: ")


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="revision is v2, but"):
        find_model(str(tmp_path), revision="v2", progress=lambda *event: None)


def test_a_model_of_the_hub_is_downloaded_once_without_pickles(tmp_path, files):
    with serve(FakeHub(files)) as hub:
        first = find("org/tiny", tmp_path, hub, env={"HF_TOKEN": "hf_secret"})
        assert first.refusal == ""
        assert hub.downloaded == WANTED
        tokens = {token for request, token in hub.tokens.items() if "org/tiny" in request}
        assert tokens == {"Bearer hf_secret"}
        hub.requests.clear()
        again = find("org/tiny", tmp_path, hub)
        assert hub.downloaded == set()
    assert first.folder == again.folder == tmp_path / "hub/models--org--tiny/snapshots" / COMMIT
    assert folder_files(first.folder) == {name: files[name] for name in WANTED}
    size = sum(len(files[name]) for name in WANTED)
    assert first.progress_events[0] == ["download", 0, size]
    assert first.progress_events[-1] == ["download", size, size]
    assert [done for _, done, _ in first.progress_events] == sorted(
        done for _, done, _ in first.progress_events
    )
    assert len(first.progress_events) > 3
    assert "hf_secret" not in first.errors


@pytest.mark.parametrize("how", ["environment", "option", "network"])
def test_what_is_cached_is_used_where_the_hub_is_not_asked(tmp_path, files, how):
    with serve(FakeHub(files)) as hub:
        first = find("org/tiny", tmp_path, hub)
    env = {"HF_HUB_OFFLINE": "1"} if how == "environment" else {}
    # With `network` it is asked, and nothing is there.
    again = find("org/tiny", tmp_path, env=env, **({"offline": True} if how == "option" else {}))
    assert again.folder == first.folder
    assert "the cached model is used" in again.errors


@pytest.mark.parametrize("how", ["environment", "option"])
def test_offline_and_not_cached_is_one_line_and_no_request(tmp_path, files, how):
    env = {"HF_HUB_OFFLINE": "1"} if how == "environment" else {}
    with serve(FakeHub(files)) as hub:
        found = find("org/tiny", tmp_path, hub, env, **({"offline": True} if how == "option" else {}))
        assert not hub.requests
    why = "HF_HUB_OFFLINE is set" if how == "environment" else "offline was asked for"
    assert found.refusal == f"{why}, and {tmp_path / 'hub'} does not have all of org/tiny"


def test_a_half_downloaded_model_is_not_taken_for_a_whole_one(tmp_path, files):
    with serve(FakeHub(files)) as hub:
        folder = find("org/tiny", tmp_path, hub).folder
    (folder / "model.safetensors").unlink()
    found = find("org/tiny", tmp_path, offline=True)
    assert "does not have all of org/tiny" in found.refusal


@pytest.mark.parametrize("has_json", [True, False])
def test_a_cache_without_tokenizer_model_is_whole_where_there_is_a_tokenizer_json(tmp_path, files, has_json):
    of_json = {"tokenizer.json": b"{}"} if has_json else {}
    with serve(FakeHub({**files, **of_json})) as hub:
        folder = find("org/tiny", tmp_path, hub).folder
    (folder / "tokenizer.model").unlink()
    found = find("org/tiny", tmp_path, offline=True)
    assert found.folder == (folder if has_json else None)
    assert ("does not have all of org/tiny" in found.refusal) is not has_json


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    found = find("org/tiny", tmp_path)
    assert found.refusal.startswith("http://127.0.0.1:9/org/tiny cannot be reached (")
    assert "\n" not in found.refusal


def test_a_gated_model_says_what_to_do(tmp_path, files):
    with serve(FakeHub(files, gated=True)) as hub:
        found = find("org/tiny", tmp_path, hub)
    assert found.refusal == (
        f"org/tiny is gated: accept its licence at {hub.url}/org/tiny and set HF_TOKEN to a token of the "
        "account that did"
    )


@pytest.mark.parametrize("name", ["org/private", "org/nothing"])
def test_a_model_that_is_not_there_or_private_is_one_line(tmp_path, files, name):
    with serve(FakeHub(files)) as hub:
        found = find(name, tmp_path, hub)
    assert found.refusal == (
        f"{name} is neither a folder here nor a model at {hub.url}/{name}; a private one needs HF_TOKEN"
    )


def test_a_token_without_permission_is_one_line(tmp_path, files):
    with serve(FakeHub(files)) as hub:
        found = find("org/forbidden", tmp_path, hub)
    assert found.refusal == (
        f"{hub.url}/org/forbidden refuses access (403): set HF_TOKEN to a token that may read it"
    )


def test_an_unknown_revision_is_named(tmp_path, files):
    with serve(FakeHub(files)) as hub:
        found = find("org/tiny", tmp_path, hub, revision="v2")
    assert found.refusal == f"{hub.url}/org/tiny has no revision v2"


def test_a_hub_out_of_order_is_one_line(tmp_path, files):
    with serve(FakeHub(files, status=503)) as hub:
        found = find("org/tiny", tmp_path, hub)
    assert found.refusal.startswith(f"{hub.url}/org/tiny answers 503, and ")


def test_pickles_alone_are_refused_before_anything_is_downloaded(tmp_path, files):
    pickled = {"config.json": files["config.json"], "pytorch_model.bin": b"x"}
    with serve(FakeHub(pickled)) as hub:
        found = find("org/tiny", tmp_path, hub)
    assert found.refusal == (
        "org/tiny has weights only as pytorch_model.bin; only safetensors are read, nothing was downloaded"
    )
    assert hub.downloaded == set()


def test_a_disk_too_small_is_seen_before_anything_is_downloaded(tmp_path, files):
    with serve(FakeHub(files, sizes={"model.safetensors": 2**60})) as hub:
        found = find("org/tiny", tmp_path, hub)
    assert found.refusal.startswith(f"org/tiny needs {2**30}.0 GiB in {tmp_path / 'hub'}, which has ")
    assert hub.downloaded == set()


def test_of_a_repository_of_gguf_files_that_of_the_tag_alone_is_downloaded(tmp_path, files):
    gguf = tiny_llama().written()
    names = ("tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-tiny-Q4_K_M.gguf")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serve(FakeHub({**files, **dict.fromkeys(names, gguf)})) as hub:
        first = find("org/tiny:q4_k_m", tmp_path, hub, env=cache)
        assert first.refusal == ""
        assert hub.downloaded == {"tiny-Q4_K_M.gguf"}
        assert first.progress_events[-1] == ["download", len(gguf), len(gguf)]
    assert (first.folder / "model.gguf").read_bytes() == gguf
    assert find("org/tiny:Q4_K_M", tmp_path, env=cache, offline=True).folder == first.folder
    missing = find("org/tiny:Q8_0", tmp_path, env=cache, offline=True)
    assert missing.refusal.endswith("does not have all of org/tiny:Q8_0")


def test_shards_of_a_tag_are_downloaded_together(tmp_path):
    parts = {}
    for index, tensors in enumerate((slice(0, 4), slice(4, None))):
        shard = tiny_llama()
        shard.tensors = shard.tensors[tensors]
        for key, value in {"no": index, "count": 2, "tensors.count": 11}.items():
            shard.set(f"split.{key}", u32(value))
        parts[f"tiny-Q8_0-0000{index + 1}-of-00002.gguf"] = shard.written()
    with serve(FakeHub(parts)) as hub:
        found = find("org/tiny:Q8_0", tmp_path, hub, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert found.refusal == ""
    assert hub.downloaded == parts.keys()
    assert len(list(found.folder.glob("*.gguf"))) == 2


def test_a_tag_that_no_file_has_names_those_there_are(tmp_path, files):
    with serve(FakeHub({**files, "tiny-Q8_0.gguf": b"GGUF"})) as hub:
        found = find("org/tiny:Q5_K_M", tmp_path, hub)
        assert found.refusal == (
            "org/tiny has no GGUF file with a name that ends with Q5_K_M; it has tiny-Q8_0.gguf"
        )
        assert hub.downloaded == set()


def test_gguf_files_alone_are_refused_with_how_to_name_one(tmp_path):
    with serve(FakeHub({"tiny-Q8_0.gguf": b"GGUF"})) as hub:
        found = find("org/tiny", tmp_path, hub)
    assert found.refusal == (
        "org/tiny has weights only as tiny-Q8_0.gguf; only safetensors are read, nothing was downloaded; "
        "org/tiny:Q4_K_M is the GGUF file whose name ends so"
    )
