"""Fingerprint of a model: engines with equal ones are interchangeable. Knows no tensors and no wire."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engine_svc.core.artifacts import Artifact, ArtifactKind
from engine_svc.core.facts import ModelFingerprint, SamplingDefaults

_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 64
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def make_fingerprint(
    folder: Path,
    artifacts: tuple[Artifact, ...],
    *,
    weights_digest: str,
    dtype: str,
    vocab_size: int,
    kernel_mode: str,
    max_model_len: int,
    results: str,
) -> ModelFingerprint:
    """The fingerprint of the model as this engine runs it.

    weights_digest: over tensor names and shapes.  results: see `describe_results`.
    """
    tokenizer = [artifact.sha256 for artifact in artifacts if artifact.kind is ArtifactKind.TOKENIZER]
    return ModelFingerprint(
        weights_sha256=_weights_sha256(folder, weights_digest),
        dtype=dtype,
        tokenizer_sha256=tokenizer[0] if tokenizer else "",
        vocab_size=vocab_size,
        rope=_rope(folder),
        kernel_mode=kernel_mode,
        max_model_len=max_model_len,
        results=results,
    )


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Defaults from generation_config.json; none if it is absent or samples greedily."""
    config = _read_json(folder / "generation_config.json")
    if not config.get("do_sample"):
        return SamplingDefaults()
    return SamplingDefaults(
        temperature=_number(config, "temperature"),
        top_p=_number(config, "top_p"),
        top_k=None if (top_k := _number(config, "top_k")) is None else int(top_k),
        repetition_penalty=_number(config, "repetition_penalty"),
    )


def main_eos_first(folder: Path, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The model's end-of-sequence ids, starting with the first one in its configuration."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        main = value[0] if isinstance(value, list) and value else value
        if main in eos_token_ids:
            return (main, *(token for token in eos_token_ids if token != main))
    return eos_token_ids


def declares_experts(folder: Path) -> bool:
    """Whether config.json describes a mixture of experts. Does not load the model."""
    try:
        config = _read_json(folder / "config.json")
    except ValueError:
        # Loading reports the error.
        return False
    if any(_number(config, key) for key in _EXPERT_KEYS):
        return True
    # A family's default number of experts may be missing in the file.
    return config.get("model_type") in _EXPERT_FAMILIES and not any(key in config for key in _EXPERT_KEYS)


def _weights_sha256(folder: Path, weights_digest: str) -> str:
    # Fine-tunes of one model have equal names and shapes, so a sample of the values is included.
    digest = hashlib.sha256(weights_digest.encode())
    # Projections of results are in folders of their own.
    patterns = ("*.safetensors", "*/model.safetensors", "*.gguf")
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        size = path.stat().st_size
        stride = max(_SAMPLE_BYTES, size // _NUM_SAMPLES)
        with path.open("rb") as file:
            for offset in range(0, size, stride):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _rope(folder: Path) -> str:
    config = _read_json(folder / "config.json")
    rope = {key: config[key] for key in _ROPE_KEYS if config.get(key) is not None}
    return json.dumps(rope, sort_keys=True) if rope else ""


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _number(config: dict[str, object], key: str) -> float | None:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) else None
