"""Pooling requests: checks them, tokenizes their inputs and decodes their results. Knows no engine."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import embedding_pb2
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych_kit.errors import Internal, Unimplemented

# By the fields of the request that errors name.
Inputs: TypeAlias = Mapping[str, embedding_pb2.PoolingInput]

T = TypeVar("T")

# Names of the tasks in Ready.supported_tasks.
TASK_NAMES = {
    sampling_pb2.POOLING_TASK_EMBED: "embed",
    sampling_pb2.POOLING_TASK_CLASSIFY: "classify",
    sampling_pb2.POOLING_TASK_SCORE: "score",
    sampling_pb2.POOLING_TASK_TOKEN_EMBED: "token_embed",
    sampling_pb2.POOLING_TASK_TOKEN_CLASSIFY: "token_classify",
}
# These need every position of the prompt computed.
_PER_TOKEN = (sampling_pb2.POOLING_TASK_TOKEN_EMBED, sampling_pb2.POOLING_TASK_TOKEN_CLASSIFY)
_ITEM_BYTES = {
    tensor_pb2.D_TYPE_FP32: 4,
    tensor_pb2.D_TYPE_FP16: 2,
    tensor_pb2.D_TYPE_BF16: 2,
}
# Texts of one request that are tokenized in one task, as far as their characters go, and tasks that run
# concurrently; more would delay other requests.
_TEXTS_OF_A_TASK, _CHARS_OF_A_TASK = 128, 8192
_TASKS_AT_ONCE = 4


def supports_pooling(model: ServedModel) -> bool:
    """Whether `model` supports any pooling task."""
    return not set(TASK_NAMES.values()).isdisjoint(model.supported_tasks)


def refuse_unsupported(model: ServedModel, tasks: Sequence[sampling_pb2.PoolingTask]) -> None:
    """Raise Unimplemented that names model, task and supported tasks, unless it supports one of `tasks`."""
    names = [TASK_NAMES[task] for task in tasks]
    if set(names).isdisjoint(model.supported_tasks):
        supported = ", ".join(model.supported_tasks) or "nothing"
        wanted = " or ".join(names)
        raise Unimplemented(
            f"model {model.name!r} does not support {wanted}; it supports: {supported}",
            reason="TASK_NOT_SUPPORTED",
            metadata={"model": model.name, "task": wanted, "supported_tasks": supported},
        )


def is_per_token(task: sampling_pb2.PoolingTask) -> bool:
    """Whether a result has an entry for each token of the prompt."""
    return task in _PER_TOKEN


def check_pooling(
    pooling: sampling_pb2.PoolingParams,
    tasks: Sequence[sampling_pb2.PoolingTask],
    violations: Violations,
) -> None:
    """Add a violation for a task that is none of `tasks`."""
    if pooling.task != sampling_pb2.POOLING_TASK_UNSPECIFIED:
        violations.need_enum("pooling.task", pooling.task, sampling_pb2.PoolingTask, tasks)


def inputs_of(field: str, entries: Iterable[embedding_pb2.PoolingInput]) -> Inputs:
    """The entries of a repeated field."""
    return {f"{field}[{index}]": entry for index, entry in enumerate(entries)}


def check_inputs(
    inputs: Inputs, model: ServedModel, violations: Violations, *, may_be_long: bool = False
) -> None:
    """Add violations for inputs that are missing, empty or too long, or have ids outside the vocabulary.

    may_be_long: whether ids are cut to what the model takes.
    """
    for field, entry in inputs.items():
        kind = entry.WhichOneof("input")
        if kind is None:
            violations.add(field, None, "must have one of prompt, token_ids")
        elif kind == "prompt":
            num_chars = len(entry.prompt)
            violations.need_count(f"{field}.prompt", num_chars, "characters", 1, model.max_text_chars)
        else:
            ids = entry.token_ids.ids
            most = max(len(ids), 1) if may_be_long else model.max_model_len
            if violations.need_count(f"{field}.token_ids", len(ids), "ids", 1, most):
                violations.need_ids(f"{field}.token_ids", ids, model.vocab_size)


async def tokenize_inputs(
    inputs: Inputs,
    model: ServedModel,
    *,
    add_special_tokens: bool = True,
    num_kept: int | None = None,
    may_be_long: bool = False,
) -> list[list[int]]:
    """The token ids of checked inputs, in order, without change where they are given.

    num_kept: first tokens of each that are kept; special tokens at the end of a text stay; None: all.
    may_be_long: whether a text is cut later.
    """
    texts = {
        f"{field}.prompt": entry.prompt
        for field, entry in inputs.items()
        if entry.WhichOneof("input") == "prompt"
    }
    if num_kept is None and not may_be_long:
        bounds = [max(1, model.tokenizer.min_num_tokens(text)) for text in texts.values()]
        _check_lengths(texts, bounds, "tokens or more", model)
    encode = partial(model.tokenizer.encode_all, add_special_tokens=add_special_tokens)
    tasks = _tasks_of(texts)
    encoded: list[list[int]] = []
    for start in range(0, len(tasks), _TASKS_AT_ONCE):
        for part in await asyncio.gather(*map(encode, tasks[start : start + _TASKS_AT_ONCE])):
            encoded += part
    num_special_behind = model.tokenizer.num_special_behind if add_special_tokens else 0
    ids_of_texts = iter(encoded)
    return [
        truncated(next(ids_of_texts), num_kept, num_special_behind)
        if entry.WhichOneof("input") == "prompt"
        else list(entry.token_ids.ids[:num_kept])
        for entry in inputs.values()
    ]


def _tasks_of(texts: Mapping[str, str]) -> list[dict[str, str]]:
    """Texts by their fields, divided in order into tasks for the text workers."""
    tasks: list[dict[str, str]] = []
    num_chars = 0
    for field, text in texts.items():
        exceeds = num_chars + len(text) > _CHARS_OF_A_TASK
        if not tasks or exceeds or len(tasks[-1]) == _TEXTS_OF_A_TASK:
            tasks.append({})
            num_chars = 0
        tasks[-1][field] = text
        num_chars += len(text)
    return tasks


def truncated(token_ids: list[int], num_kept: int | None, num_special_behind: int) -> list[int]:
    """The first `num_kept` tokens, of which the last are the special ones at the end; None: all."""
    if num_kept is None or len(token_ids) <= num_kept:
        return token_ids
    behind = token_ids[len(token_ids) - num_special_behind :] if num_special_behind < num_kept else []
    return token_ids[: num_kept - len(behind)] + behind


def truncated_pair(first: list[int], second: list[int], num_kept: int | None) -> tuple[list[int], list[int]]:
    """Two texts with at most `num_kept` tokens together; the second is cut before the first. None: as is."""
    if num_kept is None:
        return first, second
    return first[:num_kept], second[: max(0, num_kept - len(first))]


def spread(firsts: Sequence[T], seconds: Collection[object]) -> Sequence[T]:
    """The first of each pair: as many as there are, or the only one for all."""
    return firsts if len(firsts) == len(seconds) else [firsts[0]] * len(seconds)


def check_prompts(fields: Iterable[str], prompts: Sequence[Sequence[int]], model: ServedModel) -> None:
    """Raise InvalidArgument that names every prompt without tokens or with too many for the model."""
    _check_lengths(fields, list(map(len, prompts)), "tokens", model)


def _check_lengths(fields: Iterable[str], lengths: Sequence[int], unit: str, model: ServedModel) -> None:
    violations = Violations()
    for field, length in zip(fields, lengths, strict=True):
        violations.need_count(field, length, unit, 1, model.max_model_len)
    violations.raise_if_any(
        "CONTEXT_LENGTH_EXCEEDED",
        {"num_tokens": str(max(lengths, default=0)), "max_model_len": str(model.max_model_len)},
    )


def check_result(tensor: tensor_pb2.Tensor, num_dimensions: int) -> None:
    """Raise Internal unless `tensor` is complete, of floats, and has `num_dimensions`."""
    item_bytes = _ITEM_BYTES.get(tensor.dtype, 0)
    is_whole = tensor.HasField("inline") and len(tensor.inline) == item_bytes * math.prod(tensor.shape)
    if not item_bytes or not is_whole or len(tensor.shape) != num_dimensions:
        shape, dtype = list(tensor.shape), tensor_pb2.DType.Name(tensor.dtype)
        raise Internal(f"the engine gave a result of shape {shape}, type {dtype}, {len(tensor.inline)} bytes")


def read_floats(tensor: tensor_pb2.Tensor) -> Sequence[float]:
    """The numbers of a checked result, in row-major order."""
    content = tensor.inline
    if tensor.dtype == tensor_pb2.D_TYPE_FP16:
        return struct.unpack(f"<{len(content) // 2}e", content)
    if tensor.dtype == tensor_pb2.D_TYPE_BF16:
        # bfloat16 is the upper half of the binary32 of the same value.
        wide = bytearray(2 * len(content))
        wide[2::4], wide[3::4] = content[::2], content[1::2]
        content = bytes(wide)
    return struct.unpack(f"<{len(content) // 4}f", content)
