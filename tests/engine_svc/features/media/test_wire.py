"""Pictures as ADDs bring them: what becomes of them, what need not be sent again, and what is refused."""

from __future__ import annotations

import grpc
import pytest

from engine_svc.convert.feature import AddContext
from engine_svc.core.encoder_spec import IMAGE, EncoderSpec, InputSpec
from engine_svc.features.media.extras import EncoderInput, MediaItems, digest_of
from engine_svc.features.media.wire import MediaOfAdd, MediaStore
from engine_svc.tensors.host_tensor import HostTensor
from engine_svc.tensors.source import TensorReceiver
from tests.engine_svc.session.service_rig import make_entry, make_facts
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import FailedPrecondition, InvalidArgument, ServiceError, Unimplemented

PLACEHOLDER = 7
SPEC = EncoderSpec("llava", IMAGE, PLACEHOLDER, (InputSpec("pixel_values", "float32", (3, 2, 2)),), 4)
PROMPT = [1, 7, 7, 7, 7, 2, 7, 7, 7, 7]
ITEM_BYTES = 48


def make_feature(spec: EncoderSpec | None = SPEC, *, num_kept: int = 4, max_outputs: int = 64) -> MediaOfAdd:
    return MediaOfAdd(spec, MediaStore(num_kept * ITEM_BYTES), max_outputs=max_outputs)


def pixels(value: int) -> bytes:
    return bytes([value, 0, 0, 0]) * 12


def hash_of(value: int) -> str:
    tensor = HostTensor("float32", (3, 2, 2), pixels(value))
    return digest_of([EncoderInput("pixel_values", tensor)])


def item(value: int, start: int, *, sent: bool = True, **fields: object) -> add_pb2.MediaItem:
    """A picture of four positions. sent: with its tensor."""
    made = add_pb2.MediaItem(
        modality=add_pb2.MEDIA_MODALITY_IMAGE,
        hash=hash_of(value),
        placeholder_offset=start,
        placeholder_length=4,
    )
    if sent:
        tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[3, 2, 2], inline=pixels(value))
        made.tensors.add(name="pixel_values", tensor=tensor)
    for name, changed in fields.items():
        setattr(made, name, changed)
    return made


def parse(feature: MediaOfAdd, *items: add_pb2.MediaItem, token_ids: list[int] | None = None):
    entry = make_entry(1)
    entry.media.extend(items)
    source = TensorReceiver(is_open=True).source("a frontend", "a session")
    context = AddContext(make_facts(), source, list(PROMPT if token_ids is None else token_ids))
    return feature.parse(entry, context)


def test_each_picture_is_a_span_of_its_content():
    parsed = parse(make_feature(), item(1, 1), item(2, 6))
    assert [(span.start, span.num_tokens, span.key, span.tokens) for span in parsed.spans] == [
        (1, 4, f"media:{hash_of(1)}", ()), (6, 4, f"media:{hash_of(2)}", ()),
    ]  # fmt: skip
    assert isinstance(parsed.extra, MediaItems)
    assert [one.content.inputs[0].value.data for one in parsed.extra.items] == [pixels(1), pixels(2)]


def test_tokens_between_the_embeddings_of_a_picture_are_no_part_of_its_content():
    prompt = [1, 7, 7, 9, 7, 7]
    tiles = item(1, 1, placeholder_length=5, is_embed=b"\1\1\0\1\1")
    (span,) = parse(make_feature(), tiles, token_ids=prompt).spans
    assert (span.start, span.num_tokens, span.tokens) == (1, 5, (2,))


# Row 236.
def test_a_known_picture_is_not_sent_again():
    feature = make_feature()
    parse(feature, item(1, 1), item(2, 6))
    parsed = parse(feature, item(2, 1, sent=False), item(1, 6, sent=False))
    assert [one.content.sha256 for one in parsed.extra.items] == [hash_of(2), hash_of(1)]


def test_an_unknown_picture_has_to_be_sent():
    feature = make_feature()
    parse(feature, item(1, 1), token_ids=PROMPT[:6])
    with pytest.raises(FailedPrecondition) as caught:
        parse(feature, item(1, 1, sent=False), item(2, 6, sent=False))
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION, "MEDIA_NOT_FOUND",
    )  # fmt: skip
    assert caught.value.metadata == {"field": "media[1].hash", "items": "1"}
    assert len(parse(feature, item(1, 1, sent=False), item(2, 6)).extra.items) == 2


def test_the_picture_used_longest_ago_is_dropped_first():
    feature = make_feature(num_kept=2)
    for value in (1, 2):
        parse(feature, item(value, 1), token_ids=PROMPT[:6])
    parse(feature, item(1, 1, sent=False), token_ids=PROMPT[:6])
    held = parse(feature, item(3, 1), token_ids=PROMPT[:6])
    parse(feature, item(1, 1, sent=False), token_ids=PROMPT[:6])
    with pytest.raises(FailedPrecondition):
        parse(feature, item(2, 1, sent=False), token_ids=PROMPT[:6])
    assert held.extra.items[0].content.inputs[0].value.data == pixels(3)


def test_a_picture_larger_than_what_is_kept_is_served():
    feature = make_feature(num_kept=0)
    assert len(parse(feature, item(1, 1), token_ids=PROMPT[:6]).extra.items) == 1
    with pytest.raises(FailedPrecondition):
        parse(feature, item(1, 1, sent=False), token_ids=PROMPT[:6])


