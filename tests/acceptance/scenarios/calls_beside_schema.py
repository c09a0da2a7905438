"""Answers with tools and a response_format over HTTP: calls of declared tools, or a text of the schema.

    python -m tests.acceptance calls_beside_schema --json benchmarks/results/calls_beside_schema.json

The embedded model answers in the format of each tool parser, behind a frontend of its own: greedy and at
three temperatures with seeds, whole and as events, with each tool choice, of strict tools and of others. Its
end token has another name, as `<|end|>` is a marker in the format of gpt-oss. Promised: an answer that comes
to its end has nothing but calls of the chosen tools, whose arguments are valid for jsonschema, or a text that
is valid for the schema; the latter where no call is demanded alone. There are both in every format, no
request fails, and hardly any answer is cut.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from benchmarks.report import Report, Row
from benchmarks.rig.processes import Fleet, ServicePlan
from frontend_svc.parsers.registry import TOOL_PARSERS
from triptych_cli.services import embedded_model

MAX_CUT_SHARE = 0.05
MIN_DISTINCT_IDS = 20
_AT_ONCE = 8
_LIMIT_S = 300.0
_MAX_TOKENS = 400
_END_BIAS = 3.0
_TEXT_BIAS = 15.0
_TEMPERATURES = (1, 1.5, 2)
_ENGINE_FLAGS = ("--num-threads=1", f"--max-num-seqs={_AT_ONCE}")


def _closed(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TOOLS = {
    "weather": _closed(city={"type": "string", "enum": ["Oslo", "Rome"]}, days={"enum": [1, 2, 3]}),
    "add": _closed(a={"type": "integer", "minimum": 0, "maximum": 99}, is_last={"type": "boolean"}),
    "note": _closed(
        tags={"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
        author=_closed(name={"type": "string", "pattern": "^[a-z]{1,6}$"}),
    ),
}
_ANSWER = _closed(sum={"type": "integer", "minimum": 0, "maximum": 9}, unit={"enum": ["m", "kg"]})
_CHOICES: dict[str, Any] = {
    "auto": "auto",
    "required": "required",
    "named": {"type": "function", "function": {"name": "note"}},
}
_PROMPTS = ("Is it warm in Rome?", "Add 4 and 5.", "Note it in red, by ann.", "What is the mean?", "Go on.")


@cache
def _bias(*, to_text: bool) -> dict[str, float]:
    """To the end of the output, as the model rarely ends a list of calls; or to a text of the schema too."""
    config = json.loads((embedded_model() / "config.json").read_text(encoding="utf-8"))
    eos = config["eos_token_id"]
    bias = dict.fromkeys(map(str, eos if isinstance(eos, list) else [eos]), _END_BIAS)
    if to_text:
        vocabulary = Tokenizer.from_file(str(embedded_model() / "tokenizer.json")).get_vocab()
        first_key = next(iter(_ANSWER["properties"])) + '"'
        bias |= {str(id_): _TEXT_BIAS for text, id_ in vocabulary.items() if first_key.startswith(text)}
    return bias


@dataclass(frozen=True)
class _Case:
    choice: str
    is_strict: bool
    is_streamed: bool
    is_parallel: bool
    seed: int | None  # None: greedy

    def body(self) -> dict[str, Any]:
        functions = [{"name": name, "parameters": schema} for name, schema in _TOOLS.items()]
        prompt = _PROMPTS[(self.seed or 0) % len(_PROMPTS)]
        schema = {"name": "answer", "schema": _ANSWER, "strict": self.is_strict}
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "tools": [
                {"type": "function", "function": {**function, "strict": self.is_strict}}
                for function in functions
            ],
            "tool_choice": _CHOICES[self.choice],
            "parallel_tool_calls": self.is_parallel,
            "response_format": {"type": "json_schema", "json_schema": schema},
            "max_tokens": _MAX_TOKENS,
            "stream": self.is_streamed,
            "return_token_ids": True,
            "logit_bias": _bias(to_text=bool(self.seed and self.seed % 2)),
        }
        if self.seed is None:
            return body | {"temperature": 0}
        return body | {"temperature": _TEMPERATURES[self.seed % 3], "seed": self.seed}


@dataclass
class _Answer:
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments
    reason: str = ""
    token_ids: list[int] = field(default_factory=list)

    def fault(self, case: _Case) -> str:
        """The reason why a whole answer breaks the promise; empty if it keeps it."""
        if self.content.strip() and (self.calls or case.choice != "auto"):
            return "text beside calls, or in their place"
        if not self.calls and case.choice != "auto":
            return "no call"
        if len(self.calls) > 1 and (not case.is_parallel or case.choice == "named"):
            return "several calls"
        allowed = {"note"} if case.choice == "named" else {*_TOOLS}
        texts = [(arguments, _TOOLS.get(name), name) for name, arguments in self.calls]
        for text, schema, name in texts or [(self.content, _ANSWER, "")]:
            if name and name not in allowed:
                return f"a call of {name!r}"
            try:
                jsonschema.validate(json.loads(text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                return f"{text!r}: {error}".splitlines()[0]
        return ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parser", action="append", help="tool parser; default: each")
    parser.add_argument(
        "--seeds", type=int, default=4, help="sampled answers beside each greedy one, on average"
    )


def run(options: argparse.Namespace) -> Report:
    names = options.parser or sorted(TOOL_PARSERS)
    rows, shortfalls, token_ids = asyncio.run(_run(names, options.seeds))
    total: Counter[str] = Counter()
    for row in rows:
        total.update({key: value for key, value in row.items() if isinstance(value, int)})
    if total["cut"] > MAX_CUT_SHARE * total["answers"]:
        shortfalls.append(f"{total['cut']} of {total['answers']} answers are cut")
    if len(token_ids) < MIN_DISTINCT_IDS:
        shortfalls.append(f"the outputs have {len(token_ids)} distinct ids")
    settings = {"seeds": options.seeds, "max_tokens": _MAX_TOKENS, "distinct_ids": len(token_ids)}
    return Report("calls_beside_schema", settings, [*rows, {"parser": "all", **total}], shortfalls)


async def _run(names: Sequence[str], num_seeds: int) -> tuple[list[Row], list[str], set[int]]:
    rows: list[Row] = []
    shortfalls: list[str] = []
    token_ids: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(Path(folder)) as fleet:
            model = _renamed_end(Path(folder))
            fleet.add(ServicePlan("engine", 0, (str(model), *_ENGINE_FLAGS)))
            await fleet.start()
            (engine,) = fleet.of("engine")
            for index, name in enumerate(names):
                flags = (f"--engine={engine.address}", f"--tool-parser={name}", "--http-port=0")
                plan = ServicePlan("frontend", index, (*flags, "--text-workers=1", "--drain-lag-s=0"))
                frontend = fleet.add(plan)
                await fleet.start([frontend.name])
                await fleet.until_routed()
                answered = await asyncio.to_thread(_answer_all, frontend.http, list(_cases(num_seeds)))
                rows.append(_judged(name, answered, shortfalls, token_ids))
                print(dict(rows[-1]), file=sys.stderr, flush=True)
                await frontend.stop()
    return rows, shortfalls, token_ids


def _renamed_end(folder: Path) -> Path:
    """A copy of the embedded model whose end token is `<|stop|>`."""
    copied = Path(shutil.copytree(embedded_model(), folder / "model"))
    for file in copied.iterdir():
        if file.suffix in (".json", ".jinja"):
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace("<|end|>", "<|stop|>"), encoding="utf-8")
    return copied


def _cases(num_seeds: int) -> Iterator[_Case]:
    for choice, is_strict, is_streamed in itertools.product(_CHOICES, (True, False), (True, False)):
        # Texts are rare, and only where no call is demanded.
        num_sampled = 2 * num_seeds if choice == "auto" else num_seeds // 2
        for number in range(num_sampled + 1):
            # Seeds differ between cases; one answer in three is free to have several calls.
            seed = None if number == 0 else number + 10 * (2 * is_strict + is_streamed)
            yield _Case(choice, is_strict, is_streamed, number % 3 == 1, seed)


def _judged(
    name: str, answered: Sequence[tuple[_Case, _Answer | str]], shortfalls: list[str], token_ids: set[int]
) -> Row:
    count = dict.fromkeys(("answers", "calls", "texts", "several", "cut", "failed", "wrong"), 0)
    for case, answer in answered:
        count["answers"] += 1
        if isinstance(answer, str):
            count["failed"] += 1
            shortfalls.append(f"{name}, {case}: {answer}")
            continue
        token_ids.update(answer.token_ids)
        if answer.reason == "length":
            count["cut"] += 1
            continue
        count["calls" if answer.calls else "texts"] += 1
        count["several"] += len(answer.calls) > 1
        if fault := answer.fault(case):
            count["wrong"] += 1
            shortfalls.append(f"{name}, {case}: {fault}")
    missing = [kind for kind in ("calls", "texts") if not count[kind]]
    shortfalls += [f"{name}: no answer of the kind {kind!r}" for kind in missing]
    return {"parser": name, **count}


def _answer_all(address: str, cases: Sequence[_Case]) -> list[tuple[_Case, _Answer | str]]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(zip(cases, pool.map(lambda case: _answer(address, case), cases), strict=True))


def _answer(address: str, case: _Case) -> _Answer | str:
    """The answer to one request; of one that fails, the error."""
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions",
        json.dumps(case.body()).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return str(error)
    if not case.is_streamed:
        (choice,) = json.loads(text)["choices"]
        return _joined([(choice, choice["message"])])
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return _joined([(choice, choice["delta"]) for choice in choices])


def _joined(parts: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> _Answer:
    """The answer of its choices, each with a message or a delta."""
    answer = _Answer()
    for choice, message in parts:
        answer.content += message.get("content") or ""
        answer.reason = choice["finish_reason"] or answer.reason
        answer.token_ids += choice.get("token_ids") or []
        for call in message.get("tool_calls") or []:
            if call.get("id"):
                answer.calls.append([call["function"]["name"], ""])
            answer.calls[-1][1] += call["function"]["arguments"]
    return answer
