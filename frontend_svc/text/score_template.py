"""Prompts of pairs of texts by a model's score template: its messages have the roles query and document."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.prompt import check_text
from triptych.api.v1 import embedding_pb2
from triptych_kit.errors import InvalidArgument

# The name of a score template beside those for chats.
_NAME = "score"
_ROLES = [re.compile(f"[\"']{role}[\"']") for role in ("query", "document")]
_RENDERED_AT_ONCE = 8
# A text that was cut between two tokens may have a few more when it is tokenized again.
_MAX_CUTS = 4


def find_score_template(templates: Mapping[str, str]) -> str:
    """The score template of a model among its chat templates by name; empty if there is none.

    It is the one named `score`, or any that names both roles.
    """
    if _NAME in templates:
        return templates[_NAME]
    sources = (templates[name] for name in sorted(templates))
    return next((source for source in sources if all(role.search(source) for role in _ROLES)), "")


async def render_pairs(
    queries: Sequence[embedding_pb2.PoolingInput],
    documents: Sequence[embedding_pb2.PoolingInput],
    fields: tuple[str, str],
    model: ServedModel,
    num_kept: int | None,
) -> list[list[int]]:
    """The token ids of the prompt of each pair. fields: of queries and documents, for errors.

    num_kept: the longest prompt, to which the document is cut; None: it is not. Raises InvalidArgument.
    """
    _check_texts(fields[0], queries, model)
    _check_texts(fields[1], documents, model)

    async def ids_of(index: int) -> list[int]:
        query, document = queries[index].prompt, documents[index].prompt
        return await _render_pair(query, document, f"{fields[1]}[{index}]", model, num_kept)

    token_ids: list[list[int]] = []
    for start in range(0, len(documents), _RENDERED_AT_ONCE):
        part = range(start, min(start + _RENDERED_AT_ONCE, len(documents)))
        token_ids += await asyncio.gather(*map(ids_of, part))
    return token_ids


def _check_texts(field: str, inputs: Sequence[embedding_pb2.PoolingInput], model: ServedModel) -> None:
    violations = Violations()
    for index, entry in enumerate(inputs):
        kind = entry.WhichOneof("input")
        violations.need(
            kind == "prompt", f"{field}[{index}]", kind, "must be a text: the model has a score template"
        )
    violations.raise_if_any()
    for index, entry in enumerate(inputs):
        check_text(f"{field}[{index}].prompt", entry.prompt, model)


async def _render_pair(
    query: str, document: str, field: str, model: ServedModel, num_kept: int | None
) -> list[int]:
    token_ids = await _rendered(query, document, model)
    if num_kept is None or len(token_ids) <= num_kept:
        return token_ids
    kept = await model.tokenizer.encode(document, add_special_tokens=False, field=field)
    num_least = len(token_ids) - len(kept)
    for _ in range(_MAX_CUTS):
        kept = kept[: max(0, len(kept) - (len(token_ids) - num_kept))]
        text = await model.tokenizer.decode(kept, skip_special_tokens=False, field=field)
        token_ids = await _rendered(query, text, model)
        if len(token_ids) <= num_kept:
            return token_ids
    raise InvalidArgument(
        f"truncate_prompt_tokens is {num_kept}, must be more than the {num_least} tokens of the score "
        f"template and the query of {field}",
        field="truncate_prompt_tokens",
    )


async def _rendered(query: str, document: str, model: ServedModel) -> list[int]:
    conversation: dict[str, object] = {
        "messages": [{"role": "query", "content": query}, {"role": "document", "content": document}],
        "chat_template": model.score_template,
    }
    _, token_ids = await model.tokenizer.render_and_encode(conversation, max_chars=model.max_text_chars)
    return token_ids
