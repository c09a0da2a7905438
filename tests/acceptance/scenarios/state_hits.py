"""Prefix hits of models whose layers keep states, on an idle engine: how many tokens each prompt computes.

    python -m tests.acceptance state_hits --json benchmarks/results/state_hits.json

An engine and a frontend, for small random checkpoints, and requests one after another. Each prompt's tokens
that no earlier sequence begins with are its own. Promised: of 16 prompts that share a beginning of 100,
300, 500 or 2,000 tokens each from the second on computes at most its own tokens and 64; so does each turn
of a conversation of 10 turns, of one that parts from another between turns, and of chats whose template
leaves reasoning out of the history; of conversations that part within a turn each from the second on, as
the first one shows where they part. An engine that has room for 4 states answers 64 conversations, in
turns, with the ids of one without a prefix cache, and its memory grows by at most 8 MiB over all rounds
after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.report import Report, Row
from tests.acceptance.rig.state_checkpoints import FIRST_ID, state_bytes, write_model
from tests.chaos.stacks import Stack, StackPlan
from tests.resident import anonymous_mib
from tests.system.checkpoints import VOCAB_SIZE
from triptych_cli.llm import LLM, SamplingParams, StructuredOutput

FAMILIES = ("qwen3_5", "nemotron_h", "mamba2")
MAX_ADDED = 64
MAX_GROWTH_MIB = 8.0
SHARED = (100, 300, 500, 2000)
_NUM_SHARING, _NUM_TURNS, _SYSTEM_TOKENS = 16, 10, 300
_OWN_TOKENS, _TURN_TOKENS, _ANSWER_TOKENS = (4, 200), (40, 200), 40
_NUM_STATES, _NUM_CONVERSATIONS, _NUM_ROUNDS = 4, 64, 3
_MAX_MODEL_LEN = 4096
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.role == 'assistant' %}{{ message.content.split('|')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_REASONING = StructuredOutput(regex="[a-z ]{40,60}[|][a-z ]{20,30}")
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "runs", "along", "river", "bank")

_Ids = list[int]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--shared", nargs="+", type=int, default=list(SHARED))
    parser.add_argument(
        "--conversations", type=int, default=_NUM_CONVERSATIONS, help="at an engine with few states"
    )


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for family in options.family:
        with tempfile.TemporaryDirectory(prefix="triptych-") as name:
            model = write_model(family, Path(name) / family)
            (model / "chat_template.jinja").write_text(_TEMPLATE)
            found = asyncio.run(_measure(model, options.shared, options.conversations, Path(name)))
            rows += [{"family": family, **row} for row in found]
            print(*rows[-len(found) :], sep="\n", file=sys.stderr, flush=True)
    settings = {"max_added": MAX_ADDED, "states": _NUM_STATES, "max_growth_mib": MAX_GROWTH_MIB}
    return Report("state_hits", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Promises that were not kept, in words."""
    limits = {"most_added": MAX_ADDED, "different": 0, "growth_mib": MAX_GROWTH_MIB}
    return [
        f"{row['family']}, {row['case']}: {name} is {row[name]}, at most {limit:g} is promised"
        for row in rows
        for name, limit in limits.items()
        if name in row and float(str(row[name])) > limit
    ] + [f"{row['family']}, {row['case']}: cached_tokens is 0" for row in rows if not row["cached_tokens"]]


async def _measure(model: Path, lengths: Sequence[int], num_conversations: int, folder: Path) -> list[Row]:
    rows: list[Row] = []
    async with _serving(model, folder / "idle", "--max-num-seqs=8") as (llm, _):
        rows += await asyncio.to_thread(_hits, llm, lengths)
    few = f"--state-cache-memory={_NUM_STATES * state_bytes(model)}", f"--max-num-seqs={_NUM_STATES - 1}"
    async with _serving(model, folder / "few", *few) as (llm, pid):
        answers, row = await asyncio.to_thread(_converse, llm, num_conversations, pid)
    expected = await asyncio.to_thread(_uncached, model, answers)
    different = sum(answer != own for (_, answer), own in zip(answers, expected, strict=True))
    return [*rows, {**row, "different": different}]


@asynccontextmanager
async def _serving(model: Path, folder: Path, *flags: str) -> AsyncIterator[tuple[LLM, int]]:
    """A client of an engine, and the process id of that."""
    folder.mkdir()
    plan = StackPlan(model=model, num_engines=1, engine_flags=(*flags, f"--max-model-len={_MAX_MODEL_LEN}"))
    stack = Stack(plan, folder)
    try:
        await stack.start()
        llm = await asyncio.to_thread(LLM, "", engine="remote", address=stack.frontends[0].address)
        try:
            yield llm, stack.engines[0].pid
        finally:
            await asyncio.to_thread(llm.close)
    finally:
        await stack.stop()


