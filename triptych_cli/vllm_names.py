"""vLLM's flags, arguments and variables that have other names here or no counterpart, each with a sentence.

The names are those of vLLM's Python arguments; its flags are the same with dashes. A name that means the same
in both is not listed. docs/coming-from-vllm.md is the same list for reading.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn, ParamSpec, TypeVar

from triptych_kit.config import ConfigError, UnknownKeys, nearest, unknown_names

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
# How an option is shown: by its name, and by its value if it is a switch.
_Shown = Callable[[str, bool | None], str]

_LORA = "what adapters have is `max_loras`, `max_lora_rank`, `max_cpu_loras`, `lora_modules` and `lora_dir`"
_ADAPTERS = "it is adapters, names of adapters that the engine serves"
_NO_MEDIA = "images, audio and video are not served yet"
_GRAMMAR = "each request has its grammar, and may name a backend, in its field structured_outputs"
_IDS = "a request asks for token ids with return_token_ids"
_DRAFTS = "what proposes drafts is `speculative`, a checkpoint for it `speculative_model`"
_NO_CODE = "an engine runs no code of a caller"
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

_STRUCTURED = "it is structured_output=StructuredOutput(...), with json_schema, regex, choice or grammar"
_PROXY = "let a proxy before the HTTP port do it"
_BROWSERS = "browsers get what the routes take, from pages of `http_allowed_origin`"
_ACCESS_LOG = "each request has a log line of level info; `log_level` warning leaves it out"

_OPTION = re.compile(r"`([a-z_]+)(=False)?`")
_LEVEL = re.compile(r"-O\d?")

# Likeness of a name to a known one from which on it is that one, misspelt.
_MISSPELT = 0.88

# A name in backticks is an option here, shown as a flag, as a key of a file or as an argument.
SENTENCES: dict[str, str] = {
    # Called otherwise.
    "max_num_partial_prefills": "all requests share one budget of tokens, `max_num_batched_tokens`",
    "scheduler_cls": "it is `scheduler_class`, the name of an entry point of triptych.schedulers",
    "async_scheduling": "it is `steps_in_flight`, 2 by default",
    "enforce_eager": "it is `cuda_graphs=False`",
    "num_gpu_blocks_override": "it is `num_kv_blocks`",
    "kv_cache_memory_bytes": "it is `kv_cache_memory`",
    "enable_expert_parallel": "it is `expert_parallel`",
    "tool_call_parser": "it is `tool_parser`, chosen by the model's template unless given",
    "enable_auto_tool_choice": "calls are always read where the template has tools, see `tool_parser`",
    "shutdown_timeout": "it is `drain_deadline_s`",
    "uvicorn_log_level": "it is `log_level`",
    "disable_log_requests": _ACCESS_LOG,
    "enable_log_requests": _ACCESS_LOG,
    "disable_uvicorn_access_log": _ACCESS_LOG,
    "disable_access_log_for_endpoints": _ACCESS_LOG,
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
    "return_tokens_as_token_ids": _IDS,
    "tokens_only": _IDS,
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
    "root_path": "let the proxy remove its path: routes begin with /v1 here",
    "middleware": f"a frontend runs no code of a caller: {_PROXY}",
    "enable_server_load_tracking": "load is always counted: see triptych top and docs/metrics.md",
    "disable_fastapi_docs": "no pages of documentation are served",
    "enable_offline_docs": "no pages of documentation are served",
    "enable_request_id_headers": "answers always have x-request-id",
    "enable_force_include_usage": "a client asks with stream_options.include_usage",
    "exclude_tools_when_tool_choice_none": "the template gets the tools that a request has: leave them out",
    "response_role": "the role of an answer is assistant",
    "tool_server": "tools are called by the client",
    "allow_credentials": _BROWSERS,
    "allowed_methods": _BROWSERS,
    "allowed_headers": _BROWSERS,
    "allowed_origins": "it is `http_allowed_origin`, given once for each",
    "api_key": "set TRIPTYCH_API_KEY, or name a file of keys with `api_keys`: a key is no option, "
    "for flags are in the list of processes",
    "disable_custom_all_reduce": "collectives are those of torch.distributed",
    "swap_space": _NO_OFFLOAD,
    "trust_remote_code": "code of a checkpoint is never run",
    "hf_config_path": "config.json is read from the model's folder",
    "config_format": "config.json is read from the model's folder",
    "generation_config": _DEFAULTS,
    "override_generation_config": _DEFAULTS,
    "task": _TASK,
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

_A_RUNNING_SERVER = "a running `triptych serve` is measured: triptych bench serve"
# Verbs of its benchmark.
BENCH_VERBS: dict[str, str] = {
    "latency": f"{_A_RUNNING_SERVER} --concurrency 1",
    "throughput": f"{_A_RUNNING_SERVER}, which sends all requests at once",
    "startup": "a log line of each engine has the time of its start",
    "sweep": f"{_A_RUNNING_SERVER}, once for each value",
}

# Of its benchmark too, but flags of these names are flags of services here.
_OF_BENCH: dict[str, str] = {
    "host": "it is `base_url` http://HOST:PORT of `backend` openai, else `url` grpc://HOST:PORT",
    "port": "it is `base_url` http://HOST:PORT of `backend` openai, else `url` grpc://HOST:PORT",
    "endpoint": "requests go to /v1/completions, at the server of `base_url`",
    "endpoint_type": "it is `backend`",
    "served_model_name": "it is `model`, the served name",
    "tokenizer": "prompts are random ids: none is needed",
    "dataset_path": "prompts are drawn, see `dataset`",
    "result_dir": "it is `json`, with the name of the file",
    "result_filename": "it is `json`, with the name of the file",
    "save_detailed": "`json` always has every request",
    "metric_percentiles": "mean, median, p90 and p99 of all latencies are reported",
    "num_warmups": "it is `warmup`",
    "random_prefix_len": "it is `prefix_len` of `dataset` shared-prefix",
    "header": "the key is that of TRIPTYCH_API_KEY, or of OPENAI_API_KEY for `backend` openai",
}

# Of what is not here, by a part of the name; for names that have no sentence of their own.
_FAMILIES: Sequence[tuple[str, str]] = (
    (r"lora", _LORA),
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
    (r"mamba", "states of layers are fp32, kept by `state_interval` within `state_cache_memory`"),
    (
        r"(?<!kv_cache_)metrics|traces|nvtx|nsight",
        "see docs/metrics.md, and OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (r"^allowed_|origins", _BROWSERS),
    (
        r"middleware|fastapi|uvicorn|^h11_|info_endpoint",
        f"the HTTP listener has no such option: {_PROXY}",
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
    "structured_outputs": _STRUCTURED,
    "guided_decoding": _STRUCTURED,
    "response_format": _STRUCTURED,
    "json": "it is json_schema, a schema as JSON text",
    "disable_fallback": "the first backend that enforces all is chosen, unless backend names one",
    "extra_args": _NO_CODE,
    "output_kind": "LLM returns complete results; streams are of the server",
    "stream_interval": "LLM returns complete results; streams are of the server",
}

# Attributes of vLLM's LLM and of its results.
LLM_ATTRIBUTES: dict[str, str] = {
    "get_tokenizer": "texts and ids are converted by tokenize() and detokenize()",
    "get_default_sampling_params": "it is default_sampling_params()",
    "beam_search": "there is no beam search: use n, and compare cumulative_logprob",
    "encode": "it is embed(), classify() or score()",
    "reward": "it is classify()",
    "llm_engine": "an engine has no interface in Python; model and max_model_len are attributes",
    "model_config": "model and max_model_len are attributes",
    "get_metrics": "numbers of a request are in outputs[0].stats and usage of its result",
    "collective_rpc": _NO_CODE,
    "apply_model": _NO_CODE,
    "sleep": "close() gives the memory back; a served engine sleeps by triptych admin ADDRESS sleep",
    "wake_up": "a served engine wakes by triptych admin ADDRESS wake",
    "start_profile": "a served engine is profiled by triptych admin ADDRESS profile start",
    "stop_profile": "a served engine is profiled by triptych admin ADDRESS profile start",
}
RESULT_ATTRIBUTES: dict[str, str] = {
    "finished": "a result is always complete",
    "metrics": "times are in outputs[0].stats",
    "lora_request": _ADAPTERS,
    "multi_modal_placeholders": _NO_MEDIA,
    "encoder_prompt": "there are no models with an encoder",
    "token_ids": "it is outputs[0].token_ids",
    "finish_reason": "it is outputs[0].finish_reason",
}
OUTPUT_ATTRIBUTES: dict[str, str] = {
    "stop_reason": "it is stop, the string or the token id that matched",
    "finished": "an output is always complete; finish_reason says why",
    "lora_request": _ADAPTERS,
    "reasoning_content": "it is reasoning",
}


def describe_unknown_flags(flags: Sequence[str], known: Collection[str]) -> str:
    """An error about flags that are none of `known`, each with its sentence or the nearest known one."""
    return unknown_names("flag", flags, lambda flag: _hint(explained(flag, known), flag, known))


def describe_unknown_keys(error: UnknownKeys) -> str:
    """An error about keys of a file of options, with the same sentences."""

    def hint(key: str) -> str:
        return _hint(_sentence_about(key.replace("-", "_"), error.known, _in_file), key, error.known)

    return unknown_names("option", error.keys, hint, f" in {error.path}")


def explained(flag: str, known: Collection[str] = ()) -> str:
    """The sentence about a flag of vLLM, with the flags of today; empty if there is none.

    A misspelling of a `known` flag is none of a family of vLLM's flags.
    """
    # Of a flag such as --compilation-config.level, the name is before the dot; -O3 is -O with a level.
    short = "-O" if _LEVEL.fullmatch(flag) else flag
    long = flag[2:].partition(".")[0].replace("-", "_") if flag.startswith("--") else ""
    names = [one[2:].replace("-", "_") for one in known if one.startswith("--")]
    return _sentence_about(_SHORT.get(short, long), names, _in_flags)


def _hint(sentence: str, name: str, known: Collection[str]) -> str:
    return f": {sentence}" if sentence else nearest(name, known)


def _sentence_about(name: str, known: Collection[str], shown: _Shown) -> str:
    """The sentence about a name of vLLM, its negation, or a misspelling of it; empty if there is none."""
    positive = name.removeprefix("no_")
    sentences = SENTENCES | _OF_BENCH if "base_url" in known else SENTENCES
    near = [] if name in sentences else difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    if near:
        return ""
    vllms = next(iter(difflib.get_close_matches(positive, sentences, n=1, cutoff=_MISSPELT)), positive)
    family = next((sentence for pattern, sentence in _FAMILIES if re.search(pattern, positive)), "")
    sentence = sentences.get(positive) or family or sentences.get(vllms, "")
    is_negated = name != positive
    return _OPTION.sub(lambda match: shown(match[1], is_negated if match[2] else None), sentence)


def _in_flags(name: str, value: bool | None) -> str:
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def _in_file(name: str, value: bool | None) -> str:
    return name if value is None else f"{name}: {str(value).lower()}"


def check_arguments(function: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError, with the reason or the nearest name of each, for what `function` does not take."""

    def shown(name: str, value: bool | None) -> str:
        if name in known:
            return name if value is None else f"{name}={value}"
        return f"{_in_flags(name, value)} of triptych serve"

    def hint(name: str) -> str:
        sentence = _ARGUMENTS.get(name) or _sentence_about(name, known, shown)
        return _hint(sentence, name, known)

    unknown = [name for name in names if name not in known]
    if len(unknown) == 1:
        raise TypeError(f"{function} takes no argument {unknown[0]}{hint(unknown[0])}")
    if unknown:
        lines = [f"  {name}{hint(name)}" for name in unknown]
        raise TypeError("\n".join([f"{function} takes none of these arguments:", *lines]))


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


