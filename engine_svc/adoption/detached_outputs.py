"""Outputs of requests that another session may adopt. Belongs to the engine thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan

from engine_svc.core.extras import Extras, merge_extras
from engine_svc.core.request import FirstOutput, Request, RequestOutput
from engine_svc.core.step import TokenLogprobs


@dataclass(slots=True)
class DetachedOutput:
    """Everything that one request has produced, apart from its token ids, which are in the request."""

    request: Request
    counts: list[int]  # output tokens of each step
    first: FirstOutput | None = None
    final: RequestOutput | None = None
    extras: Extras = field(default_factory=dict)
    sampled: TokenLogprobs | None = None  # logprobs of its newest tokens

    def add_logprobs(self, newest: TokenLogprobs) -> None:
        if self.sampled is None:
            self.sampled = newest
        else:
            self.sampled.extend(newest)

    def token_logprobs(self) -> TokenLogprobs | None:
        """The logprobs of all its tokens; None if it has no tokens or asked for no logprobs.

        NaN stands for tokens of an earlier engine, whose logprobs are not known here.
        """
        num_tokens, sampled, sampling = self.request.num_output_tokens, self.sampled, self.request.sampling
        if not num_tokens or (sampled is None and not sampling.wants_logprobs):
            return None
        if sampled is None:
            # With as many entries as later tokens have, or their logprobs would be read as those of these.
            sampled = TokenLogprobs([], [], k=1 if sampling.logprobs or sampling.logprob_token_ids else 0)
        num_missing = num_tokens - len(sampled.ranks)
        num_entries = num_missing * sampled.k
        padded = TokenLogprobs(
            [nan] * num_missing, [0] * num_missing, sampled.k, [0] * num_entries, [nan] * num_entries
        )
        padded.extend(sampled)
        return padded


class DetachedOutputs:
    """Outputs by request id, from the request's ADD until they are forgotten.

    A step without rows of such requests costs nothing.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, DetachedOutput] = {}

    def keep(self, request: Request) -> None:
        """Keep the outputs of `request`. Those that it has from an earlier engine count as one step."""
        num_before = request.num_output_tokens
        self._by_id[request.request_id] = DetachedOutput(request, [num_before] if num_before else [])

    def forget(self, request_id: str) -> None:
        """Drop the outputs of a request. Unknown ids are ignored."""
        self._by_id.pop(request_id, None)

    def get(self, request_id: str) -> DetachedOutput | None:
        return self._by_id.get(request_id)

    def note(self, outputs: Iterable[RequestOutput], sampled: Mapping[str, TokenLogprobs]) -> None:
        """Add the outputs of a step. sampled: the logprobs of their tokens, by request id."""
        if not self._by_id:
            return
        for output in outputs:
            detached = self._by_id.get(output.request_id)
            if detached is None:
                continue
            num_tokens = len(output.new_token_ids)
            if num_tokens:
                detached.counts.append(num_tokens)
                if sampled and output.request_id in sampled:
                    detached.add_logprobs(sampled[output.request_id].part(0, num_tokens))
            if output.extras:
                detached.extras = merge_extras(detached.extras, output.extras)
            if output.first is not None:
                detached.first = output.first
            if output.finish_reason is not None and not output.continues:
                detached.final = output
