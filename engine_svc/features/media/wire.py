"""Reads the images of an ADD: where they are in the prompt, and their content, which may be here already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, count
from pathlib import Path

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.core.encoder_spec import IMAGE, EncoderSpec, read_encoder_spec
from engine_svc.core.request import ContentSpan
from engine_svc.features.media.extras import (
    EncoderInput,
    MediaContent,
    MediaItems,
    PromptItem,
    digest_of,
)
from engine_svc.tensors.source import TensorSource
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import FailedPrecondition, InvalidArgument, Unimplemented
from triptych_kit.field_checks import unserved
from triptych_kit.rules import rules_of

_MODALITIES = {IMAGE: add_pb2.MEDIA_MODALITY_IMAGE}
_HEX = frozenset("0123456789abcdef")
_DIGEST_LENGTH = 64
_MAX_ITEMS = rules_of(add_pb2.AddEntry, "media").max_items
_NAMED_ITEMS = 32  # of those that are missing: a status has room for few


def make(config: EngineConfig) -> WireFeature:
    spec = read_encoder_spec(Path(config.model))
    if spec is None:
        return MediaOfAdd(None, MediaStore(0), max_outputs=0)
    # An item that fits into no step or not into the cache would never be encoded.
    max_outputs = min(config.max_encoder_outputs, config.max_kept_outputs)
    return MediaOfAdd(spec, MediaStore(config.media_cache_mb << 20), max_outputs=max_outputs)


class MediaStore:
    """Content that came with earlier requests, the least recently used dropped first.

    A request keeps its own content, whether it is still here or not.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._contents: OrderedDict[str, MediaContent] = OrderedDict()
        self._num_bytes = 0

    def get(self, digest: str) -> MediaContent | None:
        content = self._contents.get(digest)
        if content is not None:
            self._contents.move_to_end(digest)
        return content

    def add(self, content: MediaContent) -> None:
        """Keep new content."""
        self._contents[content.sha256] = content
        self._num_bytes += content.size_bytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._contents.popitem(last=False)
            self._num_bytes -= dropped.size_bytes

    def clear(self) -> None:
        self._contents.clear()
        self._num_bytes = 0


class MediaOfAdd(WireFeature):
    """spec: None for a model that takes text alone: images are refused by name."""

    fields = ("media",)

    def __init__(self, spec: EncoderSpec | None, store: MediaStore, *, max_outputs: int) -> None:
        self._spec = spec
        self._store = store
        self._max_outputs = max_outputs
        self.takes_tensors = spec is not None

    def announce(self, ready: session_pb2.Ready) -> None:
        if self._spec is not None:
            ready.media.family = self._spec.family
            ready.media.modalities.append(_MODALITIES[self._spec.modality])
            ready.media.max_item_tokens = self._max_outputs
            ready.media.max_items = _MAX_ITEMS

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed:
        """Raises also an error of the tensor source, and FailedPrecondition for content that is not here."""
        spec = self._spec
        if spec is None:
            raise unserved("media")
        if len(entry.media) > _MAX_ITEMS:
            raise InvalidArgument(
                f"media has {len(entry.media)} items, the limit is {_MAX_ITEMS}", field="media"
            )
        if entry.HasField("prompt_embeds"):
            raise InvalidArgument("media are set, which a prompt of embeddings cannot have", field="media")
        if spec.num_outputs > self._max_outputs:
            raise InvalidArgument(
                f"media[0] has {spec.num_outputs} embeddings, the engine takes {self._max_outputs}",
                field="media[0].placeholder_length",
            )
        places = _places(entry.media, spec, context.token_ids)
        contents: list[MediaContent | None] = [
            self._content(index, item, spec, context.tensors) for index, item in enumerate(entry.media)
        ]
        missing = [index for index, content in enumerate(contents) if content is None]
        if missing:
            raise FailedPrecondition(
                f"the content of media[{missing[0]}] is not here, nor that of {len(missing) - 1} others: "
                "send their tensors",
                reason="MEDIA_NOT_FOUND",
                metadata={
                    "field": f"media[{missing[0]}].hash",
                    "items": ",".join(map(str, missing[:_NAMED_ITEMS])),
                },
            )
        items = tuple(
            PromptItem(content, start, num_tokens, tokens)
            for content, (start, num_tokens, tokens) in zip(contents, places, strict=True)
            if content is not None
        )
        spans = tuple(ContentSpan(item.start, item.num_tokens, item.key, item.tokens) for item in items)
        return Parsed(MediaItems(items), spans=spans)

    def _content(
        self, index: int, item: add_pb2.MediaItem, spec: EncoderSpec, tensors: TensorSource | None
    ) -> MediaContent | None:
        """The content of an item, which is kept from now on. None: its tensors have to be sent."""
        field = f"media[{index}]"
        if item.modality != _MODALITIES[spec.modality]:
            raise Unimplemented(
                f"{field}.modality is {item.modality}, the model takes {spec.modality} alone",
                reason="UNIMPLEMENTED_FIELD",
                metadata={"field": f"{field}.modality"},
            )
        if len(item.hash) != _DIGEST_LENGTH or not _HEX.issuperset(item.hash):
            raise InvalidArgument(f"{field}.hash takes 64 lower-case hex digits", field=f"{field}.hash")
        known = self._store.get(item.hash)
        if known is not None or not item.tensors:
            return known
        if tensors is None:
            raise unserved("media")
        content = MediaContent(item.hash, _inputs(field, item.tensors, spec, tensors))
        if digest_of(content.inputs) != item.hash:
            raise InvalidArgument(f"{field}.hash is not that of its tensors", field=f"{field}.hash")
        self._store.add(content)
        return content