def with_attribute_hints(**hints: str) -> Callable[[type[_T]], type[_T]]:
    """A class whose AttributeErrors explain names of vLLM, by the end of the error, or name the nearest."""

    def decorate(cls: type[_T]) -> type[_T]:
        public = [name for name in dir(cls) if _is_public(name)]

        def refuse(self: _T, name: str) -> NoReturn:
            hint = _hint(hints.get(name, ""), name, public) if _is_public(name) else ""
            raise AttributeError(f"{cls.__name__!r} has no attribute {name!r}{hint}", name=name, obj=self)

        setattr(cls, "__getattr__", refuse)  # noqa: B010  mypy would take every attribute for one of the class.
        return cls

    return decorate


def _is_public(name: str) -> bool:
    return not name.startswith("_")


# Variables in the environment: none has an effect, and a key without one leaves a server open.

_VARIABLE_PREFIX = "VLLM_"
_API_KEY = "VLLM_API_KEY"
_CREDENTIALS = "TRIPTYCH_API_KEY, or a file of keys with --api-keys"

_VARIABLES: Mapping[str, str] = {
    _API_KEY: "TRIPTYCH_API_KEY",
    "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_CONFIGURE_LOGGING": "--log-level, --log-format",
    "VLLM_LOGGING_CONFIG_PATH": "--log-level, --log-format",
    "VLLM_HOST_IP": "--host",
    "VLLM_PORT": "--port",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory",
    "VLLM_CPU_OMP_THREADS_BIND": "--num-threads",
    "VLLM_TORCH_PROFILER_DIR": "--profile-dir",
    "VLLM_PLUGINS": "--plugins",
    "VLLM_BATCH_INVARIANT": "--deterministic",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "--count-nan-logits",
    "VLLM_ENGINE_READY_TIMEOUT_S": "--startup-timeout-s",
    "VLLM_CACHE_ROOT": "HF_HOME",
    "VLLM_ASSETS_CACHE": "HF_HOME",
    "VLLM_DP_SIZE": "--data-parallel-size",
    "VLLM_TRACE_FUNCTION": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "VLLM_NO_USAGE_STATS": "none are sent",
    "VLLM_DO_NOT_TRACK": "no usage is sent",
    "VLLM_ATTENTION_BACKEND": "kernels are chosen by device",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "a length beyond the model's is refused",
}


def variables_warning(variables: Mapping[str, str], *, has_credentials: bool | None) -> str:
    """A line that lists the variables of vLLM that are set, each with its replacement; "" without any.

    has_credentials: whether clients need them; None: of a service that clients do not call. Raises
    ConfigError for a key where clients need none.
    """
    names = sorted(name for name, text in variables.items() if name.startswith(_VARIABLE_PREFIX) and text)
    if _API_KEY in names and has_credentials is False:
        raise ConfigError(
            f"{_API_KEY} is set, which is not read here: anyone could call the server. Set {_CREDENTIALS}, "
            f"or unset {_API_KEY} to serve without a key"
        )
    if not names:
        return ""
    shown = [f"{name} ({hint})" if (hint := _VARIABLES.get(name)) else name for name in names]
    return f"variables of vLLM have no effect here: {', '.join(shown)}"
