"""Log probabilities of sampled tokens, and of the most likely and of given ones at the same positions."""

from __future__ import annotations

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.output.logprobs import LogprobReader
from triptych.engine.v1 import add_pb2


class SampledLogprobs(RequestOption):
    fields = ("sampling.logprobs", "sampling.logprob_token_ids")

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        sampling = request.sampling
        entry.sampling.logprob_token_ids.extend(sampling.logprob_token_ids)
        if sampling.HasField("logprobs"):
            entry.sampling.logprobs = min(sampling.logprobs, prompt.model.vocab_size)

    def token_reader(self, request: AnyRequest, prompt: PreparedPrompt) -> LogprobReader | None:
        sampling = request.sampling
        if not sampling.HasField("logprobs") and not sampling.logprob_token_ids:
            return None
        has_top = sampling.logprobs != 0 or len(sampling.logprob_token_ids) > 0
        return LogprobReader(prompt.texts, prompt.context_ids, has_top=has_top)
