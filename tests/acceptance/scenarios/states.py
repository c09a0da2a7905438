"""Models whose layers keep states, or attend in chunks: ids under any disturbance beside transformers.

    python -m tests.acceptance states --json benchmarks/results/states.json

Small random checkpoints of each family, in fp32 and bf16. The requests are greedy ones with 64 prompts,
others with seeds, with n = 4 and with grammars, all sent at once; with prefix hits, then each prompt again,
longer by its answer and further tokens, and cut short and continued otherwise. They are served in several
ways: alone, 64 in a batch, in chunks of 1, 7, 64 and odd numbers of tokens, with too few blocks, on prefix
hits, by two engines of which one is killed, by two tensor-parallel ranks. Promised: in fp32 greedy answers
are those of transformers, which is given each answer up to a token; where its logits of that and of its own
are within 1e-4, there is a tie, counted apart. All answers are those that each request has alone; those to
later requests, which begin as earlier ones, are those of an engine without a prefix cache.

In bf16 rounding decides more often, by other operations in each implementation. Each greedy token that is
not transformers' own is listed: `gap` is how far it is below that one by transformers in fp32 with the same
weights, `rounding` how far transformers' logits in bf16 and in fp32 differ at this position. `error` is the
median distance of greedy tokens' logprobs from those of fp32, `their_error` that of transformers' in bf16.
Promised: the error is at most 1.2 times theirs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Report, Row
from benchmarks.rig.greedy import TIE
from tests.acceptance.rig.disturbances import ALONE, BF16, RANKS, Served, Way, shortfalls_of
from tests.acceptance.rig.state_checkpoints import FAMILIES, NATIVE, has_attention, write_model

_MAX_ERROR = 1.2  # of transformers', in bf16
# The first of those that compute alike is the one without disturbances.
WAYS = (
    Way("alone", ALONE),
    Way("batch of 64", {"max_num_seqs": 64}),
    Way("chunks of 1", {"max_num_seqs": 64, "long_prefill_token_threshold": 1}),
    Way("chunks of 7", {"max_num_seqs": 64, "long_prefill_token_threshold": 7}),
    Way("chunks of 64", {"max_num_seqs": 64, "long_prefill_token_threshold": 64}),
    Way("odd chunks", {"max_num_seqs": 16, "max_num_batched_tokens": 37}),
    Way("preempted", {"max_num_seqs": 16, "num_kv_blocks": 48}, is_preempted=True),
    Way("hits", {"max_num_seqs": 64, "state_interval": 16}, is_hit=True),
    Way("hits, odd chunks", {"max_num_seqs": 8, "max_num_batched_tokens": 37}, is_hit=True),
    Way("kill -9", {"max_num_seqs": 32}, is_killed=True),
    Way("tp 2, alone", ALONE | RANKS),
    Way("tp 2, odd chunks, hits", {"max_num_seqs": 16, "max_num_batched_tokens": 37} | RANKS, is_hit=True),
    Way("tp 2, preempted", {"max_num_seqs": 16, "num_kv_blocks": 48} | RANKS, is_preempted=True),
    Way("bf16, alone", ALONE, BF16),
    Way("bf16, batch of 64", {"max_num_seqs": 64}, BF16),
    Way("bf16, odd chunks, hits", {"max_num_seqs": 16, "max_num_batched_tokens": 37}, BF16, is_hit=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    names = [way.name for way in WAYS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="WAY")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40, help="of an answer")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    listed: list[Row] = []
    for family in options.family:
        with tempfile.TemporaryDirectory(prefix="triptych-") as name:
            folder = write_model(family, Path(name) / family)
            measured = Served({"family": family}, folder, options.prompts, options.tokens)
            for way in WAYS:
                # What is compared with comes first.
                if way.name in options.only and (
                    "tensor_parallel_size" not in way.options or family in NATIVE
                ):
                    rows.append(measured.row(way))
                    print(rows[-1], file=sys.stderr, flush=True)
            listed += measured.near_ties
            del measured
            gc.collect()
    settings = {"prompts": options.prompts, "tokens": options.tokens, "tie": TIE}
    return Report("states", settings, [*rows, *listed], shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Promises that were not kept, in words."""
    broken = []
    for row in rows:
        where = f"{row['family']}, {row['way']}"
        way = next(way for way in WAYS if way.name == row["way"])
        is_preempted = has_attention(str(row["family"]))
        broken += shortfalls_of(where, row, way, is_preempted=is_preempted)
        if "error" in row and float(str(row["error"])) > _MAX_ERROR * float(str(row["their_error"])):
            broken.append(f"{where}: an error of {row['error']}, transformers' is {row['their_error']}")
    return broken
