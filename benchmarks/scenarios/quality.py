"""What formats of weights keep of a model: perplexity, divergence and most likely tokens, beside fp32.

    python -m benchmarks quality --json benchmarks/results/quality.json
    python -m benchmarks quality --model FILE.gguf --text FILE.txt --peer PYTHON

The weights of the model, dequantized to fp32, are compared with the model as it is and, if that is in full or
`--format` names some, with copies in other formats, made by rounding to the nearest code; `--beside` names
others of the same model. Each runs the forward of the engine over the same tokens, in windows. With `--peer`,
llama-cpp-python in the environment of PYTHON runs GGUF files. Promised beside llama.cpp: a perplexity within
0.5 % of its own, and at most 0.5 points fewer most likely tokens that are those of fp32.

The text of the embedded model are conversations that its training held out, that of others is docs/.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.report import Report, Row
from benchmarks.rig.lines import LineProcess
from benchmarks.rig.quantized_folder import (
    WEIGHTS,
    Rounding,
    awq,
    fp8,
    gptq,
    int4,
    int8,
    write_dequantized,
    write_quantized,
)
from engine_svc.model.loading.folder import read_json_object
from engine_svc.model.loading.formats.sources import quantization_method
from engine_svc.model.loading.hub import find_model
from engine_svc.model.loading.loader import ignore_progress
from tools.tiny_model.corpus import held_out_questions, held_out_stories
from tools.tiny_model.tokenizer import END
from triptych_cli.services import embedded_model

OURS, PEER = "triptych", "llama.cpp"
MOST_PERPLEXITY = 0.005
MOST_POINTS = 0.5
_REFERENCE = "fp32"
_REPOSITORY = Path(__file__).resolve().parents[2]
_SEED = 4_242
_ROUNDED: dict[str, Callable[[], Rounding]] = {
    "compressed-tensors int4, groups of 128": int4,
    "compressed-tensors int8": int8,
    "gptq, groups of 128": gptq,
    "awq, groups of 128": awq,
    "fp8, blocks of 128": fp8,
}
# Types of blocks that the gguf package can make; of a Llama, whose names and order of rows are known here.
_GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
FORMATS = (*_ROUNDED, *(f"GGUF {kind}" for kind in _GGUF))


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant: what has the weights, how they are loaded, and by which program."""

    weights: str
    load: str
    command: list[str]
    program: str = OURS


