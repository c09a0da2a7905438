"""Jobs of contestants that are compared."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict

import pytest

from benchmarks.contestants.jobs import Job, Prompts, serve


def test_a_next_turn_begins_with_each_prompt_of_the_job_before_and_its_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job([5, 7], 3, seed=1), Job([], 1, seed=2, num_added=4), Job([5, 7], 3, seed=3)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(asdict(job))}\n" for job in jobs)))
    asked: list[Prompts] = []

    def generate(prompts: Prompts, job: Job) -> list[list[int]]:
        asked.append(prompts)
        return [[sum(prompt)] * job.num_output_tokens for prompt in prompts]

    serve("sums", generate, {"facts": 1.0})
    ready, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    first, second, other = asked
    assert ready == {"ready": "sums"}
    assert [[prompt[:-4] for prompt in second], [len(prompt) for prompt in second]] == [
        [prompt + answer for prompt, answer in zip(first, answers[0]["token_ids"], strict=True)],
        [5 + 3 + 4, 7 + 3 + 4],
    ]
    assert [len(prompt) for prompt in other] == [5, 7]
    assert not any(prompt[:1] == before[:1] for prompt, before in zip(other, first, strict=True))
    assert all(answer["facts"] == 1.0 for answer in answers)
