"""Adapters beside the model: tokens a second against the model's own, and ids against merged weights.

    python -m benchmarks adapters --model M1 --model M2 --json benchmarks/results/adapters.json
    python -m benchmarks adapters --model M1-fp32 --equal --json benchmarks/results/adapters_equal.json

Adapters are PEFT's (`pip install peft`), with random matrices on every projection of attention and of the
feed-forward network.

Speed: one engine, in turns without adapters and with them: `one` of rank 16, `eight` of ranks 8, 16 and 32 in
one batch, `nine` on eight slots. Promised: one at least 0.9 of the model's tokens a second; eight at least
0.75, or 0.9 of the bound where that is lower, which is the model's bytes over its own and those of the
adapters in the batch; nine at most 10 % below eight.

With --equal: 16 adapters of ranks 4 to 128 and the model in one batch. In fp32, by both implementations,
promised are the ids of transformers with PEFT's merged weights. It is given each answer up to a token: where
its logits of that and of its own are within 1e-4, there is a tie. Answers that differ in ties alone are
counted apart; logits in bf16 often are the same number. In bf16 merging rounds the weights, so ids differ:
promised are at most as many answers with a difference as PEFT's own have, without merging.
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
from benchmarks.rig.greedy import TIE, differences
from triptych_cli.llm import LLM, SamplingParams

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIXES = {"one": (16,), "eight": (8, 16, 32, 8, 16, 32, 8, 16), "nine": (8, 16, 32, 8, 16, 32, 8, 16, 32)}
_EQUAL_RANKS = (4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 120, 128)
_NUM_SLOTS = 8
_PROMPT_TOKENS = 64
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
                found = _equal(model, Path(folder), options)
                shortfalls += _different(found)
            else:
                found = _speeds(model, Path(folder), options)
                shortfalls += _slow(found)
            rows += found
            print_table(found)
    settings = {"dtype": "in rows" if options.equal else options.dtype, "tokens": options.tokens}
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """Prompts, and the adapter of each; "": the model itself.  flags: `lora_modules` of all adapters."""

    model: Path
    flags: list[str]
    prompts: list[list[int]]
    adapters: list[str]
    num_tokens: int

    @property
    def folders(self) -> dict[str, str]:
        """Of the adapters, and of none, by name."""
        pairs = (flag.partition("=") for flag in self.flags)
        return {"": ""} | {name: folder for name, _, folder in pairs}


def _equal(model: Path, folder: Path, options: argparse.Namespace) -> list[Row]:
    flags = write_adapters(model, folder, _EQUAL_RANKS)
    names = ["", *(flag.partition("=")[0] for flag in flags)]
    choose = random.Random(7)
    prompts = [
        [choose.randrange(10, 1000) for _ in range(choose.randrange(4, 90))] for _ in range(options.prompts)
    ]
    adapters = [names[index % len(names)] for index in range(len(prompts))]
    asked = _Asked(model, flags, prompts, adapters, options.tokens)
    rows = [_compare(asked, "native", torch.float32), _compare(asked, "transformers", torch.float32)]
    return [*rows, _compare(asked, "native", torch.bfloat16), _compare(asked, "peft", torch.bfloat16)]


def _different(rows: Sequence[Row]) -> list[str]:
    found = [
        f"{row['model']}, {row['implementation']}, {row['dtype']}: {row['different']} answers differ"
        for row in rows
        if row["dtype"] == "float32" and row["different"]
    ]
    ours, theirs = (int(str(row["different"])) for row in rows if row["dtype"] == "bfloat16")
    if ours > theirs:
        found.append(f"{rows[0]['model']}, bfloat16: {ours} answers differ, {theirs} of PEFT without merging")
    return found


def _compare(asked: _Asked, implementation: str, dtype: torch.dtype) -> Row:
    """How answers differ from those of merged weights. implementation: of ours, or peft: without merging."""
    of_peft = implementation == "peft"
    answers = _answers_of_peft(asked, dtype) if of_peft else _answers(asked, implementation, dtype)
    kinds: list[str] = []
    for name, adapter in asked.folders.items():
        merged = _load(asked.model, adapter, dtype, merged=True)
        for prompt, used, answer in zip(asked.prompts, asked.adapters, answers, strict=True):
            if used == name:
                kinds.append(_difference(merged, prompt, answer))
        del merged
        gc.collect()
    return {
        "model": asked.model.name,
        "implementation": implementation,
        "dtype": str(dtype).removeprefix("torch."),
        "adapters": len(asked.flags),
        "prompts": len(asked.prompts),
        "distinct_ids": len({token for answer in answers for token in answer}),
        "equal": kinds.count("equal"),
        "ties": kinds.count("tie"),
        "different": kinds.count("different"),
    }


def _answers(asked: _Asked, implementation: str, dtype: torch.dtype) -> list[list[int]]:
    llm = LLM(
        str(asked.model), dtype=str(dtype).removeprefix("torch."), num_threads=1, max_model_len=512,
        model_impl=implementation, enable_lora=True, max_loras=len(asked.flags), max_lora_rank=128,
        lora_modules=tuple(asked.flags),
    )  # fmt: skip
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=asked.num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in asked.prompts]
        results = llm.generate(inputs, sampling, adapters=asked.adapters, progress=False)
        return [list(result.outputs[0].token_ids) for result in results]
    finally:
        llm.close()


@torch.inference_mode()
def _answers_of_peft(asked: _Asked, dtype: torch.dtype) -> list[list[int]]:
    """Of transformers with adapters beside the weights."""
    answers: dict[int, list[int]] = {}
    for name, adapter in asked.folders.items():
        model = _load(asked.model, adapter, dtype, merged=False)
        for index, (prompt, used) in enumerate(zip(asked.prompts, asked.adapters, strict=True)):
            if used == name:
                answers[index] = _continue(model, prompt, asked.num_tokens)
        del model
        gc.collect()
    return [answers[index] for index in range(len(asked.prompts))]


def _continue(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    answer: list[int] = []
    cache, following = None, prompt
    for _ in range(num_tokens):
        output = model(input_ids=torch.tensor([following]), past_key_values=cache, use_cache=True)
        cache, following = output.past_key_values, [int(output.logits[0, -1].argmax())]
        answer += following
    return answer


def _load(model: Path, adapter: str, dtype: torch.dtype, *, merged: bool) -> torch.nn.Module:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
    if adapter:
        tuned = PeftModel.from_pretrained(loaded, adapter)
        loaded = tuned.merge_and_unload() if merged else tuned
    return loaded.eval()


def _difference(merged: torch.nn.Module, prompt: list[int], answer: list[int]) -> str:
    """How the answer differs from the model's own, which is given each token of the answer up to there."""
    margins = [each.margin for each in differences(merged, prompt, answer)]
    if not margins:
        return "equal"
    return "tie" if max(margins) <= TIE else "different"
