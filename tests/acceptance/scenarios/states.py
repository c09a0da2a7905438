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
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.report import Report, Row
from benchmarks.rig import faults
from benchmarks.rig.greedy import TIE, answer_logits, differences_from
from tests.acceptance.rig.state_checkpoints import FAMILIES, FIRST_ID, NATIVE, has_attention, write_model
from tests.chaos.stacks import Stack, StackPlan
from tests.system.checkpoints import VOCAB_SIZE
from triptych_cli.llm import LLM, RequestResult, SamplingParams, StructuredOutput
from triptych_kit.errors import Unavailable

MIN_DISTINCT = 20
_MAX_MODEL_LEN = 320
_PROMPT_TOKENS, _ADDED_TOKENS = (3, 150), (1, 40)
_POLL_S = 0.002
_JUDGED_AT_ONCE = 16
_MAX_REFUSALS, _RETRY_S = 8, 2.0
_KILL_AT = 0.25  # of the tokens
_MAX_ERROR = 1.2  # of transformers'
_GRAMMARS = (
    StructuredOutput(regex="[a-z ]{12,40}"),
    StructuredOutput(choice=["yes", "no", "not yet", "perhaps later"]),
    StructuredOutput(json_schema='{"type": "object", "properties": {"a": {"type": "string", "maxLength": 8},'
                     ' "b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": false}'),
)  # fmt: skip

