"""Messages of an engine to a session, checked against the rules that hold for every message."""

from __future__ import annotations

import struct

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2, session_pb2, step_pb2, utility_pb2
from triptych_conformance.cases import expect
from triptych_kit.errors import ServiceError, from_status


class Record:
    """The messages of one session, over all its streams, and what they say of each handle."""

    def __init__(self) -> None:
        self.ready: session_pb2.Ready | None = None
        self.tokens: dict[int, list[int]] = {}
        self.first: dict[int, step_pb2.StepFirst] = {}
        self.finished: dict[int, step_pb2.StepFinished] = {}
        self.rejected: dict[int, ServiceError] = {}
        self.adopted: dict[int, engine_pb2.Adopted] = {}
        self.already_finished: list[int] = []
        self.results: dict[int, utility_pb2.UtilityResult] = {}
        self.draining: engine_pb2.Draining | None = None
        self.heartbeats: list[session_pb2.Heartbeat] = []
        self.steps: list[step_pb2.Step] = []
        self.size_bytes = 0
        self._messages: list[bytes] = []

    @property
    def last_seq(self) -> int:
        return len(self._messages)

    def begin(self, handle: int) -> None:
        """An ADD uses `handle` for a request, for the first time or again, or for its next turn."""
        for by_handle in (self.first, self.finished, self.rejected, self.adopted):
            by_handle.pop(handle, None)
        self.tokens[handle] = []

    def has_ended(self, *handles: int) -> bool:
        return all(handle in self.finished for handle in handles)

    def take(self, serialized: bytes) -> None:
        """Apply a numbered message; one that was received before must have the same bytes."""
        message = engine_pb2.ConnectResponse.FromString(serialized)
        if message.seq <= self.last_seq:
            expect(
                serialized == self._messages[message.seq - 1],
                f"message {message.seq} sent again with the same bytes",
                "other bytes",
            )
            return
        self._messages.append(serialized)
        self.size_bytes += len(serialized)
        self._apply(message)

    def _apply(self, message: engine_pb2.ConnectResponse) -> None:
        match message.WhichOneof("message"):
            case "hello_ack":
                expect(False, "hello_ack as the first message alone", f"hello_ack as message {message.seq}")
            case "ready":
                self.ready = message.ready
            case "step":
                expect(self.ready is not None, "ready before any step", "a step before ready")
                self.steps.append(message.step)
                self._apply_step(message.step)
            case "add_rejected":
                status = message.add_rejected.status
                error = from_status(status.code, status.message, status.details)
                self._end(message.add_rejected.handle)
                self.rejected[message.add_rejected.handle] = error
            case "already_finished":
                self.already_finished += message.already_finished.handles
            case "adopted":
                self.tokens.setdefault(message.adopted.handle, [])
                self.adopted[message.adopted.handle] = message.adopted
            case "utility_result":
                call_id = message.utility_result.call_id
                expect(call_id not in self.results, f"one result of call {call_id}", "a second one")
                self.results[call_id] = message.utility_result
            case "draining":
                self.draining = message.draining
            case "heartbeat":
                last_seq = message.heartbeat.last_seq
                expected = f"heartbeat.last_seq {message.seq - 1} in message {message.seq}"
                expect(last_seq == message.seq - 1, expected, last_seq)
                self.heartbeats.append(message.heartbeat)

    def _apply_step(self, step: step_pb2.Step) -> None:
        handles, counts, token_ids = _columns(step)
        position = 0
        rows: list[list[int]] = []
        for count in counts:
            rows.append(token_ids[position : position + count])
            position += count
        for first in step.first:
            handle = handles[first.row]
            expect(handle not in self.first, f"one first record of handle {handle}", "a second one")
            self.first[handle] = first
        for handle, tokens in zip(handles, rows, strict=True):
            expect(handle in self.tokens, "rows of requests of this session", f"a row of handle {handle}")
            expect(not (tokens and handle in self.finished), "no tokens after the end", f"handle {handle}")
            is_known = not tokens or handle in self.first or handle in self.adopted
            expect(is_known, "first with the first token at the latest", f"tokens of handle {handle} before")
            self.tokens[handle] += tokens
        for parts in step.parts:
            expected = f"parts of a row that sum to its {len(rows[parts.row])} tokens"
            expect(sum(parts.num_tokens) == len(rows[parts.row]), expected, list(parts.num_tokens))
        for finished in step.finished:
            self._end(handles[finished.row], turn_ended=finished.turn_ended)
            self._check_end(finished, rows[finished.row])
            self.finished[handles[finished.row]] = finished

    def _end(self, handle: int, *, turn_ended: bool = False) -> None:
        """A request ends, or a turn of it, which it may do once more behind its last turn."""
        ended = self.finished.get(handle)
        has_ended = handle in self.rejected or (ended is not None and (turn_ended or not ended.turn_ended))
        expect(not has_ended, f"exactly one end of handle {handle}", "a second one")

    def _check_end(self, finished: step_pb2.StepFinished, tokens: list[int]) -> None:
        known = set(output_pb2.FinishReason.values()) - {output_pb2.FINISH_REASON_UNSPECIFIED}
        expect(finished.reason in known, "a finish reason of the contract", finished.reason)
        stop = finished.WhichOneof("stop")
        if finished.reason != output_pb2.FINISH_REASON_STOP:
            expect(stop is None, "no stop match without reason STOP", stop)
        elif stop in ("stop_token_id", "eos_token_id"):
            stopped_at = getattr(finished, stop)
            expect(tokens[-1:] == [stopped_at], f"{stop} {stopped_at} as the row's last token", tokens[-1:])


def _columns(step: step_pb2.Step) -> tuple[list[int], list[int], list[int]]:
    """Handles, numbers of tokens and token ids, after a check of the lengths of all columns."""
    handles, token_ids = _u32(step.handles, "handles"), _u32(step.token_ids, "token_ids")
    expect(not (step.num_tokens and step.num_tokens_wide), "one of num_tokens and num_tokens_wide", "both")
    counts = _u32(step.num_tokens_wide, "num_tokens_wide") or list(step.num_tokens) or [0] * len(handles)
    expect(len(set(handles)) == len(handles), "a handle at most once in a message", handles)
    expect(len(counts) == len(handles), f"num_tokens of {len(handles)} rows", f"{len(counts)} entries")
    expect(sum(counts) == len(token_ids), f"{sum(counts)} token ids", len(token_ids))
    for name in ("sampled_logprobs", "sampled_ranks"):
        size = len(getattr(step, name))
        expect(size in (0, 4 * len(token_ids)), f"{name} of {len(token_ids)} tokens", f"{size} bytes")
    top_sizes = [len(step.top_logprobs.token_ids), len(step.top_logprobs.logprobs)]
    expected_size = 4 * step.top_logprobs.k * len(token_ids)
    expect(top_sizes == [expected_size] * 2, f"top_logprobs columns of {expected_size} bytes", top_sizes)
    of_rows = (step.finished, step.first, step.parts, step.extras, step.events)
    rows = [each.row for sparse in of_rows for each in sparse]
    expect(all(row < len(handles) for row in rows), f"rows below {len(handles)}", rows)
    return handles, counts, token_ids


def _u32(column: bytes, name: str) -> list[int]:
    expect(len(column) % 4 == 0, f"{name} as a column of u32", f"{len(column)} bytes")
    return list(struct.unpack(f"<{len(column) // 4}I", column))
