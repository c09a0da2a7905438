"""Jobs of agents: turns, tokens and tools. Knows no scheduler."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN_IDS = range(100, 2000)  # that every model has


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution. sigma: of the logarithm."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.median), self.sigma)

    def draw_count(self, rng: random.Random) -> int:
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of agents. share: of the calls.  gap_s: from the end of a turn to the job's next one."""

    name: str
    share: float
    gap_s: LogNormal


@dataclass(frozen=True, slots=True)
class JobShape:
    """The distributions of a kind of jobs, in tokens."""

    name: str
    num_turns: LogNormal
    first_prompt: LogNormal
    tool_output: LogNormal
    answer: LogNormal
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a job: what its prompt has more than the turn before, its answer, and the tool after it."""

    input_ids: Sequence[int]
    num_output_tokens: int
    tool: str
    gap_s: float


@dataclass(frozen=True, slots=True)
class Job:
    turns: Sequence[Turn]

    @property
    def contexts(self) -> list[int]:
        """Tokens at the end of each turn."""
        num_tokens, contexts = 0, []
        for turn in self.turns:
            num_tokens += len(turn.input_ids) + turn.num_output_tokens
            contexts.append(num_tokens)
        return contexts


# The means of turns are those of SWE-Bench and BFCL in Continuum, arXiv 2511.02230: 10.9 and 6.3. Tokens fit
# into the context of the model whose step costs are the default; gaps are chosen so that tools differ.
SHAPES = {
    "SWE-Bench": JobShape(
        "SWE-Bench",
        num_turns=LogNormal(10.1, 0.4),
        first_prompt=LogNormal(1200, 0.3),
        tool_output=LogNormal(250, 0.8),
        answer=LogNormal(90, 0.5),
        tools=(
            Tool("read", 0.45, LogNormal(0.3, 0.6)),
            Tool("edit", 0.25, LogNormal(0.15, 0.6)),
            Tool("search", 0.15, LogNormal(1.0, 0.8)),
            Tool("test", 0.15, LogNormal(8.0, 1.0)),
        ),
    ),
    "BFCL": JobShape(
        "BFCL",
        num_turns=LogNormal(5.8, 0.4),
        first_prompt=LogNormal(2000, 0.3),
        tool_output=LogNormal(250, 0.9),
        answer=LogNormal(60, 0.5),
        tools=(
            Tool("call", 0.4, LogNormal(0.5, 0.7)),
            Tool("web_search", 0.4, LogNormal(2.0, 0.7)),
            Tool("fetch", 0.2, LogNormal(4.0, 1.0)),
        ),
    ),
}


def draw_jobs(shape: JobShape, num_jobs: int, max_context: int, seed: int) -> list[Job]:
    """Jobs, a function of the seed. One that would grow beyond `max_context` tokens ends before."""
    rng = random.Random(f"{shape.name} {seed}")
    return [_draw_job(shape, max_context, rng) for _ in range(num_jobs)]


def _draw_job(shape: JobShape, max_context: int, rng: random.Random) -> Job:
    turns: list[Turn] = []
    num_tokens = 0
    for index in range(max(2, shape.num_turns.draw_count(rng))):
        num_input = (shape.tool_output if index else shape.first_prompt).draw_count(rng)
        num_output = shape.answer.draw_count(rng)
        num_tokens += num_input + num_output
        if num_tokens > max_context:
            break
        (tool,) = rng.choices(shape.tools, [tool.share for tool in shape.tools])
        input_ids = rng.choices(_TOKEN_IDS, k=num_input)
        turns.append(Turn(input_ids, num_output, tool.name, tool.gap_s.draw(rng)))
    return Job(turns)
