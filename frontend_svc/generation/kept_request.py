"""The request of a generate session in an engine, which may keep it with its KV between two turns."""

from __future__ import annotations

from frontend_svc.engines.connection.client import EngineClient
from frontend_svc.generation.preprocess import Prepared
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.tokenize.id_column import id_column
from triptych.engine.v1 import add_pb2

# What may differ from one ADD of a request to the next.
_OF_A_TURN = (
    "handle", "request_id", "attempt", "segment", "resumable", "prompt_token_ids", "output_token_ids",
    "sampling", "age_ms", "remaining_ms", "trace_context",
)  # fmt: skip


class KeptRequest:
    """Where the tokens of a session are. A turn that does not continue them opens another request.

    Call `sent` with each ADD, `end_turn` when a turn has ended, and `close` when no other follows.
    """

    def __init__(self) -> None:
        self._client: EngineClient | None = None
        self._entry = add_pb2.AddEntry()  # that was sent last
        self._num_tokens = 0  # that the engine has: all but the last, which it does not compute
        self.is_cancelled = False  # the turn

    def engine_for(self, prepared: Prepared) -> EngineClient | None:
        """The engine that keeps all tokens before the new ones of a turn; None: there is none."""
        client, prompt = self._client, prepared.prompt
        if client is None or not client.requests.is_idle(self._entry.handle):
            return None
        has_new = len(prompt.token_ids) > self._num_tokens
        is_same = _of_all_turns(prepared.entries[0]) == _of_all_turns(self._entry)
        return client if has_new and is_same and not prompt.is_computed_whole else None

    def continue_with(self, entry: add_pb2.AddEntry, prepared: Prepared) -> add_pb2.AddEntry:
        """The input segment that `entry`, an ADD of the whole context, is in the kept request."""
        segment = add_pb2.AddEntry()
        segment.CopyFrom(entry)
        segment.handle, segment.request_id = self._entry.handle, self._entry.request_id
        segment.attempt, segment.segment = self._entry.attempt, self._entry.segment + 1
        segment.prompt_token_ids = id_column(prepared.prompt.token_ids[self._num_tokens :])
        return segment

    def sent(self, client: EngineClient, entry: add_pb2.AddEntry) -> None:
        """A turn has begun at an engine; the request of another that was kept ends."""
        if (client, entry.handle) != (self._client, self._entry.handle):
            self.close()
        self._client, self._entry = client, entry

    def cancel_turn(self) -> bool:
        """End the turn that was sent last with its next token; False: its engine only ends whole requests."""
        if self._client is None or not self._entry.resumable:
            return False
        self.is_cancelled = True
        self._client.requests.cancel_turn(self._entry.handle, self._entry.segment)
        return True

    def end_turn(self, num_prompt_tokens: int, state: RequestState) -> None:
        """The turn of `state` has ended."""
        # Behind a stop string the engine may have tokens that the client does not have.
        is_cut = state.ending is None or state.ending.stop_string is not None or not state.num_output_tokens
        if is_cut:
            self.close()
        self.is_cancelled = False
        self._num_tokens = num_prompt_tokens + state.num_output_tokens - 1

    def close(self) -> None:
        """End the request if the engine keeps it."""
        if self._client is not None:
            self._client.requests.close(self._entry.handle)
        self._client = None


def _of_all_turns(entry: add_pb2.AddEntry) -> add_pb2.AddEntry:
    common = add_pb2.AddEntry()
    common.CopyFrom(entry)
    for name in _OF_A_TURN:
        common.ClearField(name)
    return common
