"""Random requests that have much in common: documents, earlier conversations, tenants, adapters, spans."""

from __future__ import annotations

import random
from collections import deque

from engine_svc.cache.attention import CrossAttention
from engine_svc.core.request import ContentSpan, Request
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from tests.simulation.alone import Turn, answers_alone
from tests.simulation.digest_model import EOS_TOKEN_ID, NUM_PROMPT_TOKENS, STOP_TOKEN_ID, identity_of
from tests.simulation.setup import Setup

BLOCKER = "something"  # what some requests wait for
PLACEHOLDER_TOKEN = NUM_PROMPT_TOKENS - 1
_TOKENS = range(NUM_PROMPT_TOKENS - 1)
_STOPS = frozenset({STOP_TOKEN_ID})
_REPETITIONS = (
    RepetitionLimits(1),
    RepetitionLimits(3),
    RepetitionLimits(2, 2, 2),
    RepetitionLimits(4, 1, 3),
)


class Workload:
    """Draws one request after the other."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self._setup = setup
        self._rng = rng
        self._max_model_len = setup.scheduler.max_model_len
        self._max_span = min(setup.max_encoder_tokens or 6, self._max_model_len // 4)
        self._has_encoder = any(isinstance(kind, CrossAttention) for kind in setup.cache.groups)
        self._documents = self._draw_documents()
        # Tokens of requests that have ended, and what they share with those that continue them.
        self._conversations: deque[Request] = deque(maxlen=4)
        self._spare_ids: deque[str] = deque(maxlen=4)
        self.num_drawn = 0

    def remember(self, request: Request) -> None:
        """A request has ended: others may go on from there, or have its id."""
        self._conversations.append(request)
        self._spare_ids.append(request.request_id)

    def draw(self, now: float) -> Request:
        rng = self._rng
        random = rng.random
        draw = random()
        salt = ""
        extra_keys: tuple[str, ...] = ()
        if draw < 0.2 and self._conversations:
            earlier = rng.choice(self._conversations)
            base, spans = earlier.token_ids, earlier.spans
            salt, extra_keys = earlier.cache_salt, earlier.extra_keys
        else:
            document, spans = self._documents[int(random() * 5)] if draw < 0.7 else ([], ())
            base = document[: int(random() * (len(document) + 1))]
            if random() < 0.2:
                salt = "tenant"
            if random() < (0.6 if self._setup.max_adapters else 0.05):
                extra_keys = (rng.choice(("adapter-1", "adapter-2", "adapter-3")),)
        # A little too long now and then: such requests are refused.
        num_own = 1 + int(random() * self._max_model_len / 3)
        base = base[: max(0, self._max_model_len - num_own - (random() > 0.02))]
        prompt = [*base, *rng.choices(_TOKENS, k=num_own)]
        if spans:
            spans = tuple(span for span in spans if span.start + span.num_tokens <= len(base))
        request = Request(
            self._draw_id(),
            prompt,
            len(prompt),
            self.draw_sampling(),
            priority=int(random() * self._setup.num_priorities),
            account=f"account-{(number := int(random() * self._setup.num_accounts))}",
            weight=1 + 2 * number,
            job=f"job-{int(random() * self._setup.num_jobs)}" if self._setup.num_jobs else "",
            arrival_at=now - now % self._setup.arrival_interval,
            cache_salt=salt,
            extra_keys=extra_keys,
            spans=spans,
            num_encoder_tokens=self._draw_encoder_tokens(),
            is_resumable=self._setup.has_sessions and random() < 0.3,
            blockers={BLOCKER} if random() < 0.08 else set(),
        )
        if random() < 0.1 and len(prompt) < self._max_model_len:
            self._let_another_engine_begin(request)
        return request

    def draw_turn(self) -> Turn:
        rng = self._rng
        return Turn(rng.choices(_TOKENS, k=rng.randint(1, 6)), self.draw_sampling())

    def draw_sampling(self) -> SamplingParams:
        """How a request wants to be continued, and when it is to end."""
        random = self._rng.random
        return SamplingParams(
            max_tokens=1 + int(random() * random() * 28),
            min_tokens=int(random() * 4),
            ignore_eos=random() < 0.6,
            eos_token_id=EOS_TOKEN_ID,
            stop_token_ids=_STOPS if random() < 0.25 else frozenset(),
            skip_reading_prefix_cache=random() < 0.05,
            repetition=self._rng.choice(_REPETITIONS) if random() < 0.2 else None,
        )

    def _draw_id(self) -> str:
        self.num_drawn += 1
        if self._spare_ids and self._rng.random() < 0.1:
            return self._spare_ids.pop()
        return f"r{self.num_drawn}"

    def _draw_encoder_tokens(self) -> int:
        return 1 + int(self._rng.random() * self._max_model_len / 2) if self._has_encoder else 0

    def _draw_documents(self) -> list[tuple[list[int], tuple[ContentSpan, ...]]]:
        rng, length = self._rng, self._max_model_len // 2
        plain = [rng.choices(_TOKENS, k=length) for _ in range(3)]
        start, num_tokens = rng.randint(0, 4), rng.randint(2, self._max_span)
        second = start + num_tokens + rng.randint(0, 3)
        filled = plain[2].copy()
        spans = [(start, num_tokens)]
        if second + num_tokens <= length:
            spans.append((second, num_tokens))
        for first, size in spans:
            filled[first : first + size] = [PLACEHOLDER_TOKEN] * size
        keyed = [
            (filled, tuple(ContentSpan(first, size, key) for first, size in spans))
            for key in ("image-a", "image-b")
        ]
        return [(plain[0], ()), (plain[1], ()), (filled, ()), *keyed]

    def _let_another_engine_begin(self, request: Request) -> None:
        turn = Turn(list(request.token_ids), request.sampling)
        alone = next(answers_alone(identity_of(request), [turn], self._max_model_len))
        request.token_ids += alone.token_ids[: int(self._rng.random() * len(alone.token_ids))]
