"""Names of vLLM's flags and arguments that are others here, or have no counterpart, with a sentence each.

The names are those of vLLM's Python arguments; its flags are the same with dashes. A name that means the same
in both is not listed. docs/coming-from-vllm.md is the same list for reading.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_NO_LORA = "LoRA adapters are not served yet"
_NO_MEDIA = "images, audio and video are not served yet"
_NO_GRAMMAR = "structured output is not served yet"
_NO_DRAFTS = "there is no speculative decoding yet"
_NO_CODE = "an engine runs no code of a caller"
_NO_HTTP = "there is no OpenAI HTTP server yet; clients use gRPC"
_NO_TLS = "there is no authentication and no TLS: put a mesh or a proxy before the frontend"
_NO_OFFLOAD = "weights and KV cache stay on the device, nothing is offloaded"
_NO_TRANSFER = "KV caches are not transferred between engines yet"
_NO_COMPILER = "nothing is compiled by torch; `cuda_graphs` decides about CUDA graphs"
_HUB = "models are read from a folder or from the hub's cache, see HF_HOME and HF_TOKEN"
_TASK = "the task follows from the model"
_DEFAULTS = "defaults of the model's generation_config.json always apply, unless a request sets the parameter"
_TOKENIZER = "texts are tokenized as the model's tokenizer.json says"

# A name in backticks is an option here, shown as a flag or as an argument.
SENTENCES: dict[str, str] = {
    # Called otherwise.
    "max_num_partial_prefills": "all requests share one budget of tokens, `max_num_batched_tokens`",
    "scheduler_cls": "it is `scheduler_class`, the name of an entry point of triptych.schedulers",
    "async_scheduling": "it is `steps_in_flight`, 2 by default",
    "enforce_eager": "it is `cuda_graphs`, which can be switched off",
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
    # A former flag of this program.
    "record_decisions": "it is `sched_trace_path`, whose file triptych replay reads",
    # Without a counterpart.
    "api_key": _NO_TLS,
    "ssl_keyfile": _NO_TLS,
    "ssl_certfile": _NO_TLS,
    "ssl_ca_certs": _NO_TLS,
    "uds": "the frontend listens on TCP",
    "allowed_origins": _NO_HTTP,
    "root_path": _NO_HTTP,
    "middleware": _NO_HTTP,
    "response_role": _NO_HTTP,
    "disable_fastapi_docs": _NO_HTTP,
    "enable_lora": _NO_LORA,
    "lora_modules": _NO_LORA,
    "lora_request": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "max_cpu_loras": _NO_LORA,
    "fully_sharded_loras": _NO_LORA,
    "limit_mm_per_prompt": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "mm_processor_cache_gb": _NO_MEDIA,
    "allowed_local_media_path": _NO_MEDIA,
    "media_io_kwargs": _NO_MEDIA,
    "interleave_mm_strings": _NO_MEDIA,
    "structured_outputs_config": _NO_GRAMMAR,
    "guided_decoding_backend": _NO_GRAMMAR,
    "guided_decoding": _NO_GRAMMAR,
    "structured_outputs": _NO_GRAMMAR,
    "speculative_config": _NO_DRAFTS,
    "num_speculative_tokens": _NO_DRAFTS,
    "compilation_config": _NO_COMPILER,
    "disable_custom_all_reduce": "collectives are those of torch.distributed",
    "swap_space": _NO_OFFLOAD,
    "cpu_offload_gb": _NO_OFFLOAD,
    "kv_offloading_size": _NO_OFFLOAD,
    "kv_offloading_backend": _NO_OFFLOAD,
    "kv_transfer_config": _NO_TRANSFER,
    "trust_remote_code": "code of a checkpoint is never run",
    "logits_processors": _NO_CODE,
    "logits_processor_pattern": _NO_CODE,
    "worker_cls": _NO_CODE,
    "worker_extension_cls": _NO_CODE,
    "hf_overrides": "config.json is used as it is: change a copy of the folder",
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
    "max_seq_len_to_capture": _NO_COMPILER,
    "cuda_graph_sizes": _NO_COMPILER,
    # Flags of its benchmark.
    "num_prompts": "it is `num_requests`",
    "request_rate": "it is `rate`",
    "max_concurrency": "it is `concurrency`",
    "dataset_name": "it is `dataset`",
    "random_input_len": "it is `input_len`",
    "random_output_len": "it is `output_len`",
    "random_range_ratio": "it is `range_ratio`",
    "base_url": "it is `url`",
    "backend": "the protocol is gRPC",
    "percentile_metrics": "mean, median, p90 and p99 of all latencies are reported",
    "save_result": "it is `json`, with the name of the file",
    "goodput": "it is `slo`",
}

# Of LLM, its methods and SamplingParams alone: flags of these names are flags here, or are none of vLLM's.
_ARGUMENTS: dict[str, str] = {
    "seed": "give each request its own seed",
    "use_tqdm": "it is progress=False",
    "priority": "it is priorities, one for all or a list",
    "messages": "it is conversations",
    "chat_template_kwargs": "it is template_arguments",
    "chat_template_content_format": "the format follows from the template",
    "include_stop_str_in_output": "it is include_stop_in_output",
    "best_of": "use n, and compare cumulative_logprob",
    "use_beam_search": "there is no beam search",
    "flat_logprobs": "logprobs have one form",
    "extra_args": _NO_CODE,
    "output_kind": "LLM returns complete results; streams are of the server",
    "stream_interval": "LLM returns complete results; streams are of the server",
}


def explained(flag: str) -> str:
    """The sentence about a flag of vLLM, with the flags of today; empty if there is none."""
    if not flag.startswith("--"):
        return ""
    sentence = SENTENCES.get(flag[2:].replace("-", "_"), "")
    return re.sub("`([a-z_]+)`", lambda found: "--" + found[1].replace("_", "-"), sentence)


def nearest(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the known name that is like it, if there is one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_arguments(function: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError, with the reason or the nearest name, for arguments that `function` does not take."""
    for name in names:
        if name not in known:
            sentence = (SENTENCES | _ARGUMENTS).get(name, "").replace("`", "")
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
