"""What one frontend knows of one engine's load: the newest report, and its own requests since. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from frontend_svc.engines.routing.engine_info import EngineInfo


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine has said of its load, as of a step. Of whose requests it tells is not known."""

    engine_epoch: int = 0
    step_number: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0


# What no engine has more of, so that a forged or broken report weighs no more than a full engine.
_MAX_REQUESTS = 1 << 20
_MAX_TOKENS = 1 << 32


class EngineAccount:
    """Keeps the load of one engine as far as one frontend knows it; `info` is what routing goes by.

    Whoever routes calls `send` for each request it sends there, `begin` with its first token and `end` when
    it has ended in whatever way; and `report` with what the engine says, directly or through a coordinator.
    Until the first report the engine weighs by the requests of ours alone.
    """

    def __init__(self, address: str) -> None:
        self._epoch = 0  # 0: not known, the first report tells
        self._report: LoadReport | None = None
        self._is_direct = False
        self._direct_step = 0  # of the newest report that the engine has told itself
        self._tokens: dict[int, int] = {}  # of our requests' prompts, 0 once they have begun
        self._num_pending_tokens = 0
        self._unreported: dict[int, int] = {}
        self._num_unreported_tokens = 0
        self._num_ended = 0  # of ours that the report may still count
        self._num_begun_tokens = 0  # of prompts of ours that the report may still have wait
        self._info = EngineInfo(address)
        self._is_current = True

    @property
    def num_in_flight(self) -> int:
        """Requests of ours that have not ended."""
        return len(self._tokens)

    def place(self, *, dp_rank: int | None = None, block_size: int | None = None) -> None:
        """Take in facts that hold for the engine's life; what is None stays."""
        self._info = replace(
            self._info,
            dp_rank=self._info.dp_rank if dp_rank is None else dp_rank,
            block_size=self._info.block_size if block_size is None else block_size,
        )

    def hold(self, is_held: bool) -> None:
        """Note whether an operator has it pause or sleep."""
        if is_held != self._info.is_held:
            self._info = replace(self._info, is_held=is_held)

    def send(self, handle: int, num_prompt_tokens: int) -> None:
        """A request of ours goes there. `num_prompt_tokens` is 0 where another one brings the same prompt."""
        self._tokens[handle] = self._unreported[handle] = num_prompt_tokens
        self._num_pending_tokens += num_prompt_tokens
        self._num_unreported_tokens += num_prompt_tokens
        self._is_current = False

    def begin(self, handle: int) -> None:
        """A request of ours has its first token: its prompt is computed. Harmless when told again."""
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
        """A request of ours has ended; harmless when told again."""
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
        """Take in what the engine says, unless something newer is here; returns whether it was taken.

        What the engine has said itself (`is_direct`) goes by its own order alone: no step that others tell,
        by mistake or on purpose, hides it. What others tell counts if its step is greater than that of the
        newest report, or equal where that is not direct. A report of another epoch than the present one's
        is of a process that is gone or that is not met yet.
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
        """The coordinator hears nothing of the engine: what it has told is too old to go by."""
        if self._report is not None and not self._is_direct:
            self._forget_report()

    def meet(self, engine_epoch: int) -> None:
        """There is a stream to the engine: reports of other epochs are passed over from now on."""
        if engine_epoch != self._epoch:
            self._forget_report()
        self._epoch = engine_epoch

    def reset(self) -> None:
        """The engine is lost: nothing of ours is there, and nothing is known of it."""
        self._tokens.clear()
        self._num_pending_tokens = 0
        self._epoch = 0
        self._forget_report()

    def info(self) -> EngineInfo:
        """What routing goes by now. Made anew only where something has changed."""
        if not self._is_current:
            self._info = self._made()
            self._is_current = True
        return self._info

    def _forget_report(self) -> None:
        # Without a report all that is ours is what no report knows of.
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
            # What has ended is likely to have run; where more has ended than ran, the rest waited.
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
