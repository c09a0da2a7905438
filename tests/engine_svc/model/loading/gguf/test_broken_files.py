"""Files that are cut off, damaged, or of a kind that is not served are refused by a line with the fault."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_svc.model.errors import ModelError
from engine_svc.model.loading.gguf.config import read_config
from engine_svc.model.loading.gguf.file import read_model
from engine_svc.model.loading.gguf.folder import open_as_folder
from engine_svc.model.loading.gguf.names import read_origins
from engine_svc.model.loading.gguf.tokenizer import (
    generation_config,
    read_vocabulary,
    tokenizer_config,
    tokenizer_json,
)
from tests.engine_svc.model.loading.gguf.gguf_bytes import (
    ARRAY,
    F32,
    HIDDEN,
    NUM_TOKENS,
    TEXT,
    U32,
    Described,
    GgufBytes,
    Value,
    array,
    f32,
    numbers,
    text,
    texts,
    tiny_llama,
    u32,
)

HUGE = 1 << 63
MAX_BYTES = 16 << 20
Change = Callable[[GgufBytes], object]


def with_value(key: str, value: Value) -> Change:
    return lambda file: file.set(key, value)


def without(key: str) -> Change:
    return lambda file: file.remove(key)


def with_parts(**parts: object) -> Change:
    def change(file: GgufBytes) -> None:
        for name, value in parts.items():
            setattr(file, name, value)

    return change


def with_tensor(name: str, **parts: object) -> Change:
    def change(file: GgufBytes) -> None:
        for part, value in parts.items():
            setattr(file.tensor(name), part, value)

    return change


def with_more(*tensors: Described) -> Change:
    return lambda file: file.tensors.extend(tensors)


def without_tensor(name: str) -> Change:
    return lambda file: file.tensors.remove(file.tensor(name))


def with_first_key(key: str | bytes, value: Value) -> Change:
    return lambda file: file.keys.insert(0, (key, value))


def byte_level(**values: Value) -> Change:
    """With the vocabulary of a byte-level BPE."""

    def change(file: GgufBytes) -> None:
        file.set("tokenizer.ggml.model", text("gpt2")).set("tokenizer.ggml.pre", text("qwen2"))
        file.set("tokenizer.ggml.merges", texts(["a b"]))
        for name, value in values.items():
            file.set(f"tokenizer.ggml.{name}", value)

    return change


_Q, _EMBEDDING = "blk.0.attn_q.weight", "token_embd.weight"
_EPS, _TOKENS = "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.tokens"
BROKEN: dict[str, tuple[Change, str]] = {
    "magic": (with_parts(magic=b"GGML"), "is not a GGUF file: it begins with b'GGML'"),
    "pointer": (with_parts(magic=b"version https://git-lfs"), "is a pointer of Git LFS"),
    "version 1": (with_parts(version=1), "has GGUF version 1; versions 2 and 3 are read"),
    "version 4": (with_parts(version=4), "has GGUF version 4"),
    "big-endian": (with_parts(version=3 << 24), "is a big-endian GGUF file"),
    "tensors": (with_parts(num_tensors=HUGE), f"it has {HUGE} tensors"),
    "more tensors": (with_parts(num_tensors=100), "is damaged: "),
    "keys": (with_parts(num_keys=HUGE), f"it has {HUGE} keys of metadata"),
    "more keys": (with_parts(num_keys=100), "is damaged: "),
    "length of a text": (
        with_value("general.name", text("", HUGE)),
        f"the value of general.name has {HUGE} bytes",
    ),
    "length within the limit": (
        with_value("general.name", text("", 1 << 21)),
        "the value of general.name ends at byte",
    ),
    "length of an array": (
        with_value("general.x", array(U32, [], HUGE)),
        "the value of general.x ends at byte",
    ),
    "length of texts": (with_value("general.x", array(TEXT, [], HUGE)), f"general.x has {HUGE} texts"),
    "texts within the limit": (
        with_value("general.x", array(TEXT, [], 1 << 21)),
        "the value of general.x ends at byte",
    ),
    "length in an array": (
        with_value("general.x", array(TEXT, [text("", HUGE).content])),
        "the value of general.x ends at byte",
    ),
    "kind": (with_value("general.x", Value(99, b"")), "general.x has values of kind 99"),
    "kind in an array": (with_value("general.x", array(99, [])), "general.x has values of kind 99"),
    "nested arrays": (
        with_value("general.x", array(ARRAY, [array(U32, []).content])),
        "general.x is an array of arrays",
    ),
    "key": (with_first_key(b"\xff", u32(1)), "a key of metadata is not UTF-8"),
    "text": (with_value("general.name", text(b"\xff")), "the value of general.name is not UTF-8"),
    "same key": (with_first_key("llama.block_count", u32(1)), "llama.block_count is there twice"),
    "same tensor": (with_more(Described(_Q, (HIDDEN, HIDDEN))), f"tensor {_Q} is there twice"),
    "no dimensions": (with_tensor(_Q, lengths=()), f"tensor {_Q} has 0 dimensions"),
    "dimensions": (with_tensor(_Q, lengths=(1,) * 5), f"tensor {_Q} has 5 dimensions"),
    "no rows": (with_tensor(_Q, lengths=(HIDDEN, 0)), f"tensor {_Q} has shape [32, 0]"),
    "rows": (with_tensor(_Q, lengths=(HIDDEN, HUGE), content=b""), f"tensor {_Q} has shape [32, {HUGE}]"),
    "overflow": (
        with_tensor(_Q, lengths=(1 << 32, 1 << 32), content=b""),
        f"tensor {_Q} has shape [{1 << 32}, {1 << 32}]",
    ),
    "block": (
        with_tensor(_Q, lengths=(33, 32), kind=8, content=b""),
        f"tensor {_Q} has rows of 33, no multiple of the 32 of Q8_0",
    ),
    "type": (with_tensor(_Q, kind=99), f"tensor {_Q} has type 99; read are F32, F16, Q4_0"),
    "type by name": (with_tensor(_Q, kind=10), f"tensor {_Q} has type Q2_K; read are F32"),
    "offset outside": (with_tensor(_Q, offset=1 << 40), f"tensor {_Q} ends at byte"),
    "huge offset": (with_tensor(_Q, offset=HUGE), f"tensor {_Q} ends at byte"),
    "odd offset": (with_tensor(_Q, offset=1), f"tensor {_Q} has offset 1, no multiple of 32"),
    "overlap": (with_tensor(_Q, offset=0), "overlaps "),
    "alignment 0": (with_value("general.alignment", u32(0)), "general.alignment is 0"),
    "alignment 3": (with_value("general.alignment", u32(3)), "general.alignment is 3, must be a power of 2"),
    "huge alignment": (with_value("general.alignment", u32(1 << 30)), f"no multiple of {1 << 30}"),
    "alignment as text": (with_value("general.alignment", text("32")), "general.alignment is '32'"),
    "no architecture": (without("general.architecture"), "lacks general.architecture in its metadata"),
    "architecture": (
        with_value("general.architecture", text("mamba")),
        "has architecture 'mamba'; served are llama, qwen2, qwen3, qwen3moe, gemma3, phi3, gpt-oss",
    ),
    "mmproj": (
        with_value("general.type", text("mmproj")),
        "is the part of a model that reads images (mmproj)",
    ),
    "clip": (with_value("general.architecture", text("clip")), "(mmproj); served are models"),
    "adapter": (with_value("general.type", text("adapter")), "is a LoRA adapter"),
    "imatrix": (with_value("general.type", text("imatrix")), "is an importance matrix"),
    "vocabulary alone": (with_parts(tensors=[]), "has no tensors: a vocabulary alone is not served"),
    "experts": (with_value("llama.expert_count", u32(8)), "llama.expert_count is not 0"),
    "scale": (with_value("llama.logit_scale", f32(0.5)), "llama.logit_scale is 0.5, which is not served"),
    "no layers": (without("llama.block_count"), "lacks llama.block_count"),
    "no length": (without("llama.context_length"), "lacks llama.context_length"),
    "no size": (without("llama.embedding_length"), "lacks llama.embedding_length"),
    "no inner size": (without("llama.feed_forward_length"), "lacks llama.feed_forward_length"),
    "no heads": (without("llama.attention.head_count"), "lacks llama.attention.head_count"),
    "no epsilon": (without(_EPS), f"lacks {_EPS}"),
    "0 layers": (with_value("llama.block_count", u32(0)), "llama.block_count is 0, must be a whole number"),
    "many layers": (with_value("llama.block_count", u32(1 << 30)), f"has 11 tensors for {1 << 30} layers"),
    "layers as text": (with_value("llama.block_count", text("1")), "llama.block_count is '1'"),
    "heads by layer": (
        with_value("llama.attention.head_count", numbers(U32, [4])),
        "llama.attention.head_count is an array of 1",
    ),
    "heads": (with_value("llama.attention.head_count_kv", u32(3)), "llama.attention.head_count is 4, for 3"),
    "epsilon": (with_value(_EPS, f32(float("nan"))), f"{_EPS} is nan, must be a number"),
    "rope": (with_value("llama.rope.scaling.type", text("su")), "llama.rope.scaling.type is 'su'"),
    "part of a head": (
        with_value("llama.rope.dimension_count", u32(4)),
        "llama.rope.dimension_count is 4, heads have 8 channels",
    ),
    "no embedding": (without_tensor(_EMBEDDING), f"lacks tensor {_EMBEDDING}"),
    "no tensor": (without_tensor(_Q), f"lacks tensor {_Q}"),
    "shape": (
        with_tensor(_Q, lengths=(HIDDEN, 16)),
        f"tensor {_Q} has shape [16, 32], by the metadata [32, 32]",
    ),
    "another tensor": (
        with_more(Described("blk.0.attn_q_norm.weight", (8,))),
        "has tensors that no llama has here: blk.0.attn_q_norm.weight",
    ),
    "rope factors": (
        with_more(Described("rope_freqs.weight", (4,))),
        "rope_freqs.weight are not the factors of a Llama 3",
    ),
    "no tokenizer": (without("tokenizer.ggml.model"), "lacks tokenizer.ggml.model"),
    "tokenizer": (
        with_value("tokenizer.ggml.model", text("bert")),
        "tokenizer.ggml.model is 'bert'; served are llama (SentencePiece) and gpt2 (BPE)",
    ),
    "no tokens": (without(_TOKENS), f"lacks {_TOKENS}"),
    "tokens": (with_value(_TOKENS, texts(["a"])), f"has 1 tokens, and embeddings of {NUM_TOKENS}"),
    "numbers as tokens": (with_value(_TOKENS, numbers(U32, [1])), f"{_TOKENS} has numbers, must have texts"),
    "bytes as tokens": (with_value(_TOKENS, texts([b"\xff"])), f"{_TOKENS} has a text that is not UTF-8"),
    "types": (
        with_value("tokenizer.ggml.token_type", numbers(U32, [1])),
        "tokenizer.ggml.token_type has 1 entries",
    ),
    "no scores": (without("tokenizer.ggml.scores"), "lacks tokenizer.ggml.scores"),
    "scores": (
        with_value("tokenizer.ggml.scores", numbers(F32, [0.0])),
        "tokenizer.ggml.scores has 1 entries",
    ),
    "end of text": (
        with_value("tokenizer.ggml.eos_token_id", u32(NUM_TOKENS)),
        f"tokenizer.ggml.eos_token_id is {NUM_TOKENS}, must be a whole number from 0 to {NUM_TOKENS - 1}",
    ),
    "pre-tokenizer": (
        byte_level(pre=text("bloom")),
        "tokenizer.ggml.pre is 'bloom', a pre-tokenizer that is not known here",
    ),
    "no pre-tokenizer": (byte_level(pre=text("default")), "tokenizer.ggml.pre is 'default'"),
    "merges": (byte_level(merges=texts(["a c"])), "tokenizer.ggml.merges has 'a c', which makes no token"),
    "no merges": (byte_level(merges=u32(1)), "tokenizer.ggml.merges is 1, must be an array"),
}
CUT_AT = (
    "the magic bytes", "the version", "the number of tensors", "the number of keys", "a key", "a kind",
    "a value", "an array", "a tensor's name", "a tensor's shape", "a tensor's type", "a tensor's offset",
    "the first tensor", "the last tensor",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refusal(path: Path) -> str:
    """The message for a file, for which little memory was needed."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as raised:
            open_as_folder(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    message = str(raised.value)
    assert message.startswith((str(path), str(path.parent)))
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_by_its_fault(tmp_path: Path, change: Change, words: str) -> None:
    file = tiny_llama()
    change(file)
    assert words in refusal(file.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("part", CUT_AT)
@pytest.mark.parametrize("further", [0, 3])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, part: str, further: int) -> None:
    file = tiny_llama()
    content = file.written()
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: file.marks[part] + further])
    expected = "is not a GGUF file" if part == "the magic bytes" else "is damaged: "
    assert expected in refusal(path)


