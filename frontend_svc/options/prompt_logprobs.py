"""Log probabilities of the prompt's tokens, which come with the first output."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from frontend_svc.engines.connection.columns import read_logprobs
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.output.logprobs import LogprobReader, Logprobs, fill_logprobs
from frontend_svc.output.request_state import OutputReader
from frontend_svc.text.limits import Violations
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2, step_pb2
from triptych_kit.rules import rules_of

_MAX_ENTRIES = rules_of(sampling_pb2.SamplingParams, "prompt_logprobs").max_results


class PromptLogprobs(RequestOption):
    fields = ("sampling.prompt_logprobs",)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        sampling, vocab_size = request.sampling, prompt.model.vocab_size
        if not sampling.HasField("prompt_logprobs"):
            return
        prompt.is_computed_whole = True
        num_prompt_tokens = len(prompt.token_ids)
        num_top = vocab_size if sampling.prompt_logprobs == -1 else sampling.prompt_logprobs
        num_entries = (num_top + len(sampling.logprob_token_ids)) * num_prompt_tokens
        violations = Violations()
        unit = f"entries for {num_prompt_tokens} prompt tokens"
        violations.need_count("sampling.prompt_logprobs", num_entries, unit, 0, _MAX_ENTRIES)
        violations.raise_if_any()
        # All outputs of a sampling group have the same prompt.
        prompt.first.sampling.prompt_logprobs = min(sampling.prompt_logprobs, vocab_size)
        # There are no logprobs of positions that are not computed.
        if not sampling.HasField("skip_reading_prefix_cache"):
            entry.sampling.skip_reading_prefix_cache = True

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        sampling = request.sampling
        if index or not sampling.HasField("prompt_logprobs"):
            return None
        has_top = sampling.prompt_logprobs != 0 or len(sampling.logprob_token_ids) > 0
        return PromptLogprobReader(prompt.token_ids, LogprobReader(prompt.texts, has_top=has_top))


class PromptLogprobReader:
    """Reads the log probabilities of a prompt, which may come in several parts.

    Positions that a lost engine has already reported are skipped.
    """

    extra = "prompt_logprobs"
    is_awaited = True

    def __init__(self, prompt_token_ids: list[int], reader: LogprobReader) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._reader = reader
        self._num_read = 0  # prompt positions
        self._unread = Logprobs()  # by the client

    def read(self, extra: step_pb2.StepExtra) -> None:
        """Add the prompt positions of one step. Raises MalformedStep."""
        part = extra.prompt_logprobs
        num_positions = len(part.ranks) // 4
        top = part.top if part.HasField("top") else None
        columns = read_logprobs(part.logprobs, part.ranks, top, num_positions)
        num_known = max(0, self._num_read - part.first_position)
        if num_known >= num_positions:
            return
        first, self._num_read = part.first_position + num_known, part.first_position + num_positions
        token_ids = self._prompt_token_ids[first : self._num_read]
        new = columns.part(num_known, num_positions) if num_known else columns
        self._unread.extend(self._reader.read(token_ids, new))

    def fill(self, message: Message, output_token_ids: Sequence[int]) -> None:
        """Move all unread logprobs to the message that starts the answer."""
        if isinstance(message, generate_pb2.Started) and len(self._unread):
            fill_logprobs(message.prompt_logprobs, self._unread)
            self._unread = Logprobs()
