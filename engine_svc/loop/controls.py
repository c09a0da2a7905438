"""Operator calls on a loaded engine, in the engine thread: pause, sleep, caches, weights, profiles.

Knows no wire. Calls come through `serve`, which waits for the steps in flight first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_svc.loop.answer import EngineBroken
from engine_svc.loop.pause import Part, PauseController, RunState
from engine_svc.loop.protocols import NoLockstep
from engine_svc.ranks.watch import RankLost
from engine_svc.runner.control import RanksDisagree, Refused
from engine_svc.runner.sleep import WakeTag, WeightsLost
from engine_svc.scheduler.config import PauseState
from service_kit.clock import Clock
from service_kit.errors import FailedPrecondition, InvalidArgument

logger = logging.getLogger(__name__)

_MAX_PREFIX_CHARACTERS = 64


class ControlledLoop(Protocol):
    """The engine's loop."""

    def settle(self) -> None:
        """Wait for the steps in flight and publish their outputs."""
        ...

    def abort(self, request_ids: Iterable[str], cause: str) -> None: ...

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call it once, as soon as nothing can be computed."""
        ...


class ControlledScheduler(Protocol):
    """The engine's scheduler."""

    @property
    def running_ids(self) -> list[str]: ...

    @property
    def waiting_ids(self) -> list[str]: ...

    def set_pause(self, state: PauseState) -> None: ...

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        """Forget all cached content; False if requests hold blocks."""
        ...


class ControlledLockstep(Protocol):
    """The lockstep with other engines that share the model."""

    def check_quiet(self, *, or_apart: bool = False) -> None:
        """Raise FailedPrecondition, with the reason, while the ranks may step with this engine's model.

        or_apart: also return if this engine is in no group, as the call ends before it can be in one.
        """
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class ControlledRunners(Protocol):
    """All ranks of the engine. A method that is refused raises Refused and changes nothing.

    A refused wake may have been done in part; the next one does the rest.
    """

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: Collection[WakeTag]) -> None: ...

    def reload_weights(self, folder: Path | None) -> str:
        """Replace the weights; returns their digest. Raises WeightsLost if the old ones are gone too."""
        ...

    def start_profile(self, folder: Path, prefix: str) -> Sequence[Path]: ...

    def stop_profile(self) -> Sequence[Path]: ...

    def num_bytes_in_use(self) -> Sequence[int]:
        """Memory that each rank uses on its device."""
        ...


