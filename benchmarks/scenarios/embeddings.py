"""Vectors of texts beside sentence-transformers on the same checkpoint, in turns.

    python -m benchmarks embeddings --model FOLDER --peer PYTHON --json benchmarks/results/embeddings.json

`LLM.embed` of an engine in the process, and `encode` of sentence-transformers in the environment of PYTHON;
with `--onnxruntime` a session of that, too. Each gets the same texts of one length in tokens, in fp32, in
batches of 32, with as many threads. The vectors of the first turn are compared. Promised: at least 0.9 of
the texts a second of sentence-transformers, as the median of the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from pathlib import Path

from benchmarks.report import Report, Row, median_interval, print_table
from benchmarks.rig.lines import LineProcess

OURS, PEER, OTHER = "triptych", "sentence-transformers", "onnxruntime"
PROMISED = 0.9
TOLERANCE = 1e-5
# About a second: the speed of a host changes within minutes, and only close turns meet the same one.
_TOKENS_OF_A_TURN = 4_096
# Tokens of every text besides its words.
_NUM_SPECIAL = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of sentence-transformers")
    parser.add_argument("--peer", required=True, help="Python with sentence-transformers")
    parser.add_argument("--onnxruntime", action="store_true", help="that Python has it as well")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 32, 128], help="in tokens")
    parser.add_argument("--turns", type=int, default=31)


def run(options: argparse.Namespace) -> Report:
    names = [OURS, PEER, *([OTHER] if options.onnxruntime else [])]
    seconds: dict[int, dict[str, list[float]]] = {
        length: {name: [] for name in names} for length in options.lengths
    }
    furthest = 0.0
    words = _words(options.model)
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(LineProcess(_command(name, options))) for name in names}
        for turn in range(-1, options.turns):
            for length in options.lengths:
                texts = _texts(words, length, seed=turn)
                # The first turn warms up, and its vectors are compared; then each is the first in turn.
                shift = max(0, turn) % len(names)
                answers = {
                    name: processes[name].ask(texts=texts, vectors=turn < 0)
                    for name in names[shift:] + names[:shift]
                }
                if turn < 0:
                    furthest = max(furthest, _furthest(answers[OURS]["vectors"], answers[PEER]["vectors"]))
                    continue
                for name, answer in answers.items():
                    seconds[length][name].append(answer["seconds"])
    rows = [_row(length, names, seconds[length]) for length in options.lengths]
    print_table(rows)
    settings = {
        "model": options.model.name,
        "threads": options.threads,
        "turns": options.turns,
        "largest_difference": furthest,
    }
    return Report("embeddings", settings, rows, _shortfalls(rows, furthest))


def _command(name: str, options: argparse.Namespace) -> list[str]:
    python = sys.executable if name == OURS else options.peer
    return [
        python, "-m", "benchmarks.contestants.embeddings", name, str(options.model), str(options.threads)
    ]  # fmt: skip


def _words(model: Path) -> list[str]:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    # Words of some length are not split, and are spelled as in the vocabulary.
    return [word for word in vocabulary if word.isascii() and word.isalpha() and word.islower()]


def _texts(words: list[str], length: int, seed: int) -> list[str]:
    choose = random.Random(f"{length} {seed}")
    count = _TOKENS_OF_A_TURN // length
    return [" ".join(choose.choices(words, k=length - _NUM_SPECIAL)) for _ in range(count)]


def _furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(
        abs(one - other)
        for vector, peer in zip(ours, theirs, strict=True)
        for one, other in zip(vector, peer, strict=True)
    )


def _row(length: int, names: list[str], seconds: dict[str, list[float]]) -> Row:
    count = _TOKENS_OF_A_TURN // length
    row: dict[str, float] = {"length": length, "texts": count}
    for name in names:
        row[f"{name}_texts_per_s"] = count / statistics.median(seconds[name])
    for name in names[1:]:
        pairs = zip(seconds[OURS], seconds[name], strict=True)
        ratio = median_interval([theirs / ours for ours, theirs in pairs])
        row[f"ratio_to_{name}"] = ratio.estimate
        row[f"ratio_to_{name}_low"], row[f"ratio_to_{name}_high"] = ratio.low, ratio.high
    return row


def _shortfalls(rows: list[Row], furthest: float) -> list[str]:
    found = [
        f"length {row['length']}: {row[f'ratio_to_{PEER}']:.2f} of {PEER}, {PROMISED} are promised"
        for row in rows
        if float(str(row[f"ratio_to_{PEER}"])) < PROMISED
    ]
    if furthest > TOLERANCE:
        found.append(f"vectors differ by {furthest:.1e}, at most {TOLERANCE:.0e} is promised")
    return found