class _Computed:
    """Prompts one after another, and what each computes beside its own tokens."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.added: list[int] = []
        self.num_prompt_tokens = self.num_cached_tokens = 0

    def answer(self, prompt: _Ids, num_own: int, *, counts: bool = True) -> _Ids:
        """The answer to a prompt. counts: False for the first of those that share a beginning."""
        (result,) = self._llm.generate([{"prompt_token_ids": prompt}], _greedy(), progress=False)
        if counts:
            self.note(len(prompt), result.num_cached_tokens, num_own)
        return list(result.outputs[0].token_ids)

    def note(self, num_tokens: int, num_cached: int, num_own: int) -> None:
        self.added.append(num_tokens - num_cached - num_own)
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached

    def row(self, case: str) -> Row:
        return {
            "case": case,
            "prompts": len(self.added),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "most_added": max(self.added),
        }


def _greedy(num_tokens: int = _ANSWER_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _draw(rng: random.Random, lengths: tuple[int, int]) -> _Ids:
    return rng.choices(range(FIRST_ID, VOCAB_SIZE), k=rng.randint(*lengths))


def _hits(llm: LLM, lengths: Sequence[int]) -> list[Row]:
    rng = random.Random(9)
    rows = [_sharing(llm, rng, length) for length in lengths]
    conversation = _Computed(llm)
    history = _turns(conversation, rng, _draw(rng, (_SYSTEM_TOKENS, _SYSTEM_TOKENS)), _NUM_TURNS, is_new=True)
    rows.append(conversation.row("conversation"))
    parting = _Computed(llm)
    _turns(parting, rng, history[3], _NUM_TURNS - 3)
    rows.append(parting.row("parts between turns"))
    within = _Computed(llm)
    begun = history[5][: len(history[4]) + 25]
    for index in range(3):
        _turns(within, rng, begun, 3, is_new=index == 0)
    rows.append(within.row("parts within a turn"))
    return [*rows, _reasoning(llm, rng)]


def _sharing(llm: LLM, rng: random.Random, length: int) -> Row:
    shared, computed = _draw(rng, (length, length)), _Computed(llm)
    for index in range(_NUM_SHARING):
        own = _draw(rng, _OWN_TOKENS)
        computed.answer([*shared, *own], len(own), counts=index > 0)
    return computed.row(f"{length} shared tokens")


def _turns(
    computed: _Computed, rng: random.Random, begun: _Ids, num_turns: int, *, is_new: bool = False
) -> list[_Ids]:
    """What there is after each turn of a conversation. is_new: whether the first turn does not count."""
    after, history = [], begun
    for turn in range(num_turns):
        own = _draw(rng, _TURN_TOKENS)
        prompt = [*history, *own]
        history = [*prompt, *computed.answer(prompt, len(own), counts=not is_new or turn > 0)]
        after.append(history)
    return after


def _reasoning(llm: LLM, rng: random.Random) -> Row:
    """A chat whose template leaves the beginning of each answer out of the history."""
    computed = _Computed(llm)
    messages = [{"role": "system", "content": _text(rng, _SYSTEM_TOKENS)}]
    sampling = SamplingParams(temperature=0.0, max_tokens=120, structured_output=_REASONING)
    before = 0
    for turn in range(_NUM_TURNS):
        messages.append({"role": "user", "content": _text(rng, rng.randint(*_TURN_TOKENS))})
        (result,) = llm.chat([messages], sampling, progress=False)
        num_tokens = result.usage.num_prompt_tokens
        if turn:
            computed.note(num_tokens, result.num_cached_tokens, num_tokens - before)
        before = num_tokens
        assert "|" in result.text, result.text
        messages.append({"role": "assistant", "content": result.text})
    return computed.row("reasoning left out")


def _text(rng: random.Random, num_tokens: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_tokens))


def _converse(llm: LLM, num_conversations: int, pid: int) -> tuple[list[tuple[_Ids, _Ids]], Row]:
    """Conversations that go on in turns; prompts and answers, in the order in which they are sent."""
    rng = random.Random(10)
    histories = [_draw(rng, (20, 120)) for _ in range(num_conversations)]
    answers: list[tuple[_Ids, _Ids]] = []
    num_cached, memory_mib = 0, []
    for _ in range(_NUM_ROUNDS):
        for some in _groups(num_conversations):
            prompts = [[*histories[index], *_draw(rng, (4, 40))] for index in some]
            results = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], _greedy(16), progress=False
            )
            for index, prompt, result in zip(some, prompts, results, strict=True):
                answer = list(result.outputs[0].token_ids)
                answers.append((prompt, answer))
                histories[index] = [*prompt, *answer]
                num_cached += result.num_cached_tokens
        memory_mib.append(anonymous_mib(pid))
    return answers, {
        "case": f"{num_conversations} conversations, {_NUM_STATES} states",
        "prompts": len(answers),
        "prompt_tokens": sum(len(prompt) for prompt, _ in answers),
        "cached_tokens": num_cached,
        "distinct_ids": len({token for _, answer in answers for token in answer}),
        "memory_mib": memory_mib[0],
        "growth_mib": max(memory_mib) - memory_mib[0],
    }


def _groups(num_conversations: int) -> Iterator[range]:
    """Those that go on together: more than have rows, then pairs, each twice, which find their states."""
    for start in range(0, num_conversations, _NUM_STATES):
        end = min(start + _NUM_STATES, num_conversations)
        yield range(start, end)
        for first in range(start, end, 2):
            yield from [range(first, min(first + 2, end))] * 2


def _uncached(model: Path, answers: Sequence[tuple[_Ids, _Ids]]) -> list[_Ids]:
    """The answers of an engine without a prefix cache."""
    with LLM(
        model, num_threads=1, max_model_len=_MAX_MODEL_LEN, enable_prefix_caching=False, device="cpu"
    ) as llm:
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in answers], _greedy(16), progress=False
        )
    return [list(result.outputs[0].token_ids) for result in results]
