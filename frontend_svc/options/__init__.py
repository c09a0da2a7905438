"""Options of requests: one file each, and the list of them, whose order is that of application.

An option that changes the prompt comes first, as the others are checked against it.
"""

from __future__ import annotations

from frontend_svc.options.adapter import Adapter
from frontend_svc.options.forward_outputs import FORWARD_OUTPUTS
from frontend_svc.options.job import Job
from frontend_svc.options.logprobs import SampledLogprobs
from frontend_svc.options.option import RequestOption
from frontend_svc.options.passed_on import PassedOn
from frontend_svc.options.penalties import Penalties
from frontend_svc.options.prompt_embeddings import PromptEmbeddings
from frontend_svc.options.prompt_logprobs import PromptLogprobs
from frontend_svc.options.sampling_limits import SamplingLimits
from frontend_svc.options.structured_output import StructuredOutput
from frontend_svc.options.thinking_budget import ThinkingBudget
from frontend_svc.options.token_rules import TokenRules

OPTIONS: tuple[RequestOption, ...] = (
    PromptEmbeddings(),
    Adapter(),
    Job(),
    SamplingLimits(),
    PassedOn(),
    Penalties(),
    SampledLogprobs(),
    PromptLogprobs(),
    TokenRules(),
    StructuredOutput(),
    ThinkingBudget(),
    *FORWARD_OUTPUTS,
)
