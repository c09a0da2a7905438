"""What fake engines say of a request wherever it runs: tokens and logprobs by seed and place alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random

from tests.frontend_svc.fakes import AT_EOS, AT_LENGTH, EOS_ID, TOKENIZER, FakeEngine, FakeRequest
from triptych.engine.v1 import add_pb2, step_pb2

_TEXT = " sat on the mat 日本 😀 and the dog ran."
_IDS = TOKENIZER.encode(_TEXT).ids
_MAX_LENGTH = 40


class TokenSource:
    """A script for engines that continue each other's requests.

    `cut_after` is how many tokens an attempt produces before it stands still; None: all. With -1 there are
    none, and log probabilities of half of the prompt alone where they are asked for.
    """

    def __init__(self, cut_after: Callable[[FakeRequest], int | None] = lambda request: None) -> None:
        self._cut_after = cut_after
        self.faults: list[str] = []

    def __call__(self, engine: FakeEngine, request: FakeRequest) -> None:
        entry, done = request.entry, request.output
        whole, ending = whole_output(entry)
        if done != whole[: len(done)] or len(done) >= len(whole):
            self.faults.append(f"{entry.external_request_id} continues {done} of {whole}")
            return
        cut_after = self._cut_after(request)
        if entry.sampling.HasField("prompt_logprobs"):
            self._add_prompt_logprobs(request, is_half=cut_after == -1)
        end = len(whole) if cut_after is None else min(len(whole), len(done) + max(0, cut_after))
        for index in range(len(done), end):
            step = step_pb2.Step(
                step_number=index + 1,
                handles=array("I", [request.handle]).tobytes(),
                num_tokens=bytes([1]),
                token_ids=array("I", [whole[index]]).tobytes(),
            )
            if index == len(done):
                step.first.add(row=0, num_cached_tokens=16 * (entry.attempt + 1))
            if entry.sampling.HasField("logprobs"):
                _add_logprobs(step, entry.request_seed, index, whole[index])
            if index == len(whole) - 1:
                step.finished.add().CopyFrom(ending)
            request.session.send(step=step)

    def _add_prompt_logprobs(self, request: FakeRequest, *, is_half: bool) -> None:
        positions = list(range(len(request.prompt)))
        half = len(positions) // 2 or 1
        for part in (positions[:half],) if is_half else (positions[:half], positions[half:]):
            prompt_logprobs = step_pb2.PromptLogprobs(
                first_position=part[0] if part else 0,
                logprobs=array("f", [-0.5 * index for index in part]).tobytes(),
                ranks=array("I", [index + 1 for index in part]).tobytes(),
            )
            step = step_pb2.Step(
                step_number=1, handles=array("I", [request.handle]).tobytes(), num_tokens=bytes([0])
            )
            step.extras.add(row=0, prompt_logprobs=prompt_logprobs)
            request.session.send(step=step)


def whole_output(entry: add_pb2.AddEntry) -> tuple[list[int], step_pb2.StepFinished]:
    """All ids of a request's output, whatever was given out of them, and how it ends."""
    chance = Random(entry.request_seed)
    start, length = chance.randrange(4), chance.randrange(6, 14)
    sampling = entry.sampling
    length = max(length, sampling.min_tokens)
    ids = [_IDS[(start + index) % len(_IDS)] for index in range(min(length, _MAX_LENGTH))]
    if len(ids) < sampling.max_tokens:
        return [*ids, EOS_ID], AT_EOS
    return ids[: sampling.max_tokens], AT_LENGTH


def _add_logprobs(step: step_pb2.Step, seed: int, index: int, token_id: int) -> None:
    value = -Random(seed + index).random()
    step.sampled_logprobs = array("f", [value]).tobytes()
    step.sampled_ranks = array("I", [index % 3 + 1]).tobytes()
    step.top_logprobs.k = 2
    step.top_logprobs.token_ids = array("I", [token_id, 7 + index]).tobytes()
    step.top_logprobs.logprobs = array("f", [value, value - 1]).tobytes()
