"""What storing weights in fewer bits costs in quality and saves in memory.

    python -m benchmarks.quantization --json quantization.json
    python -m benchmarks.quantization --model FOLDER

The text is what the embedded model never saw: conversations about pairs of nouns that its training held out.
Other models are asked about the same text, so that only the ratio of their rows means something.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.report import Report, Row, print_table
from engine_svc.model.context import ForwardContext
from engine_svc.model.loader import LoadedModel, LoadWishes, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.runner.kv_tensors import KVSizing, KVTensors
from tools.tiny_model.corpus import Example, held_out_questions, held_out_stories
from tools.tiny_model.tokenizer import END
from tools.tiny_model.train import WEIGHTS_FOLDER
from triptych_kernels import AttentionBatch

SEED = 4_242
_BLOCK_SIZE = 16
_PLAIN = ("bfloat16", "none")
FORMS = (("float32", "none"), _PLAIN, ("bfloat16", "int8"))


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark, print its table and write its report."""
    arguments = _parse(words)
    texts = held_out_texts(arguments.model, arguments.texts)
    rows = compare([measure(arguments.model, dtype, quantization, texts) for dtype, quantization in FORMS])
    print_table(rows)
    if arguments.json:
        settings = {"model": arguments.model.name, "seed": SEED, "num_texts": len(texts)}
        Report("quantization", settings, rows).write(arguments.json)


@dataclass(frozen=True, slots=True)
class Quality:
    """The model in one form."""

    dtype: str
    quantization: str
    num_tokens: int  # that were predicted
    perplexity: float
    weight_bytes: int


def measure(folder: Path, dtype: str, quantization: str, texts: Sequence[Sequence[int]]) -> Quality:
    """The model in this form over the texts."""
    wishes = LoadWishes(
        dtype=dtype,
        quantization="" if quantization == "none" else quantization,
        device="cpu",
        model_impl="native",
        num_threads=1,
    )
    loaded = load_model(folder, wishes)
    assert isinstance(loaded.model, NativeDecoder), "it was asked for"
    return Quality(
        dtype=dtype,
        quantization=quantization,
        num_tokens=sum(len(text) - 1 for text in texts),
        perplexity=perplexity(loaded, texts),
        weight_bytes=loaded.model.num_bytes,
    )


def compare(measured: Sequence[Quality]) -> list[Row]:
    """A row each, with how much worse than plain bf16 it is, in percent."""
    (plain,) = [each.perplexity for each in measured if (each.dtype, each.quantization) == _PLAIN]
    return [{**asdict(each), "percent_over_bf16": 100 * (each.perplexity / plain - 1)} for each in measured]


def held_out_texts(folder: Path, num_texts: int) -> list[list[int]]:
    """Token ids of conversations, half of them stories, the same at every call."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stories = itertools.islice(held_out_stories(SEED), num_texts // 2)
    questions = itertools.islice(held_out_questions(SEED), num_texts - num_texts // 2)
    return [tokenizer.encode(_rendered(example)).ids for example in (*stories, *questions)]


@torch.inference_mode()
def perplexity(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean over all tokens but each text's first of -log p(token | those before it)."""
    loss, num_tokens = 0.0, 0
    for text in texts:
        logits = _logits(loaded, text[:-1])
        targets = torch.tensor(text[1:], device=logits.device)
        loss += torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum").item()
        num_tokens += len(targets)
    return math.exp(loss / num_tokens)


def _logits(loaded: LoadedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, V] fp32, of a prefill in one step."""
    num_tokens, device, groups = len(token_ids), loaded.device, range(len(loaded.facts.groups))
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    kv = KVTensors(loaded.facts, KVSizing(num_blocks * len(groups), _BLOCK_SIZE, bytes_per_block=0), device)
    places = torch.arange(num_tokens, device=device)
    # Each group of layers has blocks of its own.
    tables = torch.arange(num_blocks * len(groups), device=device).view(len(groups), 1, num_blocks)
    context = ForwardContext(
        kv.layers,
        [places + group * num_blocks * _BLOCK_SIZE for group in groups],
        [AttentionBatch.of(table, [num_tokens], [num_tokens], _BLOCK_SIZE) for table in tables],
    )
    return loaded.model.forward(torch.tensor(token_ids, device=device), places, places, context)


def _rendered(example: Example) -> str:
    return "".join(_parts(example))


def _parts(example: Example) -> Iterator[str]:
    for turn in example.turns:
        yield f"<|{turn.role}|>{turn.text}{END}"


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument(
        "--model", type=Path, default=WEIGHTS_FOLDER, help="folder (default: the embedded model)"
    )
    parser.add_argument("--texts", type=int, default=200, help="conversations to read")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
