"""Adapters beside the model: tokens a second against the model's own, and ids against merged weights.

    python -m benchmarks adapters --model M1 --model M2 --json benchmarks/results/adapters.json
    python -m benchmarks adapters --model M1-fp32 --equal --json benchmarks/results/adapters_equal.json

Adapters are PEFT's (`pip install peft`), with random matrices on every projection of attention and of the
feed-forward network.

Speed: one engine, in turns without adapters and with them: `one` of rank 16, `eight` of ranks 8, 16 and 32 in
one batch, `nine` on eight slots. Promised: one at least 0.9 of the model's tokens a second; eight at least
0.75, or 0.9 of the bound where that is lower, which is the model's bytes over its own and those of the
adapters in the batch; nine at most 10 % below eight.

With --equal: 16 adapters of ranks 4 to 128 and the model in one batch, fp32, in both implementations.
Promised: the ids of transformers with PEFT's merged weights. A difference where its two logits are within
1e-4 is a tie, and is counted apart.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import Report, Row, median_interval, print_table
from triptych_cli.llm import LLM, SamplingParams

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIXES = {"one": (16,), "eight": (8, 16, 32, 8, 16, 32, 8, 16), "nine": (8, 16, 32, 8, 16, 32, 8, 16, 32)}
_EQUAL_RANKS = (4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 120, 128)
_NUM_SLOTS = 8
_PROMPT_TOKENS = 64
_TIE = 1e-4
_MIN_RATIO = {"one": 0.9, "eight": 0.75}
_MAX_LOSS_OF_NINE = 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, action="append", required=True, help="checkpoint folder")
    parser.add_argument("--concurrency", default="1,8,64", help="requests at once")
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=7, help="turns with adapters and without")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--equal", action="store_true", help="compare ids with merged weights")
    parser.add_argument("--prompts", type=int, default=128, help="with --equal")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    shortfalls: list[str] = []
    for model in options.model:
        with tempfile.TemporaryDirectory() as folder:
            if options.equal:
                found = [
                    _compare(model, implementation, Path(folder), options)
                    for implementation in ("native", "transformers")
                ]
                shortfalls += [
                    f"{row['model']}, {row['implementation']}: {row['different']} answers differ"
                    for row in found
                    if row["different"]
                ]
            else:
                found = _speeds(model, Path(folder), options)
                shortfalls += _slow(found)
            rows += found
            print_table(found)
    settings = {"dtype": "float32" if options.equal else options.dtype, "tokens": options.tokens}
    return Report("adapters", settings, rows, shortfalls)


def write_adapters(model: Path, folder: Path, ranks: Sequence[int], seed: int = 0) -> list[str]:
    """PEFT's folders of adapters of these ranks: `lora_modules` of them."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]  # Only this benchmark needs it.
    from transformers import AutoModelForCausalLM

    flags = []
    for index, rank in enumerate(ranks):
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        torch.manual_seed(seed + index)
        config = LoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=list(MODULES),
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        tuned = get_peft_model(base, config)
        target = folder / f"adapter-{index}"
        tuned.save_pretrained(target)
        flags.append(f"adapter-{index}={target}")
    return flags


@dataclass(frozen=True, slots=True)
class _Cell:
    """mix: of MIXES.  names: of its adapters."""

    mix: str
    names: tuple[str, ...]
    num_requests: int


def _speeds(model: Path, folder: Path, options: argparse.Namespace) -> list[Row]:
    flags = write_adapters(model, folder, MIXES["nine"])
    one = write_adapters(model, folder / "one", MIXES["one"], seed=100)
    flags.append(one[0].replace("adapter-0=", "one=", 1))
    names = {
        "one": ("one",),
        **{mix: tuple(f"adapter-{i}" for i in range(len(MIXES[mix]))) for mix in ("eight", "nine")},
    }
    sizes = {
        name: _num_elements(Path(flag.partition("=")[2]))
        for flag in flags
        for name in [flag.partition("=")[0]]
    }
    llm = LLM(
        str(model),
        dtype=options.dtype,
        num_threads=1,
        max_model_len=1024,
        enable_lora=True,
        max_loras=_NUM_SLOTS,
        max_cpu_loras=16,
        lora_modules=tuple(flags),
        enable_prefix_caching=False,
    )
    num_base = _num_elements(model)
    try:
        rows = []
        for count in map(int, options.concurrency.split(",")):
            for mix in options.mix:
                if mix != "one" and count < _NUM_SLOTS:
                    continue
                cell = _Cell(mix, names[mix], count)
                rows.append(_speed(llm, model.name, cell, num_base, sizes, options))
        return rows
    finally:
        llm.close()