Prompt = tuple[int, ...]
Answer = tuple[tuple[int, ...], ...]
_Continued = tuple[Prompt, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are served. options: of the engine.  is_hit: also prompts that begin as earlier ones."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    dtype: str = "float32"
    is_hit: bool = False
    is_killed: bool = False
    is_preempted: bool = False

    @property
    def num_ranks(self) -> int:
        return int(str(self.options.get("tensor_parallel_size", 1)))

    @property
    def computes(self) -> tuple[str, int]:
        """Ways that compute alike have the same answers."""
        return self.dtype, self.num_ranks


_UNCACHED: dict[str, object] = {"enable_prefix_caching": False, "steps_in_flight": 1}
_ALONE = {**_UNCACHED, "max_num_seqs": 1}
_RANKS = {"tensor_parallel_size": 2}
_BF16 = "bfloat16"
# The first of those that compute alike is the one without disturbances.
WAYS = (
    Way("alone", _ALONE),
    Way("batch of 64", {"max_num_seqs": 64}),
    Way("chunks of 1", {"max_num_seqs": 64, "long_prefill_token_threshold": 1}),
    Way("chunks of 7", {"max_num_seqs": 64, "long_prefill_token_threshold": 7}),
    Way("chunks of 64", {"max_num_seqs": 64, "long_prefill_token_threshold": 64}),
    Way("odd chunks", {"max_num_seqs": 16, "max_num_batched_tokens": 37}),
    Way("preempted", {"max_num_seqs": 16, "num_kv_blocks": 48}, is_preempted=True),
    Way("hits", {"max_num_seqs": 64, "state_interval": 16}, is_hit=True),
    Way("hits, odd chunks", {"max_num_seqs": 8, "max_num_batched_tokens": 37}, is_hit=True),
    Way("kill -9", {"max_num_seqs": 32}, is_killed=True),
    Way("tp 2, alone", _ALONE | _RANKS),
    Way("tp 2, odd chunks, hits", {"max_num_seqs": 16, "max_num_batched_tokens": 37} | _RANKS, is_hit=True),
    Way("tp 2, preempted", {"max_num_seqs": 16, "num_kv_blocks": 48} | _RANKS, is_preempted=True),
    Way("bf16, alone", _ALONE, _BF16),
    Way("bf16, batch of 64", {"max_num_seqs": 64}, _BF16),
    Way("bf16, odd chunks, hits", {"max_num_seqs": 16, "max_num_batched_tokens": 37}, _BF16, is_hit=True),
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
            measured = _Family(family, folder, options.prompts, options.tokens)
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
        broken += [f"{where}: {row[name]} {name}" for name in ("different", "unlike_alone") if row[name]]
        if int(str(row["distinct_ids"])) < MIN_DISTINCT:
            broken.append(f"{where}: {row['distinct_ids']} distinct ids")
        needed = {
            "cached_tokens": way.is_hit,
            "moved": way.is_killed,
            "preemptions": way.is_preempted and has_attention(str(row["family"])),
        }
        broken += [f"{where}: {name} is 0" for name in needed if needed[name] and not row[name]]
        if "error" in row and float(str(row["error"])) > _MAX_ERROR * float(str(row["their_error"])):
            broken.append(f"{where}: an error of {row['error']}, transformers' is {row['their_error']}")
    return broken


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: Prompt
    sampling: SamplingParams

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0 and self.sampling.structured_output is None

    @property
    def key(self) -> tuple[Prompt, str]:
        return self.prompt, repr(self.sampling)


def first_requests(num_prompts: int, num_tokens: int) -> list[Asked]:
    rng = random.Random(5)
    prompts = [_draw(rng, _PROMPT_TOKENS) for _ in range(num_prompts)]
    greedy = [
        SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)
        for logprobs in (None, 0)
    ]
    asked = [Asked(prompt, greedy[index % 2]) for index, prompt in enumerate(prompts)]
    for seed, prompt in enumerate(prompts[: num_prompts // 4]):
        drawn = {"temperature": 1.0, "max_tokens": num_tokens, "seed": seed}
        asked.append(Asked(prompt, SamplingParams(**drawn, ignore_eos=True)))
        if seed % 2:
            asked.append(Asked(prompt, SamplingParams(**drawn, ignore_eos=True, n=4)))
        grammar = _GRAMMARS[seed % len(_GRAMMARS)]
        heat = drawn if seed % 2 else {"temperature": 0.0, "max_tokens": num_tokens}
        asked.append(Asked(prompt, SamplingParams(**heat, structured_output=grammar)))
    rng.shuffle(asked)
    return asked


def later_requests(asked: Sequence[Asked], answers: Sequence[Answer]) -> Iterator[list[Asked]]:
    """The same requests again, those with one output continued after it, and after a part of the prompt."""
    rng = random.Random(6)
    yield list(asked)
    single = [
        (one, answer[0])
        for one, answer in zip(asked, answers, strict=True)
        if len(answer) == 1 and one.sampling.structured_output is None
    ]
    yield [Asked((*one.prompt, *answer, *_draw(rng, _ADDED_TOKENS)), one.sampling) for one, answer in single]
    yield [
        Asked((*one.prompt[: rng.randint(1, len(one.prompt))], *_draw(rng, _ADDED_TOKENS)), one.sampling)
        for one, _ in single
    ]


def _draw(rng: random.Random, lengths: tuple[int, int]) -> Prompt:
    return tuple(rng.choices(range(FIRST_ID, VOCAB_SIZE), k=rng.randint(*lengths)))


class _Family:
    """A checkpoint, and what is known of its answers."""

    def __init__(self, family: str, folder: Path, num_prompts: int, num_tokens: int) -> None:
        self.near_ties: list[Row] = []
        self._family, self._folder = family, folder
        self._asked = first_requests(num_prompts, num_tokens)
        self._judges: dict[str, _Judge] = {}
        self._alone: dict[tuple[str, int], dict[tuple[Prompt, str], Answer]] = {}

    def row(self, way: Way) -> Row:
        alone = self._alone.get(way.computes)
        asked, results = self._serve(way)
        answers = [tuple(output.token_ids for output in result.outputs) for result in results]
        if alone is None:
            alone = self._alone[way.computes] = {}
        unknown = [one for one in asked if one.key not in alone]
        if way.options.items() >= _ALONE.items():
            alone.update((one.key, answer) for one, answer in zip(asked, answers, strict=True))
        elif unknown:
            alone.update(self._served_uncached(way, unknown))
        greedy = [
            (one.prompt, answer[0]) for one, answer in zip(asked, answers, strict=True) if one.is_greedy
        ]
        judge = self._judge(way.dtype)
        kinds = judge.kinds(greedy)
        errors: dict[str, float] = {}
        if way.dtype == _BF16:
            errors = judge.errors(asked, results)
            found = judge.near_ties(greedy)
            self.near_ties += [{"family": self._family, "way": way.name, **each} for each in found]
        outputs = [output for result in results for output in result.outputs]
        return {
            "family": self._family,
            "way": way.name,
            "requests": len(asked),
            "distinct_ids": len({token for _, answer in greedy for token in answer}),
            "equal": kinds.count("equal"),
            "ties": kinds.count("tie"),
            "different": 0 if way.dtype == _BF16 else kinds.count("different"),
            "unlike_alone": sum(alone[one.key] != answer for one, answer in zip(asked, answers, strict=True)),
            "cached_tokens": sum(result.num_cached_tokens for result in results),
            "preemptions": sum(output.stats.num_preemptions for output in outputs),
            "moved": sum(output.stats.num_migrations > 0 for output in outputs),
            **errors,
        }

    def _serve(self, way: Way) -> tuple[list[Asked], list[RequestResult]]:
        if way.is_killed:
            with tempfile.TemporaryDirectory(prefix="triptych-") as name:
                return self._asked, asyncio.run(_killed(way, self._folder, self._asked, Path(name)))
        with self._llm(way) as llm:
            asked, results = list(self._asked), _generate(llm, self._asked)
            if way.is_hit:
                answers = [tuple(output.token_ids for output in result.outputs) for result in results]
                for later in later_requests(self._asked, answers):
                    asked += later
                    results += _generate(llm, later)
            return asked, results

    def _served_uncached(self, way: Way, asked: Sequence[Asked]) -> dict[tuple[Prompt, str], Answer]:
        """The answers to later requests by an engine that computes all of each prompt in one chunk."""
        dtype, num_ranks = way.computes
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 64 * _MAX_MODEL_LEN}
        with self._llm(Way("", _UNCACHED | options | {"tensor_parallel_size": num_ranks}, dtype)) as llm:
            results = _generate(llm, asked)
        return {
            one.key: tuple(output.token_ids for output in result.outputs)
            for one, result in zip(asked, results, strict=True)
        }

    def _llm(self, way: Way) -> LLM:
        defaults: dict[str, object] = {"num_threads": 1, "max_model_len": _MAX_MODEL_LEN, "device": "cpu"}
        return LLM(self._folder, dtype=way.dtype, **{**defaults, **way.options})

    def _judge(self, dtype: str) -> _Judge:
        if dtype not in self._judges:
            self._judges = {dtype: _Judge(self._folder, getattr(torch, dtype))}
        return self._judges[dtype]


def _generate(llm: LLM, asked: Sequence[Asked]) -> list[RequestResult]:
    prompts = [{"prompt_token_ids": list(one.prompt)} for one in asked]
    return llm.generate(prompts, [one.sampling for one in asked], progress=False)


def _generate_each(llm: LLM, asked: Sequence[Asked]) -> list[RequestResult]:
    """All at once, each again where it is refused while the frontend tries what may have ended an engine."""

    def answer(one: Asked) -> RequestResult:
        for _ in range(_MAX_REFUSALS):
            try:
                return _generate(llm, [one])[0]
            except Unavailable:
                time.sleep(_RETRY_S)
        return _generate(llm, [one])[0]

    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(answer, asked))


async def _killed(way: Way, model: Path, asked: Sequence[Asked], folder: Path) -> list[RequestResult]:
    """By two engines, one of which is killed when it has computed a part of the tokens."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in way.options.items()]
    plan = StackPlan(model=model, engine_flags=(*flags, f"--max-model-len={_MAX_MODEL_LEN}"))
    stack = Stack(plan, folder)
    try:
        await stack.start()
        llm = await asyncio.to_thread(LLM, "", engine="remote", address=stack.frontends[0].address)
        try:
            running = asyncio.create_task(asyncio.to_thread(_generate_each, llm, asked))
            num_tokens = sum((one.sampling.max_tokens or 0) * max(1, one.sampling.n or 1) for one in asked)
            least = num_tokens * _KILL_AT / plan.num_engines
            while not running.done():
                if int((await stack.engines[0].status()).get("generated_tokens", 0)) >= least:
                    await faults.kill(stack.engines[0])
                    break
                await asyncio.sleep(_POLL_S)
            return await running
        finally:
            await asyncio.to_thread(llm.close)
    finally:
        await stack.stop()


class _Judge:
    """transformers, which is given an answer up to a token."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = _load(folder, dtype)
        self._exact = self._model if dtype == torch.float32 else _load(folder, dtype).float()
        self._kinds: dict[_Continued, str] = {}

    def kinds(self, answers: Sequence[_Continued]) -> list[str]:
        """How each differs from transformers' own."""
        for some in _batches([each for each in dict.fromkeys(answers) if each not in self._kinds]):
            for each, logits in zip(some, answer_logits(self._model, some), strict=True):
                found = differences_from(logits, each[1])
                is_tie = all(difference.margin <= TIE for difference in found)
                self._kinds[each] = "equal" if not found else "tie" if is_tie else "different"
        return [self._kinds[each] for each in answers]

    def near_ties(self, answers: Sequence[_Continued]) -> Iterator[Row]:
        """The tokens of answers that are not the most likely ones."""
        kinds = zip(answers, self.kinds(answers), strict=True)
        for some in _batches(list(dict.fromkeys(each for each, kind in kinds if kind != "equal"))):
            computed = answer_logits(self._model, some), answer_logits(self._exact, some)
            for (prompt, answer), logits, exact in zip(some, *computed, strict=True):
                for position, _ in differences_from(logits, answer):
                    own = int(logits[position].argmax())
                    yield {
                        "prompt_tokens": len(prompt),
                        "position": position,
                        "gap": float(exact[position, own] - exact[position, answer[position]]),
                        "rounding": float((logits[position] - exact[position]).abs().max()),
                    }

    def errors(self, asked: Sequence[Asked], results: Sequence[RequestResult]) -> dict[str, float]:
        """Median distances from fp32 of the logprobs that greedy answers have."""
        ours: dict[_Continued, list[float]] = {}
        for one, result in zip(asked, results, strict=True):
            output = result.outputs[0]
            if one.is_greedy and output.logprobs is not None:
                ours[one.prompt, output.token_ids] = [float(each.logprob or 0.0) for each in output.logprobs]
        found: list[Tensor] = []
        for some in _batches(list(ours)):
            computed = answer_logits(self._model, some), answer_logits(self._exact, some)
            for each, logits, exact in zip(some, *computed, strict=True):
                tokens = torch.tensor(each[1])[:, None]
                theirs, wanted = (
                    torch.log_softmax(rows, dim=-1).gather(1, tokens)[:, 0] for rows in (logits, exact)
                )
                found.append((torch.stack([torch.tensor(ours[each]), theirs]) - wanted).abs())
        error, their_error = torch.cat(found, dim=1).median(dim=1).values.tolist()
        return {"error": error, "their_error": their_error}


def _batches(answers: list[_Continued]) -> Iterator[list[_Continued]]:
    """Of similar lengths."""
    answers.sort(key=lambda each: len(each[0]) + len(each[1]))
    for start in range(0, len(answers), _JUDGED_AT_ONCE):
        yield answers[start : start + _JUDGED_AT_ONCE]


def _load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval()
