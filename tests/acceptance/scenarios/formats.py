"""Quantized weights in each format: ids under any disturbance beside transformers with the numbers in full.

    python -m tests.acceptance formats --json benchmarks/results/formats.json

Small random checkpoints, rounded to each format that folders and GGUF files have, and their weights in full
in fp32. Rows are multiplied as they are (`--activations exact`), in fp32. Requests, ways, ties and what is
promised: see `states`; drafts are made with the weights themselves.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Report, Row
from benchmarks.rig.greedy import TIE
from benchmarks.rig.quantized_folder import awq, fp8, gptq, int4, int8, write_dequantized, write_quantized
from tests.acceptance.rig.disturbances import ALONE, RANKS, Served, Way, shortfalls_of
from tests.engine_svc.model import checkpoints as of_many_families
from tests.engine_svc.model.loading.gguf.gguf_models import add_tokens_of, types_in_turn, write_model
from tests.system.checkpoints import MAX_POSITIONS, VOCAB_SIZE, make_checkpoint, write_tokenizer

_GROUP = 32
_ROUNDINGS = {
    "compressed-tensors int4": int4(_GROUP),
    "compressed-tensors int8": int8(),
    "gptq": gptq(_GROUP),
    "awq": awq(_GROUP),
    "fp8": fp8(_GROUP),
}
# Their matrices have the types of GGUF in turn, experts of gpt-oss MXFP4.
_GGUF_FAMILIES = ("llama", "gemma3", "qwen3_moe", "gpt_oss")
WAYS = (
    Way("alone", ALONE),
    Way("batch of 64", {"max_num_seqs": 64}),
    Way("chunks of 7", {"max_num_seqs": 64, "long_prefill_token_threshold": 7}),
    Way("odd chunks", {"max_num_seqs": 16, "max_num_batched_tokens": 37}),
    Way("preempted", {"max_num_seqs": 16, "num_kv_blocks": 48}, is_preempted=True),
    Way("hits, odd chunks", {"max_num_seqs": 8, "max_num_batched_tokens": 37}, is_hit=True),
    Way("drafts", {"max_num_seqs": 16}, is_drafted=True),
    Way("kill -9", {"max_num_seqs": 32}, is_killed=True),
    Way("tp 2, alone", ALONE | RANKS),
    Way("tp 2, odd chunks, hits", {"max_num_seqs": 16, "max_num_batched_tokens": 37} | RANKS, is_hit=True),
)


def _rounded(name: str, folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    source = make_checkpoint("llama", folder / "source")
    quantized = write_quantized(source, folder / "quantized", _ROUNDINGS[name])
    return quantized, write_dequantized(quantized, folder / "full")


def _in_gguf(family: str, folder: Path) -> tuple[Path, Path]:
    source, path, full = folder / "source", folder / "model.gguf", folder / "full"
    changes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS, "eos_token_id": 0}
    # Files do not state it: all published models of the family have it.
    fixed = {"gemma3": {"query_pre_attn_scalar": 8}, "qwen3_moe": {"norm_topk_prob": True}}
    model = of_many_families.make_checkpoint(family, source, **changes, **fixed.get(family, {}))
    write_tokenizer(source)
    add_tokens = functools.partial(add_tokens_of, source)
    write_model(source, model.config, path, full, types_in_turn(family), add_tokens=add_tokens)
    return path, full


# Each gives what is served, and what transformers runs.
FORMATS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    **{name: functools.partial(_rounded, name) for name in _ROUNDINGS},
    **{f"gguf {family}": functools.partial(_in_gguf, family) for family in _GGUF_FAMILIES},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    names = [way.name for way in WAYS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="WAY")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40, help="of an answer")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    broken: list[str] = []
    for name in options.format:
        with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
            served, judged = FORMATS[name](Path(folder) / "checkpoints")
            measured = Served(
                {"format": name},
                served,
                options.prompts,
                options.tokens,
                judged=judged,
                options={"activations": "exact"},
            )
            for way in WAYS:
                if way.name in options.only:
                    rows.append(measured.row(way))
                    print(rows[-1], file=sys.stderr, flush=True)
                    broken += shortfalls_of(f"{name}, {way.name}", rows[-1], way, is_preempted=True)
            del measured
            gc.collect()
    settings = {"prompts": options.prompts, "tokens": options.tokens, "tie": TIE}
    return Report("formats", settings, rows, broken)
