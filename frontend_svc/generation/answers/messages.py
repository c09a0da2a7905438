"""Converts outputs to messages of the public API, for the parts that its answers share."""

from __future__ import annotations

from collections.abc import Sequence

from frontend_svc.generation.generation import OpenRequest
from frontend_svc.output.collector import Ending, EndReason, Output, OutputKind, OutputPiece
from frontend_svc.output.logprobs import Logprobs, fill_logprobs
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import output_pb2, sampling_pb2

_REASONS = {
    EndReason.STOP: output_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: output_pb2.FINISH_REASON_LENGTH,
    EndReason.ABORT: output_pb2.FINISH_REASON_ABORT,
    EndReason.ERROR: output_pb2.FINISH_REASON_ERROR,
    EndReason.REPETITION: output_pb2.FINISH_REASON_REPETITION,
}

_KINDS = {
    sampling_pb2.OUTPUT_KIND_CUMULATIVE: OutputKind.CUMULATIVE,
    sampling_pb2.OUTPUT_KIND_FINAL_ONLY: OutputKind.FINAL_ONLY,
}


def kind_of(sampling: sampling_pb2.SamplingParams) -> OutputKind:
    """How a stream with these parameters delivers its outputs."""
    return _KINDS.get(sampling.output_kind, OutputKind.DELTA)


def started_message(opened: OpenRequest, output: Output, *, returns_ids: bool) -> generate_pb2.Started:
    """The first message of a stream, sent with the first output."""
    started = generate_pb2.Started(
        request_id=opened.request_id,
        num_prompt_tokens=len(opened.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        prompt_token_ids=opened.prompt_token_ids if returns_ids else (),
        model=opened.served_as,
        fingerprint=opened.fingerprint,
    )
    opened.fill(started)
    return started


def finished_message(
    opened: OpenRequest, output: Output, piece: OutputPiece, ending: Ending
) -> generate_pb2.Finished:
    finished = generate_pb2.Finished(
        output_index=piece.index,
        reason=reason_value(ending),
        stop_match=stop_match_message(ending),
        usage=usage_message(opened, output, [piece]),
        cumulative_logprob=piece.cumulative_logprob,
        error_message=ending.message,
        error_fields=opened.error_fields(ending),
        stats=stats_message(opened, piece.index),
    )
    opened.fill(finished, piece.index)
    return finished


def stats_message(opened: OpenRequest, index: int) -> output_pb2.OutputStats:
    """Where output `index`, which has ended, spent its time."""
    times = opened.states[index].times
    return output_pb2.OutputStats(
        queue_ms=times.spent_ns[times.QUEUE] / 1e6,
        prefill_ms=times.spent_ns[times.PREFILL] / 1e6,
        decode_ms=times.spent_ns[times.DECODE] / 1e6,
        num_preemptions=times.num_preemptions,
        num_migrations=times.num_migrations,
    )


def reason_value(ending: Ending) -> output_pb2.FinishReason:
    return _REASONS[ending.reason]


def stop_match_message(ending: Ending) -> output_pb2.StopMatch | None:
    if ending.stop_string is not None:
        return output_pb2.StopMatch(string=ending.stop_string)
    if ending.eos_token_id is not None:
        return output_pb2.StopMatch(eos=ending.eos_token_id)
    if ending.stop_token_id is not None:
        return output_pb2.StopMatch(token_id=ending.stop_token_id)
    return None


def usage_message(opened: OpenRequest, output: Output, pieces: Sequence[OutputPiece]) -> output_pb2.Usage:
    """The tokens of `pieces`, and those of the prompt, counted once."""
    usage = output_pb2.Usage(
        num_prompt_tokens=len(opened.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        num_completion_tokens=sum(piece.num_output_tokens for piece in pieces),
    )
    drafts = [piece.ending.drafts for piece in pieces if piece.ending and piece.ending.drafts]
    if drafts:
        usage.num_draft_tokens = sum(of_piece.num_proposed for of_piece in drafts)
        usage.num_accepted_draft_tokens = sum(of_piece.num_accepted for of_piece in drafts)
    return usage


def logprobs_message(logprobs: Logprobs | None) -> output_pb2.Logprobs | None:
    if logprobs is None:
        return None
    message = output_pb2.Logprobs()
    fill_logprobs(message, logprobs)
    return message
