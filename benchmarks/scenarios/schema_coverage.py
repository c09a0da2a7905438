"""Which JSON schemas grammar backends serve: python -m benchmarks.schema_coverage FOLDER [NUMBER] [SKIPPED].

FOLDER holds files of MaskBench: {"schema": ..., "tests": [{"data": ..., "valid": ...}]}. Per subset, NUMBER
of them (50) after SKIPPED others are compiled by `auto`, as a request would be, and by each backend from the
schema as it is. A schema is served correctly if the grammar allows each valid test and no other, and answers
that are drawn evenly from what is allowed satisfy an independent validator.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

import launcher.tiny_model
from engine_svc.features.structured_output.backends.backend import (
    CompiledGrammar,
    GrammarBackend,
    MatcherError,
    Vocabulary,
)
from engine_svc.features.structured_output.backends.llguidance_backend import LLGuidanceBackend
from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend
from frontend_svc.text.json_schema.document import InvalidSchema, SchemaTooLarge
from frontend_svc.text.json_schema.keywords import UnenforcedKeywords, serve
from service_kit.grammars.constraint import Constraint, ConstraintKind, GrammarError

TIME_LIMIT_S = 15
NUM_SAMPLES = 4
MAX_TOKENS = 150

TOKENIZER_JSON = (Path(launcher.tiny_model.__file__).parent / "weights" / "tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
VOCABULARY = Vocabulary(TOKENIZER_JSON, TOKENIZER.get_vocab_size(), (0,))
BACKENDS: dict[str, GrammarBackend] = {
    "llguidance": LLGuidanceBackend(VOCABULARY),
    "xgrammar": XGrammarBackend(VOCABULARY),
}


def by_auto(text: str) -> CompiledGrammar:
    served = serve(text)
    return BACKENDS[served.backend].compile(Constraint(ConstraintKind.JSON_SCHEMA, served.text))


def alone(backend: str) -> Callable[[str], CompiledGrammar]:
    return lambda text: BACKENDS[backend].compile(Constraint(ConstraintKind.JSON_SCHEMA, text))


COMPILERS = {"auto": by_auto, "llguidance": alone("llguidance"), "xgrammar": alone("xgrammar")}


def allows(grammar: CompiledGrammar, value: object) -> bool:
    tokens = TOKENIZER.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False).ids
    matcher = grammar.matcher()
    return matcher.accept(tokens) == len(tokens) and matcher.is_accepting


def sampled(grammar: CompiledGrammar, seed: int) -> str | None:
    """An answer, in which the end is somewhat likelier than it would be; None without an end."""
    noise, matcher = random.Random(seed), grammar.matcher()
    tokens: list[int] = []
    masks = torch.zeros((1, VOCABULARY.num_words), dtype=torch.int32)
    for _ in range(MAX_TOKENS):
        matcher.fill_mask(masks, 0)
        allowed = (
            ((masks[0][:, None] >> torch.arange(32)) & 1).flatten()[: VOCABULARY.size].nonzero().flatten()
        )
        token = 0 if allowed[0] == 0 and noise.random() < 0.3 else int(noise.choice(allowed.tolist()))
        matcher.accept([token])
        if token == 0:
            return str(TOKENIZER.decode(tokens))
        tokens.append(token)
    return None


def judged(compile_schema: Callable[[str], CompiledGrammar], case: dict[str, Any]) -> str:
    try:
        grammar = compile_schema(json.dumps(case["schema"]))
    except (GrammarError, UnenforcedKeywords, InvalidSchema, SchemaTooLarge):
        return "refused"
    for test in case.get("tests", ()):
        if allows(grammar, test["data"]) != test["valid"]:
            return "refuses valid" if test["valid"] else "allows invalid"
    validator = Draft202012Validator(case["schema"], format_checker=Draft202012Validator.FORMAT_CHECKER)
    try:
        for seed in range(NUM_SAMPLES):
            answer = sampled(grammar, seed)
            if answer is not None and not validator.is_valid(json.loads(answer)):
                return "samples invalid"
    except (MatcherError, ValueError):
        return "samples invalid"
    return "correct"


def isolated(compile_schema: Callable[[str], CompiledGrammar], case: dict[str, Any]) -> str:
    """Judged in a child process, which a limit ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(TIME_LIMIT_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # xgrammar writes warnings
        os.write(writing, pickle.dumps(judged(compile_schema, case)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return str(pickle.loads(found)) if found else "time limit"


def main(folder: str, number: str = "50", skipped: str = "0") -> None:
    subsets: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(Path(folder).glob("*.json")):
        subsets[re.sub(r"(---|_\d|_java|_sql|_simple|_multiple|_parallel).*", "", path.stem)].append(path)
    totals: dict[str, Counter[str]] = {name: Counter() for name in COMPILERS}
    started_at = time.monotonic()
    for subset, paths in subsets.items():
        random.Random(5).shuffle(paths)
        cases = [json.loads(path.read_text()) for path in paths[int(skipped) :][: int(number)]]
        for name, compile_schema in COMPILERS.items():
            found = Counter(isolated(compile_schema, case) for case in cases)
            totals[name] += found
            print(f"{subset:18} {name:12} {found['correct']:4} of {len(cases)}  {dict(found)}", flush=True)
    for name, found in totals.items():
        print(f"{'all':18} {name:12} {found['correct']:4} of {found.total()}  {dict(found)}")
    print(f"{time.monotonic() - started_at:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
