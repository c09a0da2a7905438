"""One request as the engine sees it: its tokens, its place in the life cycle, its blocks, its times.

Knows no tensors, no wire and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from engine_svc.core.prompt_embeds import PromptEmbeds
from engine_svc.core.sampling_params import SamplingParams


class InvalidTransition(RuntimeError):
    """A request was moved to a status that its present one does not lead to: a bug of ours."""


class RequestStatus(Enum):
    """Where a request is in its life."""

    BLOCKED = "blocked"  # has names in `blockers`, or has not been added yet; so is one between two turns
    WAITING = "waiting"  # may be admitted; a preempted request waits again
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.BLOCKED: frozenset({RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.WAITING: frozenset({RequestStatus.BLOCKED, RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.BLOCKED, RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Timeline:
    """When things happened to a request, in seconds of the engine's clock. None: not yet."""

    queued_at: float = 0.0
    scheduled_at: float | None = None  # first admission
    first_token_at: float | None = None
    finished_at: float | None = None
    # Names are scheduled, preempted, resumed, first_token, aborted.
    events: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Places of a prompt whose KV depends on more than token ids, e.g. on what a placeholder stands for."""

    start: int  # index of its first token
    num_tokens: int
    key: str  # equal keys, equal content


@dataclass(frozen=True, slots=True)
class Chunk:
    """More input for a resumable request: its next turn."""

    token_ids: list[int]
    sampling: SamplingParams


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group of layers, in the order of its tokens. The cache keeps it."""

    block_ids: list[int] = field(default_factory=list)  # 0 where no layer of the group will look again
    num_registered: int = 0  # leading blocks that the prefix cache knows
    num_released: int = 0  # leading blocks that were given back while the request runs


@dataclass(slots=True, eq=False)
class Request:
    """One prompt to be continued once; a resumable one is continued turn by turn, by further chunks.

    `token_ids` is prompt, then output; it may start with output where another engine has begun the request,
    so `num_prompt_tokens` alone tells the two apart. The scheduler owns every field below `blockers`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0  # smaller is more urgent
    arrival_at: float = 0.0
    cache_salt: str = ""  # cached blocks are shared only between requests of the same salt
    extra_keys: tuple[str, ...] = ()  # what else its KV depends on as a whole, e.g. changes to the weights
    spans: tuple[ContentSpan, ...] = ()  # in order of their start
    num_encoder_tokens: int = 0  # what cross-attention reads; 0 = nothing
    is_resumable: bool = False  # it waits for a further chunk at the end of a turn
    trace_context: tuple[str, str] = ("", "")  # carried, never read: traceparent, tracestate
    prompt_embeds: PromptEmbeds | None = None  # carried to the runner, never read; `spans` tell what it is
    blockers: set[str] = field(default_factory=set)  # names of what it waits for before it may be admitted

    status: RequestStatus = field(default=RequestStatus.BLOCKED, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    abort_cause: str = field(default="", init=False)  # who or what ended it from outside
    timeline: Timeline = field(init=False)
    draft_token_ids: list[int] = field(default_factory=list, init=False)  # proposed for the next step
    num_computed_tokens: int = field(default=0, init=False)  # with KV, those of steps in flight included
    num_placeholders: int = field(default=0, init=False)  # sampled by a step in flight, value not yet known
    num_cached_tokens: int = field(default=0, init=False)  # prefix hit at the first admission
    num_preemptions: int = field(default=0, init=False)
    resumes_after_step: int = field(default=0, init=False)  # the last in flight when it was preempted
    last_row_sampled: bool = field(default=True, init=False)  # False: its last step ended inside the prompt
    max_num_tokens: int = field(default=0, init=False)  # prompt and output at which it ends by length
    # From this length on every new token is looked at, whatever it is.
    check_from: int = field(default=0, init=False)
    chunks: deque[Chunk] = field(default_factory=deque, init=False)  # that came before their turn
    end_token_ids: frozenset[int] = field(init=False)  # every token that ends it
    order_key: tuple[float, float, str] = field(default=(0.0, 0.0, ""), init=False)  # place among the waiting
    num_uncached_tokens: int = field(default=0, init=False)  # estimated when it began to wait

    block_tables: list[BlockTable] = field(default_factory=list, init=False)  # one a group; [] without blocks
    block_hashes: list[bytes] = field(default_factory=list, init=False)  # of its full blocks, as far as known
    # The cache keeps these three. Up to here tokens can be computed with no block to take or to give back,
    room_until: int = field(default=0, init=False)
    # from here on known tokens fill a block that can be registered,
    registers_at: int = field(default=0, init=False)
    # and up to here neither happens.
    quiet_until: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(queued_at=self.arrival_at)
        self.end_token_ids = self.sampling.end_token_ids

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens behind the prompt, those of an earlier engine included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Change the status along the table of allowed moves."""
        if status not in _TRANSITIONS[self.status]:
            raise InvalidTransition(
                f"request {self.request_id}: {self.status.value} does not lead to {status.value}"
            )
        self.status = status


@dataclass(slots=True)
class RequestOutput:
    """What a step gave one request. Exactly one output of a request, or of a turn of it, has a finish reason:
    the last."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it; None for the end-of-sequence token
    num_cached_tokens: int | None = None  # set in the first output of the request only
    message: str = ""  # for people, what went wrong where it ended by an error
    continues: bool = False  # only the turn ended: the request waits for its next chunk, or has it already
