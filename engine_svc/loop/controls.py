"""Operator calls on a loaded engine, in the engine thread: pause, sleep, caches, weights, profiles.

Knows no wire. Calls come through `serve`, which waits for the steps in flight first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from engine_svc.core.control import Collective, RanksDisagree, Refused, WakeTag, WeightsLost
from engine_svc.core.errors import DeviceLost
from engine_svc.core.extras import Extra
from engine_svc.loop.engine import Engine
from engine_svc.loop.pause import PauseController, RunState
from engine_svc.loop.protocols import EngineScheduler, Lockstep, RankCalls
from triptych_kit.clock import Clock
from triptych_kit.errors import Aborted, FailedPrecondition, InvalidArgument, Unimplemented

logger = logging.getLogger(__name__)

_MAX_PREFIX_CHARACTERS = 64


class EngineControls:
    """One engine's controls. Its state belongs to the engine thread; `pause_controller` publishes some of it.

    weights_folder: the source of the present weights.  profile_dir: the folder for profiles, None: disabled.
    on_weights: called with folder and digest when the weights were replaced.
    """

    def __init__(
        self,
        *,
        loop: Engine,
        scheduler: EngineScheduler,
        lockstep: Lockstep,
        ranks: RankCalls,
        clock: Clock,
        weights_folder: Path = Path(),
        profile_dir: Path | None = None,
        profile_prefix: str = "engine",
        collectives: Iterable[Collective] = (),
        on_weights: Callable[[Path, str], None] = lambda folder, digest: None,
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._lockstep = lockstep
        self._ranks = ranks
        self._clock = clock
        self._weights_folder = weights_folder
        self._profile_dir = profile_dir
        self._profile_prefix = profile_prefix
        self._on_weights = on_weights
        self._collectives = {collective.name: collective for collective in collectives}
        self._weight_version = ""
        self.pause_controller = PauseController(
            loop=loop, scheduler=scheduler, lockstep=lockstep, ranks=ranks, clock=clock
        )

    @property
    def weight_version(self) -> str:
        """The operator's name for the weights; may be read by any thread."""
        return self._weight_version

    def serve(self, work: Callable[[], None]) -> None:
        """Run `work` with no step in flight. It handles its own errors; those of steps go to the loop."""
        self._loop.settle()
        work()

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Clear the prefix cache. Requests with blocks prevent it, or are preempted with `reset_running`."""
        if not self._scheduler.reset_prefix_cache(self._clock.now(), reset_running=reset_running):
            num_running = len(self._scheduler.running_ids)
            raise FailedPrecondition(
                f"requests hold KV blocks, {num_running} of them run: wait, or set reset_running",
                reason="CACHE_IN_USE",
            )

    def note(self, note: Extra) -> None:
        """Pass a call of an operator to the features; what one answers is in `note`."""
        self._scheduler.note("", note, self._clock.now())

    def start_profile(self, prefix: str) -> None:
        """Begin to record steps into files with this prefix; empty: the engine's own."""
        if self._profile_dir is None:
            raise FailedPrecondition(
                "profiling is disabled: start the engine with --profile-dir", reason="NO_PROFILE_DIR"
            )
        if len(prefix) > _MAX_PREFIX_CHARACTERS or not prefix.isprintable() or prefix != Path(prefix).name:
            raise InvalidArgument(
                f"prefix has to be a part of a file name, at most {_MAX_PREFIX_CHARACTERS} characters",
                field="profile.prefix",
            )
        self._lockstep.check_quiet(or_apart=True)
        # If only some ranks refuse, none is to record.
        arguments = {"folder": str(self._profile_dir), "prefix": prefix or self._profile_prefix}
        answers = self._ranks.call_each("start_profile", arguments, undo="stop_profile")
        logger.info("profile begun", extra={"files": [answer["file"] for answer in answers]})

    def stop_profile(self) -> None:
        """Stop recording and write the files, one per rank."""
        # This takes seconds, longer than another rank would wait in a step.
        self._lockstep.check_quiet(or_apart=True)
        self._ranks.call_each("stop_profile")

    def set_weight_version(self, version: str) -> None:
        self._weight_version = version

    def update_weights(self, folder: Path | None, version: str, names: Sequence[str] = ()) -> None:
        """Replace the weights by those of `folder`; None: load the present folder again.

        names: tensors to replace, if not all. Their names and shapes are those of the present ones.
        No request may run, or all have to be paused; paused requests then compute their tokens anew with the
        new weights. A refusal keeps the old weights and leaves the prefix cache empty. With the reason
        WEIGHTS_LOST no weights are left, and after an unexpected error their state is unknown. The engine
        then sleeps until it is woken, which needs a folder that can be loaded, or updated from another.
        """
        # Ranks compare their weights when they form a group.
        self._lockstep.check_quiet(or_apart=True)
        is_going = self.pause_controller.state in (RunState.RUNNING, RunState.PAUSING)
        num_running = len(self._scheduler.running_ids)
        if is_going and num_running:
            raise FailedPrecondition(
                f"{num_running} requests run: pause the engine first", reason="ENGINE_BUSY"
            )
        self.reset_prefix_cache(reset_running=True)
        digest = self._reload(folder, names)
        if not names:
            self._weights_folder = folder or self._weights_folder
        self.pause_controller.note_awake((WakeTag.WEIGHTS,))
        if version:
            self._weight_version = version
        self._on_weights(self._weights_folder, digest)

    def save_weights(self, folder: Path) -> None:
        """Have every rank write its weights as they are packed, for later starts. Requests wait meanwhile.

        After a refusal some ranks may have written theirs, which is no harm: each file is whole.
        """
        if self.pause_controller.state is RunState.ASLEEP:
            raise FailedPrecondition("the engine is asleep: wake it first", reason="ENGINE_ASLEEP")
        # This may take longer than another rank would wait in a step.
        self._lockstep.check_quiet(or_apart=True)
        answers = self._ranks.call_each("save_weights", {"folder": str(folder)})
        logger.info("weights saved", extra={"files": [answer["file"] for answer in answers]})

    def run_collective(self, name: str, arguments: Mapping[str, object]) -> list[str]:
        """Have every rank run a registered function; its results, in the order of the ranks."""
        collective = self._collectives.get(name)
        if collective is None:
            raise Unimplemented(f"the only collectives are {', '.join(self._collectives)}")
        try:
            collective.check(arguments)
        except ValueError as error:
            raise InvalidArgument(str(error), field="collective.arguments") from error
        answers = self._ranks.call_each("collective", {"name": name, "arguments": dict(arguments)})
        return [str(answer["result"]) for answer in answers]

    def execute_dummy_batch(self) -> None:
        """Run one step without requests: with the other ranks of a lockstep group, else alone."""
        if self.pause_controller.state is RunState.ASLEEP:
            raise FailedPrecondition("the engine is asleep: wake it first", reason="ENGINE_ASLEEP")
        if self._scheduler.has_work:
            raise FailedPrecondition(
                f"{len(self._scheduler.running_ids)} requests run and {len(self._scheduler.waiting_ids)} "
                "wait: a step without requests is for an idle engine",
                reason="ENGINE_BUSY",
            )
        # Begins a wave, as a request does, so that the other ranks step as well.
        if not self._lockstep.may_step(True):
            raise FailedPrecondition(
                "the ranks that step together with this engine are paused, or have formed no group",
                reason="NO_GROUP",
            )
        if not self._loop.run_idle_step():
            raise Aborted("the step failed and was rolled back, see the engine's log")

    def _reload(self, folder: Path | None, names: Sequence[str]) -> str:
        arguments = {"folder": None if folder is None else str(folder), "names": list(names)}
        try:
            answers = self._ranks.call_all("reload_weights", arguments)
        except (Refused, RanksDisagree, DeviceLost):
            raise
        except WeightsLost as error:
            self.pause_controller.note_away((WakeTag.WEIGHTS,))
            logger.error("weights lost", extra={"cause": str(error)})
            raise FailedPrecondition(
                "the engine has no weights and is asleep: restore its model folder and wake it, or update "
                f"its weights from a folder that can be loaded: {error}",
                reason="WEIGHTS_LOST",
            ) from error
        except Exception:
            # After an unexpected error the state of the device is unknown.
            self.pause_controller.note_away((WakeTag.WEIGHTS,))
            raise
        digests = {str(answer["digest"]) for answer in answers}
        if len(digests) > 1:
            raise RanksDisagree("ranks have different weights: the folder changed while they were read")
        return digests.pop()