def _places(
    media: Sequence[add_pb2.MediaItem], spec: EncoderSpec, token_ids: list[int]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """First position, number of positions and offsets of tokens of each item.

    Raises InvalidArgument unless exactly the placeholders of the prompt have embeddings.
    """
    places, end, num_placeholders = [], 0, token_ids.count(spec.placeholder_id)
    for index, item in enumerate(media):
        field = f"media[{index}]"
        start, num_tokens = item.placeholder_offset, item.placeholder_length
        if start < end or not 0 < num_tokens <= len(token_ids) - start:
            raise InvalidArgument(
                f"{field} has positions {start} to {start + num_tokens - 1}, it takes 1 or more from {end} "
                f"to {len(token_ids) - 1}",
                field=f"{field}.placeholder_offset",
            )
        flags = item.is_embed or b"\x01" * num_tokens
        if len(flags) != num_tokens or max(flags) > 1 or not (flags[0] and flags[-1]):
            raise InvalidArgument(
                f"{field}.is_embed takes a 0 or 1 for each of {num_tokens} positions, 1 for the first and "
                "the last",
                field=f"{field}.is_embed",
            )
        if sum(flags) != spec.num_outputs:
            raise InvalidArgument(
                f"{field} has {sum(flags)} positions with an embedding, its content has {spec.num_outputs}",
                field=f"{field}.placeholder_length",
            )
        end = start + num_tokens
        if any(token_ids[position] != spec.placeholder_id for position in compress(range(start, end), flags)):
            raise InvalidArgument(
                f"{field} has positions without the placeholder, token {spec.placeholder_id}",
                field=f"{field}.placeholder_offset",
            )
        places.append((start, num_tokens, tuple(compress(count(), (not flag for flag in flags)))))
    num_covered = len(media) * spec.num_outputs
    if num_placeholders != num_covered:
        raise InvalidArgument(
            f"the prompt has {num_placeholders} placeholders, media have {num_covered} embeddings for them",
            field="media",
        )
    return places


def _inputs(
    field: str, named: Sequence[add_pb2.NamedTensor], spec: EncoderSpec, tensors: TensorSource
) -> tuple[EncoderInput, ...]:
    """The encoder's inputs in the order of their names. Raises InvalidArgument, or as the source does."""
    expected = {each.name: each for each in spec.inputs}
    if sorted(each.name for each in named) != sorted(expected):
        raise InvalidArgument(
            f"{field}.tensors takes {', '.join(sorted(expected))}, each once", field=f"{field}.tensors"
        )
    inputs = []
    for index, each in sorted(enumerate(named), key=lambda pair: pair[1].name):
        wanted, where = expected[each.name], f"{field}.tensors[{index}].tensor"
        shape = tuple(each.tensor.shape)
        # Before anything is read: an image that is far too large must cost no more.
        if shape != wanted.shape:
            raise InvalidArgument(
                f"{where}.shape is {list(shape)[:8]}, {each.name} takes {list(wanted.shape)}",
                field=f"{where}.shape",
            )
        value = tensors.take(each.tensor, where)
        if value.dtype != wanted.dtype:
            raise InvalidArgument(
                f"{where}.dtype is {value.dtype}, {each.name} takes {wanted.dtype}", field=f"{where}.dtype"
            )
        if not value.is_sound:
            raise InvalidArgument(f"{where} has elements that are not finite", field=where)
        if not value.is_moderate:
            raise InvalidArgument(f"{where} has elements that are too large", field=where)
        inputs.append(EncoderInput(each.name, value))
    return tuple(inputs)
