"""Streams of clients compared with an undisturbed run: errors, gaps, repeats, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from benchmarks.rig.streams import StreamRecord
from triptych.common.v1 import output_pb2

_MIN_DISTINCT_IDS = 20


@dataclass(slots=True)
class OutputSeen:
    """One output put together again. What its logprobs say is compared to the last bit."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    top: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    reason: int = output_pb2.FINISH_REASON_UNSPECIFIED
    stop_match: str = ""
    num_completion_tokens: int = 0
    num_finished: int = 0
    is_incomplete: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise that a stream broke: what kind of promise, and how."""

    request_id: str
    kind: str  # error, order, end or content
    text: str

    def __str__(self) -> str:
        return f"{self.request_id}: {self.kind}: {self.text}"


def outputs_of(record: StreamRecord) -> list[OutputSeen]:
    outputs = [OutputSeen() for _ in range(record.case.num_outputs)]
    for _, event in record.events:
        if event.HasField("delta"):
            _append(outputs[event.delta.output_index], event.delta)
        elif event.HasField("finished"):
            output, finished = outputs[event.finished.output_index], event.finished
            output.reason = finished.reason
            output.stop_match = finished.stop_match.string
            output.num_completion_tokens = finished.usage.num_completion_tokens
            output.is_incomplete = finished.is_incomplete
            output.num_finished += 1
    return outputs


def _append(output: OutputSeen, delta) -> None:
    output.token_ids += delta.token_ids
    output.text += delta.text
    logprobs = delta.logprobs
    output.logprobs += zip(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, strict=True)
    output.top += [(tuple(top.token_ids), tuple(top.logprobs)) for top in logprobs.top]


class Oracle:
    """The answer to each case in an undisturbed run."""

    def __init__(self, records: Sequence[StreamRecord]) -> None:
        broken = [violation for record in records for violation in order_violations(record)]
        if broken:
            raise ValueError(f"the undisturbed run is disturbed: {broken[0]}")
        self._outputs = {record.case.key: outputs_of(record) for record in records}
        if len(self.distinct_ids) < _MIN_DISTINCT_IDS:
            raise ValueError(f"only {len(self.distinct_ids)} distinct ids: any two runs would be alike")

    @property
    def distinct_ids(self) -> frozenset[int]:
        outputs = [output for group in self._outputs.values() for output in group]
        return frozenset(token_id for output in outputs for token_id in output.token_ids)

    def expected(self, key: int) -> Sequence[OutputSeen]:
        return self._outputs[key]

    def violations(self, records: Sequence[StreamRecord]) -> list[Violation]:
        """All that is wrong with these streams; none of them is meant to fail."""
        found = []
        for record in records:
            found += order_violations(record) or self._differences(record)
        return found

    def _differences(self, record: StreamRecord) -> list[Violation]:
        found = []
        pairs = zip(outputs_of(record), self.expected(record.case.key), strict=True)
        for index, (seen, expected) in enumerate(pairs):
            if seen != expected:
                text = f"{record.case.kind.value} output {index}: {_difference(seen, expected)}"
                found.append(Violation(record.request_id, "content", text))
        return found


def order_violations(record: StreamRecord) -> list[Violation]:
    """Errors, and events out of their order: positions count from 1, started comes first, an end ends."""
    found = []

    def note(kind: str, text: str) -> None:
        found.append(Violation(record.request_id, kind, text))

    if record.code is not grpc.StatusCode.OK:
        code = "still open" if record.code is None else record.code.name
        note("error", f"{code} {record.details[:200]} after {len(record.events)} messages")
        return found
    ended: set[int] = set()
    for place, (_, event) in enumerate(record.events, start=1):
        kind = event.WhichOneof("event")
        if event.position != place:
            note("order", f"message {place} has position {event.position}")
        if (kind == "started") != (place == 1):
            note("order", f"message {place} is {kind}")
        if kind in ("delta", "finished"):
            index = (event.delta if kind == "delta" else event.finished).output_index
            if index in ended:
                note("order", f"{kind} of output {index} after its end")
            if kind == "finished":
                ended.add(index)
    if len(ended) != record.case.num_outputs:
        note("end", f"{len(ended)} of {record.case.num_outputs} outputs have an end")
    return found


def count_kinds(violations: Sequence[Violation]) -> Mapping[str, int]:
    """How many streams broke which kind of promise."""
    kinds = sorted({violation.kind for violation in violations})
    return {kind: len({each.request_id for each in violations if each.kind == kind}) for kind in kinds}


def num_repeats(records: Sequence[StreamRecord]) -> int:
    positions = [[event.position for _, event in record.events] for record in records]
    return sum(len(each) - len(set(each)) for each in positions)


def _difference(seen: OutputSeen, expected: OutputSeen) -> str:
    if seen.token_ids != expected.token_ids:
        pairs = enumerate(zip(seen.token_ids, expected.token_ids, strict=False))
        place = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
        lengths = f"{len(seen.token_ids)} ids for {len(expected.token_ids)}"
        return f"{lengths}, the first that differs at {place}"
    for name in OutputSeen.__slots__:
        ours, theirs = getattr(seen, name), getattr(expected, name)
        if ours != theirs:
            return f"{name} is {str(ours)[-120:]!r} instead of {str(theirs)[-120:]!r}"
    return "nothing that is named here"
