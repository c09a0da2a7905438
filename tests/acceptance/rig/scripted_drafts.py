"""A proposer that knows the answers, and gives each of their tokens with a probability, else another one.

An engine finds it by the entry point that `write_entry_point` writes, and the answers in a file.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from engine_svc.core.step import AdmittedRequest
from engine_svc.speculation.proposer import IntArray

NAME = "scripted"
_TEXTS = "TRIPTYCH_BENCHMARK_TEXTS"
_CHANCE = 0.7
_NUM_IDS = 2_000


def write_entry_point(folder: Path, texts: Sequence[Sequence[int]]) -> dict[str, str]:
    """Write what an engine needs to find the proposer; returns what to add to its environment.

    texts: prompts with their outputs.
    """
    package = folder / "scripted_drafts-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-drafts\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[triptych.proposers]\n{NAME} = {__name__}:ScriptedProposer\n")
    (folder / "texts.json").write_text(json.dumps([list(text) for text in texts]))
    return {"PYTHONPATH": str(folder), _TEXTS: str(folder / "texts.json")}


class ScriptedProposer:
    """What it proposes depends on the row's tokens alone, so that ranks agree."""

    def __init__(self) -> None:
        self._texts: list[list[int]] = json.loads(Path(os.environ[_TEXTS]).read_text())

    def add_row(self, row: int, admitted: AdmittedRequest) -> None: ...

    def remove_row(self, row: int, token_ids: IntArray) -> None: ...

    def propose(self, row: int, token_ids: IntArray, limit: int) -> list[int]:
        known = token_ids.tolist()
        choose = random.Random(f"{len(known)} {known[-4:]}")
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        following = text[len(known) : len(known) + limit]
        return [token if choose.random() < _CHANCE else choose.randrange(_NUM_IDS) for token in following]
