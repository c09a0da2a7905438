"""Fetches model files from engines, verifies and caches them by digest, and makes models from them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping
from functools import partial

import grpc
from tokenizers import Tokenizer

from frontend_svc.parsers.registry import ParserNames
from frontend_svc.text.chat.template import read_templates
from frontend_svc.text.model import (
    GenerationDefaults,
    ServedModel,
    read_class_labels,
    read_eos_token_ids,
    read_generation_defaults,
    read_json_object,
)
from frontend_svc.text.score_template import find_score_template
from frontend_svc.text.tokenize.slow_tokenizer import SlowTokenizers
from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.tokenize.tokenizer import ModelTokenizer
from frontend_svc.text.workers.workers import TextWorkers
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.errors import Internal, InvalidArgument, ServiceError

logger = logging.getLogger(__name__)

_FETCH_DEADLINE_S = 60.0
_MAX_FILE_BYTES = 256 * 1024 * 1024
# Of text workers: files that cannot be read, take too long, or end every worker that reads them.
_REFUSALS = (InvalidArgument, Internal)
# The oldest files and tokenizers are evicted first. A frontend rarely sees more than a few models, and models
# in use hold references to what they need.
MAX_FILES = 64


class ArtifactError(Exception):
    """The files of a model are missing, damaged or invalid."""


class ArtifactStore:
    """Files by SHA-256, shared by all engines, and tokenizers made from them.

    `tokenizer_override` is a tokenizer.json or tokenizer.model that replaces the engine's for every model,
    `chat_template` a template that does.
    """

    def __init__(
        self,
        workers: TextWorkers,
        tokenizer_override: bytes | None = None,
        parsers: ParserNames | None = None,
        slow_tokenizers: SlowTokenizers | None = None,
        *,
        chat_template: bytes | None = None,
    ) -> None:
        self._workers = workers
        self._parsers = parsers or ParserNames()
        self._slow_tokenizers = slow_tokenizers or SlowTokenizers()
        self._override = tokenizer_override
        self._chat_template = chat_template
        self._files: dict[str, bytes] = {}
        self._preparing = asyncio.Lock()
        self._making: dict[str, asyncio.Future[ModelTokenizer]] = {}
        self._tokenizers: dict[str, ModelTokenizer] = {}
        # Loads by text workers, by the tokenizer's key: those that go on, and those that workers refused.
        self._loads: dict[str, asyncio.Future[str]] = {}

    async def prepare(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        """Make the tokenizer of an engine that is loading, which takes seconds for a large vocabulary.

        Nothing depends on it: what fails is tried again when the engine is ready.
        """
        # Of several engines with the same files the first one's are fetched.
        async with self._preparing:
            try:
                if self._files and not await _has_others(self._files, stub):
                    return
                received = await _receive(engine_pb2.GetArtifactsRequest(), stub)
                self._keep({artifact.sha256: content for artifact, content in received.values()})
                await self._tokenizer({kind: content for kind, (_, content) in received.items()})
            except ArtifactError as error:
                logger.info("the files of a loading engine are not used", extra={"reason": str(error)})

    async def model_of(
        self, ready: session_pb2.Ready, stub: engine_pb2_grpc.EngineCoreServiceStub
    ) -> ServedModel:
        """The model that an engine announces with `ready`. Raises ArtifactError."""
        contents = await self._fetch(ready.artifacts, stub)
        generation_config = contents.get(session_pb2.ARTIFACT_KIND_GENERATION_CONFIG, b"")
        config = contents.get(session_pb2.ARTIFACT_KIND_CONFIG, b"")
        text_key, tokenizer = await self._tokenizer(contents)
        try:
            templates = _chat_templates(self._with_template(contents))
            parsers = self._parsers.resolved("\n".join(templates.values()), tokenizer.has_token)
            return ServedModel(
                name=ready.model_name,
                text_key=text_key,
                fingerprint=ready.fingerprint.digest,
                tokenizer=tokenizer,
                defaults=_defaults(generation_config, ready),
                max_model_len=ready.max_model_len,
                vocab_size=ready.vocab_size,
                eos_token_ids=tuple(ready.eos_token_ids) or read_eos_token_ids(generation_config, config),
                supported_tasks=tuple(ready.supported_tasks),
                class_labels=read_class_labels(config),
                has_chat_template=bool(templates),
                score_template=find_score_template(templates),
                parsers=parsers,
                variants={adapter.name: adapter.digest for adapter in ready.served_adapters},
                ready=ready,
            )
        except ValueError as error:
            raise ArtifactError(f"a file of model {ready.model_name} cannot be read: {error}") from error

    async def until_loaded(self, model: ServedModel) -> None:
        """Wait until a text worker has loaded the model's tokenizer. Raises ArtifactError where none can."""
        loading = self._loads.get(model.text_key)
        if loading is None:
            return
        try:
            await asyncio.shield(loading)
        except _REFUSALS as error:
            raise ArtifactError(f"a text worker cannot load the tokenizer: {error}") from error
        except ServiceError:
            # Workers end, do not start or have too much to do: all that needs them is refused meanwhile.
            return

    async def _tokenizer(self, contents: Mapping[int, bytes]) -> tuple[str, ModelTokenizer]:
        loop = asyncio.get_running_loop()
        try:
            contents = self._with_template(contents)
            files = TextFiles(
                await self._tokenizer_json(contents),
                contents.get(session_pb2.ARTIFACT_KIND_TOKENIZER_CONFIG, b""),
                contents.get(session_pb2.ARTIFACT_KIND_CHAT_TEMPLATE, b""),
            )
            # In a thread: hashing many megabytes and parsing them takes up to seconds.
            key = await loop.run_in_executor(None, lambda: files.key)
            making = self._making.get(key)
            if making is None:
                making = self._making[key] = asyncio.ensure_future(self._make(key, files))
                making.add_done_callback(partial(self._note_made, key))
            # It goes on where the stream is lost that it was begun for, and the next one finds it.
            tokenizer = await asyncio.shield(making)
        except (ValueError, OSError, ServiceError) as error:
            raise ArtifactError(f"the tokenizer cannot be read: {error}") from error
        return key, tokenizer

    async def _make(self, key: str, files: TextFiles) -> ModelTokenizer:
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            loop = asyncio.get_running_loop()
            tokenizer = await loop.run_in_executor(None, parse_tokenizer, files, self._workers)
            # A worker loads it as well. The first request waits for that, and the model need not.
            loading = self._loads[key] = asyncio.ensure_future(self._workers.load(files))
            loading.add_done_callback(partial(self._note_loaded, key))
        elif key in self._loads and self._loads[key].done():
            # Not announced once more before a worker can load it.
            await self._workers.load(files)
            self._loads.pop(key, None)
        return self._remember(key, tokenizer)

    def _note_loaded(self, key: str, loading: asyncio.Future[str]) -> None:
        error = None if loading.cancelled() else loading.exception()
        if not isinstance(error, _REFUSALS):
            self._loads.pop(key, None)

    def _note_made(self, key: str, making: asyncio.Future[ModelTokenizer]) -> None:
        del self._making[key]
        # What waits for it raises the error. Where nothing does any more, it is not reported as unseen.
        if not making.cancelled():
            making.exception()

    def _with_template(self, contents: Mapping[int, bytes]) -> Mapping[int, bytes]:
        if self._chat_template is None:
            return contents
        return {**contents, session_pb2.ARTIFACT_KIND_CHAT_TEMPLATE: self._chat_template}

    def _remember(self, key: str, tokenizer: ModelTokenizer) -> ModelTokenizer:
        """Keep it as the one that was used last."""
        kept = self._tokenizers[key] = self._tokenizers.pop(key, tokenizer)
        while len(self._tokenizers) > MAX_FILES:
            self._tokenizers.pop(next(iter(self._tokenizers)))
        return kept

    async def _tokenizer_json(self, contents: Mapping[int, bytes]) -> bytes:
        tokenizer = (
            self._override
            or contents.get(session_pb2.ARTIFACT_KIND_TOKENIZER)
            or contents.get(session_pb2.ARTIFACT_KIND_TOKENIZER_MODEL)
        )
        if tokenizer is None:
            raise ArtifactError("the engine offers no tokenizer.json; give one with --tokenizer")
        if not is_slow_tokenizer(tokenizer):
            return tokenizer
        files = {
            "tokenizer.model": tokenizer,
            "tokenizer_config.json": contents.get(session_pb2.ARTIFACT_KIND_TOKENIZER_CONFIG, b"{}"),
            "config.json": contents.get(session_pb2.ARTIFACT_KIND_CONFIG, b"{}"),
        }
        return await self._slow_tokenizers.convert(files)

    async def _fetch(
        self, artifacts: Iterable[session_pb2.Artifact], stub: engine_pb2_grpc.EngineCoreServiceStub
    ) -> dict[int, bytes]:
        known = {artifact.sha256: self._files.get(artifact.sha256) for artifact in artifacts}
        missing = [artifact for artifact in artifacts if known[artifact.sha256] is None]
        if missing:
            fetched = await _download(missing, stub)
            known.update(fetched)
            self._keep(fetched)
        return {artifact.kind: known[artifact.sha256] or b"" for artifact in artifacts}

    def _keep(self, files: Mapping[str, bytes]) -> None:
        self._files |= files
        while len(self._files) > MAX_FILES:
            self._files.pop(next(iter(self._files)))


