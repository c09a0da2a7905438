"""What a contestant is asked, and what it answers, in JSON lines. Imports nothing that a peer might lack."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# Ids that every vocabulary compared here has, and that are no special tokens.
_FIRST_ID, _END_ID = 10, 16_000

Prompts = list[list[int]]


@dataclass(frozen=True)
class Job:
    """Requests that all come at once, each with exactly `num_output_tokens` of output.

    json_schema: what every output is constrained to; it has to have room for so many tokens.
    given: the prompts, if they are not random ones of these lengths.
    num_shared: leading tokens that all prompts share, also with other jobs of this number.
    temperature: 0, greedy, for contestants that do not read it.
    num_added: tokens that the next turn of each conversation of the job before adds to it, if these are the
    prompts.
    """

    prompt_lengths: list[int]
    num_output_tokens: int
    seed: int
    json_schema: str = ""
    given: Prompts | None = None
    num_shared: int = 0
    temperature: float = 0.0
    num_added: int = 0

    def prompts(self, conversations: Sequence[list[int]] = ()) -> Prompts:
        """The prompts: the same for every contestant, and none that a job of another seed had.

        conversations: the prompts of the job before, each with its answer.
        """
        if self.given is not None:
            return self.given
        choose, choose_shared = random.Random(self.seed), random.Random(self.num_shared)
        if self.num_added:
            return [
                each + [choose.randrange(_FIRST_ID, _END_ID) for _ in range(self.num_added)]
                for each in conversations
            ]
        shared = [choose_shared.randrange(_FIRST_ID, _END_ID) for _ in range(self.num_shared)]
        return [
            shared + [choose.randrange(_FIRST_ID, _END_ID) for _ in range(length - self.num_shared)]
            for length in self.prompt_lengths
        ]


def serve(
    name: str,
    generate: Callable[[Prompts, Job], list[list[int]]],
    facts: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Say that it is ready, then do jobs until the input ends.

    `generate` takes the prompts and the job; it returns the output ids of each prompt. It may change the
    facts, which each answer has beside the time and the ids.
    """
    print(json.dumps({"ready": name}), flush=True)
    conversations: Prompts = []
    for line in sys.stdin:
        job = Job(**json.loads(line))
        prompts = job.prompts(conversations)
        started_at = time.perf_counter()
        answers = generate(prompts, job)
        seconds = time.perf_counter() - started_at
        counts = [len(answer) for answer in answers]
        if counts != [job.num_output_tokens] * len(prompts):
            raise SystemExit(f"{name} generated {counts} tokens instead of {job.num_output_tokens} each")
        conversations = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        print(json.dumps({"seconds": seconds, "token_ids": answers, **facts}), flush=True)
