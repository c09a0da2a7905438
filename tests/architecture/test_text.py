"""Docstrings, names of files, and words that do not belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import OTHERS, PACKAGES, ROOT, all_sources, package_sources

FEATURE_NAMES = re.compile(r"lora|adapter|grammar|schema|image|connector|continuum", re.IGNORECASE)
POLICIES = "engine_svc/scheduler/policies"
# A policy has a name, which no other file of the core knows.
POLICY_NAME = re.compile("continuum", re.IGNORECASE)
CORE = ("engine_svc/scheduler", "engine_svc/cache", "engine_svc/runner", "engine_svc/loop")
FORBIDDEN_FILE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
LEFT_OVER = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK|NOTE)\b")

# Words of a private vocabulary, for which the field has others.
SHORT_LIST = re.compile(
    "told|whoever|nobody|wish(e[sd])?|roads?|rosters?|standstills?|doorbells?|inquir(y|ies)|rulings?|accused"
    "|offenders?|disown(s|ed)?|adoptables?"
)
# Whole words, also those of identifiers: split_at_underscores, SplitAtCapitals.
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
TEXT_FOLDERS = (*PACKAGES, *OTHERS, "kernels", "protos", "docs", "deploy", ".")
TEXT_SUFFIXES = {
    ".py", ".cpp", ".h", ".proto", ".md", ".toml", ".yml", ".yaml", ".json", ".sh", ".js", ".ini", ".txt",
}  # fmt: skip
# What the embedded model is trained on and consists of, and this list.
EXEMPT_TEXT = ("tools/tiny_model", "triptych_cli/tiny_model/weights", "tests/architecture/test_text.py")
# A field of the contract keeps its name.
EXEMPT_NAMES = re.compile(r"\bleaves_adoptable\b|\"standstill\": engine.run_state.value")


def test_docstrings_begin_with_a_sentence() -> None:
    bad = []
    for source in package_sources():
        first = (ast.get_docstring(source.tree) or "").partition("\n\n")[0]
        if not re.search(r"[.!?:]$", first.strip()):
            bad.append(source.path)
    assert bad == []


def test_the_core_knows_no_feature() -> None:
    hits = []
    for source in all_sources():
        if source.is_in(*CORE):
            lines = enumerate(source.text.splitlines(), start=1)
            hits += [
                f"{source.path}:{number} {line.strip()}"
                for number, line in lines
                if FEATURE_NAMES.search(POLICY_NAME.sub("", line) if source.is_in(POLICIES) else line)
            ]
    assert hits == []


def test_no_file_is_a_drawer() -> None:
    names = [(source.path, source.path.removesuffix(".py").split("/")) for source in all_sources()]
    assert [path for path, parts in names if FORBIDDEN_FILE_NAMES & set(parts)] == []


def test_nothing_is_left_for_later() -> None:
    hits = []
    for source in package_sources():
        lines = enumerate(source.text.splitlines(), start=1)
        hits += [f"{source.path}:{number}" for number, line in lines if LEFT_OVER.search(line)]
    assert hits == []


def test_the_short_list_of_words_is_not_used() -> None:
    hits = []
    for path, text in _hand_written_texts():
        for number, line in enumerate((path, *text.splitlines())):
            words = {word.lower() for word in WORD.findall(EXEMPT_NAMES.sub("", line))}
            found = sorted(filter(SHORT_LIST.fullmatch, words))
            hits += [f"{path}:{number} {', '.join(found)}"] if found else []
    assert hits == []


def _hand_written_texts() -> Iterator[tuple[str, str]]:
    """Every file of code, configuration or documentation: its path below the root, and what is in it."""
    files = {
        file
        for folder in TEXT_FOLDERS
        for file in ((ROOT / folder).iterdir() if folder == "." else (ROOT / folder).rglob("*"))
        if file.is_file() and (file.suffix in TEXT_SUFFIXES or file.name in ("Makefile", "Dockerfile"))
    }
    for file in sorted(files):
        path = file.relative_to(ROOT).as_posix()
        is_foreign = "_pb2" in file.name or "node_modules" in file.parts
        if not is_foreign and not any(path == one or path.startswith(one + "/") for one in EXEMPT_TEXT):
            yield path, file.read_text(encoding="utf-8")
