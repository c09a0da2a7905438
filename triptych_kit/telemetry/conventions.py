"""Names of attributes by OpenTelemetry's semantic conventions, and of our own. No other module spells them.

`gen_ai.*`: open-telemetry/semantic-conventions-genai at 002c8a6ea1c8 (2026), docs/gen-ai/gen-ai-spans.md, the
span `gen_ai.inference.client`, status Development. It names no span of a server or an engine. That of our
engine has vLLM's name and attributes (`SpanAttributes` of vllm/tracing) beside those of the conventions that
fit. `rpc.*`, `server.*`, `error.type`: open-telemetry/semantic-conventions, docs/rpc, release candidate. The
Python package has the older names too, hence this list. Nothing here holds content: neither prompts nor
outputs nor stop strings.
"""

from __future__ import annotations

CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"  # values of OPERATION_NAME
PROVIDER = "triptych"  # value of PROVIDER_NAME
GRPC = "grpc"  # value of RPC_SYSTEM_NAME

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
OUTPUT_TYPE = "gen_ai.output.type"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
USAGE_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# vLLM's, of a span of an engine.
REQUEST_ID_OF_VLLM = "gen_ai.request.id"
REQUEST_N = "gen_ai.request.n"
USAGE_NUM_SEQUENCES = "gen_ai.usage.num_sequences"
USAGE_PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
USAGE_COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
LATENCY_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_INFERENCE = "gen_ai.latency.time_in_model_inference"
LATENCY_END_TO_END = "gen_ai.latency.e2e"

RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"  # package.Service/Method
RPC_STATUS_CODE = "rpc.response.status_code"  # a name
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

REQUEST_ID = "triptych.request_id"
ENGINE = "triptych.engine"
OUTPUT_INDEX = "triptych.output_index"
ATTEMPT = "triptych.attempt"
ERROR_REASON = "triptych.error_reason"
CAUSE = "triptych.cause"
FROM_ENGINE = "triptych.from"
TO_ENGINE = "triptych.to"
NUM_OUTPUT_TOKENS = "triptych.num_output_tokens"
NUM_PREEMPTIONS = "triptych.num_preemptions"
NUM_MIGRATIONS = "triptych.num_migrations"
NUM_DRAFT_TOKENS = "triptych.num_draft_tokens"
NUM_ACCEPTED_DRAFT_TOKENS = "triptych.num_accepted_draft_tokens"
NUM_DROPPED_SPANS = "triptych.num_dropped_spans"
BUSY_US = "triptych.busy_us"
QUEUE_US = "triptych.queue_us"
ACCOUNT = "triptych.account"  # a tenant, or a key without one
OPERATION_ID = "triptych.operation_id"
GROUP = "triptych.dp_group"
OLD_SIZE = "triptych.old_size"
NEW_SIZE = "triptych.new_size"
STATE = "triptych.state"