def is_slow_tokenizer(content: bytes) -> bool:
    """Whether this is a tokenizer.model, which is not JSON: it is binary, or lines of base64."""
    return content.lstrip()[:1] != b"{"


def read_tokenizer(content: bytes) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises ValueError."""
    try:
        # Not from text, of which the library keeps a second copy for as long.
        return Tokenizer.from_buffer(content)
    except Exception as error:  # The library has no exception class of its own for a malformed file.
        raise ValueError(str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")) from error


def parse_tokenizer(files: TextFiles, workers: TextWorkers) -> ModelTokenizer:
    """The tokenizer of a model's files. Raises ValueError."""
    return ModelTokenizer(read_tokenizer(files.tokenizer), workers, files)


async def _download(
    artifacts: list[session_pb2.Artifact], stub: engine_pb2_grpc.EngineCoreServiceStub
) -> dict[str, bytes]:
    for artifact in artifacts:
        if artifact.size_bytes > _MAX_FILE_BYTES:
            raise ArtifactError(
                f"a file of {artifact.size_bytes} bytes exceeds the limit of {_MAX_FILE_BYTES}"
            )
    request = engine_pb2.GetArtifactsRequest(kinds=[artifact.kind for artifact in artifacts])
    received = await _receive(request, stub)
    for artifact in artifacts:
        if artifact.kind not in received or received[artifact.kind][0].sha256 != artifact.sha256:
            raise ArtifactError(f"a file does not have its digest {artifact.sha256}")
    return {artifact.sha256: received[artifact.kind][1] for artifact in artifacts}


