"""Responses that can be read and continued later, in the memory of this process, up to a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend_svc.protocols.openai.bodies import Message, encode
from triptych_kit.errors import NotFound


class StoredResponse:
    """A response as JSON, and the messages of its turn; those before it are in what it continues.

    One that was removed is kept as long as a later one continues it, without its body.

    num_inputs: how many of the messages are its input; the others are its output.
    """

    def __init__(
        self,
        body: dict[str, Any],
        messages: Sequence[Message],
        previous: StoredResponse | None,
        *,
        num_inputs: int = 0,
    ) -> None:
        self.body: bytes = encode(body)
        self.previous = previous
        self.num_message_bytes = len(encode(messages))
        before = 0 if previous is None else previous.num_conversation_bytes
        self.num_conversation_bytes: int = before + self.num_message_bytes
        self.num_continuations = 0
        self.is_listed = False
        self._messages, self._num_inputs = messages, num_inputs

    @property
    def is_counted(self) -> bool:
        """Whether the bytes of its messages are among those of the store."""
        return self.is_listed or self.num_continuations > 0

    def input_messages(self) -> list[Message]:
        """The messages that it answers, those of earlier turns included."""
        before = [] if self.previous is None else self.previous.conversation()
        return [*before, *self._messages[: self._num_inputs]]

    def conversation(self) -> list[Message]:
        """The messages of all turns, oldest first."""
        turns = []
        turn: StoredResponse | None = self
        while turn is not None:
            turns.append(turn._messages)
            turn = turn.previous
        return [message for messages in reversed(turns) for message in messages]


class ResponseStore:
    """Responses by owner and id.

    Beyond the limits, which are of all owners together, the oldest of the owner that has most are removed.
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._owners: dict[str, _Owned] = {}

    def __len__(self) -> int:
        return sum(len(owned.listed) for owned in self._owners.values())

    @property
    def num_bytes(self) -> int:
        return sum(owned.num_bytes for owned in self._owners.values())

    def get(self, owner: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """Raises NotFound for an id that is unknown, removed, another owner's or another process's."""
        owned = self._owners.get(owner)
        response = None if owned is None else owned.listed.get(response_id)
        if response is None:
            raise NotFound(
                f"{field} {response_id!r:.80} is not known here: a frontend keeps its last"
                f" {self._max_responses} responses in {self._max_bytes} bytes, and not beyond its end",
                resource_type="response",
                resource_name=response_id,
                reason=f"{field.removesuffix('_id')}_NOT_FOUND".upper(),
                metadata={"field": field},
            )
        return response

    def add(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Keep it, and remove others until all fit.

        One that does not fit alone, with the conversation before it, is not kept.
        """
        if len(response.body) + response.num_conversation_bytes > self._max_bytes:
            return
        self._owners.setdefault(owner, _Owned()).add(response_id, response)
        while len(self) > self._max_responses:
            self._remove_oldest(max(self._owners, key=lambda name: len(self._owners[name].listed)))
        while self.num_bytes > self._max_bytes:
            self._remove_oldest(max(self._owners, key=lambda name: self._owners[name].num_bytes))

    def delete(self, owner: str, response_id: str) -> None:
        """Raises NotFound as `get` does. Later responses keep the turn in their conversation."""
        self.get(owner, response_id)
        self._remove(owner, response_id)

    def _remove_oldest(self, owner: str) -> None:
        self._remove(owner, next(iter(self._owners[owner].listed)))

    def _remove(self, owner: str, response_id: str) -> None:
        owned = self._owners[owner]
        owned.remove(response_id)
        if not owned.listed:
            del self._owners[owner]


class _Owned:
    """The responses of one owner, oldest first, and what they count for."""

    def __init__(self) -> None:
        self.listed: dict[str, StoredResponse] = {}
        self.num_bytes = 0

    def add(self, response_id: str, response: StoredResponse) -> None:
        self.listed[response_id] = response
        response.is_listed = True
        self.num_bytes += len(response.body) + response.num_message_bytes
        turn, is_counted = response.previous, False
        while turn is not None and not is_counted:
            # What was removed while it was being continued is counted again.
            is_counted = turn.is_counted
            self.num_bytes += 0 if is_counted else turn.num_message_bytes
            turn.num_continuations += 1
            turn = turn.previous

    def remove(self, response_id: str) -> None:
        removed = self.listed.pop(response_id)
        removed.is_listed = False
        self.num_bytes -= len(removed.body)
        removed.body = b""
        turn: StoredResponse | None = removed
        while turn is not None and not turn.is_counted:
            self.num_bytes -= turn.num_message_bytes
            turn = turn.previous
            if turn is not None:
                turn.num_continuations -= 1
