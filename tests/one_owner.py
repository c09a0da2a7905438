"""A guard for tests: no thread touches the state of an engine that another one runs.

While a loop runs, each object of `engine_svc/loop`, `adoption`, `scheduler` and `cache` that can be reached
from it has a subclass of its class, whose methods and attribute writes raise in another thread. Nothing of
this is there outside tests, and it costs an engine that does not run nothing.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import pytest

from engine_svc.cache.block_hash import BlockHasher
from engine_svc.loop.controls import EngineControls
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Inbox, KVEventLog, Outbox, StatsSnapshot

# Of these packages state is guarded; recorders and hooks of the last one are passed through to find it.
_GUARDED = ("engine_svc.loop.", "engine_svc.adoption.", "engine_svc.scheduler.", "engine_svc.cache.")
_SEARCHED = (*_GUARDED, "engine_svc.features.")

# What is made for several threads: the doors, and a hasher without state, which fills in a new request.
_SHARED = (Inbox, Outbox, StatsSnapshot, KVEventLog, BlockHasher)

# What other threads call or read all the same, and why they may.
_ALLOWED = {
    "Scheduler.refusal": "of limits, which never change, and one look-up of an id",
    "KVCache.max_blocks_for": "for `refusal`: sizes, which never change",
    "TokenBlocks.max_blocks": "for `refusal`: sizes, which never change",
    "AlignedStates.max_blocks": "for `refusal`: sizes, which never change",
    "KeptStates.max_blocks": "for `refusal`: sizes, which never change",
    "KVCache.num_total_blocks": "for `refusal`: sizes, which never change",
    "BlockPool.num_usable_blocks": "for `refusal`: sizes, which never change",
    "PauseController.state": "one reference, replaced whole",
    "PauseController.is_paused": "two references, each replaced whole, for statistics",
    "EngineControls.weight_version": "one reference, replaced whole",
}
_UNCHECKED = {
    "__init__",
    "__new__",
    "__repr__",
    "__hash__",
    "__eq__",
    "__init_subclass__",
    "__class_getitem__",
}


class ForeignAccess(RuntimeError):
    """A thread touched the state of an engine that another one runs."""


class OneOwner:
    """Guards engines while they run, and keeps what was refused: the caller may have caught the error."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        # By the id of their loop, which they hold.
        self._controls: WeakValueDictionary[int, EngineControls] = WeakValueDictionary()
        self._owners: dict[int, int] = {}  # of guarded objects, by their ids: the threads that run them
        self._classes: dict[type, type] = {}

    def install(self) -> None:
        """Guard every engine of this process that begins to run from now on."""
        run, init = Engine.run, EngineControls.__init__
        if run.__module__ != Engine.__module__:
            return

        def guarded_run(engine: Engine) -> None:
            guarded = self.guard(engine)
            try:
                run(engine)
            finally:
                self.release(guarded)

        def noted_init(controls: EngineControls, **options: Any) -> None:
            init(controls, **options)
            self._controls[id(options["loop"])] = controls

        patches = pytest.MonkeyPatch()
        patches.setattr(Engine, "run", guarded_run)
        patches.setattr(EngineControls, "__init__", noted_init)

    def guard(self, engine: Engine) -> list[object]:
        """Give an engine to the present thread; returns its objects, for `release`."""
        guarded = list(_state_of([engine, self._controls.get(id(engine))]))
        for one in guarded:
            self._owners[id(one)] = threading.get_ident()
            one.__class__ = self._guarded_class(type(one))
        return guarded

    def release(self, guarded: Iterable[object]) -> None:
        for one in guarded:
            one.__class__ = type(one).__bases__[0]
            del self._owners[id(one)]

    def _guarded_class(self, cls: type) -> type:
        if cls in self._classes:
            return self._classes[cls]
        members: dict[str, object] = {"__slots__": (), "__module__": cls.__module__, "is_guarded": True}
        for base in reversed(cls.__mro__[:-1]):
            for name, member in vars(base).items():
                where = f"{cls.__name__}.{name}"
                if name in _UNCHECKED or where in _ALLOWED:
                    continue
                if isinstance(member, FunctionType):
                    members[name] = self._checked(member, where)
                elif isinstance(member, property) and member.fget is not None:
                    members[name] = member.getter(self._checked(member.fget, where))
        members["__setattr__"] = self._checked(cls.__setattr__, f"a write to {cls.__name__}")
        guarded = self._classes[cls] = type(cls.__name__, (cls,), members)
        return guarded

    def _checked(self, call: Callable[..., Any], where: str) -> Callable[..., Any]:
        owners, get_ident = self._owners, threading.get_ident

        @functools.wraps(call)
        def checked(one: object, *arguments: Any, **options: Any) -> Any:
            if owners.get(id(one)) != get_ident():
                thread = threading.current_thread().name
                self.refused.append(f"{where} in thread {thread}, which does not run the engine")
                raise ForeignAccess(self.refused[-1])
            return call(one, *arguments, **options)

        return checked


def _state_of(roots: Iterable[object]) -> Iterator[object]:
    """The objects to guard that can be reached from `roots`, each once."""
    found: dict[int, object] = {}
    pending = deque(roots)
    while pending:
        one = pending.popleft()
        if isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, (list, tuple, deque, set, frozenset)):
            pending.extend(one)
        if id(one) in found or not type(one).__module__.startswith(_SEARCHED) or isinstance(one, _SHARED):
            continue
        found[id(one)] = one
        names = {*vars(one)} if hasattr(one, "__dict__") else set()
        names.update(name for base in type(one).__mro__ for name in getattr(base, "__slots__", ()))
        pending.extend(getattr(one, name) for name in names if hasattr(one, name))
        if _is_state(type(one)):
            yield one


def _is_state(cls: type) -> bool:
    """Whether objects of a class change and have methods: blocks, enums and frozen data have not."""
    if not cls.__module__.startswith(_GUARDED) or issubclass(cls, Enum) or hasattr(cls, "is_guarded"):
        return False
    if getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
        return False
    return any(
        isinstance(member, FunctionType) and name not in _UNCHECKED for name, member in vars(cls).items()
    )


_GUARD = OneOwner()


@pytest.fixture(scope="session", autouse=True)
def guarded_engines() -> None:
    """Before any other fixture, as those of modules may run engines."""
    _GUARD.install()


@pytest.fixture(autouse=True)
def one_owner() -> Iterator[OneOwner]:
    """What the guard refused fails the test, even if the error was caught."""
    yield _GUARD
    refused, _GUARD.refused = _GUARD.refused, []
    assert refused == []
