"""Variables of vLLM in the environment: none has an effect, and a key without one leaves a server open."""

from __future__ import annotations

from collections.abc import Mapping

from triptych_kit.config import ConfigError

_PREFIX = "VLLM_"
_API_KEY = "VLLM_API_KEY"
_CREDENTIALS = "TRIPTYCH_API_KEY, or a file of keys with --api-keys"
_HUB = "HF_HOME"

_REPLACEMENTS: Mapping[str, str] = {
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
    "VLLM_CACHE_ROOT": _HUB,
    "VLLM_ASSETS_CACHE": _HUB,
    "VLLM_DP_SIZE": "--data-parallel-size",
    "VLLM_TRACE_FUNCTION": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "VLLM_NO_USAGE_STATS": "none are sent",
    "VLLM_DO_NOT_TRACK": "no usage is sent",
    "VLLM_ATTENTION_BACKEND": "kernels are chosen by device",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "a length beyond the model's is refused",
}


def warning_of(variables: Mapping[str, str], *, has_credentials: bool | None) -> str:
    """A line that lists the variables of vLLM that are set, each with its replacement; "" without any.

    has_credentials: whether clients need them; None: of a service that clients do not call. Raises
    ConfigError for a key where clients need none.
    """
    names = sorted(name for name, text in variables.items() if name.startswith(_PREFIX) and text)
    if _API_KEY in names and has_credentials is False:
        raise ConfigError(
            f"{_API_KEY} is set, which is not read here: anyone could call the server. Set {_CREDENTIALS}, "
            f"or unset {_API_KEY} to serve without a key"
        )
    if not names:
        return ""
    shown = [f"{name} ({hint})" if (hint := _REPLACEMENTS.get(name)) else name for name in names]
    return f"variables of vLLM have no effect here: {', '.join(shown)}"
