"""The random shape of one simulated engine: sizes, kinds of attention, policy, and how hard it is driven."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine_svc.cache.attention import (
    AlignedState,
    AttentionKind,
    ChunkedLocal,
    CrossAttention,
    EveryState,
    FullAttention,
    KeptState,
    SingleState,
    SlidingWindow,
)
from engine_svc.cache.config import CacheConfig
from engine_svc.scheduler.config import SchedulerConfig

POLICIES = ("fcfs", "priority", "priority", "prefill-first", "least-recompute", "fair", "fair", "continuum")


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a seed decides before the first request comes."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    policy: str
    has_budget_watch: bool  # a budget that grants everything, and checks that what is taken is given back
    max_adapters: int  # different ones in a step; 0 = no such budget
    max_encoder_tokens: int  # of spans encoded in a step; 0 = no such budget
    arrival_rate: float  # requests a step, until all have come
    accident_rate: float  # accidents, before a step and between its launch and its result
    num_priorities: int
    num_accounts: int
    num_jobs: int
    gives_pins_first: bool  # where blocks are short, before requests are preempted
    arrival_interval: float  # arrivals within one count as of the same instant
    has_sessions: bool
    has_senders: bool  # some blocks are held for a while after the end of their request
    has_remote_loads: bool  # some requests begin with KV from elsewhere
    has_broken_rows: bool
    limits_drafts: bool  # drafts are proposed at launch, a random number for each row


def draw_setup(rng: random.Random) -> Setup:
    """A setup in which any request of full length fits when it is alone."""
    max_model_len = rng.choice((24, 32, 48))
    caches = rng.random() < 0.85
    groups, name = draw_groups(rng, max_model_len, caches=caches)
    has_states = name in ("states", "kept")
    overlaps = rng.random() < 0.35
    # No runner has states for drafts.
    num_drafts = 0 if has_states else rng.choice((0, 0, 1, 3))
    policy = rng.choice(POLICIES)
    # A drafter with KV of its own, which the sliding windows of another group do not bother.
    has_drafter = num_drafts > 0 and rng.random() < 0.5
    drops_last = has_drafter and name != "local" and rng.random() < 0.6
    # A policy that gives prompts a part of a step has them enter in chunks.
    chunked = policy == "prefill-first" or name == "states" or rng.random() < 0.8
    max_num_batched_tokens = rng.choice((7, 16, 40)) if chunked else max_model_len + rng.choice((0, 8, 40))
    depth = 2 if overlaps else 1
    longest = max_model_len + num_drafts
    num_alone = sum(kind.max_blocks(longest, max_num_batched_tokens * depth) for kind in groups)
    num_blocks = 1 + max(1, int(num_alone * rng.choice((1.0, 1.3, 2.0, 4.0))))
    max_num_seqs = rng.choice((2, 4, 8, 12))
    return Setup(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice((0, 0, 5)),
            reserve_full_prompt=rng.random() < 0.5,
            num_speculative_tokens=num_drafts,
            async_scheduling=overlaps,
            max_steps_in_flight=depth,
            prefill_share=rng.choice((0.3, 0.5, 0.8)),
        ),
        CacheConfig(
            num_blocks=num_blocks,
            groups=groups,
            enable_prefix_caching=caches,
            num_lookahead_tokens=num_drafts if has_drafter else 0,
            drop_last_matched_block=drops_last,
            num_state_slots=max_num_seqs + rng.choice((1, 2, 6, 20)) if name == "kept" else 0,
        ),
        policy=policy,
        # Where victims can be in the plan already, always.
        has_budget_watch=policy == "priority" or rng.random() < 0.4,
        max_adapters=rng.choice((0, 0, 0, 1, 2)),
        # Without chunks a prompt enters whole or not, whatever has to be encoded for it.
        max_encoder_tokens=rng.choice((0, 4)) if chunked else 0,
        arrival_rate=rng.choice((0.4, 0.8, 2.0)),
        accident_rate=rng.choice((0.05, 0.15, 0.3)),
        num_priorities=rng.choice((1, 3, 3)),
        num_accounts=rng.choice((1, 2, 4)) if policy == "fair" else 1,
        num_jobs=rng.choice((2, 5)) if policy == "continuum" else 0,
        gives_pins_first=policy == "continuum" and rng.random() < 0.3,
        arrival_interval=rng.choice((1.0, 1.0, 16.0)),
        # A state that a request between two turns holds is shared a step later: such a step may do nothing.
        has_sessions=rng.random() < 0.3 and name != "states",
        # A request goes on in the slot of its state, also while blocks of an earlier turn are sent.
        has_senders=not has_states and rng.random() < 0.1,
        has_remote_loads=not has_states and rng.random() < 0.1,
        has_broken_rows=rng.random() < 0.2,
        limits_drafts=num_drafts > 0 and rng.random() < 0.5,
    )


def draw_groups(
    rng: random.Random, max_model_len: int, *, caches: bool
) -> tuple[tuple[AttentionKind, ...], str]:
    """Groups of layers, and in a word what they are."""
    size = rng.choice((1, 2, 4))
    window, chunk = rng.choice((1, 3, 5, 8, 12)), size * rng.choice((2, 3, 4))
    if not caches and rng.random() < 0.25:
        return (FullAttention(size), CrossAttention(rng.choice((1, 2, 4)))), "cross"
    if rng.random() < 0.25:
        kept = KeptState(size, size * rng.choice((1, 3, 8)))
        if rng.random() < 0.7:
            attention = rng.choice(
                ((FullAttention(size),), (FullAttention(size), SlidingWindow(size, window)), ())
            )
            return (*attention, kept), "kept"
        state = rng.choice((AlignedState(size), EveryState(size))) if caches else SingleState(max_model_len)
        return rng.choice(((FullAttention(size), state), (state,))), "states"
    match rng.choice(("full", "full", "full", "window", "mixed", "mixed", "local", "unequal")):
        case "full":
            return (FullAttention(rng.choice((1, 2, 4, 8))),), "full"
        case "window":
            return (SlidingWindow(size, window),), "window"
        case "mixed":
            return (FullAttention(size), *[SlidingWindow(size, window)] * rng.choice((1, 1, 2))), "mixed"
        case "local":
            return (ChunkedLocal(size, chunk), FullAttention(size)), "local"
        case _:
            return (FullAttention(2 * size), SlidingWindow(size, window)), "unequal"
