"""Requests to a checkpoint in several ways, beside transformers: ids are the same under any disturbance.

The requests are greedy ones, others with seeds, with n = 4 and with grammars, all sent at once; with prefix
hits, then each prompt again, longer by its answer and further tokens, and cut short and continued otherwise.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.report import Row
from benchmarks.rig import faults
from benchmarks.rig.greedy import TIE, answer_logits, differences_from
from tests.chaos.stacks import Stack, StackPlan
from tests.system.checkpoints import VOCAB_SIZE
from triptych_cli.llm import LLM, RequestResult, SamplingParams, StructuredOutput
from triptych_kit.errors import Unavailable

MIN_DISTINCT = 20
MAX_MODEL_LEN = 320
FIRST_ID = 1  # 0 ends a text
BF16 = "bfloat16"
_PROMPT_TOKENS, _ADDED_TOKENS = (3, 150), (1, 40)
_POLL_S = 0.002
_JUDGED_AT_ONCE = 16
_MAX_REFUSALS, _RETRY_S = 8, 2.0
_KILL_AT = 0.25  # of the tokens
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
    is_drafted: bool = False

    @property
    def num_ranks(self) -> int:
        return int(str(self.options.get("tensor_parallel_size", 1)))

    @property
    def computes(self) -> tuple[str, int]:
        """Ways that compute alike have the same answers."""
        return self.dtype, self.num_ranks


UNCACHED: dict[str, object] = {"enable_prefix_caching": False, "steps_in_flight": 1}
ALONE = {**UNCACHED, "max_num_seqs": 1}
RANKS = {"tensor_parallel_size": 2}


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


def shortfalls_of(where: str, row: Row, way: Way, *, is_preempted: bool) -> list[str]:
    """Promises that were not kept, in words. is_preempted: whether too few blocks preempt requests."""
    broken = [f"{where}: {row[name]} {name}" for name in ("different", "unlike_alone") if row[name]]
    if int(str(row["distinct_ids"])) < MIN_DISTINCT:
        broken.append(f"{where}: {row['distinct_ids']} distinct ids")
    needed = {
        "cached_tokens": way.is_hit,
        "moved": way.is_killed,
        "preemptions": way.is_preempted and is_preempted,
        "drafts": way.is_drafted,
    }
    return broken + [f"{where}: {name} is 0" for name in needed if needed[name] and not row[name]]


class Served:
    """A checkpoint, and what is known of its answers."""

    def __init__(
        self,
        labels: Mapping[str, str],
        folder: Path,
        num_prompts: int,
        num_tokens: int,
        *,
        judged: Path | None = None,
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """labels: of its rows.  judged: what transformers runs, if not `folder`.  options: of all engines."""
        self.near_ties: list[Row] = []
        self._labels, self._folder, self._judged = dict(labels), folder, judged or folder
        self._options = {"max_model_len": MAX_MODEL_LEN, **options}
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
        if way.options.items() >= ALONE.items():
            alone.update((one.key, answer) for one, answer in zip(asked, answers, strict=True))
        elif unknown:
            alone.update(self._served_uncached(way, unknown))
        greedy = [
            (one.prompt, answer[0]) for one, answer in zip(asked, answers, strict=True) if one.is_greedy
        ]
        judge = self._judge(way.dtype)
        kinds = judge.kinds(greedy)
        errors: dict[str, float] = {}
        if way.dtype == BF16:
            errors = judge.errors(asked, results)
            found = judge.near_ties(greedy)
            self.near_ties += [{**self._labels, "way": way.name, **each} for each in found]
        outputs = [output for result in results for output in result.outputs]
        return {
            **self._labels,
            "way": way.name,
            "requests": len(asked),
            "distinct_ids": len({token for _, answer in greedy for token in answer}),
            "equal": kinds.count("equal"),
            "ties": kinds.count("tie"),
            "different": 0 if way.dtype == BF16 else kinds.count("different"),
            "unlike_alone": sum(alone[one.key] != answer for one, answer in zip(asked, answers, strict=True)),
            "cached_tokens": sum(result.num_cached_tokens for result in results),
            "preemptions": sum(output.stats.num_preemptions for output in outputs),
            "moved": sum(output.stats.num_migrations > 0 for output in outputs),
            "drafts": sum(result.usage.num_accepted_draft_tokens or 0 for result in results),
            **errors,
        }

    def _serve(self, way: Way) -> tuple[list[Asked], list[RequestResult]]:
        if way.is_killed:
            with tempfile.TemporaryDirectory(prefix="triptych-") as name:
                return self._asked, asyncio.run(
                    _killed(self._options_of(way), self._folder, self._asked, Path(name))
                )
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
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 64 * MAX_MODEL_LEN}
        with self._llm(Way("", UNCACHED | options | {"tensor_parallel_size": num_ranks}, dtype)) as llm:
            results = _generate(llm, asked)
        return {
            one.key: tuple(output.token_ids for output in result.outputs)
            for one, result in zip(asked, results, strict=True)
        }

    def _llm(self, way: Way) -> LLM:
        return LLM(self._folder, **{"num_threads": 1, "device": "cpu", **self._options_of(way)})

    def _options_of(self, way: Way) -> dict[str, object]:
        drafts = (
            {"speculative": "draft", "speculative_model": str(self._folder), "draft_limit": "none"}
            if way.is_drafted
            else {}
        )
        return {"dtype": way.dtype, **self._options, **drafts, **way.options}

    def _judge(self, dtype: str) -> _Judge:
        if dtype not in self._judges:
            self._judges = {dtype: _Judge(self._judged, getattr(torch, dtype))}
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


async def _killed(
    options: Mapping[str, object], model: Path, asked: Sequence[Asked], folder: Path
) -> list[RequestResult]:
    """By two engines, one of which is killed when it has computed a part of the tokens."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    plan = StackPlan(model=model, engine_flags=tuple(flags))
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
