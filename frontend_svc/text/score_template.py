"""Prompts of pairs of texts by a model's score template: its messages have the roles query and document."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.pooling import Inputs, spread
from triptych_kit.errors import InvalidArgument, with_fields

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
    queries: Inputs, documents: Inputs, model: ServedModel, num_kept: int | None
) -> list[list[int]]:
    """The token ids of the prompt of each pair, of checked inputs. An only query goes with every document.

    num_kept: the longest prompt, to which the document is cut; None: it is not. Raises InvalidArgument.
    """
    _check_are_texts({**queries, **documents})
    pairs = [
        _Pair(query_field, document_field, query.prompt, document.prompt)
        for (query_field, query), (document_field, document) in zip(
            spread(list(queries.items()), documents), documents.items(), strict=True
        )
    ]
    token_ids: list[list[int]] = []
    for start in range(0, len(pairs), _RENDERED_AT_ONCE):
        part = pairs[start : start + _RENDERED_AT_ONCE]
        token_ids += await asyncio.gather(*(_render_pair(pair, model, num_kept) for pair in part))
    return token_ids


@dataclass(frozen=True, slots=True)
class _Pair:
    query_field: str
    document_field: str
    query: str
    document: str


def _check_are_texts(inputs: Inputs) -> None:
    violations = Violations()
    for field, entry in inputs.items():
        kind = entry.WhichOneof("input")
        violations.need(kind == "prompt", field, kind, "must be a text: the model has a score template")
    violations.raise_if_any()


async def _render_pair(pair: _Pair, model: ServedModel, num_kept: int | None) -> list[int]:
    token_ids = await _rendered(pair, model)
    if num_kept is None or len(token_ids) <= num_kept:
        return token_ids
    tokenizer, field = model.tokenizer, pair.document_field
    kept = await tokenizer.encode(pair.document, add_special_tokens=False, field=field)
    num_least = len(token_ids) - len(kept)
    for _ in range(_MAX_CUTS):
        kept = kept[: max(0, len(kept) - (len(token_ids) - num_kept))]
        text = await tokenizer.decode(kept, skip_special_tokens=False, field=field)
        token_ids = await _rendered(replace(pair, document=text), model)
        if len(token_ids) <= num_kept:
            return token_ids
    raise InvalidArgument(
        f"truncate_prompt_tokens is {num_kept}, must be at least the {num_least} tokens of the score "
        f"template and the query of {field}",
        field="truncate_prompt_tokens",
    )


async def _rendered(pair: _Pair, model: ServedModel) -> list[int]:
    conversation: dict[str, object] = {
        "messages": [
            {"role": "query", "content": pair.query},
            {"role": "document", "content": pair.document},
        ],
        "chat_template": model.score_template,
    }
    # Clients send texts: each of them has its limit, and the template comes on top.
    max_chars = 2 * model.max_text_chars + len(model.score_template)
    names = {"messages[0]": pair.query_field, "messages[1]": pair.document_field}
    try:
        _, token_ids = await model.tokenizer.render_and_encode(
            conversation, max_chars=max_chars, field=pair.document_field
        )
    except InvalidArgument as error:
        raise with_fields(error, lambda field: names.get(field, field)) from error
    return token_ids
