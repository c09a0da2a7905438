"""The served models in the shape of Anthropic's API, whose clients name its version in a header."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from triptych.api.v1 import model_pb2

VERSION_HEADER = "anthropic-version"


def model_list(models: Sequence[model_pb2.Model], created: int) -> dict[str, Any]:
    infos = [model_info(model, created) for model in models]
    ids = [info["id"] for info in infos] or [None]
    return {"data": infos, "first_id": ids[0], "last_id": ids[-1], "has_more": False}


def model_info(model: model_pb2.Model, created: int) -> dict[str, Any]:
    created_at = datetime.fromtimestamp(created, UTC).isoformat()
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created_at.replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
    }