def _speed(
    llm: LLM, model: str, cell: _Cell, num_base: int, sizes: dict[str, int], options: argparse.Namespace
) -> Row:
    adapters = [cell.names[index % len(cell.names)] for index in range(cell.num_requests)]
    ratios, base_rates, rates = [], [], []
    choose = random.Random(f"{model} {cell}")
    for round_number in range(options.rounds + 1):
        prompts = [[choose.randrange(10, 1000) for _ in range(_PROMPT_TOKENS)] for _ in adapters]
        base_rate = _rate(llm, prompts, None, options.tokens)
        rate = _rate(llm, prompts, adapters, options.tokens)
        # The first round loads the adapters.
        if round_number:
            base_rates.append(base_rate)
            rates.append(rate)
            ratios.append(rate / base_rate)
    interval = median_interval(ratios)
    in_batch = sum(sizes[name] for name in cell.names[: min(cell.num_requests, _NUM_SLOTS)])
    return {
        "model": model,
        "mix": cell.mix,
        "requests": cell.num_requests,
        "base_tokens_per_s": statistics.median(base_rates),
        "tokens_per_s": statistics.median(rates),
        "ratio": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "bound": num_base / (num_base + in_batch),
    }


def _rate(llm: LLM, prompts: list[list[int]], adapters: list[str] | None, num_tokens: int) -> float:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    began_at = time.perf_counter()
    results = llm.generate(inputs, sampling, adapters=adapters, progress=False)
    seconds = time.perf_counter() - began_at
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


def _num_elements(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  It is no mapping.
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _slow(rows: Sequence[Row]) -> list[str]:
    found = []
    rates = {(row["model"], row["mix"], row["requests"]): row["tokens_per_s"] for row in rows}
    for row in rows:
        mix, ratio, bound = str(row["mix"]), float(str(row["ratio"])), float(str(row["bound"]))
        where = f"{row['model']}, {mix}, {row['requests']} requests"
        if mix in _MIN_RATIO:
            least = _MIN_RATIO[mix] if mix == "one" else min(_MIN_RATIO[mix], 0.9 * bound)
            if ratio < least:
                found.append(f"{where}: {ratio:.3f} of the model's tokens, {least:.3f} is promised")
        elif (eight := rates.get((row["model"], "eight", row["requests"]))) is not None:
            share = float(str(row["tokens_per_s"])) / float(str(eight))
            if share < 1 - _MAX_LOSS_OF_NINE:
                found.append(f"{where}: {share:.3f} of eight adapters, {1 - _MAX_LOSS_OF_NINE} is promised")
    return found


def _compare(model: Path, implementation: str, folder: Path, options: argparse.Namespace) -> Row:
    folders = sorted(folder.glob("adapter-*"), key=lambda path: int(path.name.removeprefix("adapter-")))
    flags = [f"{path.name}={path}" for path in folders]
    flags = flags or write_adapters(model, folder, _EQUAL_RANKS)
    names = ["", *(flag.partition("=")[0] for flag in flags)]
    choose = random.Random(7)
    prompts = [
        [choose.randrange(10, 1000) for _ in range(choose.randrange(4, 90))] for _ in range(options.prompts)
    ]
    adapters = [names[index % len(names)] for index in range(len(prompts))]
    llm = LLM(
        str(model), dtype="float32", num_threads=1, max_model_len=512, model_impl=implementation,
        enable_lora=True, max_loras=len(flags), max_lora_rank=128, lora_modules=tuple(flags),
    )  # fmt: skip
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
        results = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, adapters=adapters, progress=False
        )
        answers = [list(result.outputs[0].token_ids) for result in results]
    finally:
        llm.close()
    num_equal = num_ties = num_different = 0
    for name, flag in zip(names, ["", *flags], strict=True):
        merged = _merged(model, flag.partition("=")[2])
        for prompt, adapter, answer in zip(prompts, adapters, answers, strict=True):
            if adapter == name:
                kind = _difference(merged, prompt, answer)
                num_equal += kind == "equal"
                num_ties += kind == "tie"
                num_different += kind == "different"
        del merged
        gc.collect()
    return {
        "model": model.name,
        "implementation": implementation,
        "adapters": len(flags),
        "prompts": len(prompts),
        "distinct_ids": len({token for answer in answers for token in answer}),
        "equal": num_equal,
        "ties": num_ties,
        "different": num_different,
    }


def _merged(model: Path, adapter: str) -> torch.nn.Module:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    merged: torch.nn.Module = PeftModel.from_pretrained(base, adapter).merge_and_unload() if adapter else base
    return merged.eval()


@torch.inference_mode()
def _difference(merged: torch.nn.Module, prompt: list[int], answer: list[int]) -> str:
    """How the answer differs from the model's own, which is given each token of the answer up to there."""
    logits = merged(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.argmax(-1).tolist()
    for position, (ours, theirs) in enumerate(zip(answer, chosen, strict=True)):
        if ours != theirs:
            gap = logits[position, theirs] - logits[position, ours]
            return "tie" if gap <= _TIE else "different"
    return "equal"
