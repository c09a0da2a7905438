"""What operators may ask of a loaded engine, in the engine thread: pause, sleep, caches, weights, profiles.

Knows no wire. `serve` is the way in: it lets the steps in flight come to their end first.
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
        """Wait for the steps in flight, and publish them."""
        ...

    def abort(self, request_ids: Iterable[str], cause: str) -> None:
        """End requests, and tell who sent them."""
        ...

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call it once, as soon as nothing can be computed."""
        ...


class ControlledScheduler(Protocol):
    """Who decides what runs."""

    @property
    def running_ids(self) -> list[str]:
        """Requests that hold a row."""
        ...

    @property
    def waiting_ids(self) -> list[str]:
        """Requests that do not yet, or not any more."""
        ...

    def set_pause(self, state: PauseState) -> None:
        """Hold back everything, only admissions, or nothing."""
        ...

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        """Forget all cached content; False where requests hold blocks."""
        ...


class ControlledLockstep(Protocol):
    """How the engine keeps step with others that share its model."""

    def check_quiet(self, *, or_apart: bool = False) -> None:
        """Raise FailedPrecondition, with the reason, while they may step with what this engine holds.

        or_apart: what is to be done is over before an engine that is in no group can be in one.
        """
        ...

    def pause(self) -> None:
        """The requests of this engine stand still."""
        ...

    def resume(self) -> None:
        """They go on."""
        ...


class ControlledRunners(Protocol):
    """All ranks of the engine. Each of these raises Refused, and changes nothing, where it cannot be.

    Of a wake that is refused, the next one does what is left.
    """

    def sleep(self, level: int) -> None:
        """Give memory back."""
        ...

    def wake(self, tags: Collection[WakeTag]) -> None:
        """Take it again."""
        ...

    def reload_weights(self, folder: Path | None) -> str:
        """Put other weights in place; their digest. WeightsLost where there are none any more."""
        ...

    def start_profile(self, folder: Path, prefix: str) -> Sequence[Path]:
        """Record what steps do from now on."""
        ...

    def stop_profile(self) -> Sequence[Path]:
        """End that, and write the files."""
        ...

    def num_bytes_in_use(self) -> Sequence[int]:
        """Memory that each rank holds on its device."""
        ...


class EngineControls:
    """One engine's controls. Its state belongs to the engine thread; `pause_controller` publishes some of it.

    weights_folder: where the present weights are from.  profile_dir: where profiles go, None: nowhere.
    on_weights: told of the folder and the digest of weights that took the place of those before.
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
        """What an operator calls the weights; may be read by any thread."""
        return self._weight_version

    def serve(self, work: Callable[[], None]) -> None:
        """Do `work`, which takes its own errors, with no step in flight; those of a step are the loop's."""
        self._loop.settle()
        work()

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Forget what is cached. Running requests prevent it, or lose their blocks and compute anew."""
        if not self._scheduler.reset_prefix_cache(self._clock.now(), reset_running=reset_running):
            num_running = len(self._scheduler.running_ids)
            raise FailedPrecondition(
                f"requests hold blocks, {num_running} of them run: wait, or ask for reset_running",
                reason="CACHE_IN_USE",
            )

    def start_profile(self, prefix: str) -> None:
        """Begin to record steps, for a file whose name begins so; empty: with the engine's own name."""
        if self._profile_dir is None:
            raise FailedPrecondition(
                "profiles have no place to go: start the engine with --profile-dir", reason="NO_PROFILE_DIR"
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
        """End the recording and write its files, one a rank."""
        # This takes seconds, for which no other rank would wait in a step.
        self._held.lockstep.check_quiet(or_apart=True)
        with _refusals():
            self._runners.stop_profile()

    def set_weight_version(self, version: str) -> None:
        """Call the weights so from now on."""
        self._weight_version = version

    def update_weights(self, folder: Path | None, version: str) -> None:
        """Put the weights of `folder`, None: those of the same one again, in place of the present ones.

        Nothing may run, or all has to be held: then what is held computes its tokens anew, by the new ones. A
        refusal leaves the old ones, and no cache. One with the reason WEIGHTS_LOST leaves none, and what an
        error that nobody has foreseen leaves is not known: the engine sleeps then, until it is woken, which
        can be as soon as its folder can be loaded again, or until it is updated from another.
        """
        # Ranks that meet compare their weights.
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
        """Memory that each rank holds on its device, in bytes."""
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
                "the engine has no weights and sleeps: make its folder as it was and wake it, or update its "
                f"weights from one that can be loaded: {error}",
                reason="WEIGHTS_LOST",
            ) from error
        except Exception:
            # What an error that nobody has foreseen leaves on the device is not known.
            self.pause_controller.note_away((Part.WEIGHTS,))
            raise


@dataclass(frozen=True, slots=True)
class _Held:
    """Loop and scheduler as the standstill sees them."""

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
            # Who lets running requests end has to step as well.
            self.lockstep.resume()

    def abort_all(self) -> None:
        self.loop.abort([*self.scheduler.running_ids, *self.scheduler.waiting_ids], "pause")

    def forget_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache(self.clock.now(), reset_running=True)

    def when_idle(self, call: Callable[[], None]) -> None:
        self.loop.when_idle(call)


@dataclass(frozen=True, slots=True)
class _Sleeper:
    """The ranks as the standstill sees them."""

    runners: ControlledRunners

    def sleep(self, level: int) -> None:
        with _refusals():
            self.runners.sleep(level)

    def wake(self, parts: Collection[Part]) -> None:
        with _refusals():
            self.runners.wake([WakeTag(part.value) for part in Part if part in parts])


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns what ranks say into what operators are told, and what no engine survives into its end."""
    try:
        yield
    except Refused as error:
        raise FailedPrecondition(str(error)) from error
    except (RanksDisagree, RankLost) as error:
        raise EngineBroken(str(error)) from error
