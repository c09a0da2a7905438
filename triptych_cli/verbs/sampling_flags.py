"""Flags of sampling parameters: the contract's fields with plain values, their help from its comments."""

from __future__ import annotations

import functools
import inspect
import re
from importlib import resources
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from triptych.common.v1 import sampling_pb2
from triptych_kit.plain_fields import plain_fields
from triptych_kit.rules import rules_of

# Groups of the help. A parameter without a group here is a rule.
RULES, OUTPUT = "Penalties and rules", "Output"
_COMMON = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "stop_token_ids"})
_OF_OUTPUT = frozenset({
    "include_stop_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
    "logprobs", "prompt_logprobs", "logprob_token_ids", "stream_interval",
})  # fmt: skip
_FORMS = {"list[str]": "; repeatable", "list[int]": ", written 1,2,3"}
_FIELD = re.compile(r"((?: *//.*\n)+) *(?:optional |repeated )?\w+ (\w+) = \d+")


@functools.cache
def sampling_flags(names: frozenset[str] | None = None) -> list[TyperOption]:
    """The options of the command line, in the contract's order; `names`: these alone."""
    sentences = _sentences()
    parameters = []
    for name, kind in plain_fields(sampling_pb2.SamplingParams).items():
        if names is not None and name not in names:
            continue
        form = str(kind)
        unset = rules_of(sampling_pb2.SamplingParams, name).unset
        group = None if name in _COMMON else OUTPUT if name in _OF_OUTPUT else RULES
        option = typer.Option(
            help=f"{sentences[name]}{_FORMS.get(form, '')}; unset: {unset}", rich_help_panel=group
        )
        # Ids are written 1,2,3 as those of a prompt are.
        annotation: Any = list[str] if form in _FORMS else kind
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[annotation | None, option],
            )
        )

    def flags() -> None:
        """The carrier of the signature."""

    setattr(flags, "__signature__", inspect.Signature(parameters))  # noqa: B010  mypy refuses the assignment.
    flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    carrier = typer.Typer(add_completion=False)
    carrier.command()(flags)
    return list(typer.main.get_command(carrier).params)  # type: ignore[arg-type]


def _sentences() -> dict[str, str]:
    """The first sentence of each parameter's comment, without its name."""
    text = resources.files("triptych.common.v1").joinpath("sampling.proto").read_text()
    message = text.partition("message SamplingParams {")[2].partition("\n}\n")[0]
    sentences = {}
    for comment, name in _FIELD.findall(message):
        words = " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
        sentence = words.partition(". ")[0].removesuffix(".")
        sentences[name] = re.sub(rf"^{name} (is |are )?", "", sentence)
    return sentences
