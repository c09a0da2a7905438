"""The formats by name, and the detection of a model's format from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from frontend_svc.parsers.deepseek import DEEPSEEK, DEEPSEEK_V31
from frontend_svc.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from frontend_svc.parsers.hermes import HERMES
from frontend_svc.parsers.llama3_json import LLAMA3_JSON
from frontend_svc.parsers.mistral import MISTRAL, MISTRAL_ARGS
from frontend_svc.parsers.parser import ReasoningFormat, ToolParserFormat
from frontend_svc.parsers.pythonic import PYTHONIC
from frontend_svc.parsers.think import MISTRAL_THINK, THINK

# Values of options: no parser, and the one that fits the model's chat template.
NONE = "none"
AUTO = "auto"

_TOOL_FORMATS: tuple[ToolParserFormat, ...] = (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    DEEPSEEK,
    DEEPSEEK_V31,
    GPT_OSS,
)
_REASONING_FORMATS: tuple[ReasoningFormat, ...] = (THINK, MISTRAL_THINK, GPT_OSS_REASONING)

# Parsers of vLLM that read the same formats under other names.
_TOOL_PARSERS_OF_VLLM = {
    "deepseek_v3": DEEPSEEK.name,
    "llama4_json": LLAMA3_JSON.name,
    "llama4_pythonic": PYTHONIC.name,
    "openai": GPT_OSS.name,
}
_REASONING_PARSERS_OF_VLLM = {
    "deepseek_r1": THINK.name,
    "mistral": MISTRAL_THINK.name,
    "openai_gptoss": GPT_OSS_REASONING.name,
    "qwen3": THINK.name,
}

# The format of demanded calls of a model that has none of its own: a grammar has it write them.
DEMANDED_CALLS: ToolParserFormat = LLAMA3_JSON

TOOL_PARSERS: Mapping[str, ToolParserFormat] = MappingProxyType({each.name: each for each in _TOOL_FORMATS})
REASONING_PARSERS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {each.name: each for each in _REASONING_FORMATS}
)


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Names of the parsers for a model's output. Raises ValueError for an unknown name."""

    tool: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        if self.tool != AUTO:
            tool_parser(self.tool)
        if self.reasoning != AUTO:
            reasoning_parser(self.reasoning)

    def resolved(self, chat_template: str, vocabulary_has: Callable[[str], bool]) -> ParserNames:
        """A copy with "auto" replaced by the names that fit `chat_template`."""
        tool, reasoning = detect(chat_template, vocabulary_has)
        return ParserNames(
            (tool or NONE) if self.tool == AUTO else self.tool,
            (reasoning or NONE) if self.reasoning == AUTO else self.reasoning,
        )


def tool_parser(name: str) -> ToolParserFormat | None:
    """The tool call format with this name; None for "none". Raises ValueError for an unknown name."""
    if name == NONE:
        return None
    if name not in TOOL_PARSERS:
        raise _unknown(name, "tool_parser", _TOOL_PARSERS_OF_VLLM, TOOL_PARSERS)
    return TOOL_PARSERS[name]


def reasoning_parser(name: str) -> ReasoningFormat | None:
    """The reasoning format with this name; None for "none". Raises ValueError for an unknown name."""
    if name == NONE:
        return None
    if name not in REASONING_PARSERS:
        raise _unknown(name, "reasoning_parser", _REASONING_PARSERS_OF_VLLM, REASONING_PARSERS)
    return REASONING_PARSERS[name]


def _unknown(name: str, option: str, of_vllm: Mapping[str, str], known: Iterable[str]) -> ValueError:
    if own := of_vllm.get(name):
        return ValueError(f"{option} is {name!r}, which is {own!r} here")
    return ValueError(f"{option} is {name!r}, must be one of {', '.join((AUTO, NONE, *known))}")


def detect(chat_template: str, vocabulary_has: Callable[[str], bool]) -> tuple[str | None, str | None]:
    """The names of the tool parser and the reasoning parser that fit a template; None if none is known.

    vocabulary_has: whether a text is a single token, which the markers of some formats always are.
    """
    return _detect_tools(chat_template, vocabulary_has), _detect_reasoning(chat_template, vocabulary_has)


def _detect_tools(template: str, vocabulary_has: Callable[[str], bool]) -> str | None:
    if "<|channel|>" in template and vocabulary_has("<|channel|>"):
        return GPT_OSS.name
    if "<｜tool▁calls▁begin｜>" in template:
        # V3 and R1 put the arguments into a code fence.
        return DEEPSEEK.name if "```json" in template else DEEPSEEK_V31.name
    if "[TOOL_CALLS]" in template and vocabulary_has("[TOOL_CALLS]"):
        return MISTRAL_ARGS.name if "[ARGS]" in template else MISTRAL.name
    if "<tool_call>" in template:
        # Other families put other things between the same tags.
        return None if "<function=" in template or "<arg_key>" in template else HERMES.name
    if "[func_name1(" in template:
        return PYTHONIC.name
    if "<|python_tag|>" in template or ('"parameters": ' in template and '{"name": ' in template):
        return LLAMA3_JSON.name
    return PYTHONIC.name if "<|python_start|>" in template else None


def _detect_reasoning(template: str, vocabulary_has: Callable[[str], bool]) -> str | None:
    if "<|channel|>" in template and vocabulary_has("<|channel|>"):
        return GPT_OSS_REASONING.name
    if "[THINK]" in template and vocabulary_has("[THINK]"):
        return MISTRAL_THINK.name
    return THINK.name if "</think>" in template else None