def named(name: str) -> add_pb2.MediaItem:
    made = item(1, 1)
    made.tensors[0].name = name
    return made


def shaped(**fields: object) -> add_pb2.MediaItem:
    made = item(1, 1)
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[3, 2, 2], inline=pixels(1))
    for field, value in fields.items():
        if field == "shape":
            tensor.ClearField("shape")
            tensor.shape.extend(value)
        else:
            setattr(tensor, field, value)
    made.tensors[0].tensor.CopyFrom(tensor)
    return made


@pytest.mark.parametrize(
    ("items", "token_ids", "field", "words"),
    [
        ([item(1, 1)], PROMPT, "media", "8 placeholders, media have 4"),
        ([item(1, 1)], [1, 7, 7, 7, 5, 7], "media[0].placeholder_offset", "without the placeholder, token 7"),
        ([item(1, 6), item(2, 1)], PROMPT, "media[1].placeholder_offset", "positions 1 to 4"),
        ([item(1, 1), item(2, 4)], PROMPT, "media[1].placeholder_offset", "positions 4 to 7"),
        ([item(1, 8)], PROMPT, "media[0].placeholder_offset", "positions 8 to 11"),
        ([item(1, 2**32 - 1)], PROMPT, "media[0].placeholder_offset", "to 9"),
        ([item(1, 1, placeholder_length=3)], PROMPT, "media[0].placeholder_length", "its content has 4"),
        ([item(1, 1, placeholder_length=0)], PROMPT, "media[0].placeholder_offset", "1 or more"),
        ([item(1, 1, is_embed=b"\1\1\1")], PROMPT, "media[0].is_embed", "each of 4 positions"),
        ([item(1, 1, is_embed=b"\1\2\1\1")], PROMPT, "media[0].is_embed", "a 0 or 1"),
        ([item(1, 1, is_embed=b"\0\1\1\1")], PROMPT, "media[0].is_embed", "1 for the first"),
        ([item(1, 1, hash="AB" * 32)], PROMPT[:6], "media[0].hash", "64 lower-case hex digits"),
        ([item(1, 1, hash="ab")], PROMPT[:6], "media[0].hash", "64 lower-case hex digits"),
        ([item(1, 1, hash=hash_of(2))], PROMPT[:6], "media[0].hash", "not that of its tensors"),
        ([named("input_features")], PROMPT[:6], "media[0].tensors", "takes pixel_values"),
        ([shaped(shape=[3, 4, 1])], PROMPT[:6], "media[0].tensors[0].tensor.shape", "takes [3, 2, 2]"),
        ([shaped(shape=[2**40, 2**40])], PROMPT[:6], "media[0].tensors[0].tensor.shape", "takes [3, 2, 2]"),
        (
            [shaped(dtype=tensor_pb2.D_TYPE_INT32)],
            PROMPT[:6],
            "media[0].tensors[0].tensor.dtype",
            "takes float32",
        ),
        (
            [shaped(inline=b"\0\0\xc0\x7f" * 12)],
            PROMPT[:6],
            "media[0].tensors[0].tensor",
            "not finite",
        ),
        ([shaped(inline=b"\0")], PROMPT[:6], "media[0].tensors[0].tensor", "48 bytes, 1 came"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(items, token_ids, field, words):
    with pytest.raises(InvalidArgument) as caught:
        parse(make_feature(), *items, token_ids=token_ids)
    assert [found for found, _ in caught.value.violations] == [field]
    assert words in caught.value.message


def test_an_item_that_fits_into_no_step_or_not_into_the_cache_is_refused():
    with pytest.raises(InvalidArgument, match="has 4 embeddings, the engine takes 3"):
        parse(make_feature(max_outputs=3), item(1, 1), token_ids=PROMPT[:6])


@pytest.mark.parametrize(
    ("feature", "made", "field"),
    [
        (make_feature(), item(1, 1, modality=add_pb2.MEDIA_MODALITY_VIDEO), "media[0].modality"),
        (make_feature(None), item(1, 1), "media"),
    ],
)
def test_what_the_model_does_not_take_is_not_served(feature: MediaOfAdd, made: add_pb2.MediaItem, field: str):
    with pytest.raises(Unimplemented) as caught:
        parse(feature, made, token_ids=PROMPT[:6])
    assert caught.value.metadata["field"] == field


def test_media_and_embeddings_in_one_prompt_are_refused():
    entry = make_entry(1)
    entry.media.append(item(1, 1))
    entry.prompt_embeds.shape.extend([1, 1])
    with pytest.raises(ServiceError, match="which a prompt of embeddings cannot have"):
        make_feature().parse(entry, AddContext(make_facts(), None, PROMPT))


def test_the_engine_announces_what_it_takes():
    ready = session_pb2.Ready()
    make_feature(None).announce(ready)
    assert not ready.HasField("media")
    make_feature(max_outputs=9).announce(ready)
    assert (ready.media.family, list(ready.media.modalities)) == ("llava", [add_pb2.MEDIA_MODALITY_IMAGE])
    assert (ready.media.max_item_tokens, ready.media.max_items) == (9, 256)
