"""Creates the request states of a sampling group: one for each of the n outputs, with a shared collector."""

from __future__ import annotations

from frontend_svc.output.collector import Collector
from frontend_svc.output.logprobs import LogprobReader
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.model import ServedModel
from frontend_svc.text.stop_strings import StopBuffer
from frontend_svc.text.tokenize.token_text import TokenTexts
from triptych.common.v1 import sampling_pb2


def make_states(
    sampling: sampling_pb2.SamplingParams,
    prompt_token_ids: list[int],
    model: ServedModel,
    collector: Collector,
    n: int,
    *,
    markers: frozenset[str],
    num_leading_positions: int = 0,
) -> list[RequestState]:
    """One state for each of `n` outputs, set up for `sampling`.

    markers: special tokens that stay in the text even if the others are skipped.
    num_leading_positions: prompt positions that are not all tokens; the text's context is the tokens after.
    """
    context = prompt_token_ids[num_leading_positions:]
    skips_special = sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
    has_spaces = (
        not sampling.HasField("spaces_between_special_tokens") or sampling.spaces_between_special_tokens
    )
    has_text = not sampling.HasField("detokenize") or sampling.detokenize
    texts = model.tokenizer.token_texts if has_text else None
    include = sampling.include_stop_in_output
    states = []
    for index in range(n):
        detokenizer = None
        if has_text:
            detokenizer = model.tokenizer.detokenizer(
                context,
                skip_special_tokens=skips_special,
                spaces_between_special_tokens=has_spaces,
                markers=markers,
            )
        states.append(
            RequestState(
                collector,
                detokenizer,
                StopBuffer(sampling.stop, include=include) if sampling.stop else None,
                include_stop=include,
                min_tokens=sampling.min_tokens,
                index=index,
                logprobs=_sampled_reader(sampling, texts, context),
                prompt_logprobs=_prompt_reader(sampling, texts) if index == 0 else None,
                prompt_token_ids=prompt_token_ids,
            )
        )
    return states


def _sampled_reader(
    sampling: sampling_pb2.SamplingParams, texts: TokenTexts | None, context: list[int]
) -> LogprobReader | None:
    if not sampling.HasField("logprobs") and not sampling.logprob_token_ids:
        return None
    has_top = sampling.logprobs != 0 or len(sampling.logprob_token_ids) > 0
    return LogprobReader(texts, context, has_top=has_top)


def _prompt_reader(sampling: sampling_pb2.SamplingParams, texts: TokenTexts | None) -> LogprobReader | None:
    if not sampling.HasField("prompt_logprobs"):
        return None
    has_top = sampling.prompt_logprobs != 0 or len(sampling.logprob_token_ids) > 0
    return LogprobReader(texts, has_top=has_top)