def test_a_whole_file_is_opened(tmp_path: Path) -> None:
    assert (open_as_folder(tiny_llama().write(tmp_path / "model.gguf")) / "config.json").is_file()


def shard(index: int, count: int, tensors: slice, **values: int) -> GgufBytes:
    """One of several files; but the first, they have no metadata of the model."""
    file = tiny_llama()
    file.tensors = file.tensors[tensors]
    if index:
        file.keys = []
    for key, value in {"no": index, "count": count, "tensors.count": 11, **values}.items():
        file.set(f"split.{key}", u32(value))
    return file


def test_shards_are_one_model(tmp_path: Path) -> None:
    for index, tensors in enumerate((slice(0, 4), slice(4, 9), slice(9, None))):
        shard(index, 3, tensors).write(tmp_path / f"m-{index + 1:05d}-of-00003.gguf")
    # By whichever of them.
    folder = open_as_folder(tmp_path / "m-00002-of-00003.gguf")
    assert open_as_folder(tmp_path / "m-00001-of-00003.gguf") == folder
    links = sorted(folder.glob("*.gguf"))
    assert [link.resolve().name for link in links] == [f"m-0000{index}-of-00003.gguf" for index in (1, 2, 3)]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (None, "lacks 1 of 2 shards: m-00002-of-00002.gguf"),
        (shard(1, 2, slice(3, None)), "has blk.0.attn_q.weight, as has "),
        (shard(1, 2, slice(5, None)), "there have to be 11 tensors in all shards, not 10"),
        (shard(0, 2, slice(4, None)), "is shard 1 of 2 by its metadata, 2 of 2 by its name"),
        (shard(1, 3, slice(4, None)), "is shard 2 of 3 by its metadata, 2 of 2 by its name"),
    ],
    ids=["missing", "same tensor", "tensor missing", "order", "count"],
)
def test_shards_that_do_not_go_together_are_refused(
    tmp_path: Path, second: GgufBytes | None, words: str
) -> None:
    first = shard(0, 2, slice(0, 4)).write(tmp_path / "m-00001-of-00002.gguf")
    if second is not None:
        second.write(tmp_path / "m-00002-of-00002.gguf")
    assert words in refusal(first)


def test_a_shard_with_another_name_is_refused(tmp_path: Path) -> None:
    path = shard(0, 2, slice(0, 4)).write(tmp_path / "model.gguf")
    assert "is shard 1 of 2 by its metadata, 1 of 1 by its name" in refusal(path)


def test_no_byte_of_a_header_can_do_more_than_have_the_file_refused(tmp_path: Path) -> None:
    file, choose = tiny_llama(), random.Random(5)
    content = file.written()
    path, messages = tmp_path / "model.gguf", []
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(choose.randint(1, 3)):
            changed[choose.randrange(file.marks["the first tensor"])] = choose.choice((0, 1, 0x7F, 0xFF))
        path.write_bytes(changed)
        try:
            model = read_model([path])
            config = read_config(model)
            read_origins(model, config)
            vocabulary = read_vocabulary(model.metadata, config["vocab_size"])
            for make in (tokenizer_json, tokenizer_config, generation_config):
                make(vocabulary)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not any("\n" in message for message in messages)
