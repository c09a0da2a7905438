"""The protocol of a request option, and what all options share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from frontend_svc.engines.routing.engine_info import EngineNeed
from frontend_svc.output.logprobs import LogprobReader
from frontend_svc.output.request_state import OutputReader
from frontend_svc.parsers.registry import reasoning_parser
from frontend_svc.tensors.wire_tensor import WireTensor
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.tokenize.token_text import TokenTexts
from triptych.api.v1 import chat_message_pb2, generate_pb2, model_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import Unimplemented

# Both have the same fields for sampling and placement.
AnyRequest: TypeAlias = "generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest"


@dataclass(slots=True)
class PreparedPrompt:
    """The prompt of a checked request, which options complete.

    field_name: of the request, for violations.
    context_ids: the tokens that the text of the output follows; all of `token_ids`, unless some positions
    are no tokens.
    texts: of tokens; None if the request wants no text.
    tensors: the ADDs refer to them by digest. No other frontend can continue a request that has some.
    first: is merged into the ADD of the first output of a sampling group, and of no other.
    opens_reasoning: whether the prompt ends within the model's reasoning.
    may_open_reasoning: whether the model may open it in the output.
    constrained_after: the tokens of the output behind which its constraint begins; (): with the first.
    constrained_unless: the tokens at its beginning without which it begins there.
    served_as: the model's name in answers, if it is not its own.
    slot: the digest of the variant that an engine should have in a slot.
    needs: what an engine must have beside what the request alone says.
    client_fields: names of the client for fields of the ADD that an engine may refuse, where they differ.
    session_id: of requests that should be at one engine, where the request has none itself.
    scoped: makes of a name of the client's one that no other tenant means.
    hint_of: what the engine gets to know of an output that has ended by itself, from the name of the first
    tool that it calls; "": it calls none; None: not known. None: nothing.
    is_computed_whole: whether the answer needs the computation of each position, kept or not.
    """

    field_name: str
    model: ServedModel
    token_ids: list[int]
    context_ids: list[int]
    texts: TokenTexts | None
    tensors: list[WireTensor] = field(default_factory=list)
    first: add_pb2.AddEntry = field(default_factory=add_pb2.AddEntry)
    opens_reasoning: bool = False
    may_open_reasoning: bool = False
    constrained_after: tuple[int, ...] = ()
    constrained_unless: tuple[int, ...] = ()
    served_as: str = ""
    slot: str = ""
    needs: list[EngineNeed] = field(default_factory=list)
    client_fields: dict[str, str] = field(default_factory=dict)
    session_id: str = ""
    scoped: Callable[[str], str] = str
    hint_of: Callable[[str | None], session_pb2.FinishHint] | None = None
    is_computed_whole: bool = False


class RequestOption(Protocol):
    """One thing that a client can ask for: how it is checked, sent and read back. Keeps no state of requests.

    fields: of the public request, each of exactly one option. A set field that neither the core nor an
    option has is refused.
    check: adds violations of rules over several fields, as those of one field are in the contract. Raises
    Unimplemented for what the model's engines do not serve.
    prepare: completes the prompt and the ADD that all outputs have in common, once per request. Raises
    InvalidArgument or Unimplemented.
    prepare_pooling: the same once for all prompts of a pooling request, whose field `model` is `model_name`;
    its other fields are of no option. The prompt has no tokens.
    need: what an engine must have for the request.
    describe: adds to the card of a model what its engines serve.
    token_reader: for what comes with each token of output `index`. reader: for what comes beside tokens.
    """

    fields: Sequence[str]

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        return

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        return

    def prepare_pooling(self, model_name: str, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        return

    def need(self, request: AnyRequest) -> EngineNeed | None:
        return None

    def describe(self, model: ServedModel, card: model_pb2.Model) -> None:
        return

    def token_reader(self, request: AnyRequest, prompt: PreparedPrompt) -> LogprobReader | None:
        return None

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        return None


async def add_reasoning_markers(field: str, model: ServedModel, entry: add_pb2.AddEntry) -> None:
    """Add the tokens around the model's reasoning, which `field` needs. Raises Unimplemented."""
    reasoning = reasoning_parser(model.parsers.reasoning)
    if reasoning is None:
        raise Unimplemented(
            f"{field}: no reasoning parser is known for model {model.name!r}",
            reason="PARAMETER_NOT_SERVED",
            metadata={"fields": field},
        )
    opening, closing = reasoning.block
    encode, markers = model.tokenizer.encode, entry.reasoning_options
    markers.start_token_ids[:] = await encode(opening, add_special_tokens=False)
    markers.end_token_ids[:] = await encode(closing, add_special_tokens=False)
