"""Budgets as optional features have them, small and easily checked."""

from __future__ import annotations

from collections import Counter

from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.feature import SchedulerFeature
from tests.simulation.broken import expect


class BudgetWatch:
    """Grants everything; what rows have at the end of a step must be what was taken and not given back."""

    def __init__(self) -> None:
        self._taken: dict[Request, int] = {}
        self.num_given_back = 0

    def begin_step(self) -> None:
        self._taken.clear()

    def admits(self, request: Request) -> bool:
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        expect(request not in self._taken and num_tokens > 0, "budget", f"{request.request_id} takes twice")
        self._taken[request] = num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        taken = self._taken.pop(request, 0)
        expect(taken == num_tokens, "budget", f"{request.request_id} took {taken}, gives back {num_tokens}")
        self.num_given_back += 1

    def check(self, plan: StepPlan) -> None:
        taken = {request.request_id: num_tokens for request, num_tokens in self._taken.items()}
        rows = dict(zip(plan.request_ids, plan.num_tokens, strict=True))
        expect(taken == rows, "budget", f"rows have {rows}, taken is {taken}")


class AdapterCap:
    """At most so many different adapters in a step. Asked about requests with one alone."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._rows: Counter[str] = Counter()
        self.num_passed_over = 0

    def begin_step(self) -> None:
        self._rows.clear()

    def admits(self, request: Request) -> bool:
        """Requests whose adapter is in use, or finds a free slot."""
        has_slot = self._has_slot(request)
        self.num_passed_over += not has_slot
        return has_slot

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens if self._has_slot(request) else 0

    def take(self, request: Request, num_tokens: int) -> None:
        self._rows[request.extra_keys[0]] += 1
        expect(len(self._rows) <= self._max_adapters, "budget", f"adapters in use: {list(self._rows)}")

    def give_back(self, request: Request, num_tokens: int) -> None:
        self._rows[request.extra_keys[0]] -= 1
        self._rows += Counter()

    def _has_slot(self, request: Request) -> bool:
        return request.extra_keys[0] in self._rows or len(self._rows) < self._max_adapters


class Adapters(SchedulerFeature):
    """A feature whose requests alone spend its budget."""

    def __init__(self, cap: AdapterCap) -> None:
        self.budget = cap

    def on_add(self, request: Request) -> None:
        request.num_budgets += bool(request.extra_keys)


class EncoderBudget:
    """Spans are encoded whole, so many tokens a step, before the first of their tokens is computed."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.remaining = max_tokens
        self.encoded: set[tuple[Request, int]] = set()
        self._of_step: dict[Request, list[tuple[int, int]]] = {}
        self.num_clipped = 0

    def begin_step(self) -> None:
        """The encoder is idle. What was encoded is kept."""
        self.remaining = self._max_tokens
        self._of_step.clear()

    def admits(self, request: Request) -> bool:
        """All: one that finds nothing left ends the admission."""
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        """Up to the first span that cannot be encoded in this step."""
        start, remaining = request.num_computed_tokens, self.remaining
        for span in request.spans:
            if self._needs(request, span.start, span.num_tokens, start, start + num_tokens):
                remaining -= span.num_tokens
                if remaining < 0:
                    self.num_clipped += 1
                    return max(0, span.start - start)
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        """Encode what the row begins. Its tokens count as computed by now."""
        end = request.num_computed_tokens
        for span in request.spans:
            if self._needs(request, span.start, span.num_tokens, end - num_tokens, end):
                self.encoded.add((request, span.start))
                self._of_step.setdefault(request, []).append((span.start, span.num_tokens))
                self.remaining -= span.num_tokens
                expect(self.remaining >= 0, "budget", f"{request.request_id}: too much to encode")

    def give_back(self, request: Request, num_tokens: int) -> None:
        for start, num_span_tokens in self._of_step.pop(request, []):
            self.encoded.discard((request, start))
            self.remaining += num_span_tokens

    def _needs(self, request: Request, span_start: int, num_span_tokens: int, start: int, end: int) -> bool:
        is_touched = span_start < end and span_start + num_span_tokens > start
        return is_touched and (request, span_start) not in self.encoded
