"""What an engine is: its identity from the start, and its facts once the model is loaded. Knows no wire."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

# The revision of the engine's contract that this code speaks.
SCHEMA_REVISION = 1


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Which engine process this is. The epoch is random at its start: what another one said is void."""

    engine_id: str
    engine_epoch: int
    version: str
    dp_rank: int = 0
    dp_size: int = 1
    dp_group: str = ""  # tells groups of equal engines apart
    labels: tuple[tuple[str, str], ...] = ()  # keys and values that an operator gave, for placement


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Everything two engines must share so that a request can move between them."""

    weights_sha256: str
    dtype: str
    tokenizer_sha256: str
    vocab_size: int
    rope: str  # canonical text of the rotary embedding's parameters, empty where there is none
    kernel_mode: str
    max_model_len: int
    schema_revision: int = SCHEMA_REVISION

    @property
    def digest(self) -> str:
        """Equal digests mean interchangeable engines. Lower-case hex."""
        parts = (
            self.weights_sha256, self.dtype, self.tokenizer_sha256, str(self.vocab_size), self.rope,
            self.kernel_mode, str(self.max_model_len), str(self.schema_revision),
        )  # fmt: skip
        # Lengths go in as well, so that no part can borrow from the next.
        return hashlib.sha256("".join(f"{len(part)}:{part}," for part in parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a loaded engine tells frontends. `num_kv_blocks` are those that requests can have."""

    model_name: str
    fingerprint: ModelFingerprint
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # the main one first
    default_sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    supported_tasks: tuple[str, ...] = ("generate",)
    max_logprobs: int = 20  # most likely tokens told of a place; -1 = up to the whole vocabulary
    hidden_size: int = 0  # of the input embeddings; 0 where it is not known
    takes_prompt_embeds: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is: `done` of `total` in the unit of the phase, 0 where it is unknown."""

    phase: str = "start"
    done: int = 0
    total: int = 0
