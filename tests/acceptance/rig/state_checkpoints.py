"""Small random models whose layers keep states, or attend in chunks, with a tokenizer; their answers vary."""

from __future__ import annotations

from pathlib import Path

from engine_svc.model.loading.folder import read_headers, read_json_object, text_config
from engine_svc.model.loading.states import stated_state_bytes
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.system.checkpoints import VOCAB_SIZE, write_tokenizer

MAX_POSITIONS = 4096
FIRST_ID = 1  # 0 ends a text
# Served natively, with tensor parallelism.
NATIVE = ("qwen3_5", "qwen3_5_moe", "granitemoehybrid")
FAMILIES = (*NATIVE, "qwen3_next", "nemotron_h", "falcon_h1", "mamba2", "llama4")
# A chunk of Llama 4 has whole blocks.
_CHANGES: dict[str, dict[str, object]] = {"llama4": {"attention_chunk_size": 32}}


def write_model(family: str, folder: Path) -> Path:
    """Write an fp32 checkpoint of one of FAMILIES; returns the folder."""
    changes = {
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "max_position_embeddings": MAX_POSITIONS,
        **_CHANGES.get(family, {}),
    }
    make_checkpoint(family, folder, **changes)
    write_tokenizer(folder)
    return folder


def has_attention(family: str) -> bool:
    """Whether requests have blocks, of which there can be too few."""
    return family != "mamba2"


def state_bytes(folder: Path) -> int:
    """The size of one state of all layers."""
    entries = [entry for header in read_headers(folder) for entry in header.entries]
    return stated_state_bytes(folder, text_config(read_json_object(folder / "config.json")), entries)
