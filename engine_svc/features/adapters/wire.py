"""The adapters of an engine by name: reads the adapter of an ADD, and announces them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine_svc.admin.served_engine import CallContext, Role, UtilityCall
from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.adapters.checkpoint import AdapterError, CheckedAdapter, check_adapter, module_shapes
from engine_svc.features.adapters.extras import AdapterUse, Pins
from engine_svc.features.adapters.options import folders_in, folders_of
from triptych.engine.v1 import add_pb2, session_pb2, utility_pb2
from triptych_kit.config import ConfigError
from triptych_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 16_384
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_RULE = "is not 1 to 64 of A-Z, a-z, 0-9, . _ -"


def make(config: EngineConfig) -> WireFeature | None:
    return ServedAdapters(config) if config.enable_lora else None


class ServedAdapters(WireFeature):
    """Adapters that requests may name. ConfigError for one of the configuration that cannot be served."""

    fields = ("adapter", "adapter_digest")

    def __init__(self, config: EngineConfig) -> None:
        self._max_rank, self._max_loaded = config.max_lora_rank, config.num_cpu_loras
        self._max_pinned = config.num_cpu_loras - config.max_loras
        self._lora_dir = None if config.lora_dir is None else Path(config.lora_dir).resolve()
        self._lock = asyncio.Lock()
        self._pinned: set[str] = set()  # names
        self._pins = Pins()
        self._recent: OrderedDict[str, None] = OrderedDict()  # digests of the last requests, the newest last
        role = Role.FRONTEND if config.allow_runtime_lora else Role.ADMIN
        self.utilities = (
            UtilityCall("add_adapter", role, self._add),
            UtilityCall("remove_adapter", role, self._remove),
            UtilityCall("pin_adapter", role, self._pin),
            UtilityCall("unpin_adapter", role, self._unpin),
            UtilityCall("list_adapters", Role.FRONTEND, self._list),
        )
        self._known: dict[str, CheckedAdapter] = {}
        self._broken: dict[str, str] = {}  # in --lora-dir: why they are not served
        try:
            self._shapes = module_shapes(Path(config.model))
            for name, folder in folders_in(config.lora_dir).items():
                self._read_or_note(name, folder)
            for name, folder in folders_of(config.lora_modules).items():
                self._known[name] = self._read(name, folder)
        except AdapterError as error:
            raise ConfigError(str(error)) from error

    def announce(self, ready: session_pb2.Ready) -> None:
        for name in sorted(self._known):
            ready.adapters.append(name)
            ready.served_adapters.add(name=name, digest=self._known[name].digest)

    def report(self, stats: session_pb2.Stats) -> None:
        stats.slot_digests.extend(self._recent)

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        """Raises NotFound for an unknown name, and FailedPrecondition where it stands for other weights."""
        name = entry.adapter
        if not name:
            if entry.adapter_digest:
                raise InvalidArgument("adapter_digest is given without adapter", field="adapter_digest")
            return None
        if name in self._broken:
            raise InvalidArgument(self._broken[name], field="adapter")
        self._check_known(name)
        files = self._known[name]
        if entry.adapter_digest not in ("", files.digest):
            raise FailedPrecondition(
                f"adapter {name} has digest {files.digest[:12]}, the request is for "
                f"{entry.adapter_digest[:12]}",
                reason="ADAPTER_CHANGED",
            )
        self._recent[files.digest] = None
        self._recent.move_to_end(files.digest)
        while len(self._recent) > self._max_loaded:
            self._recent.popitem(last=False)
        use = AdapterUse(name, str(files.folder), files.digest, self._pins)
        return Parsed(use, cache_keys=(use.cache_key,), variant=name)

    async def _add(self, context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
        """Check an adapter's files, and serve it from now on."""
        adapter = call.add_adapter
        if not _NAME.fullmatch(adapter.name):
            raise InvalidArgument(f"name {adapter.name!r} {_NAME_RULE}", field="add_adapter.name")
        folder = self._below(adapter.path)
        if not folder.is_dir():
            raise NotFound(
                f"adapter folder {adapter.path!r} does not exist",
                resource_type="folder",
                resource_name=adapter.path,
            )
        # One at a time: a large one takes a second.
        async with self._lock:
            try:
                files = await asyncio.to_thread(self._read, adapter.name, folder)
            except AdapterError as error:
                raise InvalidArgument(str(error), field="add_adapter.path") from error
            present = self._known.get(adapter.name)
            if present is not None and not adapter.replace and present.digest != files.digest:
                raise AlreadyExists(
                    f"adapter {adapter.name} is loaded with other content, and replace is not set"
                )
            if present is None and len(self._known) >= MAX_ADAPTERS:
                raise ResourceExhausted(
                    f"{len(self._known)} adapters are loaded, the limit is {MAX_ADAPTERS}"
                )
            self._known[adapter.name] = files
            self._broken.pop(adapter.name, None)
            self._note_pins()
        context.engine.announce_again()
        return self._described([adapter.name])

    async def _remove(self, context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
        """Forget an adapter. Its running requests keep it."""
        name = call.remove_adapter.name
        # After one that is being added.
        async with self._lock:
            self._check_known(name)
            del self._known[name]
            self._pinned.discard(name)
            self._note_pins()
        context.engine.announce_again()
        return utility_pb2.UtilityResult(done=utility_pb2.UtilityDone())

    async def _pin(self, context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
        """Keep an adapter in memory from its next request on."""
        name = call.pin_adapter.name
        self._check_known(name)
        if name not in self._pinned and len(self._pinned) >= self._max_pinned:
            raise ResourceExhausted(
                f"{len(self._pinned)} adapters are pinned, the limit is {self._max_pinned}, --max-cpu-loras "
                "less --max-loras"
            )
        self._pinned.add(name)
        self._note_pins()
        return self._described([name])

    async def _unpin(self, context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
        """Let an adapter leave memory again, from the next request on."""
        name = call.unpin_adapter.name
        self._check_known(name)
        self._pinned.discard(name)
        self._note_pins()
        return self._described([name])

    async def _list(self, context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
        return self._described(sorted(self._known))

    def _described(self, names: Sequence[str]) -> utility_pb2.UtilityResult:
        adapters = [
            utility_pb2.LoadedAdapter(
                name=name,
                rank=files.rank,
                digest=files.digest,
                pinned=name in self._pinned,
                in_slot=files.digest in self._recent,
            )
            for name in names
            for files in (self._known[name],)
        ]
        return utility_pb2.UtilityResult(adapters=utility_pb2.LoadedAdapters(adapters=adapters))

    def _note_pins(self) -> None:
        """What is pinned has changed, or the content of a name."""
        digests = {self._known[name].digest for name in self._pinned}
        self._pins = Pins(self._pins.version + 1, tuple(sorted(digests)))

    def _check_known(self, name: str) -> None:
        if name not in self._known:
            raise NotFound(f"adapter {name!r} is not loaded", resource_type="adapter", resource_name=name)

    def _below(self, path: str) -> Path:
        """The folder, which has to lie in `--lora-dir`."""
        folder = Path(path)
        if self._lora_dir is None or not path or not folder.resolve().is_relative_to(self._lora_dir):
            raise PermissionDenied(
                f"path {path!r} is not below --lora-dir, {self._lora_dir or 'which is not set'}",
                reason="OUTSIDE_LORA_DIR",
            )
        return folder.resolve()

    def _read_or_note(self, name: str, folder: Path) -> None:
        try:
            self._known[name] = self._read(name, folder)
        except AdapterError as error:
            logger.warning("an adapter is not served", extra={"adapter": name, "reason": str(error)})
            self._broken[name] = str(error)

    def _read(self, name: str, folder: Path) -> CheckedAdapter:
        if not _NAME.fullmatch(name):
            raise AdapterError(f"the name of adapter {name!r} {_NAME_RULE}")
        return check_adapter(folder, self._shapes, self._max_rank)
