"""The thread that loads the model, then runs the engine loop, and reports both to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from engine_svc.admin.served_engine import Failure, LoadedCore, ServedEngine
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Stop
from engine_svc.process.watchdog import EXIT_HUNG, Watchdog
from engine_svc.ranks.watch import RankLost
from triptych_kit.process.stacks import write_stacks, write_stacks_of

logger = logging.getLogger(__name__)

# 70 as in sysexits.h: internal software error. 2: wrong usage.
EXIT_LOOP_FAILED = 70
EXIT_CANNOT_LOAD = 2


class EngineThread:
    """Owns the engine. `load` builds it on the thread, so that the process can answer while it loads.

    ends_if_hung: a step that exceeds its announced budget ends the process.
    """

    def __init__(
        self,
        served: ServedEngine,
        load: Callable[[], tuple[Engine, LoadedCore]],
        *,
        ends_if_hung: bool = False,
    ) -> None:
        self._served = served
        self._load = load
        self._event_loop = asyncio.get_running_loop()
        self._watchdog: Watchdog | None = None
        if ends_if_hung:
            self._watchdog = Watchdog(
                served.stats_snapshot,
                served.clock,
                self._hangs,
                dump_stacks=self._write_stacks,
            )
        # A daemon: loading cannot be interrupted and must not delay the end of the process.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which loads first."""
        self._thread.start()

    async def stop(self, timeout_s: float) -> bool:
        """End the loop. Returns False if the thread is still busy after `timeout_s`."""
        if self._thread.ident is None:
            return True
        self._served.inbox.put(Stop())
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine, core = self._load()
        except (ValueError, OSError) as error:
            # What an operator can fix: a wrong folder, a broken checkpoint, too little memory.
            logger.debug("loading failed", exc_info=True)
            # Messages of libraries may have line breaks.
            self._fail(Failure(" ".join(str(error).split()), EXIT_CANNOT_LOAD))
            return
        except Exception as error:  # Top level of the thread: any other error has to end the process.
            logger.exception("loading failed")
            self._fail(Failure(_described(error), EXIT_LOOP_FAILED))
            return
        if core.lockstep is not None:
            core.lockstep.subscribe(
                lambda rank_status: self._post(lambda: self._served.note_rank_status(rank_status))
            )
        self._post(lambda: self._served.become_ready(core))
        if self._watchdog is not None:
            self._watchdog.start()
        try:
            engine.run()
        except Exception as error:  # Errors that are not a request's fault end the engine.
            logger.exception("engine loop failed")
            self._fail(Failure(_described(error), EXIT_LOOP_FAILED))
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    def _write_stacks(self) -> None:
        write_stacks()
        if self._served.core is not None:
            # This process may be waiting for its ranks.
            write_stacks_of(self._served.core.rank_ids)

    def _hangs(self, reason: str) -> None:
        self._fail(Failure(reason, EXIT_HUNG))

    def _fail(self, failure: Failure) -> None:
        self._post(lambda: self._served.fail(failure))

    def _post(self, message: Callable[[], None]) -> None:
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(message)


def _described(error: Exception) -> str:
    if isinstance(error, RankLost):
        return f"rank {error.rank} {error.why}, see the engine's log"
    # The text of an unknown error may contain paths or values: clients get only its type.
    return f"internal error ({type(error).__name__}), see the engine's log"