@dataclass(slots=True)
class Sums:
    """Over all tokens that were predicted. See `benchmarks.contestants.logits`."""

    loss: float = 0.0
    divergence: float = 0.0
    num_equal: float = 0.0

    def add(self, answer: dict[str, float]) -> None:
        self.loss += answer["loss"]
        self.divergence += answer["divergence"]
        self.num_equal += answer["num_equal"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder or GGUF file; without one the embedded model")
    parser.add_argument(
        "--format", action="append", choices=FORMATS, help="a copy to make; of a model in full: all of them"
    )
    parser.add_argument("--beside", type=Path, action="append", default=[], help="the same model, quantized")
    parser.add_argument(
        "--load", action="append", help="NAME=VALUE,... of `LoadOptions`, for each quantized model; again"
    )
    parser.add_argument("--text", type=Path, help="a file")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", help="Python with llama-cpp-python")


def run(options: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory(prefix="quality-") as name, contextlib.ExitStack() as stack:
        scratch = Path(name)
        # GGUF files are opened as folders of the cache.
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        model = options.model or embedded_model()
        folder = find_model(str(model), progress=ignore_progress)
        full = write_dequantized(folder, scratch / "full")
        windows = _windows(options, folder)
        reference = stack.enter_context(LineProcess(_ours(full, "dtype=float32", options)))
        entries = [*_entries(options, model, folder, full, scratch)]
        processes = [stack.enter_context(LineProcess(entry.command)) for entry in entries]
        loss, sums = 0.0, [Sums() for _ in entries]
        path = str(scratch / "log-probabilities")
        for token_ids in windows:
            loss += reference.ask(token_ids=token_ids, path=path, writes=True)["loss"]
            for process, found in zip(processes, sums, strict=True):
                found.add(process.ask(token_ids=token_ids, path=path, writes=False))
        num_tokens = sum(len(token_ids) - 1 for token_ids in windows)
        whole = Sums(loss, 0.0, num_tokens)
        sizes = [process.facts.get("weight_bytes") for process in (reference, *processes)]
        rows = [
            _row(entry, found, whole, num_tokens, size)
            for entry, found, size in zip(
                [Entry(_REFERENCE, "dtype=float32", []), *entries], [whole, *sums], sizes, strict=True
            )
        ]
    settings = {
        "model": model.name,
        "text": options.text.name if options.text else "docs" if options.model else "held-out conversations",
        "num_tokens": num_tokens,
        "window": options.window,
        "threads": options.threads,
    }
    return Report("quality", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """What is not kept of what is promised beside llama.cpp."""
    found: list[str] = []
    for theirs in (row for row in rows if row["program"] == PEER):
        for ours in (row for row in rows if row["weights"] == theirs["weights"] and row["program"] == OURS):
            name = f"{ours['weights']} with {ours['load']}"
            ratio = _number(ours, "perplexity") / _number(theirs, "perplexity")
            if abs(ratio - 1) > MOST_PERPLEXITY:
                found.append(f"{name}: perplexity is {ratio:.4f} of {PEER}'s")
            points = _number(theirs, "top_1_percent") - _number(ours, "top_1_percent")
            if points > MOST_POINTS:
                found.append(f"{name}: {points:.2f} points fewer most likely tokens than {PEER}")
    return found


def _row(entry: Entry, found: Sums, whole: Sums, num_tokens: int, weight_bytes: int | None) -> Row:
    perplexity = math.exp(found.loss / num_tokens)
    return {
        "weights": entry.weights,
        "load": entry.load,
        "program": entry.program,
        "perplexity": perplexity,
        "percent_over_fp32": 100 * (perplexity / math.exp(whole.loss / num_tokens) - 1),
        "mean_kl_thousandths": 1e3 * found.divergence / num_tokens,
        "top_1_percent": 100 * found.num_equal / num_tokens,
        "weight_mb": None if weight_bytes is None else weight_bytes / 1e6,
    }


def _number(row: Row, name: str) -> float:
    return float(str(row[name]))


def _entries(
    options: argparse.Namespace, model: Path, folder: Path, full: Path, scratch: Path
) -> Iterator[Entry]:
    """Contestants, which are made as they are asked for."""
    quantized = {path.name: path for path in options.beside}
    formats = options.format or []
    if _is_quantized(folder):
        quantized = {model.name: model, **quantized}
    else:
        formats = formats or _possible(full)
        for load in ("dtype=bfloat16", "dtype=bfloat16,quantization=int8"):
            yield Entry(model.name, load, _ours(folder, load, options))
    quantized |= {name: _make(name, full, scratch / name.replace(" ", "-")) for name in formats}
    for name, path in quantized.items():
        opened = find_model(str(path), progress=ignore_progress)
        for load in options.load or ["dtype=bfloat16"]:
            yield Entry(name, load, _ours(opened, load, options))
        if options.peer and path.suffix == ".gguf":
            yield Entry(name, "", _command(options.peer, PEER, path, options, window=options.window), PEER)


def _is_quantized(folder: Path) -> bool:
    content = read_json_object(folder / "config.json")
    return any(folder.glob("*.gguf")) or quantization_method(content) is not None


def _possible(full: Path) -> tuple[str, ...]:
    is_llama = read_json_object(full / "config.json").get("model_type") == "llama"
    return FORMATS if is_llama else tuple(_ROUNDED)


def _make(name: str, full: Path, path: Path) -> Path:
    """A copy of the weights in the format of this name; returns its folder or file."""
    if name in _ROUNDED:
        return write_quantized(full, path, _ROUNDED[name]())
    # Imported here: only these copies need it.
    from gguf import GGMLQuantizationType
    from transformers import AutoConfig

    from tests.engine_svc.model.loading.gguf.gguf_models import write_model

    kind = GGMLQuantizationType[name.removeprefix("GGUF ")]

    def kind_of(tensor: str) -> GGMLQuantizationType:
        # As llama.cpp does, embeddings and the head keep 8 bits.
        return kind if ".layers." in tensor else GGMLQuantizationType.Q8_0

    path.mkdir()
    file = path / "model.gguf"
    write_model(full, AutoConfig.from_pretrained(full), file, path / "full", kind_of)
    (path / "full" / WEIGHTS).unlink()
    return file


def _ours(folder: Path, load: str, options: argparse.Namespace) -> list[str]:
    values = dict(pair.split("=", 1) for pair in load.split(","))
    return _command(sys.executable, OURS, folder, options, **values)


def _command(python: str, name: str, model: Path, options: argparse.Namespace, **values: object) -> list[str]:
    module = "benchmarks.contestants.logits"
    return [python, "-m", module, name, str(model.absolute()), str(options.threads), json.dumps(values)]


def _windows(options: argparse.Namespace, folder: Path) -> list[list[int]]:
    """Token ids that are read together, each time after what the tokenizer puts before a text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = tokenizer.encode("").ids
    size, left = options.window - len(before), options.tokens
    windows: list[list[int]] = []
    for text in _texts(options):
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids[:left]
        left -= len(token_ids)
        windows += [[*before, *token_ids[at : at + size]] for at in range(0, len(token_ids), size)]
        if left <= 0:
            break
    # A token alone predicts none.
    return [window for window in windows if len(window) > 1]


def _texts(options: argparse.Namespace) -> Iterator[str]:
    if options.text:
        return iter([options.text.read_text("utf-8")])
    if options.model:
        return (path.read_text("utf-8") for path in sorted((_REPOSITORY / "docs").glob("*.md")))
    pairs = zip(held_out_stories(_SEED), held_out_questions(_SEED), strict=False)
    return (
        "".join(f"<|{turn.role}|>{turn.text}{END}" for turn in example.turns)
        for example in itertools.chain.from_iterable(pairs)
    )
