"""One engine's load as one frontend knows it: the newest report plus own requests since then. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from frontend_svc.engines.routing.engine_info import EngineInfo


@dataclass(frozen=True, slots=True)
class LoadReport:
    """An engine's load as of a step, over the requests of all frontends."""

    engine_epoch: int = 0
    step_number: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0


# Upper bounds of any engine, so that a forged or broken report counts no more than a full engine.
_MAX_REQUESTS = 1 << 20
_MAX_TOKENS = 1 << 32


class EngineAccount:
    """Keeps the load of one engine as one frontend knows it; routing decides by `info`.

    Call `send` for each request sent to the engine, `begin` at its first token, `end` when it has ended for
    any reason, and `report` with each load report, from the engine itself or through a coordinator.
    Until the first report only this frontend's own requests count.
    """

    def __init__(self, address: str) -> None:
        self._epoch = 0  # 0: unknown until the first report
        self._report: LoadReport | None = None
        self._is_direct = False
        self._direct_step = 0  # of the newest report from the engine itself
        self._tokens: dict[int, int] = {}  # prompt tokens of own requests by handle; 0 after the first token
        self._num_pending_tokens = 0
        self._unreported: dict[int, int] = {}
        self._num_unreported_tokens = 0
        self._num_ended = 0  # own requests that have ended and that the report may still count
        self._num_begun_tokens = 0  # prompt tokens of own requests that the report may still count as waiting
        self._info = EngineInfo(address)
        self._is_current = True

    @property
    def num_in_flight(self) -> int:
        """Own requests that have not ended."""
        return len(self._tokens)

    def set_facts(self, *, dp_rank: int | None = None, block_size: int | None = None) -> None:
        """Set facts that hold for the engine's life; None leaves a fact as it is."""
        self._info = replace(
            self._info,
            dp_rank=self._info.dp_rank if dp_rank is None else dp_rank,
            block_size=self._info.block_size if block_size is None else block_size,
        )

    def hold(self, is_held: bool) -> None:
        """Note whether an operator has paused the engine."""
        if is_held != self._info.is_held:
            self._info = replace(self._info, is_held=is_held)

    def note_slots(self, digests: Iterable[str]) -> None:
        """Note which variants the engine used last: most likely it need not load these."""
        slots = frozenset(digests)
        if slots != self._info.slots:
            self._info = replace(self._info, slots=slots)

    def send(self, handle: int, num_prompt_tokens: int) -> None:
        """Count an own request. `num_prompt_tokens` is 0 if another request brings the same prompt."""
        self._tokens[handle] = self._unreported[handle] = num_prompt_tokens
        self._num_pending_tokens += num_prompt_tokens
        self._num_unreported_tokens += num_prompt_tokens
        self._is_current = False

    def begin(self, handle: int) -> None:
        """An own request has its first token, so its prompt is computed. Idempotent."""
        num_tokens = self._tokens.get(handle, 0)
        if num_tokens:
            self._tokens[handle] = 0
            self._num_pending_tokens -= num_tokens
            if handle in self._unreported:
                self._num_unreported_tokens -= self._unreported[handle]
                self._unreported[handle] = 0
            else:
                self._num_begun_tokens += num_tokens
            self._is_current = False

    def end(self, handle: int) -> None:
        """An own request has ended. Idempotent."""
        if handle not in self._tokens:
            return
        num_tokens = self._tokens.pop(handle)
        self._num_pending_tokens -= num_tokens
        if handle in self._unreported:
            self._num_unreported_tokens -= self._unreported.pop(handle)
        else:
            self._num_ended += 1
            self._num_begun_tokens += num_tokens
        self._is_current = False

    def report(self, report: LoadReport, *, is_direct: bool) -> bool:
        """Apply a report unless a newer one has been applied; returns whether it was applied.

        A report from the engine itself (`is_direct`) is compared with direct reports only: no step number
        from another source, wrong or forged, can hide it. A report from another source is applied if its step
        is greater than that of the newest report, or equal if that one is not direct. A report of another
        epoch than the current one is of a process that is gone or that is not connected yet.
        """
        if (self._epoch and report.engine_epoch != self._epoch) or not self._is_newer(report, is_direct):
            return False
        self._epoch, self._report, self._is_direct = report.engine_epoch, report, is_direct
        if is_direct:
            self._direct_step = report.step_number
        self._unreported.clear()
        self._num_unreported_tokens = self._num_ended = self._num_begun_tokens = 0
        self._is_current = False
        return True

    def _is_newer(self, report: LoadReport, is_direct: bool) -> bool:
        if is_direct:
            return report.step_number >= self._direct_step
        if self._report is None:
            return True
        return report.step_number >= self._report.step_number + self._is_direct

    def unreport(self) -> None:
        """The coordinator gets no reports from the engine any more: drop its last one, which is outdated."""
        if self._report is not None and not self._is_direct:
            self._forget_report()

    def meet(self, engine_epoch: int) -> None:
        """There is a stream to the engine: reports of other epochs are ignored from now on."""
        if engine_epoch != self._epoch:
            self._forget_report()
        self._epoch = engine_epoch

    def reset(self) -> None:
        """The engine is lost: forget its report and all own requests."""
        self._tokens.clear()
        self._num_pending_tokens = 0
        self._epoch = 0
        self.note_slots(())
        self._forget_report()

    def info(self) -> EngineInfo:
        """The current load. Computed only after a change."""
        if not self._is_current:
            self._info = self._made()
            self._is_current = True
        return self._info

    def _forget_report(self) -> None:
        # Without a report all own requests are unreported.
        self._report, self._is_direct, self._direct_step = None, False, 0
        self._unreported = dict(self._tokens)
        self._num_unreported_tokens = self._num_pending_tokens
        self._num_ended = self._num_begun_tokens = 0
        self._is_current = False

    def _made(self) -> EngineInfo:
        report = self._report or LoadReport()
        num_running = report.num_running - self._num_ended
        return replace(
            self._info,
            # Ended requests were probably running; if more have ended than were running, the rest waited.
            num_waiting=min(max(0, report.num_waiting + min(0, num_running)), _MAX_REQUESTS),
            num_running=min(max(0, num_running), _MAX_REQUESTS),
            num_waiting_tokens=min(max(0, report.num_waiting_tokens - self._num_begun_tokens), _MAX_TOKENS),
            num_used_blocks=min(report.num_used_blocks, report.num_total_blocks),
            num_total_blocks=report.num_total_blocks,
            num_unreported=len(self._unreported),
            num_unreported_tokens=self._num_unreported_tokens,
            num_in_flight=len(self._tokens),
            num_pending_tokens=self._num_pending_tokens,
        )