async def _has_others(known: Iterable[str], stub: engine_pb2_grpc.EngineCoreServiceStub) -> bool:
    """Whether an engine has files with other digests than these. Raises ArtifactError."""
    call = stub.GetArtifacts(engine_pb2.GetArtifactsRequest(known_sha256=known), timeout=_FETCH_DEADLINE_S)
    try:
        async for _ in call:
            return True
        return False
    except grpc.RpcError as error:
        raise ArtifactError(f"the engine's files cannot be fetched: {error}") from error
    finally:
        call.cancel()


async def _receive(
    request: engine_pb2.GetArtifactsRequest, stub: engine_pb2_grpc.EngineCoreServiceStub
) -> dict[int, tuple[session_pb2.Artifact, bytes]]:
    """The files by kind, as two may have the same content. Raises ArtifactError."""
    artifacts: dict[int, session_pb2.Artifact] = {}
    contents: dict[int, bytearray] = {}
    try:
        async for response in stub.GetArtifacts(request, timeout=_FETCH_DEADLINE_S):
            kind = response.artifact.kind
            if kind not in (request.kinds or session_pb2.ArtifactKind.values()):
                continue
            artifacts[kind] = response.artifact
            content = contents.setdefault(kind, bytearray())
            if response.offset != len(content) or len(content) + len(response.chunk) > _MAX_FILE_BYTES:
                raise ArtifactError(f"a chunk at {response.offset} came where {len(content)} was due")
            content += response.chunk
    except grpc.RpcError as error:
        raise ArtifactError(f"the engine's files cannot be fetched: {error}") from error
    for kind, artifact in artifacts.items():
        if hashlib.sha256(contents[kind]).hexdigest() != artifact.sha256:
            raise ArtifactError(
                f"a file of {len(contents[kind])} bytes does not have its digest {artifact.sha256}"
            )
    return {kind: (artifact, bytes(contents[kind])) for kind, artifact in artifacts.items()}


def _defaults(generation_config: bytes, ready: session_pb2.Ready) -> GenerationDefaults:
    if generation_config:
        return read_generation_defaults(generation_config)
    announced = ready.default_sampling
    return GenerationDefaults(
        temperature=announced.temperature if announced.HasField("temperature") else None,
        top_p=announced.top_p if announced.HasField("top_p") else None,
        top_k=announced.top_k if announced.HasField("top_k") else None,
        repetition_penalty=announced.repetition_penalty if announced.HasField("repetition_penalty") else None,
    )


def _chat_templates(contents: Mapping[int, bytes]) -> dict[str, str]:
    tokenizer_config = read_json_object(contents.get(session_pb2.ARTIFACT_KIND_TOKENIZER_CONFIG, b""))
    return read_templates(
        tokenizer_config, contents.get(session_pb2.ARTIFACT_KIND_CHAT_TEMPLATE, b"").decode()
    )
