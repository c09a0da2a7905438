"""The file format of a recorded case: events, decisions and tokens of a scheduler as compressed JSON.

A case is a configuration and a list of steps. A step is the events before a decision, the state after them,
the decision, and the tokens, of this step or of earlier ones, that came before the next decision. A scheduler
with the same configuration decides the same, without a model. Knows no scheduler, only its input and output.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from engine_svc.cache.attention import AttentionKind, FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request, RequestOutput
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.scheduler.config import SchedulerConfig

logger = logging.getLogger(__name__)

SUFFIX = ".json.gz"
FORMAT = 1

Fields = dict[str, object]  # a JSON object of the format

_POLICIES = ("fcfs", "priority")
# The lowest level costs the loop least; a case still shrinks to a tenth.
_COMPRESSION = 1


def create_case(path: Path, config: Fields, *, version: str) -> CaseFile:
    """Create a case in a new file. `config` is from `case_config`, `version` is the program's.

    An existing file is kept: the new one then gets the next free number in its name.
    """
    stream, created = _create_file(path)
    logger.info("recording decisions", extra={"path": str(created)})
    head: Fields = {
        "format": FORMAT,
        "case": created.name.removesuffix(SUFFIX),
        "family": "live",
        "set": "live",
        "reference_version": f"triptych {version}",
        "seed": 0,
        "config": config,
    }
    return CaseFile(stream, head)


class CaseFile:
    """One case as compressed JSON, written step by step. A disk error ends the recording, not the engine.

    Fields known at the end are written last: coverage, and why the recording ended.
    """

    def __init__(self, stream: BinaryIO, head: Fields) -> None:
        self.is_open = True
        self.num_steps = 0
        self.num_characters = 0  # before compression
        self._stream = stream
        self._gzip = gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=_COMPRESSION)
        self._has_updates = False  # the step that is being written
        self._write(json.dumps(head)[:-1] + ', "steps": [')

    def begin_step(self, step: Fields) -> int | None:
        """Write a step up to its updates; returns its index, None if that failed."""
        end_of_last = "]},\n" if self.num_steps else "\n"
        if not self._write(end_of_last + json.dumps(step)[:-1] + ', "updates": ['):
            return None
        self._has_updates = False
        self.num_steps += 1
        return self.num_steps - 1

    def add_update(self, update: Fields) -> None:
        """Write an update of the last step."""
        self._write((", " if self._has_updates else "") + json.dumps(update))
        self._has_updates = True

    def end(self, reason: str, coverage: Mapping[str, int]) -> None:
        """Complete the case; nothing can be written after this."""
        if not self.is_open:
            return
        end_of_last = "]}" if self.num_steps else ""
        tail = json.dumps({"coverage": coverage, "ended": reason})[1:]
        if self._write(f"{end_of_last}\n], {tail}\n"):
            logger.info("recording ended", extra={"reason": reason, "num_steps": self.num_steps})
            self._close(None)

    def _write(self, text: str) -> bool:
        self.num_characters += len(text)
        try:
            self._gzip.write(text.encode())
        except OSError as error:
            self._close(error)
        return self.is_open

    def _close(self, error: OSError | None) -> None:
        self.is_open = False
        try:
            with self._stream, self._gzip:
                pass
        except OSError as another:
            error = error or another
        if error is not None:
            logger.warning("recording is not complete", extra={"reason": str(error)})


def case_config(
    scheduler: SchedulerConfig, cache: CacheConfig, policy: str, *, has_budgets: bool = False
) -> Fields:
    """The configuration in the format of a case. Raises ValueError if the format does not support it."""
    if policy not in _POLICIES:
        raise ValueError(
            f"decisions of policy {policy} cannot be recorded, only those of {', '.join(_POLICIES)}"
        )
    if has_budgets or scheduler.pipeline_stages > 1:
        raise ValueError("decisions cannot be recorded with budgets besides tokens and blocks")
    return {
        "block_size": min(kind.block_size for kind in cache.groups),
        "num_gpu_blocks": cache.num_blocks,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_model_len": scheduler.max_model_len,
        "policy": policy,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "reserve_full_prompt": scheduler.reserve_full_prompt,
        "num_speculative_tokens": scheduler.num_speculative_tokens,
        "num_lookahead_tokens": cache.num_lookahead_tokens,
        "drop_last_matched_block": cache.drop_last_matched_block,
        "async_scheduling": scheduler.async_scheduling,
        "max_steps_in_flight": scheduler.max_steps_in_flight,
        "kv_groups": [_as_group(kind) for kind in cache.groups],
    }


def why_unrecordable(request: Request) -> str | None:
    """What the format does not support of a request; None: it has all that a scheduler reads."""
    for is_there, words in (
        (bool(request.blockers), "a blocked request"),
        (request.is_resumable, "a resumable request"),
        (bool(request.spans or request.extra_keys), "content keys"),
        (request.num_encoder_tokens > 0, "a request with encoder tokens"),
        (request.num_output_tokens > 0, "a request that comes with output"),
    ):
        if is_there:
            return words
    sampling = request.sampling
    # The effect of these is recorded as tokens, or they are in the format. All others must have defaults.
    recorded = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        eos_token_id=sampling.eos_token_id,
        stop_token_ids=sampling.stop_token_ids,
        skip_reading_prefix_cache=sampling.skip_reading_prefix_cache,
    )
    neutral = asdict(recorded)
    unknown = [name for name, value in asdict(sampling).items() if value != neutral[name]]
    return f"a request with {', '.join(unknown)}" if unknown else None


def as_request(request: Request) -> Fields:
    """A new request. Its prompt is not copied: this has to be written before the first output."""
    sampling = request.sampling
    return {
        "id": request.request_id,
        "prompt": request.token_ids,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "eos_token_id": sampling.eos_token_id,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "priority": request.priority,
        "arrival_time": request.arrival_at,
        "cache_salt": request.cache_salt or None,
        "skip_prefix_lookup": sampling.skip_reading_prefix_cache,
    }


def as_output(output: RequestOutput) -> Fields:
    """The output of a step for one request."""
    reason = output.finish_reason
    described: Fields = {
        "id": output.request_id,
        "tokens": output.new_token_ids,
        "finish": None if reason is None else reason.value,
        "stop_reason": output.stop_token_id,
    }
    if output.num_cached_tokens is not None:
        described["cached_tokens"] = output.num_cached_tokens
    return described


def _create_file(path: Path) -> tuple[BinaryIO, Path]:
    number, created = 1, path
    while True:
        try:
            return open(created, "xb"), created
        except FileExistsError:
            number += 1
            created = path.with_name(f"{path.name.removesuffix(SUFFIX)}-{number}{SUFFIX}")
        except OSError as error:
            raise ValueError(f"decisions cannot be recorded in {path}: {error.strerror}") from error


def _as_group(kind: AttentionKind) -> Fields:
    if isinstance(kind, FullAttention):
        return {"kind": "full", "block_size": kind.block_size, "sliding_window": None}
    if isinstance(kind, SlidingWindow):
        return {"kind": "sliding", "block_size": kind.block_size, "sliding_window": kind.window}
    raise ValueError(
        f"decisions over {type(kind).__name__} cannot be recorded, only full and sliding attention"
    )
