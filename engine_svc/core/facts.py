"""Identity of an engine process, and facts about its loaded model. Knows no wire."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

# The revision of the engine contract that this code implements.
SCHEMA_REVISION = 1

GENERATE = "generate"  # the task of sampling tokens


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Identifies an engine process. The epoch is random: messages from another epoch are void."""

    engine_id: str
    engine_epoch: int
    version: str
    dp_rank: int = 0
    dp_size: int = 1
    dp_group: str = ""  # distinguishes groups of equal engines
    labels: tuple[tuple[str, str], ...] = ()  # the operator's keys and values, for placement


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Everything two engines must share so that a request can move between them."""

    weights_sha256: str
    dtype: str
    tokenizer_sha256: str
    vocab_size: int
    rope: str  # canonical text of the rotary embedding's parameters, empty if there is none
    kernel_mode: str
    max_model_len: int
    schema_revision: int = SCHEMA_REVISION
    results: str = ""  # how they are made of hidden states, as canonical text; empty if none are

    @property
    def digest(self) -> str:
        """Engines with equal digests are interchangeable. Lower-case hex."""
        parts: tuple[str, ...] = (
            self.weights_sha256, self.dtype, self.tokenizer_sha256, str(self.vocab_size), self.rope,
            self.kernel_mode, str(self.max_model_len), str(self.schema_revision),
        )  # fmt: skip
        if self.results:
            parts += (self.results,)
        # Lengths are included, so that characters cannot move from one part to the next.
        return hashlib.sha256("".join(f"{len(part)}:{part}," for part in parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The model authors' recommendations; None if there is none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Announced properties of a loaded engine. `num_kv_blocks` counts those usable by requests."""

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
    supported_tasks: tuple[str, ...] = (GENERATE,)
    max_logprobs: int = 20  # limit of top logprobs per position; -1 = the whole vocabulary
    hidden_size: int = 0  # of the input embeddings; 0 if unknown
    state_size: int = 0  # see ModelFacts
    expert_choices: tuple[int, int] = (0, 0)  # see ModelFacts
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    model_folder: str = ""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading: `done` of `total` in the unit of the phase, 0 if unknown."""

    phase: str = "start"
    done: int = 0
    total: int = 0
