"""Finds the folder of a model by path or hub id, downloading it if needed. Local files need no network.

huggingface_hub itself reads HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT and HF_HOME. Knows no tensors.
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_svc.model.errors import CheckpointError, listed
from engine_svc.model.loading.gguf.file import model_stem
from engine_svc.model.loading.gguf.folder import SUFFIX, open_as_folder
from engine_svc.model.loading.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
_NEEDED = ("*.safetensors", "*.json", "*.jinja")
_WANTED = (*_NEEDED, "tokenizer.model")
# The same weights in other formats, and files of other tools.
_UNWANTED = ("*/*", "consolidated*.safetensors")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
_NO_FILE = "-"  # a pattern that no file of a model has
_TIMEOUT_S = 10.0
_LOWEST_FAULT_OF_THE_HUB = 500
_GIB = 1024**3


def is_hub_id(name_or_path: str) -> bool:
    """Whether this is the name of a hub model, "org/name" or "org/name:Q4_K_M", and not a path here."""
    is_path = is_gguf_path(name_or_path) or Path(name_or_path).exists()
    return _HUB_ID.fullmatch(name_or_path) is not None and not is_path


def is_gguf_path(name_or_path: str) -> bool:
    """Whether this is the path of a GGUF file, which is there or not."""
    return name_or_path.endswith(SUFFIX)


def name_of(name_or_path: str) -> str:
    """The name under which a model is served that has no folder of its own."""
    return model_stem(Path(name_or_path)) if is_gguf_path(name_or_path) else name_or_path


def find_model(
    name_or_path: str,
    *,
    token: str | None = None,
    offline: bool = False,
    revision: str | None = None,
    progress: Progress,
) -> Path:
    """The folder of the model: that path, or the hub's "org/name" in the local cache, downloaded if needed.

    Downloads safetensors, JSON, templates and a tokenizer.model, never pickles, into the hub's cache; of
    "org/name:Q4_K_M" the GGUF file with such an end of its name alone. A GGUF file is opened as a folder.
    token and offline override the environment; revision is a branch, tag or commit of the hub.
    progress is called with ("download", bytes done, bytes missing at first).
    Raises CheckpointError, with a message that states what to do, if the model is not available.
    """
    if not is_hub_id(name_or_path):
        if revision is not None:
            raise CheckpointError(
                f"revision is {revision}, but {name_or_path} is a path, not a model of the hub"
            )
        if is_gguf_path(name_or_path):
            return open_as_folder(Path(name_or_path))
        if not Path(name_or_path).is_dir():
            raise CheckpointError(
                f"{name_or_path} is not a folder: the model must be a Hugging Face folder, a GGUF file, "
                "or org/name of the hub"
            )
        return Path(name_or_path)
    name, _, tag = name_or_path.partition(":")
    folder = _Hub(name, tag, revision, token).fetch(offline=offline, progress=progress)
    return open_as_folder(_tagged_file(folder, tag)) if tag else folder


class _Hub:
    """One model of the hub.  tag: the end of a GGUF file's name; "" for safetensors."""

    def __init__(self, name: str, tag: str, revision: str | None, token: str | None) -> None:
        # Imported here: a local folder needs none of it.
        from huggingface_hub import constants

        self._name = name
        self._tag = tag
        self._revision = revision
        self._token = token
        self._url = f"{constants.ENDPOINT}/{name}"
        self._cache = Path(constants.HF_HUB_CACHE)

    def fetch(self, *, offline: bool, progress: Progress) -> Path:
        """The folder in the cache, with all wanted files."""
        from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of its HTTP library.
            GatedRepoError,
            HfHubHTTPError,
            HTTPError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        self._check_name()
        if offline:
            return self._cached("offline was asked for")
        try:
            info = self._model_info()
            wanted = self._wanted([file.rfilename for file in info.siblings or ()])
            missing = self._missing_bytes(info, wanted)
            folder = self._download(wanted, missing, progress)
        except OfflineModeIsEnabled:
            return self._cached("HF_HUB_OFFLINE is set")
        except GatedRepoError as error:
            raise CheckpointError(
                f"{self._name} is gated: accept its licence at {self._url} and set HF_TOKEN "
                "to a token of the account that did"
            ) from error
        except RevisionNotFoundError as error:
            raise CheckpointError(f"{self._url} has no revision {self._revision}") from error
        except RepositoryNotFoundError as error:
            raise CheckpointError(
                f"{self._name} is neither a folder here nor a model at {self._url}; "
                "a private one needs HF_TOKEN"
            ) from error
        except HfHubHTTPError as error:
            return self._after_refusal(error.response.status_code, error)
        except HTTPError as error:
            return self._cached(f"{self._url} cannot be reached ({_first_line(error)})", error)
        except (OSError, RuntimeError) as error:
            raise self._explained(error) from error
        progress("download", missing, missing)
        return folder

    def _check_name(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self._name)
        except HFValidationError as error:
            raise CheckpointError(
                f"{self._name} is neither a folder here nor a name of the hub: {_first_line(error)}"
            ) from error

    def _model_info(self) -> ModelInfo:
        from huggingface_hub import HfApi

        return HfApi(token=self._token).model_info(
            self._name, revision=self._revision, files_metadata=True, timeout=_TIMEOUT_S
        )

    def _wanted(self, names: list[str]) -> list[str]:
        """The files to download. Raises CheckpointError if the weights are not among them."""
        if self._tag:
            if wanted := _tagged(names, self._tag):
                return wanted
            ggufs = listed(name for name in names if is_gguf_path(name)) or "none"
            raise CheckpointError(
                f"{self._name} has no GGUF file with a name that ends with {self._tag}; it has {ggufs}"
            )
        wanted = [name for name in names if _is_wanted(name)]
        if not any(name.endswith(".safetensors") for name in wanted):
            others = [name for name in names if any(fnmatch.fnmatch(name, one) for one in _OTHER_WEIGHTS)]
            formats = f"weights only as {', '.join(others[:5])}" if others else "no weights"
            has_gguf = any(map(is_gguf_path, names))
            cure = f"; {self._name}:Q4_K_M is the GGUF file whose name ends so" if has_gguf else ""
            raise CheckpointError(
                f"{self._name} has {formats}; only safetensors are read, nothing was downloaded{cure}"
            )
        return wanted

    def _missing_bytes(self, info: ModelInfo, wanted: list[str]) -> int:
        """Number of bytes to download. Raises CheckpointError if the disk has no room for them."""
        from huggingface_hub import try_to_load_from_cache

        missing = sum(
            file.size or 0
            for file in info.siblings or ()
            if file.rfilename in wanted
            and not isinstance(try_to_load_from_cache(self._name, file.rfilename, revision=info.sha), str)
        )
        existing = next(path for path in (self._cache, *self._cache.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if missing > free:
            raise CheckpointError(
                f"{self._name} needs {missing / _GIB:.1f} GiB in {self._cache}, "
                f"which has {free / _GIB:.1f} GiB free; make room, or set HF_HOME to a folder on another disk"
            )
        return missing

    def _download(self, wanted: list[str], missing: int, progress: Progress) -> Path:
        from huggingface_hub import snapshot_download

        if missing:
            logger.info("downloading", extra={"model": self._name, "size_bytes": missing, "from": self._url})
            progress("download", 0, missing)
        return Path(
            snapshot_download(
                self._name,
                revision=self._revision,
                token=self._token,
                allow_patterns=wanted,
                tqdm_class=_progress_bar_class(
                    lambda done: progress("download", min(done, missing), missing)
                ),
            )
        )

    def _cached(self, why: str, error: Exception | None = None) -> Path:
        """The folder as an earlier download left it, complete; `why` the hub is not contacted."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = self._complete_snapshot()
        except LocalEntryNotFoundError as missing:
            name = f"{self._name}:{self._tag}" if self._tag else self._name
            raise CheckpointError(f"{why}, and {self._cache} does not have all of {name}") from (
                error or missing
            )
        logger.warning("the cached model is used", extra={"model": self._name, "why": why})
        return folder

    def _complete_snapshot(self) -> Path:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if self._tag:
            folder = self._snapshot((_NO_FILE,))
            if not _tagged(_names_in(folder), self._tag):
                raise LocalEntryNotFoundError(f"no file of {self._tag}")
            return folder
        try:
            return self._snapshot(_WANTED)
        except LocalEntryNotFoundError:
            # The cache may lack what is only read where there is no tokenizer.json.
            folder = self._snapshot(_NEEDED)
            if not (folder / "tokenizer.json").is_file():
                raise
            return folder

    def _snapshot(self, patterns: tuple[str, ...]) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self._name,
                revision=self._revision,
                local_files_only=True,
                allow_patterns=list(patterns),
                ignore_patterns=list(_UNWANTED),
            )
        )

    def _after_refusal(self, status: int, error: Exception) -> Path:
        if status in (401, 403):
            raise CheckpointError(
                f"{self._url} refuses access ({status}): set HF_TOKEN to a token that may read it"
            ) from error
        if status >= _LOWEST_FAULT_OF_THE_HUB:
            return self._cached(f"{self._url} answers {status}", error)
        raise CheckpointError(f"{self._url} answers {status}: {_first_line(error)}") from error

    def _explained(self, error: OSError | RuntimeError) -> CheckpointError:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return CheckpointError(
                f"{self._cache} is full: make room for {self._name}, "
                "or set HF_HOME to a folder on another disk"
            )
        return CheckpointError(f"{self._name} cannot be downloaded: {_first_line(error)}")


def _is_wanted(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in _WANTED) and not any(
        fnmatch.fnmatch(name, pattern) for pattern in _UNWANTED
    )


def _tagged(names: Iterable[str], tag: str) -> list[str]:
    """The GGUF file, or all of its shards, whose name ends with the tag: the shortest one of several."""
    ending = re.compile(rf"(.*[-_.])?{re.escape(tag)}", re.IGNORECASE)
    by_stem: dict[str, list[str]] = {}
    for name in sorted(name for name in names if is_gguf_path(name)):
        stem = model_stem(Path(name))
        if ending.fullmatch(stem) and not stem.startswith("mmproj"):
            by_stem.setdefault(stem, []).append(name)
    return by_stem[min(by_stem, key=lambda stem: (len(stem), stem))] if by_stem else []


def _names_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob(f"*{SUFFIX}")]


def _tagged_file(folder: Path, tag: str) -> Path:
    return folder / _tagged(_names_in(folder), tag)[0]


def _progress_bar_class(on_bytes: Callable[[int], None]) -> Any:
    """A progress bar class for the hub's library that draws nothing and reports the bytes downloaded."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """One of the library's bars. Bars that count bytes each cover all files; the others count files."""

        def __init__(self, *args: object, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            self._num_bytes = 0
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self._num_bytes += int(n or 0)
            if self._counts_bytes:
                on_bytes(self._num_bytes)

    return Bar


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
