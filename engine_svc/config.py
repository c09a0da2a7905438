"""The options of an engine: the only source of its flags and environment variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.features import packages
from triptych_kit.config import ConfigError, option, require
from triptych_kit.listeners import check_service_ports
from triptych_kit.security.options import SecurityOptions

# Rows are sent to a rank as 16-bit indexes.
_MAX_NUM_SEQS = 65_536
# Each step in flight has its own result buffers, and more than one beside the running one gains nothing.
_MAX_STEPS_IN_FLIGHT = 64
_MAX_GROUP_CHARACTERS = 128
# What proposes drafts besides entry points.
PROPOSERS = ("off", "auto", "ngram", "suffix", "draft", "eagle", "mtp")
# The names of these in vLLM, where they differ.
_MATCHES = "the longest match of 2 tokens or more is taken"
# Keys of vLLM's configuration of speculation that have no counterpart.
_NOT_OF_SPECULATION = {
    "prompt_lookup_max": _MATCHES,
    "prompt_lookup_min": _MATCHES,
    "disable_by_batch_size": "draft_limit gain, the default, drafts no more where that costs time",
}
_VLLM_METHODS = {"draft_model": "draft", "eagle3": "eagle"}
_WITH_CHECKPOINT = ("draft", "eagle")
# A step would compute far more than it can accept.
_MAX_SPECULATIVE_TOKENS = 64
_MAX_DRAFT_WINDOW = 1 << 20
_MAX_IDLE_S = 86_400.0
_MAX_LABELS = 32
_MAX_LABEL_CHARACTERS = 256
# Names under which frontends know built-in facts of every engine; labels must not use them.
_FACTS = ("host", "dp_rank", "dp_group")


class Speculation(NamedTuple):
    """The method that proposes drafts, the maximum per request and step, and the checkpoint that it needs."""

    method: str
    num_tokens: int
    model: str | None


@dataclass(frozen=True)
class CoreConfig(SecurityOptions):
    """The options of an engine without those of its features. Unset sizes are fitted to model and machine."""

    model: str = option(
        positional=True,
        help="folder of the checkpoint (config.json, safetensors, tokenizer.json), GGUF file, or org/name of "
        "the hub, org/name:Q4_K_M for a GGUF file",
    )
    revision: str | None = option(
        None, help="branch, tag or commit of a model of the hub (default: its main branch)"
    )
    served_model_name: str | None = option(None, help="name clients ask for (default: the folder's name)")

    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(50061, help="port for frontends; 0 lets the kernel choose")
    admin_port: int = option(
        0, help="port of the admin listener, always on loopback; 0 lets the kernel choose"
    )
    admin_http_host: str = option("127.0.0.1", help="address of the admin HTTP listener, with /metrics")
    admin_http_port: int = option(0, help="port of the admin HTTP listener; 0 lets the kernel choose")
    coordinator: str | None = option(None, help="host:port of the coordinator; unset: none")
    advertise_address: str | None = option(
        None, help="host[:port] frontends reach this engine at (default: where it listens)"
    )

    dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16", "half", "float"),
        help="type of weights and KV; half is float16, float is float32",
    )
    device: str = option(
        "auto", choices=("auto", "cpu", "cuda"), help="where the model runs; auto: a GPU if there is one"
    )
    model_impl: str = option(
        "auto",
        choices=("auto", "native", "transformers"),
        help="which code runs the model; auto: native if there is an implementation of the architecture",
    )
    runner: str = option(
        "auto",
        choices=("auto", "generate", "pooling"),
        help="what the model is for: tokens, or results from its hidden states, as embeddings and classes; "
        "auto: as its config.json and modules.json say",
    )
    convert: str = option(
        "auto",
        choices=("auto", "none", "embed", "classify"),
        help="which results it computes from hidden states; embed makes vectors with a model that generates, "
        "beside its tokens with --runner generate; auto: by its architecture",
    )
    pooler_config: str | None = option(
        None,
        help="how these results are made, as JSON: pooling_type (CLS, LAST, MEAN, MAX), normalize, "
        "use_activation (default: as the checkpoint says)",
    )
    hf_overrides: str | None = option(
        None,
        help="values in place of those of config.json, as JSON: architectures, matryoshka_dimensions, "
        "is_matryoshka; of a reranker that answers with a token classifier_from_token, method, "
        "is_original_qwen3_reranker (default: as the checkpoint says)",
    )
    quantization: str = option(
        "none",
        short="q",
        choices=("none", "int8", "fp8"),
        hint="quantized checkpoints are not read: name the one they were made from, which int8, "
        "or fp8 on a GPU, quantizes at load",
        help="how projections are stored from load on: int8 weights, or fp8 on a GPU; native models alone",
    )
    deterministic: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="whether logits depend only on the weights and the preceding tokens; auto: on for a CPU, where "
        "the native kernels ensure it; without them auto logs a warning, and on is refused",
    )
    cpu_isa: str = option(
        "auto",
        choices=("auto", "avx512", "avx2"),
        help="widest instruction set of the CPU kernels. Each rounds differently: engines on different CPUs "
        "can take over each other's requests if all are set to the narrowest",
    )
    activations: str = option(
        "auto",
        choices=("auto", "exact", "int8"),
        help="how quantized weights are multiplied: with hidden states as they are, or rounded to int8 by "
        "blocks, which loses little and is faster; auto: the faster that this device has",
    )
    packed_weights_cache: str = option(
        "auto",
        help="folder that keeps the weights of native models as a CPU's kernels read them, for later starts "
        "and other engines of this host; off: they are packed at each start; auto: triptych/weights in the "
        "user's cache ($XDG_CACHE_HOME or ~/.cache)",
    )
    packed_weights_cache_size: int = option(
        64 << 30,
        size=True,
        help="most bytes in that folder; beyond, what was not used for longest is removed",
    )
    tensor_parallel_size: int = option(1, short="tp", help="processes that share every layer of the model")
    pipeline_parallel_size: int = option(
        1, short="pp", help="stages of the model's layers, each in its own processes"
    )
    expert_parallel: bool = option(
        False,
        help="shard by experts: each tensor-parallel process gets whole experts instead of a part of every "
        "expert, each of several equal engines some experts instead of all",
    )
    num_threads: int | None = option(
        None, help="CPU threads of the model (default: one less than the CPUs, at least 1)"
    )
    max_model_len: int | None = option(
        None, size=True, help="longest sequence, prompt and output (default: the model's)"
    )
    max_num_seqs: int = option(256, help="most requests in one step")
    max_logprobs: int = option(
        20, help="most log probabilities per token that a request may ask for; -1: the vocabulary"
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
        help="which log probabilities or logits are returned for sampled tokens: raw (the model's own) or "
        "processed (after penalties, token rules and truncation)",
    )
    max_num_batched_tokens: int = option(2048, size=True, help="most tokens in one step")
    block_size: int = option(16, help="tokens of a KV block")
    kv_cache_memory: int | None = option(
        None,
        size=True,
        help="bytes of the KV cache, allocated at start (default: a share of free memory, which a CPU "
        "allocates as it is used)",
    )
    num_kv_blocks: int | None = option(None, help="number of KV blocks, regardless of their size")
    state_cache_memory: int | None = option(
        None,
        size=True,
        help="bytes for states of recurrent layers, of running requests and kept ones (default: a share of "
        "free memory, and what --max-num-seqs needs)",
    )
    state_interval: int = option(
        512,
        help="tokens after which the prefix cache keeps a further state of recurrent layers",
    )
    gpu_memory_utilization: float = option(
        0.9, help="share of a GPU's memory that the engine uses, KV cache included"
    )
    cuda_graphs: bool = option(
        True, help="record decode steps of a native model once and replay them, on a GPU"
    )
    steps_in_flight: int = option(
        2, help="steps planned before the tokens of the first of them are known; 1: no overlap"
    )
    speculative: str = option(
        "off",
        help="speculative decoding: what proposes tokens that a step verifies together; ngram: what "
        "followed the same tokens earlier in the request; suffix: also in finished answers of the same "
        "cache_salt; draft: a smaller model with the same tokenizer; eagle: an EAGLE-3 head; mtp: the "
        "head of the checkpoint; auto: suffix; or the entry point of "
        "another package",
    )
    speculative_model: str | None = option(
        None, help="the checkpoint of --speculative draft or eagle: folder, or org/name of the hub"
    )
    speculative_config: str | None = option(
        None,
        help="these as JSON, as vLLM has it: method, model and num_speculative_tokens",
    )
    draft_window: int = option(
        1024, help="tokens of a request that a draft model or head attends to: its first ones and the newest"
    )
    num_speculative_tokens: int = option(8, help="most proposed tokens of a request in a step")
    draft_limit: str = option(
        "gain",
        choices=("gain", "none"),
        help="how many proposed tokens a step verifies: as many as make answers faster, by how often they "
        "were accepted and what a step costs; or all",
    )
    enable_prefix_caching: bool = option(True, help="reuse the KV of equal prefixes")
    enable_common_prefix: bool = option(
        True, help="read the leading KV blocks that all requests of a step share once for all of them"
    )
    enable_chunked_prefill: bool = option(True, help="let a long prompt be computed over several steps")
    long_prefill_token_threshold: int = option(
        0, help="most prompt tokens of one request in a step; 0: no such limit"
    )
    scheduling_policy: str = option(
        "fcfs",
        help="which requests run first: fcfs, fair, priority, prefill-first, least-recompute, continuum, or "
        "the name of a plugin of the group triptych.policies; `triptych serve` with credentials of clients: "
        "fair",
    )
    scheduler_class: str = option(
        "default",
        help="what decides each step: default, or the name of a plugin of the group triptych.schedulers",
    )
    prefill_share: float = option(
        0.5, help="with prefill-first, the share of a step's tokens for prompts while other requests decode"
    )
    idle_sessions: str = option(
        "yield",
        choices=("yield", "hold"),
        help="what a generate session has while it waits for input: no row, and its KV until other requests "
        "need the blocks; or a row and its KV, which other requests wait for",
    )
    session_idle_s: float = option(
        600.0, help="how long a generate session may wait for input before its KV is released"
    )
    max_idle_sessions: int = option(
        1024, help="generate sessions that may wait for input; beyond, the one that waits longest is released"
    )

    data_parallel_rank: int = option(0, help="index of this engine among equal ones")
    data_parallel_size: int = option(1, help="number of equal engines")
    data_parallel_group: str = option(
        "", help="name of these engines' group, needed if a coordinator has several groups of engines"
    )
    label: tuple[str, ...] = option(
        (),
        help="key=value that the coordinator publishes for this engine, e.g. zone=a; frontends select by "
        "--engine-label; may be repeated",
    )
    lockstep_timeout_s: float = option(
        4.0,
        help="how long an engine waits for another that holds experts of the same model before it counts as "
        "lost. Applies to each exchange, of which there are two per layer with experts, so it bounds the "
        "time any engine may take from one such layer to the next, and from one step to the next",
    )

    profile_dir: str | None = option(
        None,
        help="folder for profiles of steps, which operators start by a call; unset: such calls are refused",
    )
    plugins: tuple[str, ...] = option(
        ("all",), help="names of the installed plugins to load; all: every one, empty: none"
    )
    index: int = option(0, help="instance number, for logs")
    announce_fd: int | None = option(
        None, help="file descriptor to write the bound addresses to, for supervisors"
    )
    log_format: Literal["auto", "text", "json"] = option(
        "auto", help="format of log lines; auto: text on a terminal, JSON elsewhere"
    )
    log_level: str = option(
        "info", choices=("debug", "info", "warning", "error"), help="lowest level that is logged"
    )
    reflection: bool = option(True, help="serve gRPC reflection")
    drain_deadline_s: float = option(20.0, help="time for running requests to finish at shutdown; 0: none")
    step_limit_s: float = option(
        5.0, help="a step that runs longer than this, and longer than expected, ends the engine"
    )
    replay_window_s: float = option(
        5.0, help="how long the requests of a frontend continue after its stream broke; 0: they end with it"
    )

    @property
    def divides_experts(self) -> bool:
        """Whether the experts of a model, if it has any, are sharded over equal engines."""
        return self.expert_parallel and self.data_parallel_size > 1

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(text.split("=", 1) for text in self.label)

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid options. Those that depend on the model are checked after loading."""
        self.check_security(self.host, self.admin_http_host)
        check_service_ports(self)
        for name in (
            "max_num_seqs", "max_num_batched_tokens", "block_size", "data_parallel_size", "steps_in_flight",
            "tensor_parallel_size", "pipeline_parallel_size", "state_interval",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name, maximum in (("max_num_seqs", _MAX_NUM_SEQS), ("steps_in_flight", _MAX_STEPS_IN_FLIGHT)):
            require(getattr(self, name) <= maximum, name, getattr(self, name), f"at most {maximum}")
        for name, minimum in (
            ("num_threads", 1), ("max_model_len", 2), ("kv_cache_memory", 1), ("num_kv_blocks", 1),
            ("state_cache_memory", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or value >= minimum, name, value, f"at least {minimum}")
        for name in ("port", "admin_port", "admin_http_port"):
            require(0 <= getattr(self, name) <= 65_535, name, getattr(self, name), "a port, 0 to 65535")
        require(
            self.long_prefill_token_threshold >= 0,
            "long_prefill_token_threshold",
            self.long_prefill_token_threshold,
            "0 or more",
        )
        self._check_parallel()
        require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "above 0, at most 1",
        )
        require(self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "-1 for all, 0 or more")
        require(
            0 < self.session_idle_s <= _MAX_IDLE_S,
            "session_idle_s",
            self.session_idle_s,
            "above 0, at most a day",
        )
        require(
            self.packed_weights_cache_size >= 0,
            "packed_weights_cache_size",
            self.packed_weights_cache_size,
            "0 or more",
        )
        require(bool(self.packed_weights_cache), "packed_weights_cache", "''", "a folder, off or auto")
        require(self.max_idle_sessions >= 0, "max_idle_sessions", self.max_idle_sessions, "0 or more")
        require(0 < self.prefill_share < 1, "prefill_share", self.prefill_share, "above 0 and below 1")
        self._check_speculation()
        for name in ("drain_deadline_s", "replay_window_s"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(self.step_limit_s > 0, "step_limit_s", self.step_limit_s, "above 0")
        self._check_labels()

    @property
    def pooling(self) -> PoolingOptions:
        """How to use the checkpoint for results from its hidden states."""
        return PoolingOptions(self.runner, self.convert, self.pooler_config, self.hf_overrides)

    @property
    def speculation(self) -> Speculation:
        """The method of speculation, from `speculative_config` or the single options."""
        if self.speculative_config is None:
            return Speculation(self.speculative, self.num_speculative_tokens, self.speculative_model)
        try:
            content = json.loads(self.speculative_config)
        except (ValueError, RecursionError):
            content = None
        names = ("method", "model", "num_speculative_tokens")
        known = ", ".join(f'"{name}"' for name in names)
        require(
            isinstance(content, dict), "speculative_config", self.speculative_config, f"an object of {known}"
        )
        for name in sorted(content.keys() - set(names)):
            reason = _NOT_OF_SPECULATION.get(name, f"it takes {known}")
            raise ConfigError(f'--speculative-config has "{name}", which is not known here: {reason}')
        model = content.get("model")
        method = content.get("method", "auto" if model is None else "draft")
        require(isinstance(method, str), "speculative", repr(method), "the name of a method")
        num_tokens = content.get("num_speculative_tokens", self.num_speculative_tokens)
        return Speculation(_VLLM_METHODS.get(method, method), num_tokens, model)

    def _check_speculation(self) -> None:
        for name, is_given in (
            ("speculative", self.speculative != "off"),
            ("speculative_model", self.speculative_model is not None),
        ):
            require(
                self.speculative_config is None or not is_given,
                name,
                getattr(self, name),
                "left out where --speculative-config is given",
            )
        method, num_tokens, model = self.speculation
        require(
            type(num_tokens) is int and 1 <= num_tokens <= _MAX_SPECULATIVE_TOKENS,
            "num_speculative_tokens",
            num_tokens,
            f"1 to {_MAX_SPECULATIVE_TOKENS}",
        )
        require(
            method == "off" or self.pipeline_parallel_size == 1,
            "speculative",
            method,
            "off where --pipeline-parallel-size is above 1",
        )
        if method in _WITH_CHECKPOINT:
            is_folder = isinstance(model, str) and model
            require(bool(is_folder), "speculative_model", model, f"the checkpoint of {method}")
        else:
            require(model is None, "speculative_model", model, f"left out where --speculative is {method}")
        require(
            1 <= self.draft_window <= _MAX_DRAFT_WINDOW,
            "draft_window",
            self.draft_window,
            f"1 to {_MAX_DRAFT_WINDOW}",
        )

    def _check_labels(self) -> None:
        for text in self.label:
            key, sign, _ = text.partition("=")
            is_label = key and sign and len(text) <= _MAX_LABEL_CHARACTERS and text.isprintable()
            limit = f"key=value of at most {_MAX_LABEL_CHARACTERS} printable characters"
            require(bool(is_label), "label", repr(text), limit)
            require(key not in _FACTS, "label", repr(text), f"of a key other than {', '.join(_FACTS)}")
        require(len(self.label) <= _MAX_LABELS, "label", f"given {len(self.label)} times", f"{_MAX_LABELS}")
        keys = [text.partition("=")[0] for text in self.label]
        require(len(set(keys)) == len(keys), "label", repr(self.label), "given once for each key")

    def _check_parallel(self) -> None:
        require(
            0 <= self.data_parallel_rank < self.data_parallel_size,
            "data_parallel_rank",
            self.data_parallel_rank,
            f"below the number of engines, {self.data_parallel_size}",
        )
        require(
            not self.expert_parallel or self.tensor_parallel_size > 1 or self.data_parallel_size > 1,
            "expert_parallel",
            self.expert_parallel,
            "off where --tensor-parallel-size and --data-parallel-size are 1",
        )
        if self.divides_experts:
            for name in ("tensor_parallel_size", "pipeline_parallel_size"):
                size = getattr(self, name)
                require(size == 1, name, size, "1 where --expert-parallel divides experts over engines")
            require(
                0 < self.lockstep_timeout_s < self.step_limit_s,
                "lockstep_timeout_s",
                self.lockstep_timeout_s,
                f"above 0 and below --step-limit-s, {self.step_limit_s:g}",
            )
        require(
            len(self.data_parallel_group) <= _MAX_GROUP_CHARACTERS and self.data_parallel_group.isprintable(),
            "data_parallel_group",
            repr(self.data_parallel_group),
            f"at most {_MAX_GROUP_CHARACTERS} printable characters",
        )


def _fold() -> type[CoreConfig]:
    """The options of the core and of all features as one class."""
    names = [f"{package}.options" for package in packages()]
    kinds = [import_module(name).Options for name in names if find_spec(name) is not None]

    def check_all(self: CoreConfig) -> None:
        CoreConfig.__post_init__(self)
        for kind in kinds:
            kind.check(self)

    return make_dataclass(
        "EngineConfig",
        [],
        bases=(CoreConfig, *kinds),
        namespace={
            "__post_init__": check_all,
            "__doc__": "All options of one engine.",
            "__module__": __name__,
        },
        frozen=True,
    )


if TYPE_CHECKING:

    class EngineConfig(CoreConfig):
        """All options of one engine: a type checker sees those of features as `Any`."""

        def __init__(self, model: str, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    EngineConfig = _fold()
