"""Names of vLLM's flags and arguments that are others here, or have no counterpart, with a sentence each.

The names are those of vLLM's Python arguments; its flags are the same with dashes. A name that means the same
in both is not listed. docs/coming-from-vllm.md is the same list for reading.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_NO_LORA = "LoRA adapters are not served yet"
_NO_MEDIA = "images, audio and video are not served yet"
_GRAMMAR = "a request has `structured_output`, and names a backend itself"
_DRAFTS = "what proposes drafts is `speculative`, a checkpoint for it `speculative_model`"
_NO_CODE = "an engine runs no code of a caller"
_NO_HTTP = "the OpenAI HTTP server has no such option yet, see `http_port`"
_TLS = "callers need certificates where a CA is given, and renewed files are always read again"
_NO_OFFLOAD = "weights and KV cache stay on the device, nothing is offloaded"
_NO_TRANSFER = "KV caches are not transferred between engines yet"
_NO_COMPILER = "nothing is compiled by torch; `cuda_graphs` decides about CUDA graphs"
_HUB = "models are read from a folder or from the hub's cache, see HF_HOME and HF_TOKEN"
_CONFIG = "config.json is used as it is: change a copy of the folder"
_ATTENTION = "attention and its cache follow from the model"
_OTHER_HOSTS = "`triptych engine` with --coordinator joins from another machine; see `triptych ray` for Ray"
_TASK = "the task follows from the model"
_DEFAULTS = "defaults of the model's generation_config.json always apply, unless a request sets the parameter"
_TOKENIZER = "texts are tokenized as the model's tokenizer.json says"

# Likeness of a name to a known one from which on it is that one, misspelt.
_MISSPELT = 0.88

# A name in backticks is an option here, shown as a flag or as an argument.
SENTENCES: dict[str, str] = {
    # Called otherwise.
    "max_num_partial_prefills": "all requests share one budget of tokens, `max_num_batched_tokens`",
    "scheduler_cls": "it is `scheduler_class`, the name of an entry point of triptych.schedulers",
    "async_scheduling": "it is `steps_in_flight`, 2 by default",
    "enforce_eager": "it is --no-cuda-graphs (cuda_graphs=False of LLM)",
    "num_gpu_blocks_override": "it is `num_kv_blocks`",
    "kv_cache_memory_bytes": "it is `kv_cache_memory`",
    "enable_expert_parallel": "it is `expert_parallel`",
    "tool_call_parser": "it is `tool_parser`, chosen by the model's template unless given",
    "enable_auto_tool_choice": "calls are always read where the template has tools, see `tool_parser`",
    "shutdown_timeout": "it is `drain_deadline_s`",
    "uvicorn_log_level": "it is `log_level`",
    "disable_log_requests": "it is `log_level`",
    "enable_log_requests": "it is `log_level`",
    "kv_events_config": "it is `enable_kv_events`",
    "hf_token": _HUB,
    "download_dir": _HUB,
    "load_format": _HUB,
    "model_loader_extra_config": _HUB,
    "api_server_count": "it is --workers of `triptych frontend`",
    "otlp_traces_endpoint": "it is the variable OTEL_EXPORTER_OTLP_ENDPOINT",
    "enable_sleep_mode": "sleep is always possible: triptych admin ADDRESS sleep",
    "data_parallel_address": "engines find each other through their coordinator",
    "data_parallel_rpc_port": "engines find each other through their coordinator",
    "data_parallel_hybrid_lb": "use `data_parallel_external_lb`, or --engine-label of `triptych frontend`",
    "data_parallel_backend": "`triptych ray` starts a stack on a Ray cluster",
    "distributed_executor_backend": "ranks are processes of one machine; see `triptych ray` for Ray",
    "attention_backend": "kernels are chosen by device",
    "prefix_caching_hash_algo": "block hashes are always cryptographic",
    "kv_cache_dtype": "the KV cache has the dtype of the weights",
    "calculate_kv_scales": "the KV cache has the dtype of the weights",
    "chat_template_content_format": "the format follows from the template",
    "trust_request_chat_template": "it is `request_templates`",
    "num_scheduler_steps": "it is `steps_in_flight`",
    "renderer_num_workers": "it is `text_workers`",
    "disable_frontend_multiprocessing": "it is `text_workers`",
    "tool_parser_plugin": "formats of calls are those of `tool_parser`",
    "reasoning_parser_plugin": "formats of reasoning are those of `reasoning_parser`",
    "log_config_file": "it is `log_level` and `log_format`",
    "aggregate_engine_logging": "it is `log_level` and `log_format`",
    "headless": _OTHER_HOSTS,
    "data_parallel_start_rank": _OTHER_HOSTS,
    "data_parallel_size_local": _OTHER_HOSTS,
    "nnodes": _OTHER_HOSTS,
    "node_rank": _OTHER_HOSTS,
    "master_addr": _OTHER_HOSTS,
    "master_port": _OTHER_HOSTS,
    # A former flag of this program.
    "record_decisions": "it is `sched_trace_path`, whose file triptych replay reads",
    # Without a counterpart.
    "seed": "give each request its own seed",
    "max_long_partial_prefills": "all requests share one budget of tokens, `max_num_batched_tokens`",
    "preemption_mode": "a preempted request is computed again",
    "max_log_len": "prompts and answers are not logged",
    "enable_log_outputs": "prompts and answers are not logged",
    "log_error_stack": "the stack of an internal error is always logged",
    "return_tokens_as_token_ids": "answers always have token ids",
    "tokens_only": "answers always have token ids",
    "enable_prompt_tokens_details": "usage always has the cached tokens",
    "code_revision": "code of a checkpoint is never run",
    "disable_sliding_window": _ATTENTION,
    "disable_cascade_attn": _ATTENTION,
    "disable_hybrid_kv_cache_manager": _ATTENTION,
    "kv_sharing_fast_prefill": _ATTENTION,
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "override_attention_dtype": _CONFIG,
    "ignore_patterns": _HUB,
    "safetensors_load_strategy": _HUB,
    "pt_load_map_location": _HUB,
    "max_parallel_loading_workers": _HUB,
    "allowed_origins": "it is `http_allowed_origin`, given once for each",
    "api_key": "set TRIPTYCH_API_KEY, or name a file with --api-keys: flags are in the list of processes",
    "disable_custom_all_reduce": "collectives are those of torch.distributed",
    "swap_space": _NO_OFFLOAD,
    "trust_remote_code": "code of a checkpoint is never run",
    "hf_overrides": _CONFIG,
    "hf_config_path": "config.json is read from the model's folder",
    "config_format": "config.json is read from the model's folder",
    "generation_config": _DEFAULTS,
    "override_generation_config": _DEFAULTS,
    "runner": _TASK,
    "convert": _TASK,
    "task": _TASK,
    "pooler_config": _TASK,
    "override_pooler_config": _TASK,
    "skip_tokenizer_init": "a frontend needs the tokenizer; prompts may be token ids, and detokenize=False "
    "leaves texts out of the answers",
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": "tokenizer and weights have one revision",
    "tokenization_kwargs": f"{_TOKENIZER}; add_special_tokens is an argument of generate",
    "truncate_prompt_tokens": "a prompt is not cut here: cut its token ids",
    "disable_log_stats": "statistics are not logged: triptych admin ADDRESS status",
    "profiler_config": "it is `profile_dir`",
    # Flags of its benchmark.
    "num_prompts": "it is `num_requests`",
    "request_rate": "it is `rate`",
    "max_concurrency": "it is `concurrency`",
    "dataset_name": "it is `dataset`",
    "random_input_len": "it is `input_len`",
    "random_output_len": "it is `output_len`",
    "random_range_ratio": "it is `range_ratio`",
    "percentile_metrics": "mean, median, p90 and p99 of all latencies are reported",
    "save_result": "it is `json`, with the name of the file",
    "goodput": "it is `slo`",
}

# Of what is not here, by a part of the name; for names that have no sentence of their own.
_FAMILIES: Sequence[tuple[str, str]] = (
    (r"lora", _NO_LORA),
    (r"(^|_)mm(_|$)|media|multimodal|video|image|audio", _NO_MEDIA),
    (r"guided_|structured_outputs", _GRAMMAR),
    (r"(?<!num_)speculative_(?!config|model$)|lookahead|draft_model|^spec_", _DRAFTS),
    (r"worker_.*cls|logits_processor|io_processor", _NO_CODE),
    (r"^ssl_(?!certfile|keyfile|ca_certs)|_ssl_", _TLS),
    (r"offload", _NO_OFFLOAD),
    (r"transfer_config$", _NO_TRANSFER),
    (r"compil|cudagraph|cuda_graph_|_to_capture|optimization_level|flashinfer", _NO_COMPILER),
    (r"context_parallel|^dcp_", "a sequence is not divided over processes"),
    (
        r"eplb|redundant_expert|expert_placement|all2all|(^|_)dbo(_|$)|moe_backend",
        "experts stay in their rank",
    ),
    (r"mamba", "state-space models are not served yet"),
    (
        r"(?<!kv_cache_)metrics|traces|nvtx|nsight",
        "see docs/metrics.md, and OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (
        r"^allow_credentials|^allowed_|origins|middleware|root_path|fastapi|uvicorn|^h11_|response_role|tool_server|id_headers"
        r"|include_usage|info_endpoint|load_tracking|when_tool_choice",
        _NO_HTTP,
    ),
)
# One-letter and similar spellings of vLLM.
_SHORT = {
    "-O": "optimization_level", "-cc": "compilation_config", "-ep": "enable_expert_parallel",
    "-asc": "api_server_count", "-dcp": "decode_context_parallel_size", "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local", "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend", "-dph": "data_parallel_hybrid_lb", "-n": "nnodes", "-r": "node_rank",
}  # fmt: skip

# Of LLM, its methods and SamplingParams alone: flags of these names are flags here, or are none of vLLM's.
_ARGUMENTS: dict[str, str] = {
    "use_tqdm": "it is progress=False",
    "priority": "it is priorities, one for all or a list",
    "messages": "it is conversations",
    "chat_template_kwargs": "it is template_arguments",
    "include_stop_str_in_output": "it is include_stop_in_output",
    "best_of": "use n, and compare cumulative_logprob",
    "use_beam_search": "there is no beam search",
    "flat_logprobs": "logprobs have one form",
    "extra_args": _NO_CODE,
    "output_kind": "LLM returns complete results; streams are of the server",
    "stream_interval": "LLM returns complete results; streams are of the server",
}


def explained(flag: str, known: Collection[str] = ()) -> str:
    """The sentence about a flag of vLLM, with the flags of today; empty if there is none.

    A misspelling of a `known` flag is none of a family of vLLM's flags.
    """
    name = _SHORT.get(flag, flag[2:].replace("-", "_") if flag.startswith("--") else "")
    sentence = _sentence_about(name, is_misspelt=_is_misspelt(flag, known))
    return re.sub("`([a-z_]+)`", lambda match: "--" + match[1].replace("_", "-"), sentence)


def _sentence_about(name: str, *, is_misspelt: bool) -> str:
    families = () if is_misspelt else _FAMILIES
    family = next((sentence for pattern, sentence in families if re.search(pattern, name)), "")
    return SENTENCES.get(name, family)


def _is_misspelt(name: str, known: Collection[str]) -> bool:
    return bool(difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT))


def nearest(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the known name that is like it, if there is one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_arguments(function: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError, with the reason or the nearest name, for arguments that `function` does not take."""
    for name in names:
        if name not in known:
            about = _sentence_about(name, is_misspelt=_is_misspelt(name, known))
            sentence = (_ARGUMENTS.get(name) or about).replace("`", "")
            why = f": {sentence}" if sentence else nearest(name, known)
            raise TypeError(f"{function} takes no argument {name}{why}")


def checks_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a call with an unknown argument raise a TypeError that explains it."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    shown = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        check_arguments(shown, kwargs.keys(), known)
        return function(*args, **kwargs)

    return checked


def with_checked_arguments(cls: type[_T]) -> type[_T]:
    """A class whose constructor explains unknown arguments."""
    setattr(cls, "__init__", checks_arguments(cls.__init__))  # noqa: B010  mypy refuses the assignment.
    return cls
