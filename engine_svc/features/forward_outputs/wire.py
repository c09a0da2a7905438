"""Reads what an ADD asks for of its forwards, and writes it into the rows of a step."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.forward_outputs.extras import ITEM_BYTES, ForwardOutputs, ForwardOutputSpec
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, step_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented
from triptych_kit.field_checks import check

_FIELDS = ("return_hidden_states", "return_routed_experts")


def make(config: EngineConfig) -> WireFeature:
    return ForwardOutputsOfAdd(config.max_forward_output_bytes)


class ForwardOutputsOfAdd(WireFeature):
    """max_bytes: of one request; 0: none may ask."""

    fields = _FIELDS
    writes = ForwardOutputs

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        asked = [name for name in _FIELDS if getattr(entry, name)]
        if not asked:
            return None
        facts, (num_layers, num_chosen) = context.facts, context.facts.expert_choices
        if not self._max_bytes:
            raise _unserved(asked[0], "the engine runs without --max-forward-output-bytes")
        if entry.return_hidden_states and not facts.state_size:
            raise _unserved("return_hidden_states", "this model does not report its hidden states")
        if entry.return_routed_experts and not num_layers:
            raise _unserved("return_routed_experts", "this model does not report the experts it chooses")
        if not entry.HasField("sampling"):
            raise InvalidArgument(f"{asked[0]} is true, must be false without sampling", field=asked[0])
        most = entry.sampling.max_tokens if entry.sampling.HasField("max_tokens") else facts.max_model_len
        num_positions = min(len(context.token_ids) + most, facts.max_model_len)
        num_items = (facts.state_size if entry.return_hidden_states else 0) + (
            num_layers * num_chosen if entry.return_routed_experts else 0
        )
        num_bytes = num_positions * num_items * ITEM_BYTES
        check(
            num_bytes <= self._max_bytes,
            asked[0],
            num_bytes,
            f"at most {self._max_bytes} bytes for the prompt and max_tokens together",
        )
        # There are none of positions that are not computed.
        return Parsed(
            ForwardOutputSpec(entry.return_hidden_states, entry.return_routed_experts),
            skips_reading_prefix_cache=True,
        )

    def write(self, step: step_pb2.Step, row: int, extra: ForwardOutputs, now: float) -> None:
        for run in extra.runs:
            first, count = run.first_position, run.num_positions
            if run.hidden_states:
                size = len(run.hidden_states) // (count * ITEM_BYTES)
                tensor = tensor_pb2.Tensor(
                    dtype=tensor_pb2.D_TYPE_FP32, shape=(count, size), inline=run.hidden_states
                )
                step.extras.add(row=row, first_position=first, hidden_states=tensor)
            if run.routed_experts:
                size = len(run.routed_experts) // (count * run.num_layers * ITEM_BYTES)
                tensor = tensor_pb2.Tensor(
                    dtype=tensor_pb2.D_TYPE_INT32,
                    shape=(count, run.num_layers, size),
                    inline=run.routed_experts,
                )
                step.extras.add(row=row, first_position=first, routed_experts=tensor)


def _unserved(field: str, why: str) -> Unimplemented:
    return Unimplemented(
        f"not served: {field} ({why})", reason="PARAMETER_NOT_SERVED", metadata={"fields": field}
    )
