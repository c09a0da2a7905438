"""A request in the engine: its tokens, status, blocks and times. Knows no tensors, no wire and no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from engine_svc.core.errors import InvalidTransition, RequestFailed
from engine_svc.core.extras import Extras
from engine_svc.core.sampling_params import SamplingParams

# In the place of a stop token, where a verdict and no token ended a request with STOP.
NO_STOP_TOKEN = -1


class RequestStatus(Enum):
    """The status of a request."""

    BLOCKED = "blocked"  # has names in `blockers`, e.g. between two turns, or has not been added yet
    WAITING = "waiting"  # may be admitted, also again after a preemption
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
    """Times of a request in seconds of the engine's clock. None: not yet."""

    queued_at: float = 0.0
    scheduled_at: float | None = None  # first admission
    first_token_at: float | None = None
    finished_at: float | None = None
    # The names are scheduled, preempted, resumed, first_token and aborted.
    events: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions of a prompt whose KV depends on more than token ids, e.g. on an image."""

    start: int  # index of its first token
    num_tokens: int
    key: str  # equal for equal content
    tokens: tuple[int, ...] = ()  # offsets in it, ascending, of positions that have a token of their own


@dataclass(frozen=True, slots=True)
class InputSegment:
    """Further input for a resumable request, which begins its next turn.

    extras, blockers: of the turn, in the place of the request's.  spans: counted from the segment's start.
    """

    token_ids: list[int]
    sampling: SamplingParams
    arrival_at: float | None = None  # that of the request from then on; None: as before
    extras: Extras = field(default_factory=dict)
    blockers: frozenset[str] = frozenset()
    spans: tuple[ContentSpan, ...] = ()


@dataclass(slots=True)
class DraftUse:
    """How many drafts a request had, over all its steps, and what became of them."""

    num_proposed: int = 0  # that were planned for verification
    num_accepted: int = 0

    def add(self, num_proposed: int, num_accepted: int) -> None:
        """Count the drafts of one step."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group of layers, in token order. The cache owns it."""

    block_ids: list[int] = field(default_factory=list)  # 0 where no layer of the group reads again
    num_registered: int = 0  # leading blocks that the prefix cache has
    num_released: int = 0  # leading blocks that were released while the request runs


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a feature ends a request, or its turn, in the step of its newest tokens.

    num_tokens: how many of these count, the others are dropped; None: all.  code, message: with ERROR, which
    ends the whole request.
    """

    reason: FinishReason
    num_tokens: int | None = None
    code: str = ""  # the name of a gRPC status code
    message: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt to be continued once; a resumable request continues with each further input segment.

    `token_ids` is the prompt, then the output. A request that another engine has begun comes with output, so
    only `num_prompt_tokens` separates the two. The scheduler owns every field after `blockers`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0  # smaller is more urgent
    account: str = ""  # whose share it uses
    weight: int = 1  # of the account, relative to others
    job: str = ""  # the agent's run that it is a turn of, unlike that of any tenant; "": none
    arrival_at: float = 0.0
    cache_salt: str = ""  # cached blocks are shared only between requests with the same salt
    extra_keys: tuple[str, ...] = ()  # what else all of its KV depends on, e.g. changes to the weights
    variant: str = ""  # of the model, by a public name, for those that follow the cache; "": the plain one
    spans: tuple[ContentSpan, ...] = ()  # in order of their start
    num_encoder_tokens: int = 0  # that cross-attention reads; 0 = none
    samples: bool = True  # False: it ends when its prompt is computed, without a token
    is_resumable: bool = False  # it waits for a further input segment at the end of a turn
    extras: Extras = field(default_factory=dict)  # of features; passed on to the runner, never read
    blockers: set[str] = field(default_factory=set)  # names of what it waits for before admission

    status: RequestStatus = field(default=RequestStatus.BLOCKED, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    abort_cause: str = field(default="", init=False)  # why it was ended from outside
    timeline: Timeline = field(init=False)
    draft_token_ids: list[int] = field(default_factory=list, init=False)  # proposed for the next step
    drafts: DraftUse | None = field(default=None, init=False)  # None: no draft was verified
    num_computed_tokens: int = field(default=0, init=False)  # with KV, including those of steps in flight
    num_placeholders: int = field(default=0, init=False)  # sampled by steps in flight, values not yet known
    num_cached_tokens: int = field(default=0, init=False)  # with KV at the turn's first admission
    num_chunks: int = field(default=0, init=False)  # planned rows that end inside of its known tokens
    num_preemptions: int = field(default=0, init=False)
    num_lost_tokens: int = field(default=0, init=False)  # once computed, counted from the first; 0: none lost
    resumes_after_step: int = field(default=0, init=False)  # the last step in flight at its preemption
    last_row_sampled: bool = field(default=True, init=False)  # False: its last step ended inside the prompt
    max_num_tokens: int = field(default=0, init=False)  # prompt and output at which it ends by length
    check_from: int = field(default=0, init=False)  # from this length on every new token is checked
    segments: deque[InputSegment] = field(default_factory=deque, init=False)  # that wait for their turn
    is_turn_cancelled: bool = field(default=False, init=False)  # its next token is the last of the turn
    end_token_ids: frozenset[int] = field(init=False)  # every token that ends it
    needs_verdict: bool = field(default=False, init=False)  # set by a feature that may end it
    num_budgets: int = field(default=0, init=False)  # that it spends, of features; they count between steps
    refused_in_step: int = field(default=0, init=False)  # the last in which one of these did not admit it
    verdict: Verdict | None = field(default=None, init=False)  # the newest
    order_key: tuple[float, float, str] = field(default=(0.0, 0.0, ""), init=False)  # in the waiting queue
    num_uncached_tokens: int = field(default=0, init=False)  # estimated when it began to wait

    block_tables: list[BlockTable] = field(default_factory=list, init=False)  # per group; [] without blocks
    block_hashes: list[bytes] = field(default_factory=list, init=False)  # of its full blocks, as far as known
    # Three token counts that the cache keeps.
    room_until: int = field(default=0, init=False)  # up to here no block has to be allocated or released
    registers_at: int = field(default=0, init=False)  # from here on known tokens fill a block to register
    quiet_until: int = field(default=0, init=False)  # up to here the cache has nothing to do
    # Up to here other requests have its tokens, but no state was kept; 0: not known of.
    parts_at: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(queued_at=self.arrival_at)
        self.end_token_ids = self.sampling.end_token_ids

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, including those of an earlier engine."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def rules(self) -> list[str]:
        """Public names of the rules that may exclude tokens from the next position."""
        core = ("min_tokens",) if self.num_output_tokens < self.sampling.min_tokens else ()
        return sorted({*core, *(name for extra in self.extras.values() for name in extra.rules)})

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; raises InvalidTransition if it cannot follow the present one."""
        if status not in _TRANSITIONS[self.status]:
            raise InvalidTransition(
                f"request {self.request_id}: {self.status.value} cannot become {status.value}"
            )
        self.status = status


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """How the prompt of a request was computed; output of an earlier engine is a part of it."""

    num_prompt_tokens: int
    num_chunks: int  # steps, with those that a preemption undid
    queue_s: float  # from its arrival to its first admission
    prefill_s: float  # from there to the first token


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """Statistics of a request's prompt, sent with its first output. prefill: None without a first token."""

    num_cached_tokens: int
    prefill: PrefillStats | None = None


@dataclass(slots=True)
class RequestOutput:
    """The output of a step for one request. Only the last of a request, or of a turn, has a finish reason."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, or NO_STOP_TOKEN; None: end of sequence
    first: FirstOutput | None = None  # in the first output of a request or turn only
    message: str = ""  # for people, if it ended by an error
    failure: RequestFailed | None = None  # the status of that error, if it has one
    continues: bool = False  # only the turn ended: the request waits for an input segment, or has one already
    extras: Extras | None = None  # of features, for the client; None, as most have none and all are made anew
    drafts: DraftUse | None = None  # in the last output of a request or turn only, if any was verified

    @property
    def num_cached_tokens(self) -> int | None:
        """Set in the first output of a request or turn only."""
        return None if self.first is None else self.first.num_cached_tokens