class EngineControls:
    """One engine's controls. Its state belongs to the engine thread; `pause_controller` publishes some of it.

    weights_folder: the source of the present weights.  profile_dir: the folder for profiles, None: disabled.
    on_weights: called with folder and digest when the weights were replaced.
    """

    def __init__(
        self,
        *,
        loop: ControlledLoop,
        scheduler: ControlledScheduler,
        runners: ControlledRunners,
        clock: Clock,
        weights_folder: Path = Path(),
        profile_dir: Path | None = None,
        profile_prefix: str = "engine",
        on_weights: Callable[[Path, str], None] = lambda folder, digest: None,
        lockstep: ControlledLockstep | None = None,
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._runners = runners
        self._clock = clock
        self._weights_folder = weights_folder
        self._profile_dir = profile_dir
        self._profile_prefix = profile_prefix
        self._on_weights = on_weights
        self._weight_version = ""
        self._held = _Held(loop, scheduler, clock, lockstep or NoLockstep())
        self.pause_controller = PauseController(self._held, _Sleeper(runners))

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
        self._held.lockstep.check_quiet(or_apart=True)
        with _refusals():
            files = self._runners.start_profile(self._profile_dir, prefix or self._profile_prefix)
        logger.info("profile begun", extra={"files": [str(file) for file in files]})

    def stop_profile(self) -> None:
        """Stop recording and write the files, one per rank."""
        # This takes seconds, longer than another rank would wait in a step.
        self._held.lockstep.check_quiet(or_apart=True)
        with _refusals():
            self._runners.stop_profile()

    def set_weight_version(self, version: str) -> None:
        self._weight_version = version

    def update_weights(self, folder: Path | None, version: str) -> None:
        """Replace the weights by those of `folder`; None: load the present folder again.

        No request may run, or all have to be paused; paused requests then compute their tokens anew with the
        new weights. A refusal keeps the old weights and leaves the prefix cache empty. With the reason
        WEIGHTS_LOST no weights are left, and after an unexpected error their state is unknown. The engine
        then sleeps until it is woken, which needs a folder that can be loaded, or updated from another.
        """
        # Ranks compare their weights when they form a group.
        self._held.lockstep.check_quiet(or_apart=True)
        is_going = self.pause_controller.state in (RunState.RUNNING, RunState.PAUSING)
        num_running = len(self._scheduler.running_ids)
        if is_going and num_running:
            raise FailedPrecondition(
                f"{num_running} requests run: pause the engine first", reason="ENGINE_BUSY"
            )
        self.reset_prefix_cache(reset_running=True)
        digest = self._reload(folder)
        self._weights_folder = folder or self._weights_folder
        self.pause_controller.note_awake((Part.WEIGHTS,))
        if version:
            self._weight_version = version
        self._on_weights(self._weights_folder, digest)

    def num_bytes_in_use(self) -> list[int]:
        """Memory that each rank uses on its device, in bytes."""
        with _refusals():
            return list(self._runners.num_bytes_in_use())

    def _reload(self, folder: Path | None) -> str:
        try:
            with _refusals():
                return self._runners.reload_weights(folder)
        except (FailedPrecondition, EngineBroken):
            raise
        except WeightsLost as error:
            self.pause_controller.note_away((Part.WEIGHTS,))
            logger.error("weights lost", extra={"cause": str(error)})
            raise FailedPrecondition(
                "the engine has no weights and is asleep: restore its model folder and wake it, or update "
                f"its weights from a folder that can be loaded: {error}",
                reason="WEIGHTS_LOST",
            ) from error
        except Exception:
            # After an unexpected error the state of the device is unknown.
            self.pause_controller.note_away((Part.WEIGHTS,))
            raise


@dataclass(frozen=True, slots=True)
class _Held:
    """Loop and scheduler as the pause controller needs them."""

    loop: ControlledLoop
    scheduler: ControlledScheduler
    clock: Clock
    lockstep: ControlledLockstep

    @property
    def has_running(self) -> bool:
        return bool(self.scheduler.running_ids)

    def check_quiet(self) -> None:
        self.lockstep.check_quiet()

    def hold(self, state: PauseState) -> None:
        self.scheduler.set_pause(state)
        if state is PauseState.ALL:
            self.lockstep.pause()
        else:
            # Running requests still have to finish, so this rank has to step.
            self.lockstep.resume()

    def abort_all(self) -> None:
        self.loop.abort([*self.scheduler.running_ids, *self.scheduler.waiting_ids], "pause")

    def forget_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache(self.clock.now(), reset_running=True)

    def when_idle(self, call: Callable[[], None]) -> None:
        self.loop.when_idle(call)


@dataclass(frozen=True, slots=True)
class _Sleeper:
    """The ranks as the pause controller needs them."""

    runners: ControlledRunners

    def sleep(self, level: int) -> None:
        with _refusals():
            self.runners.sleep(level)

    def wake(self, parts: Collection[Part]) -> None:
        with _refusals():
            self.runners.wake([WakeTag(part.value) for part in Part if part in parts])


@contextmanager
def _refusals() -> Iterator[None]:
    """Translates refusals of ranks into errors for the caller, and fatal errors into EngineBroken."""
    try:
        yield
    except Refused as error:
        raise FailedPrecondition(str(error)) from error
    except (RanksDisagree, RankLost) as error:
        raise EngineBroken(str(error)) from error
