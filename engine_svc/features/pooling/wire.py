"""Reads `pooling` of an ADD, and writes results into the rows of a step."""

from __future__ import annotations

import json
from pathlib import Path

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.core.pooling_spec import PoolingFilesError, PoolingSpec, read_pooling_spec
from engine_svc.features.pooling.extras import ITEM_BYTES, MAX_QUERY_BYTES, PooledResult, PoolingRequest
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, step_pb2
from triptych_kit.config import ConfigError
from triptych_kit.errors import InvalidArgument, Unimplemented
from triptych_kit.field_checks import check
from triptych_kit.rules import MessageRules

_RULES = MessageRules(sampling_pb2.PoolingParams)
_TASKS = {
    sampling_pb2.POOLING_TASK_EMBED: "embed",
    sampling_pb2.POOLING_TASK_CLASSIFY: "classify",
    sampling_pb2.POOLING_TASK_SCORE: "score",
    sampling_pb2.POOLING_TASK_TOKEN_EMBED: "token_embed",
    sampling_pb2.POOLING_TASK_TOKEN_CLASSIFY: "token_classify",
}
_VECTORS = ("embed", "token_embed")


def make(config: EngineConfig) -> WireFeature | None:
    """None for a model that generates alone. Raises ConfigError for one that cannot pool as it is to."""
    try:
        spec = read_pooling_spec(Path(config.model), config.pooling)
    except PoolingFilesError as error:
        raise ConfigError(str(error)) from error
    return None if spec is None else PoolingOfAdd(spec)


class PoolingOfAdd(WireFeature):
    """spec: of the model that the engine loads."""

    fields = ("pooling", "second_text_start")
    writes = PooledResult

    def __init__(self, spec: PoolingSpec) -> None:
        self._spec = spec

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        second = entry.second_text_start if entry.HasField("second_text_start") else None
        if not entry.HasField("pooling"):
            if second is not None:
                raise InvalidArgument(
                    f"second_text_start is {second}, must be left out without pooling",
                    field="second_text_start",
                )
            return None
        most = len(context.token_ids)
        if second is not None:
            check(second <= most, "second_text_start", second, f"at most {most}, the tokens")
        pooling = entry.pooling
        broken = _RULES.violations(pooling, {})
        if broken:
            field = f"pooling.{broken[0].field}"
            raise InvalidArgument(f"pooling.{broken[0].message}", field=field)
        task = _TASKS.get(pooling.task)
        if task is None:
            raise InvalidArgument(
                f"pooling.task is {pooling.task}, must be one of {', '.join(_TASKS.values())}",
                field="pooling.task",
            )
        key = pooling.late_interaction_key
        if key and task not in ("score", "token_embed"):
            raise InvalidArgument(
                f"pooling.late_interaction_key is {key!r}, must be left out with task {task}",
                field="pooling.late_interaction_key",
            )
        needed = "token_embed" if key else task
        if needed not in self._spec.tasks:
            supported = ", ".join(self._spec.tasks)
            raise Unimplemented(
                f"pooling.task is {needed}, this model supports {supported}",
                reason="TASK_NOT_SUPPORTED",
                metadata={"task": needed, "supported_tasks": supported},
            )
        num_dimensions = pooling.dimensions if pooling.HasField("dimensions") else None
        if num_dimensions is not None:
            self._check_dimensions(num_dimensions, needed)
        normalizes = pooling.normalize if pooling.HasField("normalize") else None
        activates = pooling.use_activation if pooling.HasField("use_activation") else None
        if activates is not None and needed in _VECTORS:
            reason = "beside late_interaction_key" if key else f"with task {task}"
            raise InvalidArgument(
                f"pooling.use_activation is {str(activates).lower()}, must be left out {reason}",
                field="pooling.use_activation",
            )
        scope = ""
        if key:
            if task == "token_embed":
                self._check_kept(most, num_dimensions)
            is_normalized = self._spec.normalizes if normalizes is None else normalizes
            # The keys of the cache have the digest of the adapter.
            scope = json.dumps([entry.tenant, *context.cache_keys, is_normalized])
        wanted = PoolingRequest(task, num_dimensions, normalizes, second, key, activates, scope)
        return Parsed(
            wanted,
            # There are no states of positions that are not computed.
            skips_reading_prefix_cache=wanted.is_per_token or self._spec.method != "last",
        )

    def write(self, step: step_pb2.Step, row: int, extra: PooledResult, now: float) -> None:
        tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=extra.shape, inline=extra.content)
        step.extras.add(row=row, pooling_output=tensor)

    def _check_kept(self, num_tokens: int, num_dimensions: int | None) -> None:
        most = MAX_QUERY_BYTES // (ITEM_BYTES * (num_dimensions or self._spec.num_dimensions))
        if num_tokens > most:
            raise InvalidArgument(
                f"prompt_token_ids has {num_tokens} tokens, a late_interaction_key takes {most} at most: "
                f"their vectors have {MAX_QUERY_BYTES >> 20} MiB",
                field="prompt_token_ids",
            )

    def _check_dimensions(self, num_dimensions: int, task: str) -> None:
        allowed, most = self._spec.dimensions, self._spec.num_dimensions
        rule = ""
        if allowed is None or task not in _VECTORS:
            rule = f"left out: results of this model and task {task} cannot be cut"
        elif num_dimensions > most:
            rule = f"at most {most}"
        elif allowed and num_dimensions not in allowed:
            rule = f"one of {', '.join(map(str, allowed))}"
        if rule:
            raise InvalidArgument(
                f"pooling.dimensions is {num_dimensions}, must be {rule}", field="pooling.dimensions"
            )
